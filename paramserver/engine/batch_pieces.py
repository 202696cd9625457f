"""A batch in pieces: how much of it is read, computed and written at a time. So a batch of any size is applied by steps that each end.

An exchange with storage has a deadline, and everything in it is tried again when that passes. A piece that is too large for the deadline
would be tried for ever, and nothing behind it would be applied. So a piece is bounded, what is stored of a batch is not tried again, and
what took too long is tried in smaller pieces. What must not live here: storage, and what becomes of a row (`paramserver.engine.engine`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvemb.errors import DeadlineExceededError

from ..model.batch import CheckedRows

MOST_BYTES = 128 << 20
"""Of records: about what a shard keeps memory for (`paramserver.engine.arena`), and more than most batches have."""
LEAST_BYTES = 4 << 10
_ROW_BYTES = 128  # that a row counts at least, for what it takes beside its record: its request, its answer, its place in the index
_TOO_SLOW, _FASTER = 4, 2


class Pace:
    """How many bytes of records one exchange with storage is to carry. One thread.

    Args:
        timeout_s: deadline of one exchange.
        clock_s: monotonic.

    Example:
        >>> pace = Pace(5.0)
        >>> with pace.exchange(1000): pass
        >>> pace.n_bytes == MOST_BYTES
        True
    """

    def __init__(self, timeout_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock_s = timeout_s, clock_s
        self.n_bytes = MOST_BYTES

    @contextmanager
    def exchange(self, n_bytes: int) -> Iterator[None]:
        """Surround what reads and writes so many bytes: after a missed deadline carry far less, and more again while there is time."""
        began_s = self._clock_s()
        try:
            yield
        except DeadlineExceededError:
            self.n_bytes = max(LEAST_BYTES, min(n_bytes, self.n_bytes) // _TOO_SLOW)
            raise
        quick = self._clock_s() - began_s < self._timeout_s / (2 * _FASTER)  # so that twice as much is not too slow either
        if quick and 2 * n_bytes > self.n_bytes:  # a small piece says nothing of large ones
            self.n_bytes = min(MOST_BYTES, _FASTER * self.n_bytes)


def row_bytes(rows: CheckedRows) -> int:
    """Bytes that one of these rows counts."""
    return max(_ROW_BYTES, rows.definition.record.size_bytes)


def size_bytes(tables: Sequence[CheckedRows]) -> int:
    """Bytes that these rows count."""
    return sum(len(rows.ids) * row_bytes(rows) for rows in tables)


def cut(tables: Sequence[CheckedRows], limit_bytes: int) -> tuple[list[CheckedRows], list[CheckedRows]]:
    """Return the first rows, as many as count at most `limit_bytes` (or one row), and the others; what is not cut is not copied."""
    room = limit_bytes
    for at, rows in enumerate(tables):
        size = row_bytes(rows)
        if len(rows.ids) * size <= room:
            room -= len(rows.ids) * size
            continue
        untouched = not any(len(earlier.ids) for earlier in tables[:at])
        n_rows = max(room // size, 1 if untouched else 0)
        first = [*tables[:at], rows.take(slice(0, n_rows))] if n_rows else [*tables[:at]]
        rest = rows.take(slice(n_rows, None)) if n_rows else rows
        return first, [rest, *tables[at + 1 :]] if len(rest.ids) else [*tables[at + 1 :]]
    return [*tables], []
