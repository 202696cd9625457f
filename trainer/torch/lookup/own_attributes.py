"""What an object has as attributes of its own, found without running code of its class: no properties, no `__getattr__`.

What must not live here: what they are looked for.
"""

from types import MemberDescriptorType
from typing import Any


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object by name, those in the `__slots__` of its classes included.

    Example:
        >>> class Pair:
        ...     __slots__ = ("left", "right")
        >>> pair = Pair()
        >>> pair.left = 1
        >>> attributes_of(pair)
        {'left': 1}
    """
    found: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            member = vars(kind).get(name)
            if isinstance(member, MemberDescriptorType) and hasattr(value, name):
                found[name] = getattr(value, name)
    return found
