"""Measures of predicted click probabilities: AUC, log loss, RMSE. NumPy only; training and data are elsewhere."""

import numpy as np
from numpy.typing import NDArray


def auc(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    """Area under the ROC curve: the probability that a click scores above a non-click, equal scores counting half.

    Args:
        labels: [n], 0 or 1.
        scores: [n], any monotonic transform of the probability.

    Returns:
        0 to 1; nan if all labels are equal.

    Source: Mann, Whitney 1947 (the U statistic over the number of pairs, from average ranks).

    Example:
        >>> auc(np.array([0.0, 1.0, 1.0]), np.array([0.2, 0.2, 0.9]))
        0.75
    """
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[group]  # equal scores share the mean of their ranks
    n_clicks = float(labels.sum(dtype=np.float64))
    n_pairs = n_clicks * (len(labels) - n_clicks)
    if n_pairs == 0:
        return float("nan")
    return float((ranks[labels > 0].sum() - n_clicks * (n_clicks + 1) / 2) / n_pairs)


def log_loss(labels: NDArray[np.floating], probabilities: NDArray[np.floating]) -> float:
    """Mean negative log likelihood, in nats; probabilities are kept 1e-7 away from 0 and 1.

    Example:
        >>> round(log_loss(np.array([1.0, 0.0]), np.array([0.5, 0.5])), 4)
        0.6931
    """
    p = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-np.mean(np.where(labels > 0, np.log(p), np.log1p(-p))))


def rmse(labels: NDArray[np.floating], probabilities: NDArray[np.floating]) -> float:
    """Root of the mean squared difference of label and probability.

    Example:
        >>> rmse(np.array([1.0, 0.0]), np.array([0.5, 0.5]))
        0.5
    """
    return float(np.sqrt(np.mean(np.square(labels.astype(np.float64) - probabilities))))
