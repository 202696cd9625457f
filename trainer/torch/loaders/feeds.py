"""Which parts of a batch feed which module, as the caller names them; and a module's arguments as expressions over the parts of a batch.

Expressions are worked out again from other batches. Pure: evaluating changes nothing, and may happen in any thread. A node is a part of the
batch (`Leaf`), a torch function's result on nodes and constants (`Call`), or one of several results of a call (`Pick`). Moves to a device
are left out: ids are needed where the pull happens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kvemb.errors import InvalidInputError

from ...bridge.shared_lookups import Asked
from ..lookup.parameter_walks import attributes_of
from ..lookup.table_module import LookupModule

Part = str | int | Sequence[str | int]
"""A key, attribute or index of a batch, or several of them, one inside the other."""
Features = Mapping[str, Part | Callable[[Any], Any] | None]
"""The parts of the batch that feed each module, by its path in the model; see `named_plan`."""


class FeedPlan(Protocol):
    """A forecast of a batch's lookups."""

    def asked(self, batch: Any) -> list[Asked]:
        """Return the lookups of a batch; called in any thread."""


@dataclass(frozen=True, eq=False)
class Feed:
    """The arguments of a module's call: `arguments(batch)`."""

    path: str
    module: LookupModule
    arguments: Callable[[Any], tuple[Any, ...]]


class NamedPlan:
    """A forecast of a batch's lookups, by the caller's `features`."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = feeds

    def asked(self, batch: Any) -> list[Asked]:
        """Return the lookups of a batch."""
        return [asked for feed in self._feeds for asked in feed.module.asked(*feed.arguments(batch))]

    def __str__(self) -> str:
        return f"looked up ahead, as named: {_listed(feed.path for feed in self._feeds)}"


def lookup_modules(model: nn.Module) -> dict[str, LookupModule]:
    """Find the modules that look rows up when they are called, by their path in the model; a shared one under each of its paths."""
    return {path: module for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, LookupModule)}


def named_plan(model: nn.Module, features: Features) -> NamedPlan:
    """Make a plan of the caller's `features`."""
    known = callable_modules(model)
    unknown = sorted(set(features) - set(lookup_modules(model)))
    if unknown:
        raise InvalidInputError(f"features: the model has no lookup module {_listed(unknown)}; it has {_listed(known)}")
    named = {id(lookup_modules(model)[path]) for path in features}
    missing = [path for path, module in known.items() if id(module) not in named]
    if missing:
        raise InvalidInputError(f"features does not say what feeds {_listed(missing)}; None means that it is pulled when it is called")
    modules = lookup_modules(model)
    return NamedPlan([Feed(path, modules[path], _arguments_of(path, part)) for path, part in features.items() if part is not None])


def callable_modules(model: nn.Module) -> dict[str, LookupModule]:
    """Return the modules that a model calls to look rows up: not modules inside another one, which makes their lookups."""
    modules = lookup_modules(model)
    inner = {id(child) for module in modules.values() for child in module.modules() if child is not module}
    found: dict[str, LookupModule] = {}
    for path, module in modules.items():
        if id(module) not in inner and all(module is not known for known in found.values()):
            found[path] = module
    return found


def part_of(batch: Any, path: Sequence[str | int]) -> Any:
    """Follow keys, attributes and indices into a batch."""
    value = batch
    for i, step in enumerate(path):
        try:
            value = _step(value, step)
        except (KeyError, IndexError, AttributeError, TypeError):
            at = "".join(f"[{one!r}]" for one in path[:i])
            raise InvalidInputError(f"features: the batch{at} is {_described(value)} and has no part {step!r}") from None
    return value


def _step(value: Any, step: str | int) -> Any:
    by_attribute = isinstance(step, str) and not isinstance(value, Mapping) and hasattr(value, step)
    return getattr(value, step) if by_attribute else value[step]  # type: ignore[arg-type]


def _arguments_of(path: str, part: Part | Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    if callable(part):

        def called(batch: Any) -> tuple[Any, ...]:
            found = part(batch)
            return found if isinstance(found, tuple) else (found,)

        return called
    steps = [part] if isinstance(part, str | int) else part
    good = isinstance(steps, Sequence) and all(isinstance(step, str | int) and not isinstance(step, bool) for step in steps)
    if not good or not steps:
        raise InvalidInputError(f"features[{path!r}] is {part!r}; give a key, attribute or index of the batch, a sequence, or a function")
    return lambda batch: (part_of(batch, steps),)


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {_listed(value)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple) else "")


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"


