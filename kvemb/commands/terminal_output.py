"""What the verbs print: a line with the progress, speed and remaining time of a long piece of work, and tables of text."""

import sys
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from kvemb.process import ProgressLine


class ProgressMeter:
    """One line, rewritten in place; a context manager that erases it."""

    def __init__(self, stream: TextIO, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._line, self._unit, self._clock = ProgressLine(stream, clock_s=clock), unit, clock
        self._what, self._begun, self._first = "", 0.0, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that so much of so much is done; the rate counts from the first call with this `what`."""
        if what != self._what:
            self._what, self._begun, self._first = what, self._clock(), done
        if self._line.due or done >= total:
            self._line.show(describe(what, done, total, done - self._first, self._clock() - self._begun, self._unit))

    def __enter__(self) -> "ProgressMeter":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()


def describe(what: str, done: int, total: int, done_here: int, seconds: float, unit: str) -> str:
    """Return the line."""
    if not total:
        return what
    scale, name = (1e6, "MB") if unit == "B" else (1, unit)
    shown = f"{done / scale:.1f} of {total / scale:.1f}" if unit == "B" else f"{done:,} of {total:,}"
    text = f"{what} {shown} {name} ({100 * done // total} %)"
    if seconds <= 0 or done_here <= 0:
        return text
    rate = done_here / seconds
    speed = f"{rate / scale:.1f} MB/s" if unit == "B" else f"{rate:,.0f} {name}/s"
    left_s = max(0, total - done) / rate
    left = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min" if left_s < 5400 else f"{left_s / 3600:.1f} h"
    return f"{text}, {speed}" + (f", {left} left" if done < total else "")


def text_table(rows: Iterable[tuple[object, ...]], *, right_from: int = 99) -> str:
    """Return the lines, each column as wide as its widest cell."""
    texts = [[str(cell) for cell in row] for row in rows]
    last = len(texts[0]) - 1
    # The last column may hold an error of any length; it needs no room of its own beyond the heading's.
    widths = [*(max(len(row[column]) for row in texts) for column in range(last)), len(texts[0][last])]

    def aligned(column: int, cell: str) -> str:
        right = column >= right_from and (column < last or cell[:1].isdigit())
        return cell.rjust(widths[column]) if right else cell.ljust(widths[column])

    return "\n".join("  ".join(aligned(*one) for one in enumerate(row)).rstrip() for row in texts)


def agreed(question: str, *, yes: bool) -> bool:
    """Ask on a terminal, unless `yes` (--yes was said); elsewhere only --yes will do."""
    if yes:
        return True
    if not sys.stdin.isatty():
        print("nothing was changed: say --yes to begin", file=sys.stderr)
        return False
    try:
        return input(f"{question}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print("\nnothing was changed", file=sys.stderr)
        return False
