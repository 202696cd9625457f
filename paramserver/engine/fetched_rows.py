"""The records of a batch before it is applied, wherever they came from, block by block. Pure.

Rows from the cache are gathered only when their block is asked for. What a block needs stays in the processor's cache, and a batch needs no
second copy of all its records.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows
from kvemb.cached_property import cached_property
from kvemb.index.record_cache import RecordCache


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
        at = self.at[block]
        if self.read is None:
            return FetchedRecords(np.take(self.cache.records, at, axis=0), np.ones(len(at), bool), self.cache.tokens[at])
        read = self.read.take(slice(int(self._n_read[block.start]), int(self._n_read[block.stop])))
        if len(read.found) == len(at):
            return read
        lacking = np.flatnonzero(at < 0)
        items = as_items(self.cache.records).take(at, mode="clip")  # any record where one is lacking
        items[lacking] = as_items(np.ascontiguousarray(read.records))
        found, tokens = np.ones(len(at), bool), np.zeros(len(at), np.uint64)
        found[lacking] = read.found
        if read.tokens is not None:
            tokens = self.cache.tokens.take(at, mode="clip")
            tokens[lacking] = read.tokens
        return FetchedRecords(as_rows(items), found, tokens)

    @cached_property
    def _n_read(self) -> NDArray[np.int64]:
        """How many of the rows before each one, and of all, were read: int64 [n + 1]."""
        return np.concatenate([[0], np.cumsum(self.at < 0)])
