"""A flag that a signal handler may set: the program has been told to stop.

`threading.Event` may not be set there. A handler runs in the main thread, wherever that is. Inside the event's own `wait` it would wait for
ever for the lock that the interrupted wait holds. Here nothing is locked, and who waits looks again and again.
"""

import time

_LOOK_S = 0.05


class StopFlag:
    """Set once, by a handler or by any thread."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Set it."""
        self._set = True

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long until it is set; return whether it is."""
        end = time.monotonic() + timeout_s
        while not self._set and (left_s := end - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
        return self._set
