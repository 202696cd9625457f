"""What a step pushes of a table: the gradients of all its lookups, summed by id.

What must not live here: lookups (`table_module`), when a step happens (`sparse_optimizer`).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvemb.arrays.segment_sum import group_by_id as group_ids

from ..lookup.pending_lookups import PendingLookups

GradientPart = tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.uint64]]
"""Unique ids [n], gradients [n, dim], versions [n] of one table."""


def unscale_factor(optimizer: torch.optim.Optimizer) -> float:
    """What GradScaler asks the step to multiply gradients by: 1, unless it left them scaled."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)


def merge_gradients(pending: PendingLookups, factor: float) -> GradientPart:
    """Sum the gradients of all lookups of one table by id; of the versions seen the oldest counts."""
    pushed = [
        lookup.pushed(_as_numpy(leaf.grad)) for leaf, lookup in zip(pending.leaves, pending.lookups, strict=True) if leaf.grad is not None
    ]
    if not pushed:
        return _empty(pending.table.dim)
    if len(pushed) == 1:  # the ids of one lookup are unique
        ids, grads, versions = pushed[0]
        return ids, grads * np.float32(factor) if factor != 1.0 else grads, versions
    columns = zip(*pushed, strict=True)
    ids, grads, versions = (np.concatenate(arrays) for arrays in columns)
    groups = group_ids(ids)
    with np.errstate(invalid="ignore"):  # infinities of both signs: the push refuses what comes of them, and says where
        summed = groups.sum(grads)
    # Out of place: without duplicates `summed` is still the leaf's own gradient.
    return groups.ids, summed * np.float32(factor) if factor != 1.0 else summed, groups.minimum(versions)


def _as_numpy(grad: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = grad.detach().cpu().numpy()
    return array


def _empty(dim: int) -> GradientPart:
    return np.empty(0, np.uint64), np.empty((0, dim), np.float32), np.empty(0, np.uint64)
