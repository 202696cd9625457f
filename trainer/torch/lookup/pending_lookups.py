"""Lookups of a table that have a gradient and wait for a step, as torch's own functions find them.

Between backward and step a table is one leaf tensor with a gradient, as a dense weight would be; gradients of one row are summed at the end
of each backward pass. It is among the model's parameters, for torch.nn.utils.clip_grad_norm_ and its callers, and in a group of the
optimizer, for GradScaler and trainers that clip. Backward passes may run in several threads; a lock keeps them and a step apart.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Variable

from kvemb.arrays.segment_sum import group_by_id
from kvemb.errors import InvalidInputError
from kvemb.process import ForkLock

from ...lookahead.cluster_ports import TablePort
from .parameter_walks import RankParams, n_ranks

log = logging.getLogger("kvemb")
MAX_PENDING = 1000
"""Lookups of one module that may wait for a step: more than any sane gradient accumulation, and memory stays
bounded.
"""
_MANY_PENDING = 100
"""Lookups of one module that wait, after which a log line asks whether an optimizer takes steps."""
_MANY_DROPPED = 30
"""Times in a row that gradients of a table were dropped, after which a log line asks the same. It is more often than GradScaler leaves
steps out until its scale fits, and than LBFGS evaluates a closure by default.
"""
KEEP = "Make the optimizer first, and keep it: one that is made after distribute pushes nothing"
_STEPS = "the optimizer that was given to distribute, or of a SparseOptimizer made from this model"


class Lookup:
    """Unique ids uint64 [n], the versions uint64 [n] that the pull saw, and the id that must not be pushed, if any."""

    def __init__(self, ids: NDArray[np.uint64], versions: NDArray[np.uint64], padding_id: np.uint64 | None) -> None:
        self.ids, self.versions, self.padding_id = ids, versions, padding_id

    def pushed(self, *rows: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """Return ids, gradients (or the values given of each row) and versions without the padding id, whose row never changes."""
        if self.padding_id is None:
            return self.ids, *rows, self.versions
        keep = self.ids != self.padding_id
        return self.ids[keep], *(of[keep] for of in rows), self.versions[keep]


class PendingLookups:
    """Lookups of one table that wait for a step with a gradient. Their `leaves` are `group["params"]`, changed in place only."""

    def __init__(self, table: TablePort, n_modules: int = 1, *, trains: bool = True, lock: ForkLock | None = None) -> None:
        self.table, self._trains = table, trains
        self._lock = ForkLock() if lock is None else lock
        self.limit, self._many = MAX_PENDING * n_modules, _MANY_PENDING * n_modules
        self._told = self._told_dropped = False
        self._n_dropped = 0  # since the last step
        self._recorded = False  # a lookup was made since the last step, and none got a gradient
        self.asleep = False  # since the last step, a lookup was made that is not trained only because of eval mode
        self._told_unused, self._n_unused = False, 0  # steps in a row of which one of the two was so
        self.n_steps = self.n_backwards = 0
        """Steps that used gradients up, and lookups that got one: `optimizer_map` compares them."""
        self.leaves: list[Tensor] = []
        self.lookups: list[Lookup] = []
        self._n_lookups: list[int] = []  # how many were made into each of them
        self.group: Callable[[], dict[str, Any]] | None = None
        """Where another optimizer, whose step pushes too, and its GradScaler look for gradients: leaves wait there as well."""
        self.watching: object = None
        """Kept alive: the watch over that optimizer's steps (`optimizer_map`)."""

    def arrived(self, leaf: Tensor, lookup: Lookup) -> None:
        """Take a lookup whose leaf got a gradient in backward, or more of it; if that fails, there is none, as in torch."""
        with self._lock:
            if any(leaf is known for known in self.leaves):
                return
            grad, leaf.grad = leaf.grad, None
        Variable._execution_engine.queue_callback(partial(self._add, leaf, lookup, grad))

    def _add(self, leaf: Tensor, lookup: Lookup, grad: Tensor | None) -> None:
        with self._lock:
            leaf.grad = grad
            self.n_backwards += 1
            self._recorded = False
            if any(known.grad is None for known in self.leaves):  # another optimizer's zero_grad has dropped them
                self._keep([known.grad is not None for known in self.leaves])
                self._tell_dropped()
            self._append(leaf, lookup, 1)
            if len(self.leaves) > 1:
                Variable._execution_engine.queue_callback(self._merge)  # after this pass's other lookups

    @property
    def has_gradient(self) -> bool:
        """Whether a step finds a gradient, be it of no row or of zeros."""
        return any(leaf.grad is not None for leaf in self.leaves)

    def recorded(self) -> None:
        """Take note of a lookup whose gradient is to come."""
        self._recorded = True

    def use_up(self) -> None:
        """Forget gradients and lookups, for a step has used them."""
        self.n_steps += 1
        self._n_dropped = 0
        self._n_unused = self._n_unused + 1 if (self._recorded or self.asleep) and not self.leaves else 0
        if self._n_unused >= _MANY_DROPPED:
            self._tell_unused()
        self._recorded = self.asleep = False
        self.clear()

    def drop(self) -> None:
        """Forget gradients and lookups that no step has used."""
        with self._lock:
            if self.leaves:
                self._tell_dropped()
            self.clear()

    def clear(self) -> None:
        """Forget gradients and lookups; lookups before their backward are not affected."""
        with self._lock:
            for leaf in self.leaves:
                leaf.grad = None
            self._keep([False] * len(self.leaves))

    def withdraw(self) -> None:
        """Take the leaves out of the other optimizer's group, where they are no parameters to be saved or numbered."""
        if self.group is not None and self.leaves:
            ours = {id(leaf) for leaf in self.leaves}
            params = self.group()["params"]
            params[:] = [param for param in params if id(param) not in ours]

    def put_back(self) -> None:
        """Undo `withdraw`."""
        if self.group is not None:
            self._show(self.group(), self.leaves)

    def _show(self, group: dict[str, Any], leaves: list[Tensor]) -> None:
        if n_ranks() > 1 and not isinstance(group["params"], RankParams):
            group["params"] = RankParams(group["params"])
        if isinstance(group["params"], RankParams):
            group["params"].waiting[self.table.name] = self
        else:
            group["params"].extend(leaves)

    def _append(self, leaf: Tensor, lookup: Lookup, n_lookups: int) -> None:
        self.leaves.append(leaf)
        self.lookups.append(lookup)
        self._n_lookups.append(n_lookups)
        if self.group is not None:
            self._show(self.group(), [leaf])

    def _keep(self, keep: list[bool]) -> None:
        self.withdraw()
        lists: tuple[list[Any], ...] = self.leaves, self.lookups, self._n_lookups
        for values in lists:
            values[:] = [value for value, kept in zip(values, keep, strict=True) if kept]
        self.put_back()

    def _merge(self) -> None:
        """Make one leaf of all leaves, with a row for each unique id, and the sum of its gradients."""
        with self._lock:
            live = [leaf.grad is not None for leaf in self.leaves]
            if sum(live) >= 2:
                self._keep(live)
                self._merge_all()

    def _merge_all(self) -> None:
        pushed = [
            lookup.pushed(leaf.detach().cpu().numpy(), leaf.grad.detach().cpu().numpy())
            for leaf, lookup in zip(self.leaves, self.lookups, strict=True)
            if leaf.grad is not None
        ]
        ids, rows, grads, versions = (np.concatenate(arrays) for arrays in zip(*pushed, strict=True))
        groups = group_by_id(ids)
        with np.errstate(invalid="ignore"):  # infinities of both signs: the push refuses what comes of them, and says where
            summed = groups.sum(grads)
        first = groups.starts if groups.order is None else groups.order[groups.starts]
        device, n_lookups = self.leaves[0].device, sum(self._n_lookups)
        leaf = torch.from_numpy(rows[first]).to(device).requires_grad_()
        leaf.grad = torch.from_numpy(summed).to(device)
        self.clear()  # a second backward through the same graph begins with nothing, then
        self._append(leaf, Lookup(groups.ids, groups.minimum(versions), None), n_lookups)

    def check_room(self) -> None:
        """Refuse to go on when no optimizer collects the gradients."""
        if not self._trains:
            raise InvalidInputError(
                f"this module over table {self.table.name!r} is a copy (deepcopy, AveragedModel, or sent to a new process): it looks up "
                "the same rows, and does not train them. Use it in eval mode or under torch.no_grad(); to train rows through it, too, make "
                "a SparseOptimizer of the copy"
            )
        n_waiting = sum(self._n_lookups)
        if n_waiting >= self.limit:
            raise InvalidInputError(
                f"table {self.table.name!r}: {n_waiting} lookups have a gradient and none was pushed. Call "
                f"step() of {_STEPS}, after backward(), or zero_grad() to drop them; use model.eval() or torch.no_grad() where nothing "
                "is trained."
            )
        if n_waiting >= self._many and not self._told:
            self._told = True
            log.warning(
                "table %r: %d lookups have a gradient and wait for step() of %s; more than %d are refused",
                *(self.table.name, n_waiting, _STEPS, self.limit),
            )

    def _tell_unused(self) -> None:
        """Log that steps find no gradients of rows that were looked up to be trained."""
        if self._told_unused:
            return
        self._told_unused = True
        if not self._recorded:
            log.warning(
                "table %r: rows were looked up in eval mode before each of the last %d steps, and do not change: only lookups in training "
                "mode are trained. Call train() of the module over the table; where it is not to be trained, requires_grad_(False)",
                *(self.table.name, self._n_unused),
            )
            return
        log.warning(
            "table %r: rows were looked up for training and got no gradient before any of the last %d steps; its rows do not change. Call "
            "loss.backward(): torch.autograd.grad pushes no gradients of rows. Where nothing is to be trained use model.eval(), "
            "torch.no_grad(), or requires_grad_(False) of the module over the table",
            *(self.table.name, self._n_unused),
        )

    def _tell_dropped(self) -> None:
        """Ask in the log whether an optimizer takes steps, when gradients are dropped again and again."""
        self._n_dropped += 1
        if self._n_dropped < _MANY_DROPPED or self._told_dropped:
            return
        self._told_dropped = True
        log.warning(
            "table %r: gradients of rows were dropped %d times in a row, and none was pushed; its rows do not change. Call step() of %s "
            "between backward() and zero_grad(). %s. Where nothing is to be trained use model.eval(), torch.no_grad(), or "
            "requires_grad_(False) of the module over the table",
            *(self.table.name, self._n_dropped, _STEPS, KEEP),
        )
