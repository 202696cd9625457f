"""Rows of one table whose new records are computed and not stored yet. A value."""

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
