"""Walks over the parameters of a model or an optimizer: which of them meet the leaves of rows that wait for a step.

In one process every walk meets the leaves. In a job of several ranks a leaf is this rank's alone, and a norm with it would scale dense
gradients differently on each: only GradScaler and zero_grad meet leaves there. Torch does not tell the caller of a walk; the call stack
does. By it a user who saves a model without its rows is warned, and a model that is frozen freezes its rows.

Lookups stay outside of torch.compile (`eager`): they use the network and unsigned 64-bit integers. `attributes_of` runs no code of a class.
"""

import functools
import logging
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import FrameType, MemberDescriptorType
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grad

from kvemb.errors import InvalidInputError

from ...lookahead.cluster_ports import TablePort

log = logging.getLogger("kvemb")
_NAME = "waiting_rows"
STAND_IN = "rows_in_cluster"
"""The name of `table_module.TableModule.stand_in` among the parameters."""
RESTS = "rests"
"""An attribute of one that requires no gradient for DistributedDataParallel's sake, and does not mean that the rows are frozen."""
_bare: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()  # asked by every module over a table, for one answer
_saved: "WeakSet[nn.Module]" = WeakSet()  # models with a warning about save_pretrained
_MEETS_LEAVES = {"_unscale_grads_", "zero_grad"}  # of torch.amp.GradScaler, those made of it, and torch.optim.Optimizer
_IN_BACKWARD = {"_apply_optimizer_in_backward", "apply_optimizer_in_backward"}  # torch's, and TorchRec's
_DEPTH = 16  # calls from torch's functions to here, through generators of modules inside of modules


class HasLeaves(Protocol):
    """The lookups of one table's rows that wait for a step: `pending_lookups.PendingLookups`."""

    leaves: list[Tensor]

    @property
    def table(self) -> TablePort:
        """The table."""


def n_ranks() -> int:
    """Return how many processes of torch.distributed train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class ParametersWithLeaves(dict[str, Any]):
    """The parameters of a module over a table: its own, and for walks over a model's parameters also the leaves that wait for a step."""

    told = False
    """Whether a warning said that torch's clipping leaves rows out: once in a process."""

    def __init__(
        self, own: Mapping[str, Any], pending: HasLeaves, stand_in: nn.Parameter | None = None, train: Callable[[bool], None] | None = None
    ) -> None:
        super().__init__({name: own[name] for name in own})
        self._pending, self._only_own = pending, False
        self._stand_in, self._train = stand_in, train

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return names and parameters: torch.nn.Module.named_parameters asks each module for them."""
        if self._only_own:
            return super().items()
        if not torch.compiler.is_compiling():
            _refuse_in_backward(self._pending.table.name)
            if self._train is not None and (requires_grad := _told_to_train()) is not None:
                self._train(requires_grad)
        shown = super().items()
        if self._stand_in is not None and _is_bare(_asked()):
            if distributed.is_available() and distributed.is_initialized() and self._stand_in.requires_grad:
                self._stand_in.requires_grad_(False)  # DistributedDataParallel, of one rank too, would wait for its gradient
                setattr(self._stand_in, RESTS, True)
            shown = {**self, STAND_IN: self._stand_in}.items()
        leaves = self._pending.leaves
        if not leaves:
            return shown
        if n_ranks() > 1:
            _tell_clipping(self._pending.table.name)
            return shown
        return {**dict(shown), **{f"{_NAME}_{at}": leaf for at, leaf in enumerate(leaves)}}.items()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Hide the waiting leaves: they are neither saved, nor loaded, nor moved."""
        before, self._only_own = self._only_own, True
        try:
            yield
        finally:
            self._only_own = before


class RankParams(list[Tensor]):
    """`group["params"]` in a job of several ranks: only GradScaler and zero_grad find the leaves that wait for a step there."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__(own)
        self.waiting: dict[str, HasLeaves] = {}
        """By table."""

    def __iter__(self) -> Iterator[Tensor]:
        waiting = [pending for pending in self.waiting.values() if pending.leaves]
        if waiting and sys._getframe(1).f_code.co_name in _MEETS_LEAVES:
            return chain(super().__iter__(), *(pending.leaves for pending in waiting))
        if waiting:
            _tell_clipping(waiting[0].table.name)
        return super().__iter__()

    def __reduce__(self) -> Any:
        """Copy the parameters: waiting leaves stay with the optimizer."""
        return list, (list(self),)


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the callers, from the nearest on."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _asked() -> nn.Module | None:
    """Return the module whose parameters are asked for, with those inside of it; None for a module's own, asked for one by one."""
    if torch.compiler.is_compiling():
        return None
    for frame in _callers():
        if frame.f_code.co_name == "named_parameters":
            root = frame.f_locals.get("self")
            return root if isinstance(root, nn.Module) and frame.f_locals.get("recurse", True) else None
    return None


