"""A click log drawn from a planted model, the same for every framework: NumPy only."""

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64

N_NUMBERS, N_CATEGORIES = 13, 26
"""Columns of a Criteo log."""
KEYS = [f"c{i + 1}" for i in range(N_CATEGORIES)]
SYNTHETIC_CATEGORIES = 1000  # of each column, Zipf-distributed

Clicks = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]
"""Numbers [n, 13], ids [n, 26] from 0 to n_ids - 1, labels [n]."""


def planted_clicks(n_lines: int, n_ids: int, seed: int) -> Clicks:
    """Draw lines whose labels depend on a weight per category, and on the products of some numbers."""
    rng = np.random.default_rng(seed)
    frequency = 1.0 / np.arange(1, SYNTHETIC_CATEGORIES + 1) ** 1.05
    category = rng.choice(SYNTHETIC_CATEGORIES, (n_lines, N_CATEGORIES), p=frequency / frequency.sum())
    numbers = rng.standard_normal((n_lines, N_NUMBERS), dtype=np.float32)
    weights = rng.normal(0.0, 0.5, (N_CATEGORIES, SYNTHETIC_CATEGORIES))
    logits = weights[np.arange(N_CATEGORIES), category].sum(axis=1) + numbers[:, 0] * numbers[:, 1] - 1.0
    labels = (rng.random(n_lines) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    column = np.arange(N_CATEGORIES, dtype=np.uint64) << np.uint64(32)
    return numbers, (mix64(column + category.astype(np.uint64)) % np.uint64(n_ids)).astype(np.int64), labels
