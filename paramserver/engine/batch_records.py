"""The records of a batch: as they were found, in the cache or in storage, and as they are to be written. Pure.

Rows from the cache are gathered only when their block is asked for. So a block stays in the processor's cache, and a batch needs no
second copy of all its records. New records lie in memory that one batch after the other uses: the system clears fresh memory first, at half
the price of using it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows
from kvemb.arrays.record_cache import RecordCache
from kvemb.process.cached_property import cached_property
from kvemb.stores.row_io import WritePart

from ..model.batch import CheckedRows

_KEPT_BYTES = 128 << 20


class RecordArena:
    """Hands out arrays that are good until the next `reset`. One thread."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._n_used = 0

    def reset(self) -> None:
        """Take back everything that was handed out."""
        self._n_used = 0

    def take(self, n: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return uint8 [n, size_bytes], contiguous, holding anything."""
        start, stop = self._n_used, self._n_used + n * size_bytes
        if stop > _KEPT_BYTES:
            return np.empty((n, size_bytes), np.uint8)
        if stop > len(self._memory):
            self._memory = np.empty(stop, np.uint8)  # arrays handed out before still use the old memory
        self._n_used = stop
        return self._memory[start:stop].reshape(n, size_bytes)


@dataclass(frozen=True, eq=False)
class FetchedRecords:
    """Records of n rows, in the rows' order.

    Args:
        records: uint8 [n, record bytes]; without meaning where a row was not found.
        found: bool [n].
        tokens: uint64 [n] for conditional writes, or None.
    """

    records: NDArray[np.uint8]
    found: NDArray[np.bool_]
    tokens: NDArray[np.uint64] | None

    @staticmethod
    def of_none(n: int, size_bytes: int) -> "FetchedRecords":
        """Return the records of n rows of which none was found; they take no memory."""
        return FetchedRecords(np.broadcast_to(np.zeros(size_bytes, np.uint8), (n, size_bytes)), np.zeros(n, bool), None)

    def take(self, which: NDArray[np.bool_] | slice) -> "FetchedRecords":
        """Return the rows where `which` (bool [n], or a slice) selects."""
        return FetchedRecords(self.records[which], self.found[which], None if self.tokens is None else self.tokens[which])


@dataclass(frozen=True, eq=False)
class Fetched:
    """The records of n rows. Good until the cache changes.

    Args:
        cache: of the table.
        at: int64 [n], place in the cache of each row, -1 for those that were read.
        read: the rows that were read, in order; None when all were cached.
    """

    cache: RecordCache
    at: NDArray[np.int64]
    read: FetchedRecords | None

    def blocks(self, n_rows: int) -> Iterator[tuple[slice, FetchedRecords]]:
        """Yield all rows, at most n_rows at a time."""
        for low in range(0, len(self.at), n_rows):
            block = slice(low, min(low + n_rows, len(self.at)))
            yield block, self._block(block)

    def _block(self, block: slice) -> FetchedRecords:
        at = self.at[block]  # int64 [m]: places in the cache of the block's m rows, -1 for those that were read
        if self.read is None:
            return FetchedRecords(np.take(self.cache.records, at, axis=0), np.ones(len(at), bool), self.cache.tokens[at])
        read = self.read.take(slice(int(self._n_read[block.start]), int(self._n_read[block.stop])))
        if len(read.found) == len(at):
            return read
        lacking = np.flatnonzero(at < 0)  # the block's rows that were read, in the order of `read`
        # One item of record bytes a row, so that NumPy moves whole records: [m], of any record first where the cache has none.
        items = as_items(self.cache.records).take(at, mode="clip")
        items[lacking] = as_items(np.ascontiguousarray(read.records))
        found, tokens = np.ones(len(at), bool), np.zeros(len(at), np.uint64)  # [m]; a row in the cache exists
        found[lacking] = read.found
        if read.tokens is not None:
            tokens = self.cache.tokens.take(at, mode="clip")
            tokens[lacking] = read.tokens
        return FetchedRecords(as_rows(items), found, tokens)

    @cached_property
    def _n_read(self) -> NDArray[np.int64]:
        """How many of the rows before each one, and of all, were read: int64 [n + 1]."""
        return np.concatenate([[0], np.cumsum(self.at < 0)])


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """Rows to write, and their new records.

    Args:
        rows: n rows of a batch.
        part: their new records, and the tokens under which they may be written.
        at: int64 [n], their places in the cache as they were when they were fetched; -1 for those that were read.
    """

    rows: CheckedRows
    part: WritePart
    at: NDArray[np.int64]
