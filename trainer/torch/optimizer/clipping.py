"""clip_grad_norm_: torch's, over dense gradients and those of rows that wait for a step.

In one process torch.nn.utils.clip_grad_norm_(model.parameters(), …) does the same (`pending_lookups` says how). In a job of several ranks
it sees no row's gradient, and this one agrees on the norm. Strategy: a table counts as the dense gradient of its weight would: gradients of
one row, from several lookups, are summed before the norm is taken. Scaling is linear, so it is done in place.
"""

import math

import numpy as np
import torch
from torch import Tensor, distributed, nn

from kvemb.arrays.segment_sum import group_by_id
from kvemb.errors import InvalidInputError

from ..lookup.parameter_walks import eager, n_ranks
from ..lookup.pending_lookups import PendingLookups
from ..lookup.table_module import TableModule


@eager
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients of a model down, in place, so that their norm together is at most `max_norm`.

    Call it where torch.nn.utils.clip_grad_norm_ stands: after backward, before the step, with GradScaler after unscale_. In a job of
    several ranks (torch.distributed) call it on every rank: all scale by one norm, so dense weights that are equal stay so. The norm is
    that of the dense gradients at hand, which DistributedDataParallel has averaged, and of all ranks' rows. Rows are averaged where their
    table's `reduce` is "mean". A row that several ranks have counts as several, for their sum does not exist before the push.

    Args:
        model: with kvemb modules, or without any.
        max_norm: above 0.
        norm_type: of the norm; math.inf for the largest absolute value.
        error_if_nonfinite: whether to refuse gradients with NaN or infinity, instead of scaling by the resulting norm.

    Returns:
        The norm before, float32 scalar.

    Raises:
        InvalidInputError: `max_norm` or `norm_type` not above 0, or parameters in place of the model.
        RuntimeError: as torch's own, with `error_if_nonfinite`; nothing was scaled.

    Source: torch.nn.utils.clip_grad_norm_.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> clip_grad_norm_(model, 1.0), model.weight.grad
        (tensor(5.), tensor([[0.6000, 0.8000]]))
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"give the model, not its parameters, got {type(model).__name__}: rows are no parameters of it")
    if not max_norm > 0 or not norm_type > 0:
        raise InvalidInputError(f"max_norm and norm_type must be above 0, got {max_norm!r} and {norm_type!r}")
    waiting = _waiting(model)
    leaves = [leaf for pendings in waiting.values() for one in pendings for leaf in one.leaves]
    ours = {id(leaf) for leaf in leaves}
    grads = [param.grad for param in model.parameters() if param.grad is not None and id(param) not in ours]
    norms = [torch.linalg.vector_norm(_values(grad), norm_type) for grad in grads]
    norms += _norms_of_rows(waiting, norm_type)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type) if norms else torch.tensor(0.0)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {float(total)}, so they cannot be clipped; nothing was scaled")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    grads += [leaf.grad for leaf in leaves if leaf.grad is not None]
    for grad in grads:
        grad.mul_(scale.to(grad.device))
    return total


def _norms_of_rows(waiting: dict[str, list[PendingLookups]], norm_type: float) -> list[Tensor]:
    """Return the norm of each table's gradients; where there are several ranks, one norm of all of theirs, the same on each."""
    ranks = n_ranks()
    norms = []
    for pendings in waiting.values():
        share = ranks if pendings[0].table.definition.reduce == "mean" else 1
        norms += [torch.linalg.vector_norm(rows, norm_type) / share for rows in _merged(pendings)]
    if ranks == 1 or not waiting:
        return norms
    device = norms[0].device if norms else torch.device("cpu")
    total = torch.linalg.vector_norm(torch.stack(norms).double() if norms else torch.zeros(1, dtype=torch.float64), norm_type)
    largest = math.isinf(norm_type)
    total = (total if largest else total**norm_type).to(device)
    distributed.all_reduce(total, distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM)
    return [(total if largest else total ** (1 / norm_type)).float()]


def _values(grad: Tensor) -> Tensor:
    """The numbers of a dense gradient, or of a sparse one, whose rows may stand there several times."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _waiting(model: nn.Module) -> dict[str, list[PendingLookups]]:
    """Return the lookups that wait for a step, by table: with a SparseOptimizer the modules over a table have one `PendingLookups`."""
    found: dict[str, dict[int, PendingLookups]] = {}
    for module in model.modules():
        if isinstance(module, TableModule):
            found.setdefault(module.table.name, {})[id(module.pending)] = module.pending
    return {name: list(of.values()) for name, of in found.items()}


def _merged(pendings: list[PendingLookups]) -> list[Tensor]:
    """Return the gradients of one table's rows: none, or one tensor [n, dim] with a line per unique id."""
    pairs = [
        (lookup, leaf.grad)
        for pending in pendings
        for leaf, lookup in zip(pending.leaves, pending.lookups, strict=True)
        if leaf.grad is not None
    ]
    if len(pairs) < 2:
        return [grad for _, grad in pairs]
    ids = np.concatenate([lookup.ids for lookup, _ in pairs])
    grads = np.concatenate([grad.detach().cpu().numpy() for _, grad in pairs])
    with np.errstate(invalid="ignore"):  # infinities of both signs; the norm tells
        return [torch.from_numpy(group_by_id(ids).sum(grads))]
