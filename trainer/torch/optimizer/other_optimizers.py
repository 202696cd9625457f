"""Optimizers that step where the one that pushes does not: found out at their second step.

What must not live here: pushing (`joined_step`), what waits (`pending_lookups`). Strategy: libraries make an optimizer of their own of
model.parameters(), and the one that was given to distribute is never called again. Rows then stand still without a word. Torch tells of
every optimizer's step. One that has weights of the joined optimizer, while gradients of rows wait, is remembered. If it steps again after
another backward, and the joined one has not stepped in between, nobody pushes. Once is no proof: wrappers step before the optimizer inside
of them does, and two optimizers may share weights.

The hook runs in every thread that steps an optimizer, and the model may be trained in another one: lists and counts are looked at, and no
tensor's gradient, which backward replaces without Python's lock.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kvemb.errors import InvalidInputError

from ..lookup.pending_lookups import KEEP, PendingLookups
from .sparse_optimizer import SparseOptimizer

_all: "WeakValueDictionary[int, OtherOptimizers]" = WeakValueDictionary()  # by id()
_registered: list[Any] = []  # torch's handle of the one hook


class OtherOptimizers:
    """Who else steps the weights of a joined optimizer. `watch` makes it; what waits for that optimizer keeps it.

    Args:
        joined: its step pushes.
        pendings: what waits for that.
        stand_ins: which a model without other parameters gives an optimizer; see `table_module.TableModule.stand_in`.
    """

    def __init__(self, joined: torch.optim.Optimizer, pendings: Sequence[PendingLookups], stand_ins: Sequence[nn.Parameter | None]) -> None:
        self._joined, self._pendings = joined, list(pendings)
        self._stand_ins = {id(one): one for one in stand_ins if one is not None}
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a second step in a row of one that does not push.

        Raises:
            InvalidInputError: saying what to do. This step has changed nothing, and gradients still wait.
        """
        if optimizer is self._joined or not any(pending.leaves for pending in self._pendings) or not self._shares(optimizer):
            return
        steps, backwards = (sum(getattr(one, count) for one in self._pendings) for count in ("n_steps", "n_backwards"))
        seen = self._seen.get(optimizer)
        if seen is None or seen[0] != steps:
            self._seen[optimizer] = steps, backwards
        elif seen[1] != backwards:
            raise InvalidInputError(self._message(type(optimizer).__name__))

    def _shares(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = {id(param) for group in self._joined.param_groups for param in group["params"]} | self._stand_ins.keys()
        return any(id(param) in mine for group in optimizer.param_groups for param in group["params"])

    def _message(self, other: str) -> str:
        joined = type(self._joined).__name__
        tables = ", ".join(repr(pending.table.name) for pending in self._pendings)
        return (
            f"this {other} steps again and again, and the {joined} that was given to distribute does not: gradients of rows of table(s) "
            f"{tables} are pushed by nobody, and rows do not change. {KEEP}. Where a library makes its own, call distribute once that "
            f"is there, with it; or step SparseOptimizer(model) beside it. Where rows are not to be trained, requires_grad_(False) of "
            f"the modules over tables says so. This step changed nothing"
        )


def watch(joined: torch.optim.Optimizer, pendings: Sequence[PendingLookups], stand_ins: Sequence[nn.Parameter | None]) -> None:
    """Refuse other optimizers' steps where rows are left out, for as long as something can wait for this one's."""
    watching = OtherOptimizers(joined, pendings, stand_ins)
    for pending in pendings:
        pending.watching = watching
    _all[id(watching)] = watching
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_before_any_step))


def _before_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or isinstance(optimizer, SparseOptimizer):
        return
    for found in _all.valuerefs():  # a copy: other threads call distribute meanwhile
        if (watching := found()) is not None:
            watching.before_step(optimizer)
