"""The requests to a store and its answers, as arrays of rows. Values only."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items
from kvemb.process.cached_property import batch_value
from kvemb.schema.keys import RowKeys


@batch_value
class ReadPart:
    """Read n rows of one table, or of several whose records have one size."""

    keys: RowKeys  # n unique keys; of several tables, `kvemb.schema.keys.coalesce_keys` has made one batch of them
    record_bytes: int  # the size every record of these tables has
    # how many bytes of each record are wanted; the rest may travel, but is not copied. Of rows in pages at least the header, by which rows
    # are told from no rows.
    prefix_bytes: int
    tokens: bool = False  # whether compare-and-swap tokens are wanted too (stores without CAS return None)
    # uint8 [n, prefix_bytes], contiguous: memory that the records may be read into, instead of new one
    into: NDArray[np.uint8] | None = None
    foreign: bool = False  # whether values of another size, which only another program can have written, are results and no error
    # work of the caller's that a store may do while the servers answer, given the order that the result will have; again where the read is
    # tried again
    meanwhile: Callable[[NDArray[np.intp] | None], None] | None = None


@dataclass(eq=False)
class ReadResult:
    """The rows of one ReadPart, in the order of their nodes."""

    records: NDArray[np.uint8]  # uint8 [n, prefix_bytes]; row i belongs to keys.ids[order[i]]; rows not found have no defined content
    found: NDArray[np.bool_]  # bool [n], in the same order
    order: NDArray[np.intp] | None = None  # intp [n], or None when the rows are in the order of the keys
    tokens: NDArray[np.uint64] | None = None  # uint64 [n] in the same order, or None
    # bool [n] in the same order: rows that were not found because a value of another size lies there (their tokens are its). None where
    # that was not asked for.
    foreign: NDArray[np.bool_] | None = None

    def in_key_order(self) -> "ReadResult":
        """Return the same rows in the order of the keys (a copy when several nodes answered)."""
        if self.order is None:
            return self
        records, found = np.empty_like(self.records), np.empty_like(self.found)
        found[self.order] = self.found
        # Records of rows that were not found are not copied: memory that was never written stays untouched.
        rows = None if self.found.all() else np.flatnonzero(self.found)
        if rows is None:
            as_items(records)[self.order] = as_items(self.records)
        elif len(rows):
            as_items(records)[self.order[rows]] = as_items(self.records)[rows]
        tokens = foreign = None
        if self.tokens is not None:
            tokens = np.empty_like(self.tokens)
            tokens[self.order] = self.tokens
        if self.foreign is not None:
            foreign = np.empty_like(self.foreign)
            foreign[self.order] = self.foreign
        return ReadResult(records, found, None, tokens, foreign)


@dataclass(frozen=True)
class HeldRows:
    """How many rows of a table a node holds; not `exact` where some of its buckets or pages were counted for all."""

    n_rows: int
    exact: bool
    idle_bytes: int = 0  # of places in pages that hold no row


@batch_value
class WritePart:
    """Write n whole records of one table, or of several whose records have one size."""

    keys: RowKeys  # n unique keys
    records: NDArray[np.uint8]  # uint8 [n, record_bytes], contiguous
    # uint64 [n] from the read that this write follows; 0 = the row must not exist yet. Ignored by stores without CAS.
    tokens: NDArray[np.uint64] | None = None


@batch_value
class WriteResult:
    """The result of a WritePart, in key order."""

    stored: NDArray[np.bool_]  # bool [n]; False is a conflict: read again before writing again
    # uint64 [n], of the rows stored, for the next write without a read; None on stores without CAS
    tokens: NDArray[np.uint64] | None = None
