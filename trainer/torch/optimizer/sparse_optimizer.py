"""SparseOptimizer: a torch.optim.Optimizer whose step is one push of all tables' gradients to the parameter servers.

A group per table holds the run-time values of its rule (lr, beta1, …), for schedulers; `group["params"]` the leaves that wait for a step,
for GradScaler. Backward passes may run in several threads; a step and they wait for one another. It does not survive fork().

A plain copy of a model has no optimizers that push; in any other copy they refuse. `copy` hands one memo to all objects, and a mark in it
reaches optimizers wherever the model holds them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvemb.errors import InvalidInputError
from kvemb.process import ForkLock

from ...bridge.pushed_steps import MAX_UNAPPLIED, PushedSteps, merge_parts
from ...bridge.shared_lookups import SharedLookups
from ...lookahead.cluster_ports import AckPort, ClusterPort, GradientPart
from ..lookup.parameter_walks import eager
from ..lookup.pending_lookups import PendingLookups
from ..lookup.table_module import modules_by_table, share_lookups


def unscale_factor(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor that GradScaler asks the step to multiply gradients by: 1, unless they are still scaled."""
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


_MARK = "kvemb: optimizers that push are left out"  # keys of copy's own are ids, integers

HELD_BY_A_MODEL = (
    "If a model that is copied holds it (model.optimizer), or a scheduler of it, take that off before (model.optimizer = None) and put it "
    "back; kvemb.torch.materialize(model) leaves it out by itself"
)
"""The advice for a refused copy of an optimizer, which may have been copied by accident."""


def leave_out(memo: dict[Any, Any]) -> None:
    """Let the copy that is made with this memo have None for optimizers that push."""
    memo[_MARK] = True


def are_left_out(memo: dict[Any, Any]) -> bool:
    """Return whether the copy that is made with this memo has none of them."""
    return _MARK in memo


