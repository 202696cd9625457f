"""Two things that classes of this house are made of: a cached property without a lock, and a dataclass that costs little to construct.

`functools.cached_property` of Python 3.11 has one lock for all instances, which is held while the value is computed. A child that is forked
meanwhile waits for it for ever, and threads wait for each other. Two threads that ask at once may both compute; their values are equal, and
one of them stays.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar, dataclass_transform, overload

_Value = TypeVar("_Value")
_Class = TypeVar("_Class")


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(field,))
def batch_value(of: type[_Class]) -> type[_Class]:
    """Make a dataclass that is compared by identity, and that only type checkers treat as frozen.

    For values that are made anew for every batch: a frozen dataclass of five fields takes seven times as long to construct, and a pull of
    one row makes fifteen of them.
    """
    return dataclass(eq=False)(of)


class cached_property(Generic[_Value]):  # noqa: N801  the name that Python gives it
    """Keep what a method without arguments returns, in `__dict__`, frozen or not; thread- and fork-safe. As in Python 3.12."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute, self._name = compute, ""
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any]) -> _Value: ...

    def __get__(self, instance: object | None, owner: type[Any]) -> Self | _Value:
        if instance is None:
            return self
        value: _Value = instance.__dict__.setdefault(self._name, self._compute(instance))
        return value
