"""A lock that a forked child finds open: the thread that held it at the fork is none of the child's.

What must not live here: what a lock guards. A child finds that as it was at the fork, perhaps in the middle of a change.
"""

import os
import threading
from contextlib import suppress
from types import TracebackType
from weakref import WeakSet

_locks: "WeakSet[ForkLock]" = WeakSet()


class ForkLock:
    """As threading.RLock in a `with`, for what pulls and a forked child's other calls go through. Thread- and fork-safe.

    Example:
        >>> lock = ForkLock()
        >>> with lock, lock:
        ...     "held twice by one thread"
        'held twice by one thread'
    """

    def __init__(self) -> None:
        self._held = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._held.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(RuntimeError):  # renewed meanwhile, by a fork within the `with`
            self._held.release()

    def renew(self) -> None:
        """Be open, whoever holds it."""
        self._held = threading.RLock()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