def _told_to_train() -> bool | None:
    """Return what `requires_grad_` of a module was called with, if it is what asks for parameters; None: something else does."""
    for frame in _callers():
        if frame.f_code is nn.Module.requires_grad_.__code__:
            return bool(frame.f_locals["requires_grad"])
    return None


def _is_bare(root: nn.Module | None) -> bool:
    """As `_has_none`, remembered."""
    if root is None:
        return False
    if root not in _bare:
        _bare[root] = _has_none(root)
    return _bare[root]


def _has_none(root: nn.Module) -> bool:
    """Whether no parameter is registered in a module, or in one inside of it."""
    return not any(param is not None for module in root.modules() for param in module._parameters.values())


def _tell_clipping(table: str) -> None:
    """Warn when torch's function clips gradients: it cannot see those of rows here, and only the call stack tells of it."""
    if ParametersWithLeaves.told:
        return
    for frame in _callers():
        if frame.f_code.co_filename == clip_grad.__file__:
            ParametersWithLeaves.told = True
            log.warning(
                "torch.nn.utils.%s leaves the gradients of rows out in a job of %d ranks (table %r waits with some): use "
                "kvemb.torch.clip_grad_norm_(model, …), on every rank",
                *(frame.f_code.co_name, n_ranks(), table),
            )
            return


def tell_saving(table: str) -> None:
    """Warn when Hugging Face's save_pretrained saves a model, once for each model: from_pretrained would draw new rows."""
    for frame in _callers():
        root = frame.f_locals.get("self") if frame.f_code.co_name == "save_pretrained" else None
        if isinstance(root, nn.Module):
            if root not in _saved:
                _saved.add(root)
                log.warning(
                    "save_pretrained of this %s writes no rows of its tables (%r is one), and from_pretrained would draw them at random; "
                    "for a folder that it reads, save a copy with rows: kvemb.torch.materialize(model).save_pretrained(…)",
                    *(type(root).__name__, table),
                )
            return


def _refuse_in_backward(table: str) -> None:
    """Refuse to give an optimizer to each parameter of a module that has none: it would silently go over nothing."""
    root: Any = None
    for frame in _callers():
        if frame.f_code.co_name in _IN_BACKWARD:
            break
        if frame.f_code.co_name in ("parameters", "named_parameters"):
            root = frame.f_locals.get("self")
    else:
        return
    if isinstance(root, nn.Module) and _has_none(root):
        raise InvalidInputError(
            f"apply_optimizer_in_backward was given the parameters of a {type(root).__name__} over table {table!r}, which has none: its "
            "rows are in a cluster, and this would train nothing. Leave it out; rows are trained by the rule that the table was created "
            "with, at each step of a SparseOptimizer(model). This module is as it was"
        )


_WHY = (
    "kvemb: rows come over the network, so lookups and pushes run outside of what torch.compile compiles. Leave fullgraph=True out; or "
    "compile with it the parts of the model that have no tables; or, to serve, a copy of plain modules: kvemb.torch.materialize(model)"
)
_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def eager(forward: _Forward) -> _Forward:
    """Keep a function out of torch.compile, as torch.compiler.disable, whose import of the compiler takes seconds."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # true where this line is traced: here a full graph is refused
            torch._dynamo.graph_break(msg=_WHY)
        if not disabled:
            if "torch._dynamo" not in sys.modules:  # nothing is compiled in this process, so far
                return forward(*args, **kwargs)
            disabled.append(torch.compiler.disable(forward))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return run  # type: ignore[return-value]


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object by name, those in the `__slots__` of its classes included."""
    found: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            member = vars(kind).get(name)
            if isinstance(member, MemberDescriptorType) and hasattr(value, name):
                found[name] = getattr(value, name)
    return found
