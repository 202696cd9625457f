"""SparseOptimizer: a torch.optim.Optimizer whose step is one push of all tables' gradients to the parameter servers.

What must not live here: update rules (the parameter servers apply them) and lookups (`table_module`). A group per table holds the run-time
values of the table's optimizer under their own names (lr, beta1, …), so that schedulers work on them. `group["params"]` holds the leaves
that wait for a step, so that GradScaler sees their gradients. Use it from one thread; it does not survive fork().
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from kvemb.arrays.ids import to_caller
from kvemb.errors import InvalidInputError

from ...bridge.cluster_ports import AckPort, ClusterPort, Prefetched
from ...bridge.shared_lookups import SharedLookups
from ...bridge.unapplied_pushes import MAX_UNAPPLIED, Unapplied, check_max_unapplied
from ...report.step_report import current_report
from ..lookup.eager import eager
from ..lookup.model_tables import modules_by_table, share_lookups
from ..lookup.pending_lookups import PendingLookups
from .left_out_of_copies import HELD_BY_A_MODEL, are_left_out
from .pushed_gradients import GradientPart, merge_gradients, unscale_factor


class SparseOptimizer(torch.optim.Optimizer):
    """Push what backward collected in a model's Embedding and EmbeddingBag modules.

    Dense weights need an optimizer of their own. There is one group per table, with "table" (its name) and the run-time values of the
    table's optimizer. These begin as `Table.hyper` says, and travel with every push. Schedulers change them as in any optimizer
    (OneCycleLR: with cycle_momentum=False unless the tables have momentum). Gradients of modules that share a table add up. A newer
    SparseOptimizer of the same modules takes them over.

    Args:
        model: a module with at least one Embedding or EmbeddingBag inside, all of one cluster.
        timeout_s: how long step() waits for the other trainers' parts of the step in a sync job, for pushes to be applied in an async one.
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

    def __init__(self, model: nn.Module, *, timeout_s: float = 120.0, max_unapplied: int = MAX_UNAPPLIED) -> None:
        if not timeout_s > 0:
            raise InvalidInputError(f"timeout_s is {timeout_s!r}; give seconds above 0")
        check_max_unapplied(max_unapplied)
        self._modules_of = modules_by_table(model)
        self._pending = {name: PendingLookups(ms[0].table, len(ms)) for name, ms in self._modules_of.items()}
        self._cluster: ClusterPort = next(iter(self._pending.values())).table.cluster
        self._timeout_s, self._unapplied = timeout_s, Unapplied(max_unapplied)
        self.last_ack: AckPort | None = None
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
        trainer without gradients takes part with empty tables, one whose gradients overflowed with none. In an async job the call returns
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
        sharing = self._sharing()
        prefetched, holding = _begin_step(sharing)  # may wait for rows, which counts as that
        began_s = time.perf_counter()
        hyper = {group["table"]: self._hyper(group) for group in self.param_groups}
        parts = {} if self._overflowed() else self._parts()  # no table at all: even an empty one would count a step of it
        sync = self._cluster.mode == "sync"
        if not sync:
            parts = {name: part for name, part in parts.items() if len(part[0])}
        waited_s = 0.0 if sync or not parts else self._timed(self._unapplied.wait_room)
        if sync or parts:
            self._push(parts, {name: hyper[name] for name in parts}, prefetched)
            _tell(sharing, self.last_ack)
        for pending in self._pending.values():
            pending.use_up()
        push_s = time.perf_counter() - began_s - waited_s
        if sync and self.last_ack is not None:
            waited_s = self._timed(self.last_ack.wait_released)
        elif parts and self.last_ack is not None:
            waited_s += self._timed(partial(self._unapplied.add, self.last_ack))
        changed = None if prefetched is None or self.last_ack is None else self.last_ack.changed_rows
        for shared in sharing:
            shared.end_step(changed if shared in holding else None)
        if (report := current_report()) is not None:
            ack, waits = self.last_ack if sync or parts else None, {"release_s" if sync else "window_s": waited_s}
            report.step(ack, push_s=push_s, **waits, loss=loss)
        return loss

    def _timed(self, wait: Callable[[float], None]) -> float:
        """Wait within the timeout; return the seconds that it took."""
        began_s = time.perf_counter()
        wait(self._timeout_s)
        return time.perf_counter() - began_s

    @property
    def max_unapplied(self) -> int:
        """How many pushes of an async job may not be applied yet when step() returns."""
        return self._unapplied.limit

    @property
    def shared(self) -> SharedLookups:
        """The lookups of the model's modules, as they are shared now; of the first, where parts of the model share them apart."""
        return self._sharing()[0]

    def _sharing(self) -> list[SharedLookups]:
        """Asked anew for each step: whoever prepares a loader for a part of the model, or for more, gives its modules others."""
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
        return {name: merge_gradients(pending, unscale_factor(self)) for name, pending in self._pending.items()}

    def _push(self, parts: dict[str, GradientPart], hyper: dict[str, dict[str, float]], prefetched: Prefetched | None) -> None:
        id_dtype = {name: self._pending[name].table.definition.id_dtype for name in parts}
        rows = {name: (to_caller(ids, id_dtype[name]), grads) for name, (ids, grads, _) in parts.items()}
        versions = {name: part[2] for name, part in parts.items()}
        more = {} if prefetched is None else {"prefetched": prefetched}  # only those that pull ahead need a cluster that knows of it
        self.last_ack = self._cluster.push(rows, versions=versions, hyper=hyper, **more)


def _begin_step(sharing: Sequence[SharedLookups]) -> tuple[Prefetched | None, list[SharedLookups]]:
    """Begin a step of all of them.

    Returns:
        What to register, and for whom: of those that hold rows of one table the first; the others pull again.
    """
    prefetched: dict[str, Any] = {}
    holding = []
    for shared in sharing:
        mine = shared.begin_step()
        if mine is not None and not prefetched.keys() & mine.keys():
            prefetched.update(mine)
            holding.append(shared)
    return prefetched if holding else None, holding


def _tell(sharing: Sequence[SharedLookups], ack: AckPort | None) -> None:
    """Tell each of those that pull ahead of a push, once."""
    ahead = {id(shared.lookahead): shared.lookahead for shared in sharing}
    for lookahead in ahead.values():
        if lookahead is not None and ack is not None:
            lookahead.pushed(ack)
