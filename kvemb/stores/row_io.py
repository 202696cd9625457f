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
    """Read n rows of one table, or of several whose records have one size.

    Args:
        keys: n unique keys; of several tables, `kvemb.schema.keys.coalesce_keys` has made one batch of them.
        record_bytes: the size every record of these tables has.
        prefix_bytes: how many bytes of each record are wanted; the rest may travel, but is not copied. Of rows in pages at least the
            header, by which rows are told from no rows.
        tokens: whether compare-and-swap tokens are wanted too (stores without CAS return None).
        into: uint8 [n, prefix_bytes], contiguous: memory that the records may be read into, instead of new one.
        foreign: whether values of another size, which only another program can have written, are results and no error.
        meanwhile: work of the caller's that a store may do while the servers answer, given the order that the result will have; again where
            the read is tried again.
    """

    keys: RowKeys
    record_bytes: int
    prefix_bytes: int
    tokens: bool = False
    into: NDArray[np.uint8] | None = None
    foreign: bool = False
    meanwhile: Callable[[NDArray[np.intp] | None], None] | None = None


@dataclass(eq=False)
class ReadResult:
    """The rows of one ReadPart, in the order of their nodes.

    Args:
        records: uint8 [n, prefix_bytes]; row i belongs to keys.ids[order[i]]; rows not found have no defined content.
        found: bool [n], in the same order.
        order: intp [n], or None when the rows are in the order of the keys.
        tokens: uint64 [n] in the same order, or None.
        foreign: bool [n] in the same order: rows that were not found because a value of another size lies there (their tokens are its).
            None where that was not asked for.
    """

    records: NDArray[np.uint8]
    found: NDArray[np.bool_]
    order: NDArray[np.intp] | None = None
    tokens: NDArray[np.uint64] | None = None
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
    """How many rows of a table a node holds; not `exact` where some of its buckets or pages were counted for all.

    Args:
        idle_bytes: of places in pages that hold no row.
    """

    n_rows: int
    exact: bool
    idle_bytes: int = 0


@batch_value
class WritePart:
    """Write n whole records of one table, or of several whose records have one size.

    Args:
        keys: n unique keys.
        records: uint8 [n, record_bytes], contiguous.
        tokens: uint64 [n] from the read that this write follows; 0 = the row must not exist yet. Ignored by stores without CAS.
    """

    keys: RowKeys
    records: NDArray[np.uint8]
    tokens: NDArray[np.uint64] | None = None


@batch_value
class WriteResult:
    """The result of a WritePart, in key order.

    Args:
        stored: bool [n]; False is a conflict: read again before writing again.
        tokens: uint64 [n], of the rows stored, for the next write without a read; None on stores without CAS.
    """

    stored: NDArray[np.bool_]
    tokens: NDArray[np.uint64] | None = None
