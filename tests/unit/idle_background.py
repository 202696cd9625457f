"""An apply thread's background in which nothing is ever to be done."""

from paramserver.engine.storage_pace import Pause


class IdleBackground:
    """Of a shard without repairs, flushes and scrubbing."""

    def step(self, pause: Pause) -> bool:
        return False

    def due_in_s(self) -> None:
        return None
