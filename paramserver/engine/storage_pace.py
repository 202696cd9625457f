"""Tries of a write until storage takes it: which errors may pass by themselves, how long to pause, what is repaired meanwhile, and the size
of one piece, so that a batch of any size is applied in steps that each end.

An exchange with storage has a deadline, and all of it is tried again when that passes. A piece that is too large for the deadline would be
tried for ever, and no later batch would be applied. So a piece is bounded, stored pieces of a batch are not tried again, and a piece that
took too long is tried as smaller ones.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from kvemb.errors import (
    DeadlineExceededError,
    FolderUnavailableError,
    ForeignPageError,
    LostRowError,
    NodeFullError,
    NodeLostError,
    NodeSuspectError,
    NodeUnavailableError,
    RecordError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import pauses

from ..model.batch import Batch, CheckedRows
from ..model.transition import Replay

Pause = Callable[[StorageError, float], None]
"""Called with an error that may pass before the next try: waits so many seconds, or raises to give up."""


@dataclass(frozen=True)
class AheadOfIndex:
    """Versions that storage may hold, or is to hold, although the index does not know of them yet.

    Args:
        first, newest: versions of the batch that is being applied, which may be written by half; rows that have them are not touched.
        tail: the final state of rows, while the journal is replayed, and once some of the batch may be written: a reader has seen that,
            perhaps. A node must not be used again with rows of before: so it is restored to this state at once, and the replay, or the
            next try of the batch, then finds its rows done.
    """

    first: int
    newest: int
    tail: Replay | None = None


NO_BATCH = AheadOfIndex(1, 0)


class RepairPort(Protocol):
    """Brings back rows that storage has lost, when the engine meets one that it needs."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every node."""

    def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
        """Restore every lost node, and compare these with the index; return how many nodes that were."""

    def rows(self, batch: Batch, ahead: AheadOfIndex) -> int:
        """Restore rows of a batch on nodes that are in order; return how many rows that were."""


RETRYABLE = (NodeUnavailableError, DeadlineExceededError, NodeFullError, WrongNodeError, FolderUnavailableError)
"""A wrong node was not written to: every new connection reads the marker first. Its address may lead to the right one again."""
PASSING = (NodeLostError, NodeSuspectError, *RETRYABLE)
"""Errors that may pass for a program that repairs nothing itself: the shards repair nodes."""
MAX_CONFLICT_ROUNDS = 16
CHANGED_BY_ANOTHER_WRITER = (
    f"changed between every read and write of {MAX_CONFLICT_ROUNDS} tries; is another program writing to these nodes?"
)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MAX_MENDED = 8  # times in a row that rows of one piece of work may be found lost
log = logging.getLogger("paramserver")


class Tries:
    """Tries of a write until storage has taken it: `for attempt in Tries(…): with attempt: write`.

    Between two tries it waits for nodes that are away, has those repaired that lost rows, or mends rows, as the error says. Raised are an
    error that does not pass, and the one that `pause` or `mend` raised. Rows may have been written. One thread; good for one write.
    """

    def __init__(
        self,
        pause: Pause,
        repair: RepairPort,
        mend: Callable[[StorageError], None],
        ahead: Callable[[], AheadOfIndex] = lambda: NO_BATCH,
    ) -> None:
        self._pause, self._repair, self._mend, self._ahead = pause, repair, mend, ahead
        self._waits, self._n_mended = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), 0
        self._stored = False
        self._to_mend: StorageError | None = None  # rows that are in the way of the next try

    def __iter__(self) -> Iterator["Tries"]:
        while not self._stored:
            if self._to_mend is None or self._is_mended(self._to_mend):
                yield self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._stored = error is None
        return error is not None and self._passes(error)

    def _is_mended(self, to_mend: StorageError) -> bool:
        try:
            self._mend(to_mend)
        except Exception as error:
            if not self._passes(error):
                raise
            return False
        self._to_mend = None
        return True

    def _passes(self, error: BaseException) -> bool:
        """Meet an error; return whether another try makes sense."""
        if isinstance(error, RETRYABLE):
            self._n_mended = 0
            self._pause(error, next(self._waits))
        elif isinstance(error, (NodeLostError, NodeSuspectError)):
            if not self._repair.nodes(self._ahead(), self._pause):
                self._pause(error, next(self._waits))
        elif isinstance(error, (LostRowError, RecordError)):  # missing, old, or written over by another program
            self._n_mended += 1
            if self._n_mended > _MAX_MENDED:
                return False
            if isinstance(error, ForeignPageError):
                log.error("%s: every row of the node is compared", error)
                self._repair.nodes(self._ahead(), self._pause, suspects=[error.address])
            elif self._to_mend is not None:  # it is `mend` that found no way
                return False
            else:
                self._to_mend = error
        else:
            return False
        return True


MOST_BYTES = 128 << 20
"""Of records: about as many as a shard keeps memory for (`paramserver.engine.batch_records`), and more than most batches have."""
LEAST_BYTES = 4 << 10
_ROW_BYTES = 128  # that a row counts at least, for its request, its answer and its place in the index, beside its record
_TOO_SLOW, _FASTER = 4, 2


class Pace:
    """How many bytes of records one exchange with storage is to carry. One thread."""

    def __init__(self, timeout_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock_s = timeout_s, clock_s
        self.n_bytes = MOST_BYTES

    @contextmanager
    def exchange(self, n_bytes: int) -> Iterator[None]:
        """Surround reads and writes of so many bytes: after a missed deadline carry far less, and more again while there is time."""
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
    return sum(len(rows.ids) * row_bytes(rows) for rows in tables)


def cut(tables: Sequence[CheckedRows], limit_bytes: int) -> tuple[list[CheckedRows], list[CheckedRows]]:
    """Return the first rows, as many as count at most `limit_bytes` (or one row), and the others; uncut arrays are not copied."""
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
