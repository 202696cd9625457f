"""What was taken and is not applied yet, oldest first, and how much of it there may be. Pure; ingest locks."""

from collections.abc import Collection
from dataclasses import dataclass

from kvemb.errors import PushRejectedError

from ..model.batch import Push, ReceivedPart, RowsWork
from .sessions import Session


@dataclass(frozen=True)
class Limits:
    """Bounds of what waits to be applied. In sync mode a trainer with nothing waiting is always let in, so that a barrier cannot starve.

    Args:
        trainer_bytes: of one trainer's pushes.
        total_bytes, total_items: of all.
        push_bytes, push_parts: of one push.
    """

    trainer_bytes: int = 64 << 20
    total_bytes: int = 256 << 20
    total_items: int = 4096
    push_bytes: int = 1 << 30
    push_parts: int = 4096


class UnappliedParts:
    """Complete pushes and row changes in the order in which they came, numbered from 1.

    Args:
        limits: of what there may be.
        sync: whether a barrier waits for every trainer.

    """

    def __init__(self, limits: Limits, *, sync: bool = False) -> None:
        self._limits, self._sync = limits, sync
        self._items: dict[int, Push | RowsWork] = {}
        self._bytes = 0
        self.last = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, number: int) -> bool:
        return number in self._items

    def add(self, item: Push | RowsWork) -> int:
        """Append an item; return its number."""
        self.last += 1
        self._items[self.last] = item
        self._bytes += item.size_bytes
        return self.last

    def remove(self, item: Push | RowsWork) -> None:
        """Take out an item; it is near the front."""
        del self._items[next(number for number, other in self._items.items() if other is item)]
        self._bytes -= item.size_bytes

    def all(self) -> list[Push | RowsWork]:
        """Return every item, oldest first."""
        return list(self._items.values())

    def numbers(self, without: Collection[Push]) -> list[int]:
        """Return the numbers of all items but these pushes."""
        left_out = {id(push) for push in without}
        return [number for number, item in self._items.items() if id(item) not in left_out]

    def age_s(self, now_s: float) -> float:
        """Age of the oldest item in seconds; 0 when nothing waits."""
        oldest = next(iter(self._items.values()), None)
        return 0.0 if oldest is None else now_s - oldest.arrived_s

    def has_room(self, session: Session | None = None) -> bool:
        """Whether one more part of this trainer, or one more row change, may be taken."""
        limits = self._limits
        room = len(self._items) < limits.total_items and self._bytes < limits.total_bytes
        if session is None:
            return room
        if session.n_waiting == 0:
            return room or self._sync
        return room and session.bytes_waiting < limits.trainer_bytes

    def check_size(self, session: Session, new: ReceivedPart) -> None:
        """Refuse the part that makes a push too large to hold."""
        parts = [*session.incomplete, new]  # of an abandoned push too: they leave when this part is taken
        if len(parts) > self._limits.push_parts or sum(part.ticket.size_bytes for part in parts) > self._limits.push_bytes:
            raise PushRejectedError(
                f"trainer {session.trainer!r}: a push of more than {self._limits.push_parts} parts or {self._limits.push_bytes} bytes; "
                "push in smaller steps"
            )

    def describe(self) -> str:
        """Say what is not applied, for the last words of a shard that could not drain."""
        items = self.all()
        who = sorted({f"{item.trainer} (to step {item.step})" for item in items if isinstance(item, Push)})
        n_changes = sum(isinstance(item, RowsWork) for item in items)
        return f"{len(items)} accepted changes are not applied: pushes of {', '.join(who) or 'nobody'}, {n_changes} assigns or erases"
