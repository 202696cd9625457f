"""Find out which parts of a batch feed which module, by watching one batch being used.

While the first batch is used, a TorchFunctionMode sees every torch function that is called, and remembers by weak reference which tensors
were made from the batch, and how. A lookup module's arguments are looked up among those. A module is named with the reason if its ids come
from elsewhere, or in a way that another batch would not repeat: random numbers, changes in place, a detour through Python numbers.

The forecast may be wrong, e.g. if a loop branches on the data: rows ahead serve exactly their ids, so that costs only time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.weak import WeakTensorKeyDictionary

from ...bridge.shared_lookups import Asked
from ..lookup.table_module import LookupModule, TableModule
from .feeds import NODES, Call, Leaf, Node, Pick, Template, Values, callable_modules, name_of, parts_of, template_of, without_move

_READ_OUT = {"numpy", "tolist", "item", "__array__", "__int__", "__index__", "__float__", "__bool__", "__contains__"}

_UNFILLED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize"}
_PURE_OPS = ("aten", "prims")
"""Namespaces of torch.ops; others hold collectives, which every rank must call equally often, and operators of other libraries."""


@dataclass(frozen=True)
class Unknown:
    """Why a tensor cannot be made again from another batch."""

    reason: str


@dataclass(frozen=True, eq=False)
class Foreseen:
    """One call of a module: its arguments as expressions over the batch."""

    path: str
    module: LookupModule
    arguments: Template

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {', '.join(str(leaf) for leaf in self.arguments.leaves if isinstance(leaf, NODES))}"


class TracedPlan:
    """A forecast of a batch's lookups, as far as one was found."""

    def __init__(self, foreseen: Sequence[Foreseen], unforeseen: Mapping[str, str]) -> None:
        self.foreseen, self.unforeseen = list(foreseen), dict(unforeseen)
        self._dropped: set[str] = set()

    def asked(self, batch: Any) -> list[Asked]:
        """Return the lookups of a batch; those that cannot be worked out from this batch will be made when they come."""
        values, asked = Values(batch), []
        for call in self.foreseen:
            with suppress(Exception):  # the forward pass says what is wrong with the batch, if anything is
                args, kwargs = values.arguments(call.arguments)
                asked.extend(call.module.asked(*args, **kwargs))
        return asked

    def drop(self, table: str) -> None:
        """Foresee no more calls of modules that look up only in this table and in tables dropped before."""
        self._dropped.add(table)
        kept: list[Foreseen] = []
        left_out: list[Foreseen] = []
        for call in self.foreseen:
            tables = {module.table.name for module in call.module.modules() if isinstance(module, TableModule)}
            (left_out if tables <= self._dropped else kept).append(call)
        self.foreseen = kept  # as a whole: threads may be reading the old one
        for call in left_out:
            self.unforeseen[call.path] = "what it was asked for was not what the first batch made expect; name it with prepare(features=…)"

    def __str__(self) -> str:
        ahead = [f"looked up ahead: {call}" for call in self.foreseen]
        return "\n".join([*ahead, *(f"pulled when called: {path or 'the model'}: {why}" for path, why in self.unforeseen.items())])


