"""A torch optimizer whose step pushes the tables' gradients, too: by hooks, so that every caller of its step reaches the push.

* The push comes before the dense step. If it fails, step() raises and nothing has changed: neither dense weights nor gradients.
* Leaves with a gradient wait in the group that their weight was in: GradScaler unscales them and sees their overflows, zero_grad drops
  them. They leave with the push, so the dense step never sees one; to state_dict they are not shown.
* Run-time values are read from that group at every step, so schedulers work.
* Copies and pickles of an optimizer come without its hooks, so they are refused; a plain copy of a model that holds one has None there.
* In a sync job every trainer takes part in every step. GradScaler leaves step() out after an overflow, unless the optimizer says that it
  handles scaled gradients. So it is made to say so, and the dense part does here what GradScaler would have done.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvemb.errors import InvalidInputError

from ..lookup.parameter_walks import eager
from ..lookup.pending_lookups import PendingLookups
from .optimizer_map import MappedGroup
from .sparse_optimizer import HELD_BY_A_MODEL, SparseOptimizer, are_left_out


@dataclass(frozen=True, eq=False)
class Follows:
    """The group of the user's optimizer that a table follows: its position, for load_state_dict makes new groups, and its meaning."""

    group: int
    mapped: MappedGroup


class JoinedStep:
    """Make `optimizer.step()` push, too; one thread."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sparse: SparseOptimizer,
        follows: Mapping[str, Follows],
        pending: Mapping[str, PendingLookups],
    ) -> None:
        # Any: GradScaler and this class set attributes on them that are in no class.
        self._optimizer: Any
        self._sparse: Any
        self._optimizer, self._sparse = optimizer, sparse
        self._follows = dict(follows)
        self._pending = dict(pending)
        for name, waiting in self._pending.items():
            waiting.group = self._group_at(self._follows[name].group)
        self._scales_itself = bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))
        if sparse.shared.cluster.mode == "sync":
            self._optimizer._step_supports_amp_scaling = True
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_state_dict_pre_hook(self._withdraw)
        optimizer.register_state_dict_post_hook(self._put_back)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        self._optimizer.__getstate__ = self._refuse_copy  # which copies and pickles ask for; they would come without the hooks
        self._optimizer.__deepcopy__ = self._copied_with_a_model

    def _group_at(self, place: int) -> Callable[[], dict[str, Any]]:
        return lambda: self._optimizer.param_groups[place]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Push, after the closure if there is one: torch's optimizers evaluate it before they change anything."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._push()
            return None

        def evaluated_and_pushed() -> Any:
            loss = closure()
            self._push()
            return loss

        return args[:1], {**kwargs, "closure": evaluated_and_pushed}

    @eager
    def _push(self) -> None:
        for group in self._sparse.param_groups:
            follows = self._follows[group["table"]]
            group.update(follows.mapped.values(self._optimizer.param_groups[follows.group]))
        found_inf, grad_scale = (getattr(self._optimizer, name, None) for name in ("found_inf", "grad_scale"))
        self._sparse.found_inf, self._sparse.grad_scale = found_inf or 0, grad_scale
        try:
            self._sparse.step()
        finally:
            self._sparse.found_inf, self._sparse.grad_scale = 0, None
        if found_inf is not None and not self._scales_itself:
            self._scale_dense(bool(found_inf), grad_scale)

    def _scale_dense(self, overflowed: bool, grad_scale: torch.Tensor | None) -> None:
        """Do for the dense parameters what GradScaler does for an optimizer that cannot handle scaled gradients."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if overflowed:
                    param.grad = None  # the step leaves it alone
                elif grad_scale is not None and param.grad is not None:
                    param.grad.div_(grad_scale)
        # Set by GradScaler for this step, and deleted after it; torch's optimizers refuse to see them unless they use them.
        self._optimizer.found_inf = self._optimizer.grad_scale = None

    def _withdraw(self, _: torch.optim.Optimizer) -> None:
        for pending in self._pending.values():
            pending.withdraw()

    def _put_back(self, _: torch.optim.Optimizer, __: dict[str, Any]) -> None:
        for pending in self._pending.values():
            pending.put_back()

    def _before_load(self, optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
        """Take gradients that wait out of the groups, which must have the parameters that were saved; as in torch they are kept."""
        self._withdraw(optimizer)

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        self._put_back(optimizer, {})

    def _copied_with_a_model(self, memo: dict[Any, Any]) -> None:
        if not are_left_out(memo):
            self._refuse_copy()

    def _refuse_copy(self) -> dict[str, Any]:
        raise InvalidInputError(
            f"this optimizer's step pushes the gradients of table(s) {', '.join(self._pending)}, a copy of it would not, and their rows "
            "would never change: it cannot be copied or pickled. Save its state_dict(); a copy of the model is trained by another "
            f"optimizer for its parameters, and a SparseOptimizer of it. {HELD_BY_A_MODEL}"
        )