_DEEPEST, _LONGEST, _MOST = 6, 256, 10_000
_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic, torch.dtype, torch.device, torch.Size, type, nn.Module)


@dataclass(frozen=True, eq=False)
class Leaf:
    """An expression: a part of the batch, by its path."""

    path: tuple[Any, ...]

    def __str__(self) -> str:
        return "batch" + "".join(f"[{step!r}]" for step in self.path)


@dataclass(frozen=True, eq=False)
class Template:
    """Nested arguments, with nodes in the place of values."""

    leaves: Sequence[Any]
    spec: Any

    def same_as(self, other: "Template") -> bool:
        """Whether it has the very same nodes and constants."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        return self.spec == other.spec and len(self.leaves) == len(other.leaves) and all(a is b for a, b in pairs)


@dataclass(frozen=True, eq=False)
class Call:
    """An expression: the result of a torch function on arguments that are expressions."""

    function: Callable[..., Any]
    arguments: Template

    def __str__(self) -> str:
        made_of = ", ".join(str(leaf) for leaf in self.arguments.leaves if isinstance(leaf, NODES))
        return f"{name_of(self.function)}({made_of})"


@dataclass(frozen=True, eq=False)
class Pick:
    """An expression: one of several results of a call."""

    call: Call
    index: int

    def __str__(self) -> str:
        return f"{self.call}[{self.index}]"


Node = Leaf | Call | Pick
NODES = (Leaf, Call, Pick)


class Values:
    """The values of nodes for one batch; each is worked out once."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._known: dict[int, Any] = {}

    def of(self, node: Node) -> Any:
        """Work a node out. Raises what its functions raise."""
        if id(node) not in self._known:
            self._known[id(node)] = self._work_out(node)
        return self._known[id(node)]

    def arguments(self, template: Template) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Fill a template in."""
        filled = [self.of(leaf) if isinstance(leaf, NODES) else leaf for leaf in template.leaves]
        return cast(tuple[tuple[Any, ...], Mapping[str, Any]], pytree.tree_unflatten(filled, template.spec))

    def _work_out(self, node: Node) -> Any:
        if isinstance(node, Leaf):
            return part_of(self._batch, node.path)
        if isinstance(node, Pick):
            return self.of(node.call)[node.index]
        args, kwargs = self.arguments(node.arguments)
        return node.function(*args, **kwargs)


def template_of(args: Sequence[Any], kwargs: Mapping[str, Any], node_of: Callable[[Any], Any]) -> Template:
    """Take arguments apart."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)), is_leaf=lambda value: node_of(value) is not None)
    nodes = [node_of(leaf) for leaf in leaves]
    return Template([leaf if node is None else node for leaf, node in zip(leaves, nodes, strict=True)], spec)


def without_move(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a call's arguments without a move to a device; None for a call that does nothing else."""
    if function in (Tensor.cuda, Tensor.cpu, Tensor.pin_memory):
        return None
    if function is not Tensor.to:
        return tuple(args), dict(kwargs)
    left = [arg.dtype if isinstance(arg, Tensor) else arg for arg in args[1:]]
    left = [arg for arg in left if isinstance(arg, torch.dtype)]
    other = kwargs.get("other")
    dtype = other.dtype if isinstance(other, Tensor) else kwargs.get("dtype")
    if not left and dtype is None:
        return None
    return (args[0], *(left or [dtype])), {}


def parts_of(batch: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Walk a batch: mappings, sequences and objects with attributes, down to arrays and tensors, itself included."""
    return _parts_of(batch, (), set())


def _parts_of(value: Any, path: tuple[Any, ...], seen: set[int]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, _PLAIN) or len(path) > _DEEPEST or id(value) in seen or len(seen) > _MOST:
        return
    seen.add(id(value))  # an object may refer to half the program
    yield path, value
    if isinstance(value, Tensor | np.ndarray):
        return
    for step, inner in _inside(value):
        yield from _parts_of(inner, (*path, step), seen)


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value[:_LONGEST])
    else:
        yield from attributes_of(value).items()


def name_of(function: Callable[..., Any]) -> str:
    """Return a torch function's name for messages."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":  # of a property: its name is that of the descriptor
        return getattr(getattr(function, "__self__", None), "__name__", name)
    return name
