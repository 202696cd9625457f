"""A click log drawn from a planted model, whose probabilities are therefore known. Reading files is elsewhere.

Every line has one category per field, Zipf-distributed. logit = bias + sum of a weight per category + sum over pairs of
fields of the product of their categories' short vectors: what a factorization machine can express, and no more.
"""

import numpy as np
from numpy.typing import NDArray

from deepfm.clicks import Clicks
from kvemb.arrays.hashing import mix64

SIZES = (4, 8, 12, 16, 20, 24, 32, 40, 50, 60, 80, 90, 100, 120, 150, 180, 200, 240, 280, 320)
"""Categories of each field: about 2,000 in all."""
RANK = 2
WEIGHT_STD, VECTOR_STD, BIAS = 0.4, 0.1, -1.0


def draw(n_lines: int, seed: int) -> tuple[Clicks, NDArray[np.float64]]:
    """Draw a log.

    Returns:
        The log, and the true click probabilities [n] its labels were drawn with: no model can have a better expected AUC.

    Example:
        >>> log, probabilities = draw(1000, seed=0)
        >>> len(log), log.n_fields, bool(((probabilities > 0) & (probabilities < 1)).all())
        (1000, 20, True)
    """
    rng = np.random.default_rng(seed)
    linear, total, squares = np.full(n_lines, BIAS), np.zeros((n_lines, RANK)), np.zeros((n_lines, RANK))
    ids = np.empty((n_lines, len(SIZES)), np.int64)
    for field, size in enumerate(SIZES):
        frequency = 1.0 / np.arange(1, size + 1) ** 1.05
        category = rng.choice(size, n_lines, p=frequency / frequency.sum())
        vectors = rng.normal(0.0, VECTOR_STD, (size, RANK))[category]
        linear += rng.normal(0.0, WEIGHT_STD, size)[category]
        total += vectors
        squares += np.square(vectors)
        ids[:, field] = _hashed(field, category)
    probabilities = 1.0 / (1.0 + np.exp(-linear - 0.5 * (np.square(total) - squares).sum(axis=1)))
    labels = (rng.random(n_lines) < probabilities).astype(np.float32)
    offsets = np.arange(n_lines + 1, dtype=np.int64) * len(SIZES)
    return Clicks(labels, offsets, ids.reshape(-1), np.ones(ids.size, np.float32)), probabilities


def _hashed(field: int, category: NDArray[np.int64]) -> NDArray[np.int64]:
    """64-bit ids that say nothing about field or category, as in a real log."""
    return mix64((np.uint64(field + 1) << np.uint64(32)) + category.astype(np.uint64)).view(np.int64)
