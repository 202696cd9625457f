"""A click log in memory, and batches of it. Where it comes from (`readers`, `synthetic`) must not live here.

Compressed sparse rows: the features of line i are ids[offsets[i]:offsets[i + 1]] with their values. No loop over lines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Clicks:
    """n lines of a click log.

    Args:
        labels: float32 [n], 0 or 1.
        offsets: int64 [n + 1], from 0 to m.
        ids: int64 [m], the features' ids.
        values: float32 [m], the features' values; 1 for categories.
    """

    labels: NDArray[np.float32]
    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    values: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def n_fields(self) -> int | None:
        """The number of features of every line, or None if it varies (or there are no lines)."""
        lengths = np.diff(self.offsets)
        same = len(lengths) > 0 and bool((lengths == lengths[0]).all()) and int(lengths[0]) > 0
        return int(lengths[0]) if same else None

    def take(self, lines: NDArray[np.int64]) -> "Clicks":
        """Return copies of some lines.

        Args:
            lines: int64 [k], line numbers in any order.

        Example:
            >>> log = Clicks(np.array([0, 1], np.float32), np.array([0, 2, 3]), np.array([7, 8, 9]), np.ones(3, np.float32))
            >>> log.take(np.array([1, 0])).ids.tolist()
            [9, 7, 8]
        """
        lengths = self.offsets[lines + 1] - self.offsets[lines]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        at = np.arange(offsets[-1]) + np.repeat(self.offsets[lines] - offsets[:-1], lengths)
        return Clicks(self.labels[lines], offsets, self.ids[at], self.values[at])


def hashed(clicks: Clicks, n_ids: int) -> Clicks:
    """Turn 64-bit ids into ids from 0 to n_ids - 1; those that are so already stay.

    Example:
        >>> hashed(Clicks(np.ones(1, np.float32), np.array([0, 2]), np.array([7, -1]), np.ones(2, np.float32)), 100).ids.tolist()
        [7, 15]
    """
    ids = (clicks.ids.view(np.uint64) % np.uint64(n_ids)).astype(np.int64)
    return Clicks(clicks.labels, clicks.offsets, ids, clicks.values)


def batches(clicks: Clicks, batch_size: int, order: NDArray[np.int64] | None = None) -> Iterator[Clicks]:
    """Yield the log in batches, in the given order of lines (as they stand by default); the last one may be short."""
    lines = np.arange(len(clicks)) if order is None else order
    for start in range(0, len(lines), batch_size):
        yield clicks.take(lines[start : start + batch_size])


def concatenate(parts: Sequence[Clicks]) -> Clicks:
    """Join logs.

    Example:
        >>> one = Clicks(np.ones(1, np.float32), np.array([0, 2]), np.array([7, 8]), np.ones(2, np.float32))
        >>> concatenate([one, one]).offsets.tolist()
        [0, 2, 4]
    """
    lengths = [np.zeros(1, np.int64), *(np.diff(part.offsets) for part in parts)]
    return Clicks(
        np.concatenate([np.empty(0, np.float32), *(part.labels for part in parts)]),
        np.cumsum(np.concatenate(lengths)),
        np.concatenate([np.empty(0, np.int64), *(part.ids for part in parts)]),
        np.concatenate([np.empty(0, np.float32), *(part.values for part in parts)]),
    )


def split(n_lines: int, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw a fraction of the lines for validation.

    Returns:
        Line numbers to train on and to validate on, each ascending; at least one line to validate on.

    Example:
        >>> [len(part) for part in split(10, 0.2, seed=0)]
        [8, 2]
    """
    shuffled = np.random.default_rng(seed).permutation(n_lines)
    n_valid = max(1, round(n_lines * fraction))
    return np.sort(shuffled[n_valid:]), np.sort(shuffled[:n_valid])
