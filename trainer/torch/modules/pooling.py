"""Combining the rows that were looked up for one table, feature after feature.

What must not live here: features, and where rows come from.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .embedding_bag import embedding_bag
from .recipes import LookedUp, exporting


def pool(rows: LookedUp, lengths: Tensor, combiner: str, weights: Tensor | None = None) -> Tensor:
    """Combine the rows of each bag; empty bags are zeros.

    Args:
        rows: of m ids.
        lengths: integers [b], together m.
        combiner: "sum", "mean", or "sqrtn": the sum over the root of the sum of the squared weights.
        weights: float32 [m]; with "mean" the sum is divided by theirs. None: 1 each.

    Returns:
        float32 [b, dim].
    """
    leaf, at = rows
    if not exporting() and weights is None and len(at) == len(lengths) and bool((lengths == 1).all()):
        return leaf.index_select(0, at)  # a value each: every combiner gives its row
    lengths = lengths.to(device=at.device, dtype=torch.int64)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if combiner == "mean" and weights is None:
        return _bags(at, leaf, offsets, "mean", None)
    factors = weights
    if combiner != "sum":
        weights = leaf.new_ones(at.shape[0]) if weights is None else weights
        factors = weights / _norms(weights, lengths, combiner)
    return _bags(at, leaf, offsets, "sum", factors)


def _bags(at: Tensor, rows: Tensor, offsets: Tensor, mode: str, weights: Tensor | None) -> Tensor:
    if exporting():  # what `bags` adds is a faster way back, chosen by sizes
        return F.embedding_bag(at, rows, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True)
    return embedding_bag(at, rows, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True)


def _norms(weights: Tensor, lengths: Tensor, combiner: str) -> Tensor:
    """What each value's weight is divided by: [m]."""
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    sums = weights.new_zeros(len(lengths)).index_add(0, bag, weights if combiner == "mean" else weights.square())
    return (sums if combiner == "mean" else sums.sqrt())[bag]
