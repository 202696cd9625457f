"""How often a connection has changed rows: a number that tells whether rows pulled earlier may have changed by its own doing.

Thread-safe. In a fork's child, which can change nothing, the number stands still and nothing is waited for. No lock is taken there that
another thread may have held.

Strategy: each change counts twice, when it begins and when it is over. So two equal numbers mean that no change began or ended in
between. One may have been under way all the time: its rows change after the second number, and a third one tells. Pushes are over when
they are released, which is looked up when the number is asked for. Some are released before storage has them; `wait_stored` waits
for those, and pulls call it first.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvemb.net.deadline import Deadline

if TYPE_CHECKING:  # the client imports gRPC
    from kvemb.client.ack import Ack


class WriteCounter:
    """Counts the changes of rows that one connection has begun and ended."""

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        self._n = 0
        self._pushes: list[Ack] = []  # as many as may be on their way
        self._unstored: list[Ack] = []  # released, and on their way to storage when that was looked up last
        self.may_wait = False  # for `wait_stored`: pushes were on their way when that was looked up last

    @contextmanager
    def change(self) -> Iterator[None]:
        """Count a change that is over at the end, also if it fails."""
        self.count()
        try:
            yield
        finally:
            self.count()

    def count(self) -> None:
        """Count that a push is about to be sent, or was not sent in spite of that; `pushed` counts the end of one that was."""
        if os.getpid() == self._process:
            with self._lock:
                self._n += 1

    def pushed(self, ack: "Ack") -> None:
        """Count the end of the push when its ack says so."""
        with self._lock:
            self.may_wait = True
            self._pushes.append(ack)
            self._settle()

    def now(self) -> int:
        """Return the number; it only rises."""
        if os.getpid() != self._process:
            return self._n
        with self._lock:
            self._settle()
            return self._n

    def all_stored(self) -> bool:
        """Whether storage has everything that was released: then rows that are pulled from now on have all that the number counts."""
        return not self._still_unstored()

    def wait_stored(self, deadline: Deadline) -> None:
        """Wait until storage has everything that was released before the call, or it has failed."""
        for ack in self._still_unstored():
            ack.wait_settled(deadline.remaining_s())

    def forget_pushes(self) -> None:
        """Wait for no push any more: the connection is closed, and its pushes are no longer reported."""
        if os.getpid() == self._process:
            with self._lock:
                self._pushes, self._unstored, self.may_wait = [], [], False

    def _still_unstored(self) -> "list[Ack]":
        if os.getpid() != self._process:
            return []
        with self._lock:
            self._settle()
            self._unstored = [ack for ack in self._unstored if not ack.settled]
            self.may_wait = bool(self._pushes or self._unstored)
            return list(self._unstored)

    def _settle(self) -> None:
        if self._pushes:
            looked_at = [(ack, ack.released) for ack in self._pushes]  # once each: it may change meanwhile
            released = [ack for ack, is_released in looked_at if is_released]
            self._n += len(released)
            self._pushes = [ack for ack, is_released in looked_at if not is_released]
            self._unstored = [ack for ack in (*self._unstored, *released) if not ack.settled]
