"""How often a connection has changed rows: a number that tells whether rows pulled earlier may be others by its own doing.

What must not live here: what a change is, and what other processes do. Thread-safe; in a fork's child, which
can change nothing, the number stands still and no lock is taken that another thread may have held.

Strategy: each change counts twice, when it begins and when it is over, so that two equal numbers mean that no change began, was under way
or ended in between, unless one was under way all the time: then rows may change after the second number only, and a third one tells.
Pushes are over when they are applied, which is looked up when somebody asks for the number.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class SettlingAck(Protocol):
    """What is needed of an ack."""

    @property
    def settled(self) -> bool:
        """Whether the push was applied, or failed."""
        ...


class ChangeCount:
    """The number.

    Example:
        >>> changes = ChangeCount()
        >>> with changes.change():
        ...     changes.now()
        1
        >>> changes.now()
        2
    """

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        self._n = 0
        self._pushes: list[SettlingAck] = []  # as many as may be on their way

    @contextmanager
    def change(self) -> Iterator[None]:
        """Count a change that is over at the end, also if it fails."""
        self._count()
        try:
            yield
        finally:
            self._count()

    def begin_push(self) -> None:
        """Count a push that is about to be sent; `pushed` or `failed` follows."""
        self._count()

    def pushed(self, ack: SettlingAck) -> None:
        """Count the end of the push when its ack says so."""
        with self._lock:
            self._pushes.append(ack)
            self._settle()

    def failed(self) -> None:
        """Count the end of a push that was not sent."""
        self._count()

    def now(self) -> int:
        """Return the number; it only rises."""
        if os.getpid() != self._process:
            return self._n
        with self._lock:
            self._settle()
            return self._n

    def _count(self) -> None:
        if os.getpid() == self._process:
            with self._lock:
                self._n += 1

    def _settle(self) -> None:
        if self._pushes:
            waiting = [ack for ack in self._pushes if not ack.settled]
            self._n += len(self._pushes) - len(waiting)
            self._pushes = waiting