class SparseOptimizer(torch.optim.Optimizer):
    """Push what backward collected in a model's Embedding and EmbeddingBag modules.

    Dense weights need an optimizer of their own. There is one group per table, with "table" (its name) and the run-time values of the
    table's optimizer. These begin as `Table.hyper` says, and travel with every push. Schedulers change them as in any optimizer
    (OneCycleLR: with cycle_momentum=False unless the tables have momentum). Gradients of modules that share a table add up. A newer
    SparseOptimizer of the same modules takes them over.

    Args:
        model: a module with at least one Embedding or EmbeddingBag inside, all of one cluster.
        timeout_s: how long step() waits for the other trainers' parts of the step in a sync job, for pushes to be applied in an async one;
            as long as a shard may be away (`parameter_servers.away_timeout_s`) unless given.
        max_unapplied: in an async job, how many of its pushes may not be applied yet when step() returns; it waits for the oldest
            ones. A lower number bounds how stale rows are when the shards fall behind. Each trainer has its own.

    Raises:
        InvalidInputError: no such module, tables of several clusters, or an option out of range.

    Source: torch.optim.Optimizer.

    Example:
        >>> import kvemb, torch
        >>> from kvemb.torch import EmbeddingBag, SparseOptimizer
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     words = cluster.create_table("word", dim=2, optimizer=kvemb.optim.sgd(lr=0.5), initializer=kvemb.init.zeros())
        ...     bag = EmbeddingBag(words, mode="sum")
        ...     optimizer = SparseOptimizer(bag)
        ...     loss = bag(torch.tensor([[7, 8, 7]])).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     cluster.flush()
        ...     words.pull([7, 8])
        array([[-1. , -1. ],
               [-0.5, -0.5]], dtype=float32)
    """

    # GradScaler then calls step() even when gradients overflowed: in a sync job this trainer must still take part in
    # the step.
    _step_supports_amp_scaling = True

    def __init__(self, model: nn.Module, *, timeout_s: float | None = None, max_unapplied: int = MAX_UNAPPLIED) -> None:
        self._modules_of = modules_by_table(model)
        self._lock = ForkLock()
        self._pending = {name: PendingLookups(ms[0].table, len(ms), lock=self._lock) for name, ms in self._modules_of.items()}
        cluster: ClusterPort = next(iter(self._pending.values())).table.cluster
        id_dtypes = {name: pending.table.definition.id_dtype for name, pending in self._pending.items()}
        self._steps = PushedSteps(cluster, id_dtypes, timeout_s=timeout_s, max_unapplied=max_unapplied)
        values = {name: dict(pending.table.hyper) for name, pending in self._pending.items()}
        common = set.intersection(*map(set, values.values()))
        defaults = {key: value for key, value in next(iter(values.values())).items() if key in common}
        super().__init__([{"params": [], "table": name, **values[name]} for name in values], defaults)
        self._share_leaves()
        share_lookups(self._modules_of)
        for name, modules in self._modules_of.items():
            for module in modules:
                module.pending = self._pending[name]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for a step, or set them to zero.

        Forward passes whose backward is to come are not concerned.
        """
        for pending in self._pending.values():
            if set_to_none:
                pending.drop()
            for leaf in pending.leaves:
                if leaf.grad is not None:
                    leaf.grad = torch.zeros_like(leaf.grad)

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients of all backward passes since the last step, all tables in one push.

        The gradients are used up. In a sync job the call returns after the step was applied. Where the next batch's rows were pulled ahead
        as "exact", it returns earlier. The step is then computed and on its way to storage, for which this connection's pulls wait. A
        trainer without gradients takes part, too. As in torch, a table without a gradient counts no step. In an async job the call returns
        once the push was handed over, and pushes nothing if there are no gradients; see `last_ack`.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            InvalidInputError: gradients that are not finite, run-time values out of range, or modules taken over by a
                newer optimizer; nothing was sent.
            KvembError: the push or, in an async job, an earlier one failed, or it was not released or applied in time: it may be
                applied later. Gradients that were not handed over are kept until zero_grad().
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_owned()
        with self._lock:
            self._steps.take(self._sharing(), self._parts, self._hypers, use_up=self._use_up, loss=loss)
        return loss

    def _use_up(self) -> None:
        for pending in self._pending.values():
            pending.use_up()

    def _hypers(self) -> dict[str, dict[str, float]]:
        return {group["table"]: self._hyper(group) for group in self.param_groups}

    @property
    def last_ack(self) -> AckPort | None:
        """Of the newest push; None before."""
        return self._steps.last_ack

    @property
    def max_unapplied(self) -> int:
        """How many pushes of an async job may not be applied yet when step() returns."""
        return self._steps.max_unapplied

    @property
    def shared(self) -> SharedLookups:
        """The present shared lookups of the model's modules; the first ones, if parts of the model have several."""
        return self._sharing()[0]

    def _sharing(self) -> list[SharedLookups]:
        """Return the present shared lookups, for each step: a loader prepared for a part of the model, or for more, replaces them."""
        return list({id(module.shared): module.shared for modules in self._modules_of.values() for module in modules}.values())

    @property
    def staleness(self) -> Any:
        """How stale the last push was, as its ack says; None before the first push and until it was released."""
        return None if self.last_ack is None else self.last_ack.staleness

    def __deepcopy__(self, memo: dict[Any, Any]) -> None:
        if not are_left_out(memo):
            self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidInputError(
            "a SparseOptimizer belongs to the modules that it was made for and cannot be copied or pickled: make one of the copied model. "
            f"{HELD_BY_A_MODEL}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the groups' run-time values. Rows and their state are kept by the cluster; waiting gradients are not
        saved.
        """
        state = super().state_dict()
        for group in state["param_groups"]:
            group["params"] = []
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the run-time values of a `state_dict`. Waiting gradients stay.

        Raises:
            InvalidInputError: other tables than this model's, or values that their optimizers do not have; nothing
                changed.
        """
        groups = state_dict["param_groups"]
        mine, given = [g["table"] for g in self.param_groups], [g.get("table") for g in groups]
        if mine != given:
            raise InvalidInputError(f"the state belongs to the tables {given}, this model has {mine}, in this order")
        for group in groups:
            self._hyper(group)
        for group in self.param_groups:
            group["params"] = []
        try:
            super().load_state_dict(state_dict)
        finally:
            self._share_leaves()

    def _share_leaves(self) -> None:
        for group in self.param_groups:
            group["params"] = self._pending[group["table"]].leaves

    def _check_owned(self) -> None:
        for name, modules in self._modules_of.items():
            if any(module.pending is not self._pending[name] for module in modules):
                raise InvalidInputError(f"table {name!r}: a newer SparseOptimizer has taken over this model; use it")

    def _hyper(self, group: dict[str, Any]) -> dict[str, float]:
        """Return a group's run-time values, checked; keys that schedulers keep beside them (initial_lr, …) are left
        out.
        """
        spec = self._pending[group["table"]].table.definition.optimizer
        missing = sorted(set(spec.defaults()) - set(group))
        if missing:
            raise InvalidInputError(f"table {group['table']!r}: {spec.kind} needs {', '.join(missing)} in its group")
        return spec.check_hyper({name: float(group[name]) for name in spec.defaults()})

    def _overflowed(self) -> bool:
        return bool(getattr(self, "found_inf", 0))  # set by GradScaler during its step

    def _parts(self) -> dict[str, GradientPart]:
        """Return the parts of the tables that have a gradient, be it of no row: as in torch, the others' rules count no step."""
        if self._overflowed():
            return {}
        return {name: merge_gradients(of, unscale_factor(self)) for name, of in self._pending.items() if of.has_gradient}
