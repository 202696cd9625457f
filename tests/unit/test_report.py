"""The step report: where time went by an injected clock, its output for each reader, and its advice."""

import io
import threading
from typing import Any

import pytest

from kvemb.client.ack import Staleness
from kvemb.errors import InvalidInputError
from trainer.report.step_report import StepReport, current_report
from trainer.report.step_times import StepTimes, counted


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Ack:
    """What a report looks at."""

    def __init__(self, n_rows: int = 0, window_s: float = 0.0, staleness: Staleness | None = None) -> None:
        self.n_rows, self.window_s, self.staleness = n_rows, window_s, staleness


class Scalars:
    def __init__(self) -> None:
        self.kept: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.kept.setdefault(global_step, {})[tag] = scalar_value


def make(**options: Any) -> tuple[StepReport, Clock, io.StringIO]:
    clock, stream = Clock(), options.pop("stream", io.StringIO())
    return StepReport(clock_s=clock, stream=stream, **options), clock, stream


def step(report: StepReport, clock: Clock, seconds: float, **waits: float) -> None:
    """A step that takes so many seconds and waited as said."""
    times = counted()
    assert times is not None
    for name, value in waits.items():
        setattr(times, name, getattr(times, name) + value)
    clock.now_s += seconds
    report.step()


def test_every_second_of_a_step_is_somewhere() -> None:
    report, clock, _ = make()
    with report:
        times = counted()
        assert times is not None
        times.ahead_s += 0.25
        times.lookup_s += 0.25
        times.loader_s += 0.125
        clock.now_s += 2.0
        report.step(Ack(n_rows=500, window_s=0.125), push_s=0.375, release_s=0.5)
        last = report.last
        assert (last.n_steps, last.total_s, last.rows_s, last.loader_s) == (1, 2.0, 0.5, 0.125)
        assert (last.window_s, last.push_s, last.release_s, last.rows_pushed) == (0.125, 0.25, 0.5, 500)
        assert last.compute_s == 0.5
        clock.now_s += 1.0
        report.step()
        assert (report.last.total_s, report.last.compute_s, report.last.rows_pushed) == (1.0, 1.0, 0)
        assert (report.total.n_steps, report.total.total_s, report.total.compute_s) == (2, 3.0, 1.5)


def test_only_the_thread_that_trains_is_measured_and_only_while_it_is_in_force() -> None:
    report, clock, _ = make()
    assert (counted(), current_report()) == (None, None)
    elsewhere: list[Any] = []
    with report:
        thread = threading.Thread(target=lambda: elsewhere.append((counted(), current_report())))
        thread.start()
        thread.join()
        assert current_report() is report
        step(report, clock, 1.0)
    assert elsewhere == [(None, None)]
    assert (counted(), current_report()) == (None, None)
    clock.now_s += 50.0  # between two epochs
    with report:
        step(report, clock, 1.0)
    assert (report.total.n_steps, report.total.total_s) == (2, 2.0)


def test_what_is_waited_for_behind_the_last_step_belongs_to_none() -> None:
    report, clock, _ = make()
    with report:
        step(report, clock, 1.0)
        times = counted()
        assert times is not None
        times.loader_s += 5.0
    assert report.total.loader_s == 0.0


@pytest.mark.parametrize(
    ("waits", "advice"),
    [
        ({"ahead_s": 0.31, "rows_ahead": 9}, "trainer waited 31 % for rows: raise capacity or threads_num, or add storage nodes"),
        ({"lookup_s": 0.31}, "trainer waited 31 % for rows: look them up ahead"),
        ({"lookup_s": 0.31, "rows_ahead": 9}, "trainer waited 31 % for rows: their lookups were not foreseen"),
        ({"window_s": 0.2, "ahead_s": 0.1}, "trainer waited 20 % for the push window: add shards"),
        ({"release_s": 0.5}, "trainer waited 50 % for the sync release: add shards, or find the trainer"),
        ({"loader_s": 0.9}, "trainer waited 90 % for the loader: give the DataLoader more worker processes"),
        ({"ahead_s": 0.09, "push_s": 0.5}, "compute-bound: nothing to turn"),
    ],
)
def test_the_summary_ends_with_what_to_turn(waits: dict[str, float], advice: str) -> None:
    report, clock, stream = make()
    with report:
        step(report, clock, 1.0, **waits)
    assert stream.getvalue() == report.summary() + "\n"
    assert f"; {advice}" in report.summary()
    assert "1 step of 1,000 ms: " in report.summary()


