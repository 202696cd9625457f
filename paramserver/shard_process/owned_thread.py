"""The life of a thread that a shard owns: begun once, told to end, waited for. Its work is its owner's."""

import threading
from collections.abc import Callable, Sequence


class OwnedThread:
    """A named thread. `start` and `stop` are for the owner, `wait` for the code that runs on it."""

    def __init__(self, run: Callable[[], object], *, name: str, wakes: Sequence[Callable[[], None]] = ()) -> None:
        self._wakes, self._told = wakes, threading.Event()
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Tell it to end; return whether it did in time, or never began. Told twice, it does the same again."""
        self._told.set()
        for wake in self._wakes:
            wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def told_to_end(self) -> bool:
        return self._told.is_set()

    def wait(self, pause_s: float) -> bool:
        """Wait so many seconds, less once it is told to end; return whether it is."""
        return self._told.wait(pause_s)
