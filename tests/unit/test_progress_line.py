"""The progress line: written over on a terminal; in a log nothing, or a plain line now and then."""

import io

from kvemb.process import ProgressLine


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_shorter_line_leaves_nothing_of_a_longer_one_and_none_is_wider_than_the_terminal() -> None:
    stream = Terminal()
    line = ProgressLine(stream, clock_s=Clock())
    line.show("a" * 200)
    line.show("b")
    assert stream.getvalue() == "\r" + "a" * 79 + "\r" + "b".ljust(79)


def test_a_line_that_stays_takes_the_place_of_the_progress() -> None:
    stream = Terminal()
    line = ProgressLine(stream, clock_s=Clock())
    line.show("half")
    line.say("done")
    line.say()
    assert stream.getvalue() == "\rhalf\r    \rdone\n\n"


def test_a_log_has_a_plain_line_now_and_then_where_that_is_wanted() -> None:
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(stream, plain_every_s=5.0, clock_s=clock)
    for second in range(12):
        clock.now_s = 100.0 + second
        if line.due:
            line.show(f"second {second}")
    line.say("done")
    assert stream.getvalue() == "second 0\nsecond 5\nsecond 10\ndone\n"


def test_a_log_has_no_progress_otherwise() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, clock_s=Clock())
    assert not line.due
    line.show("half")
    line.end()
    assert stream.getvalue() == ""
