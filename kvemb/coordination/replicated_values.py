"""Small values of which every node holds a copy: damaged copies are passed over and named, as long as another is good.

One copy is a cell: it is read, and replaced on a condition, so that several programs may change it at once.

A copy is damaged if none of our programs wrote it: bytes that are no message of ours, a value of another type or of far too many bytes. A
copy that another release wrote is not damaged: it is refused.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvemb.errors import ProtocolError

T = TypeVar("T")
log = logging.getLogger("kvemb")
MAX_TRIES = 100
"""Of a change on a condition, while other programs change the same value."""


Change = Callable[[bytes | None], bytes | None]
"""Makes of what stands there what is to stand there; None: nothing is to be changed."""


class DamagedCopyError(ProtocolError):
    """These bytes are no value of any release; of several copies: none is."""


def unless_newer(value: bytes, is_newer: Callable[[bytes], bool]) -> Change:
    """Return the change that lets a copy be this value unless it is newer: no old program takes a change back. Damage is older."""

    def change(found: bytes | None) -> bytes | None:
        try:
            return None if found is not None and is_newer(found) else value
        except DamagedCopyError:
            return value

    return change


def intact_copies(copies: Iterable[bytes | None], decode: Callable[[bytes], T], name: str, where: Sequence[str] = ()) -> list[T]:
    """Decode the good copies; say which are damaged."""
    good, damaged = [], []
    for index, copy in enumerate(copies):
        if copy is None:
            continue
        holder = where[index] if index < len(where) else "storage"
        try:
            good.append(decode(copy))
        except DamagedCopyError as error:
            damaged.append(f"{holder}: {error}")
        except ProtocolError as error:
            raise ProtocolError(f"{holder}, key {name}: {error}") from error
    text = f"the value under the key {name} is damaged, or another program's: {'; '.join(damaged)}"
    if damaged and not good:
        raise DamagedCopyError(f"{text}. No node has a good copy.")
    if damaged:
        log.error("%s. The copies of the other nodes are used.", text)
    return good


def are_damaged(copies: Iterable[bytes | None], decode: Callable[[bytes], object]) -> list[bool]:
    """Return of each copy whether it is a damaged one; none at all is not."""
    return [copy is not None and _is_damaged(copy, decode) for copy in copies]


def _is_damaged(copy: bytes, decode: Callable[[bytes], object]) -> bool:
    try:
        decode(copy)
    except DamagedCopyError:
        return True
    except ProtocolError:
        return False
    return False


@dataclass(frozen=True)
class ValueCell:
    """One copy of a small value."""

    holder: str  # of the copy, for messages
    name: str  # the key that it stands under
    read: Callable[[], bytes | None]  # returns what stands there
    # (old, new): puts `new` there if it is still `old` (None: if there is nothing), in one step; returns whether it was
    swap: Callable[[bytes | None, bytes], bool]

    def update(self, change: Change) -> None:
        """Change the value, again where another program was faster."""
        for _ in range(MAX_TRIES):
            old = self.read()
            new = change(old)
            if new is None or new == old or self.swap(old, new):
                return
        raise ProtocolError(f"{self.holder}: {self.name} changed {MAX_TRIES} times while it was to be written")

    def put(self, value: bytes) -> None:
        """Write a value, whatever stands there."""
        self.update(lambda old: value)

    def mend(self, damaged: bytes | None, value: bytes) -> None:
        """Put a value in the place of a damaged or missing copy, if that still stands there."""
        if self.swap(damaged, value):
            fault = "missing" if damaged is None else "damaged"
            log.error("%s: the value under the key %s was %s and has been put right", self.holder, self.name, fault)
