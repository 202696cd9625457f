"""One line on a terminal that is written over again and again. Writes nothing where the stream is no terminal.

What must not live here: what the line says.
"""

import os
from collections.abc import Callable
from typing import TextIO

EVERY_S = 0.5


class ProgressLine:
    """The line.

    Args:
        stream: where to write.
        clock_s: a monotonic clock.
    """

    def __init__(self, stream: TextIO, clock_s: Callable[[], float]) -> None:
        self._stream, self._clock_s = stream, clock_s
        self._on = stream.isatty()
        self._next_s = float("-inf")
        self._shown = 0

    @property
    def due(self) -> bool:
        """Whether it is time to show something new."""
        return self._on and self._clock_s() >= self._next_s

    def show(self, text: str) -> None:
        """Write over what is there."""
        text = text[: self._columns() - 1]
        self._stream.write("\r" + text.ljust(self._shown))
        self._stream.flush()
        self._shown = len(text)
        self._next_s = self._clock_s() + EVERY_S

    def end(self) -> None:
        """Leave what is there, and go on below it."""
        if self._shown:
            self._stream.write("\n")
            self._stream.flush()
        self._shown, self._next_s = 0, float("-inf")

    def _columns(self) -> int:
        try:
            return max(20, os.get_terminal_size(self._stream.fileno()).columns or 80)
        except (OSError, ValueError, AttributeError):  # a terminal that does not tell, or none with a file
            return 80
