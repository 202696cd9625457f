"""Rows of one table whose new records are computed and not stored yet. A value; no behaviour beyond picking rows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.stores.row_io import WritePart

from .batch import CheckedRows


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """Rows to write, and what to write.

    Args:
        rows: n rows of a batch.
        part: their new records, and the tokens under which they may be written.
        at: int64 [n], their places in the cache as they were when they were fetched; -1 for those that were read.
    """

    rows: CheckedRows
    part: WritePart
    at: NDArray[np.int64]

    def take(self, which: NDArray[np.bool_]) -> "PreparedRows":
        """Return the rows where `which` (bool [n]) selects; copies."""
        part, chosen = self.part, np.flatnonzero(which)
        whole = part.records.view(f"V{part.records.shape[1]}")[:, 0]  # records as items, which are copied at once
        records = whole[chosen].view(np.uint8).reshape(len(chosen), part.records.shape[1])
        tokens = None if part.tokens is None else part.tokens[chosen]
        return PreparedRows(self.rows.take(which), WritePart(part.keys.take(chosen), records, tokens), self.at[chosen])