def test_the_summary_says_how_stale_rows_were() -> None:
    report, _, _ = make()
    with report:
        for changed in (0.5, 0.0):
            report.step(Ack(10, staleness=Staleness(changed, 3)))
    assert "25.00% of the rows changed between pull and push" in report.summary()
    assert report.mean_staleness.n == 2


def test_without_a_step_nothing_is_said() -> None:
    report, _, stream = make(writer=Scalars())
    with report:
        pass
    assert stream.getvalue() == ""
    assert report.summary() == "no step yet"


def test_a_writer_gets_scalars_every_so_many_steps_and_the_rest_at_the_end() -> None:
    writer = Scalars()
    report, clock, _ = make(writer=writer, every=2, prefix="run")
    with report:
        for number in range(1, 6):
            times = counted()
            assert times is not None
            times.ahead_s += 0.125 * number
            clock.now_s += 1.0
            report.step(Ack(100 * number, staleness=Staleness(number / 8, number)), loss=1.0 / number)
    assert writer.kept == {
        2: {"run/stall_ms": 187.5, "run/rows_per_s": 150.0, "run/loss": 0.5, "run/staleness": 0.25, "run/batches_elapsed": 2.0},
        4: {"run/stall_ms": 437.5, "run/rows_per_s": 350.0, "run/loss": 0.25, "run/staleness": 0.5, "run/batches_elapsed": 4.0},
        5: {"run/stall_ms": 625.0, "run/rows_per_s": 500.0, "run/loss": 0.2, "run/staleness": 0.625, "run/batches_elapsed": 5.0},
    }


def test_a_loss_is_looked_at_when_it_is_written_and_not_before() -> None:
    class Loss:
        n_looked, n_detached = 0, 0

        def detach(self) -> "Loss":
            self.n_detached += 1
            return self

        def __float__(self) -> float:
            self.n_looked += 1
            return 0.5

    writer, losses = Scalars(), [Loss() for _ in range(4)]
    report, _, _ = make(writer=writer, every=4)
    with report:
        for loss in losses:
            report.loss(loss)
            report.step()
    assert [(loss.n_detached, loss.n_looked) for loss in losses] == [(1, 0), (1, 0), (1, 0), (1, 1)]
    assert writer.kept[4]["kvemb/loss"] == 0.5


def test_the_progress_line_is_shown_on_a_terminal_now_and_then() -> None:
    report, clock, stream = make(stream=Terminal())
    with report:
        for _ in range(10):
            times = counted()
            assert times is not None
            times.ahead_s += 0.05
            clock.now_s += 0.2
            report.step(Ack(1000, staleness=Staleness(0.125, 1)), loss=0.25)
    lines = stream.getvalue().split("\r")
    assert lines[0] == ""
    assert lines[1].rstrip() == "step 1  200 ms  loss 0.2500  5,000 rows/s  waits for rows 25 %  stale 12.5 %"
    assert [line.split("  ")[0] for line in lines[1:]] == ["step 1", "step 4", "step 7", "step 10"]
    assert lines[-1].count("\n") == 2  # the line is left as it is; the summary is below
    assert lines[-1].endswith(f"\n{report.summary()}\n")


@pytest.mark.parametrize(("stream", "progress"), [(io.StringIO(), True), (Terminal(), False)])
def test_there_is_no_progress_line_elsewhere(stream: io.StringIO, progress: bool) -> None:
    report, clock, _ = make(stream=stream, progress=progress)
    with report:
        step(report, clock, 1.0)
    assert stream.getvalue() == report.summary() + "\n"


@pytest.mark.parametrize("options", [{"writer": 3}, {"every": 5}, {"writer": Scalars(), "every": 0}, {"writer": Scalars(), "every": True}])
def test_options_that_cannot_have_an_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        StepReport(**options)


def test_sums_can_be_told_apart() -> None:
    first = StepTimes(1, 2.0, 0.5, rows_ahead=3, rows_looked_up=4)
    assert first.since(StepTimes()) == first == first.copy()
    assert first.since(first) == StepTimes()
    assert StepTimes().advice() == "no step yet"
