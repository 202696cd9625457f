"""How far a long piece of work is, in one line that is written over on a terminal. A log file gets nothing, or a plain line now and then.

What must not live here: what the line says.
"""

import math
import os
import time
from collections.abc import Callable
from typing import TextIO

_EVERY_S = 0.5


class ProgressLine:
    """One line that says how far a piece of work is. One thread.

    Args:
        stream: where to write.
        plain_every_s: seconds between plain lines where the stream is no terminal; without it there are none.
        clock_s: a monotonic clock.
    """

    def __init__(self, stream: TextIO, *, plain_every_s: float = math.inf, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock_s = stream, clock_s
        self._terminal = stream.isatty()
        self._every_s = _EVERY_S if self._terminal else plain_every_s
        self._next_s = -math.inf
        self._shown = 0  # characters on the terminal's line

    @property
    def due(self) -> bool:
        """Whether it is time to show something new."""
        return math.isfinite(self._every_s) and self._clock_s() >= self._next_s

    def show(self, text: str) -> None:
        """Write over what is there; where the stream is no terminal, write a line."""
        if self._terminal:
            text = text[: self._columns() - 1]
            self._write("\r" + text.ljust(self._shown))
            self._shown = len(text)
        elif math.isfinite(self._every_s):
            self._write(f"{text}\n")
        self._next_s = self._clock_s() + self._every_s

    def say(self, text: str = "") -> None:
        """Write a line that stays, in place of what is there."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Erase what is there."""
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")
        self._shown = 0

    def end(self) -> None:
        """Leave what is there, and go on below it."""
        if self._shown:
            self._write("\n")
        self._shown, self._next_s = 0, -math.inf

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _columns(self) -> int:
        try:
            return max(20, os.get_terminal_size(self._stream.fileno()).columns or 80)
        except (OSError, ValueError, AttributeError):  # a terminal that does not tell, or none with a file
            return 80
