"""References to modules and tensors of a model beside its tree of modules: an embedding held there would go on with its old rows.

Strategy: one walk over the attributes of all modules, into containers, objects, bound and partial functions, closures, and modules that are
no part of the model. Not into the model's own modules, which are walked themselves, nor into optimizers, which give up the weights that are
replaced. It ends after so many objects: an attribute may refer to half the program. A reference that it does not see still works: modules
and weights that are replaced know it (`distribute`).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..lookup.parameter_walks import attributes_of

_SUBMODULES = ("_parameters", "_buffers", "_modules")
_DEEPEST, _MOST = 8, 100_000
_PLAIN = (
    *(str, bytes, int, float, complex, type(None), np.generic, np.ndarray, torch.dtype, torch.device, torch.Size),
    *(type, ModuleType, torch.optim.Optimizer),
)


@dataclass(frozen=True, eq=False)
class OutsideReference:
    """An attribute of a model's module that leads to tensors or modules, by paths, and is no submodule, parameter or buffer."""

    owner: nn.Module
    attribute: str
    kind: str
    held: tuple[tuple[str, Tensor | nn.Module], ...]


def outside_references(model: nn.Module) -> list[OutsideReference]:
    """Return the attributes of a model's modules that lead to tensors, or to modules."""
    walk = _Walk(model)
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            attribute = f"{path}.{name}".lstrip(".")
            if name not in _SUBMODULES and not isinstance(value, _PLAIN) and (held := tuple(walk.reached(attribute, value))):
                found.append(OutsideReference(module, attribute, type(value).__name__, held))
    return found


class _Walk:
    """A walk over the objects behind attributes; each is walked once, but for tensors and the model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {id(module) for module in model.modules()}
        self._seen: set[int] = set()

    def reached(self, path: str, value: object, depth: int = 0) -> Iterator[tuple[str, Tensor | nn.Module]]:
        if isinstance(value, Tensor) or id(value) in self._own:
            yield path, value  # type: ignore[misc]  # the model's own are modules
            return
        if depth > _DEEPEST or id(value) in self._seen or len(self._seen) >= _MOST:
            return
        self._seen.add(id(value))
        for way, part in _parts(value):
            if not isinstance(part, _PLAIN):
                yield from self.reached(path + way, part, depth + 1)


def _parts(value: Any) -> Iterable[tuple[str, object]]:
    """Return the objects that a value refers to, each with its notation, without running code of the value's."""
    if isinstance(value, dict) and {"params", "lr"} <= value.keys():
        return ()  # a group of an optimizer's, which wrappers of one share: it gives the weight up
    if isinstance(value, dict | MappingProxyType):
        return [*((".keys()", key) for key in value), *((_key(key), one) for key, one in value.items())]
    if isinstance(value, list | tuple | deque):
        return [(f"[{at}]", one) for at, one in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [("{…}", one) for one in value]
    if isinstance(value, MethodType):
        return [(".__self__", value.__self__)]
    if isinstance(value, partial):
        given = [(f".args[{at}]", one) for at, one in enumerate(value.args)]
        return [(".func", value.func), *given, *((f".keywords[{name!r}]", one) for name, one in value.keywords.items())]
    if isinstance(value, FunctionType):
        closure = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*((f" ({name})", cell) for name, cell in closure), *((" (default)", one) for one in defaults)]
    if isinstance(value, CellType):
        try:
            return [("", value.cell_contents)]
        except ValueError:  # not filled yet
            return ()
    return [(f".{name}", one) for name, one in attributes_of(value).items()]


def _key(key: object) -> str:
    return f"[{key!r}]" if isinstance(key, str | int | float | bool) else "[…]"
