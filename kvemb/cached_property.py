"""An attribute that is computed when it is first asked for, and kept: functools.cached_property without its lock.

Python 3.11's has one lock for all instances, which is held while the value is computed. A child that is forked meanwhile waits for it
for ever, and threads wait for each other. What must not live here: values that may be computed once only. Two threads that ask at once may
both compute; their values are equal, and one of them stays.
"""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

_Value = TypeVar("_Value")


class cached_property(Generic[_Value]):  # noqa: N801  the name that Python gives it
    """Keep what a method without arguments returns, in the object's `__dict__`, frozen or not. Thread- and fork-safe.

    Source: functools.cached_property, as it is since Python 3.12.

    Example:
        >>> class Ids:
        ...     @cached_property
        ...     def largest(self) -> int:
        ...         print("computed")
        ...         return 7
        >>> ids = Ids()
        >>> ids.largest, ids.largest
        computed
        (7, 7)
    """

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
