"""Shows a running job: one line that is written over on a terminal, a plain line now and then elsewhere."""

import time
from typing import TextIO

_TERMINAL_EVERY_S = 0.5
_PLAIN_EVERY_S = 5.0
_ERASE_LINE = "\r\x1b[K"
_RATE_WINDOW_S = 3.0


class Rate:
    """Events per second over the last seconds."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, int]] = []

    def update(self, total: int) -> float:
        """Take the running total; return the current rate."""
        now = time.monotonic()
        recent = [mark for mark in self._marks if now - mark[0] <= _RATE_WINDOW_S]
        # At least one older mark, however long ago: plain lines come less often than the window is long.
        self._marks = [*(recent or self._marks[-1:]), (now, total)]
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start else 0.0


class Display:
    """Writes progress to a stream.

    Args:
        out: where to.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._last = 0.0
        self._on_line = False

    def due(self) -> bool:
        """Whether it is time for another progress line."""
        return time.monotonic() - self._last >= (_TERMINAL_EVERY_S if self._terminal else _PLAIN_EVERY_S)

    def progress(self, text: str) -> None:
        """Show the job's current state, over the former one on a terminal."""
        self._last = time.monotonic()
        self._out.write(f"{_ERASE_LINE}{text}" if self._terminal else f"{text}\n")
        self._out.flush()
        self._on_line = self._terminal

    def say(self, text: str = "") -> None:
        """Write a line that stays."""
        self._out.write(f"{_ERASE_LINE if self._on_line else ''}{text}\n")
        self._out.flush()
        self._on_line = False


def short(number: float) -> str:
    """Write a count in at most five characters.

    Example:
        >>> short(999), short(12_345), short(3_200_000)
        ('999', '12.3k', '3.20M')
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            scaled = number / size
            return f"{scaled:.2f}{letter}" if scaled < 10 else f"{scaled:.1f}{letter}" if scaled < 100 else f"{scaled:.0f}{letter}"
    return f"{number:.0f}"
