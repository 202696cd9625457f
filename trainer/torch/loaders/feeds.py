"""Which parts of a batch feed which module: as the caller names them.

What must not live here: finding it out (`batch_trace`), and pulling (`prepare`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from kvemb.errors import InvalidInputError

from ...bridge.shared_lookups import Asked
from ..lookup.table_module import LookupModule

Part = str | int | Sequence[str | int]
"""A key, attribute or index of a batch, or several of them, one inside the other."""
Features = Mapping[str, Part | Callable[[Any], Any] | None]
"""What feeds each module, by its path in the model; see `named_plan`."""


class FeedPlan(Protocol):
    """What a batch will be asked for."""

    def asked(self, batch: Any) -> list[Asked]:
        """Return the lookups of a batch; called in any thread."""
        ...


@dataclass(frozen=True, eq=False)
class Feed:
    """What a module is called with: `arguments(batch)`."""

    path: str
    module: LookupModule
    arguments: Callable[[Any], tuple[Any, ...]]


class NamedPlan:
    """What a batch will be asked for, as the caller has said."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = feeds

    def asked(self, batch: Any) -> list[Asked]:
        """Return the lookups of a batch.

        Raises:
            InvalidInputError: it lacks a part that was named, or has other ids there than the table takes.
        """
        return [asked for feed in self._feeds for asked in feed.module.asked(*feed.arguments(batch))]

    def __str__(self) -> str:
        return f"looked up ahead, as named: {_listed(feed.path for feed in self._feeds)}"


def lookup_modules(model: nn.Module) -> dict[str, LookupModule]:
    """Find the modules that look rows up when they are called, by their path in the model; a shared one under each of its paths."""
    return {path: module for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, LookupModule)}


def named_plan(model: nn.Module, features: Features) -> NamedPlan:
    """Make a plan of what the caller says.

    Args:
        model: the model.
        features: by the path of each module that is called: a key, attribute or index of the batch, or a sequence of them. Or a function of
            the batch that returns the module's only argument, or a tuple of its arguments. Or None for a module whose rows shall be pulled
            when it is called.

    Raises:
        InvalidInputError: a path that is no such module's, or one that is missing.
    """
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
    """The modules that a model calls to look rows up: not those inside another one, whose lookups that one makes."""
    modules = lookup_modules(model)
    inner = {id(child) for module in modules.values() for child in module.modules() if child is not module}
    found: dict[str, LookupModule] = {}
    for path, module in modules.items():
        if id(module) not in inner and all(module is not known for known in found.values()):
            found[path] = module
    return found


def part_of(batch: Any, path: Sequence[str | int]) -> Any:
    """Follow keys, attributes and indices into a batch.

    Raises:
        InvalidInputError: there is no such part; what there is, is named.
    """
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
