"""What a step pushes of a table: the gradients of all its lookups, summed by id.

What must not live here: lookups (`table_module`), when a step happens (`sparse_optimizer`).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...bridge.pushed_steps import GradientPart, merge_parts
from ..lookup.pending_lookups import PendingLookups


def unscale_factor(optimizer: torch.optim.Optimizer) -> float:
    """What GradScaler asks the step to multiply gradients by: 1, unless it left them scaled."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)


def merge_gradients(pending: PendingLookups, factor: float) -> GradientPart:
    """Sum the gradients of all lookups of one table by id; of the versions seen the oldest counts."""
    pushed: list[Any] = [
        lookup.pushed(_as_numpy(leaf.grad)) for leaf, lookup in zip(pending.leaves, pending.lookups, strict=True) if leaf.grad is not None
    ]
    ids, grads, versions = merge_parts(pushed, pending.table.dim)
    # Out of place: without duplicates these are still the leaf's own gradient.
    return ids, grads * np.float32(factor) if factor != 1.0 else grads, versions


def _as_numpy(grad: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = grad.detach().cpu().numpy()
    return array