class Trace(TorchFunctionMode):
    """Watches while a batch is used: a context manager around that, in the thread that does."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self._modules = callable_modules(model)
        self._parts = {id(part): (Leaf(path), part) for path, part in parts_of(batch)}  # holds the parts, so that ids stay theirs
        self._known: Any = WeakTensorKeyDictionary()
        self._read_out = ""
        self._calls: list[Foreseen] = []
        self._reasons: dict[str, str] = {}
        self._hooks: list[Any] = []
        self._active = False

    @property
    def called(self) -> bool:
        """Whether any lookup module was called."""
        return bool(self._calls or self._reasons)

    def plan(self) -> TracedPlan:
        """Return the forecast found."""
        seen = {call.path for call in self._calls} | set(self._reasons)
        some = {call.path for call in self._calls}
        reasons = {path: f"only in some calls: {why}" if path in some else why for path, why in self._reasons.items()}
        silent = {path: "it was not called with the first batch" for path in self._modules if path not in seen}
        return TracedPlan(self._calls, {**reasons, **silent})

    def __enter__(self) -> "Trace":
        self._active = True
        for path, module in self._modules.items():
            self._hooks.append(module.register_forward_pre_hook(self._hook(path), with_kwargs=True))
        _push_mode(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take this mode from any place in the stack: the loop may have put modes above it that are still there."""
        self._active = False
        for hook in self._hooks:
            hook.remove()
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self in stack:
            at = stack.index(self)
            for _ in stack[at:]:
                _pop_mode()  # type: ignore[no-untyped-call]
            for mode in stack[at + 1 :]:
                _push_mode(mode)  # type: ignore[no-untyped-call]
        self._parts, self._known = {}, WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._active:
            with suppress(Exception):  # watching must not disturb; a tensor that was missed is one whose origin is not known
                self._note(func, args, kwargs or {}, result)
        return result

    def _hook(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch._C.DisableTorchFunction():
                try:
                    self._note_call(path, module, args, kwargs)
                except Exception as error:  # watching must not disturb
                    self._refuse(path, f"its arguments cannot be taken apart: {error}")

        return called

    # --- tensors

    def _origin(self, value: Any) -> Node | Unknown | None:
        """Return how a value was made from the batch, or why that is unknown; None for a value independent of the batch."""
        if isinstance(value, Tensor):
            known: Node | Unknown | None = self._known.get(value)
            if known is not None:
                return known
        part = self._parts.get(id(value))
        return None if part is None else part[0]

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        template = template_of(args, kwargs, self._origin)
        origins = [leaf for leaf in template.leaves if isinstance(leaf, (*NODES, Unknown))]
        if _is_in_place(func, kwargs):
            self._note_change(func, kwargs.get("out", args[0] if args else None), origins)
            return
        made = [result] if isinstance(result, Tensor) else [one for one in result if isinstance(one, Tensor)] if _several(result) else []
        if not made:
            if origins and name_of(func) in _READ_OUT:
                self._read_out = name_of(func)
            return
        origin = self._made(func, args, kwargs, origins, made)
        if origin is None:
            return
        for i, value in enumerate(result if _several(result) else [result]):
            if isinstance(value, Tensor):
                self._known[value] = Pick(origin, i) if isinstance(origin, Call) and _several(result) else origin

    def _made(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], origins: Sequence[Any], made: Sequence[Tensor]
    ) -> Node | Unknown | None:
        for origin in origins:
            if isinstance(origin, Unknown):
                return origin
        if any(value.requires_grad for value in made):
            return Unknown("they are computed by the model")
        if _is_random(name_of(func)):
            return Unknown(f"{name_of(func)} draws random numbers")
        if not origins:
            return None
        if name_of(func) in _UNFILLED:
            return Unknown(f"{name_of(func)} makes them without values, and how they are filled is not seen")
        if not _is_pure(func):
            return Unknown(f"{name_of(func)} is no function of torch's own that may be called again in another thread")
        kept = without_move(func, args, kwargs)
        return origins[0] if kept is None else Call(func, _on_cpu(template_of(*kept, self._origin)))

    def _note_change(self, func: Any, changed: Any, origins: Sequence[Any]) -> None:
        if not isinstance(changed, Tensor) or not (origins or _is_random(name_of(func))):
            return
        reason = Unknown(f"they are changed in place by {name_of(func)}")
        self._known[changed] = reason
        if changed._base is not None:
            self._known[changed._base] = reason

    # --- modules

    def _note_call(self, path: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        template = template_of(args, kwargs, self._argument)
        for leaf in template.leaves:
            if isinstance(leaf, Unknown):
                self._refuse(path, leaf.reason)
                return
        if not any(isinstance(leaf, NODES) for leaf in template.leaves):
            detour = f" (parts of it were read out by {self._read_out})" if self._read_out else ""
            self._refuse(path, f"they are not made from the batch by torch functions{detour}")
            return
        call = Foreseen(path, module, _on_cpu(template))
        if not any(known.module is module and known.arguments.same_as(call.arguments) for known in self._calls):
            self._calls.append(call)

    def _argument(self, value: Any) -> Any:
        """As `_origin`; floats that the model computed (weights of a bag) are no ids: they stay as they are in this batch."""
        origin = self._origin(value)
        if isinstance(origin, Unknown) and value.is_floating_point():
            return None
        return origin

    def _refuse(self, path: str, reason: str) -> None:
        self._reasons.setdefault(path, f"cannot tell what its ids are: {reason}; name them with prepare(features=…)")


def _on_cpu(template: Template) -> Template:
    """Constants as they are used when a batch is worked out: outside of any graph, where the pull happens."""
    leaves = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in template.leaves]
    return Template(leaves, template.spec)


def _several(result: Any) -> bool:
    return isinstance(result, tuple | list)


def _is_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    name = name_of(func)
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_") or kwargs.get("out") is not None


def _is_pure(func: Any) -> bool:
    """Whether it can be called again, in any thread: torch's own functions that compute, and its operators that change nothing."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        overloads = func.overloads()  # type: ignore[no-untyped-call]
        return all(_is_pure(getattr(func, overload)) for overload in overloads if not overload.endswith("out"))
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace in _PURE_OPS and not func._schema.is_mutable
    home = getattr(func, "__module__", None) or "torch"
    return home.split(".")[0] == "torch" and not home.startswith("torch.distributed")


_random: dict[str, bool] = {}  # not functools.cache: torch.compile, which may trace this, warns of it


def _is_random(name: str) -> bool:
    if name not in _random:
        packet = getattr(torch.ops.aten, name, None)
        overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
        _random[name] = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    return _random[name]
