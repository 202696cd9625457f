"""What one shard still owes an answer for: parts in order, their sequences, the window. Bookkeeping only.

No thread, no lock, no gRPC: the push stream has those. Every part is kept until it is applied: its answer may be lost with the connection.
Then it must be sent again under its old sequence. The parts of a push are accepted together, when the shard has the whole push in its
journal. A part that is refused leaves its sequence free. What was sent behind it is refused too, as a gap; then numbering goes on from the
last accepted part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvemb.client.ack import Ack, PartAck
from kvemb.errors import PushRejectedError, ShardFailedError
from kvemb.schema.slots import Placement

WINDOW_PARTS = 8
"""Parts on their way without an acceptance; a push waits while there are this many."""
MAX_UNAPPLIED_PARTS = 64
"""Parts accepted and not applied yet that are kept for sending again; a push waits while there are this many."""


@dataclass(eq=False)
class Sent:
    """A part that is not applied yet; `placements` of its tables, by name, for the case that it must be routed again."""

    data: bytes
    part: PartAck
    ack: Ack
    placements: Mapping[str, Placement] = field(default_factory=dict)
    accepted: bool = False


class Outbox:
    """The parts to one shard that it has not applied yet, in order.

    Args:
        where: the shard, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts: dict[int, Sent] = {}  # by sequence, ascending
        self._last_sequence = self._last_accepted = self._n_accepted = 0
        self._cursor = 1  # the next sequence to go out on this connection
        self._refused_at: int | None = None  # a part was refused, and those sent behind it have not been answered yet
        self.forgotten = False  # whether the shard has lost parts that it had acknowledged: nothing can follow them

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def next_sequence(self) -> int:
        """The sequence of the next part."""
        return self._last_sequence + 1

    @property
    def has_room(self) -> bool:
        """Whether another push may be added."""
        return self._refused_at is None and self.n_unaccepted < WINDOW_PARTS and len(self._parts) < MAX_UNAPPLIED_PARTS

    @property
    def n_unaccepted(self) -> int:
        """Parts without an acceptance."""
        return len(self._parts) - self._n_accepted

    def unaccepted(self) -> list[Ack]:
        """The pushes of the parts without an acceptance."""
        return [sent.ack for sent in self._parts.values() if not sent.accepted]

    @property
    def has_next(self) -> bool:
        """Whether there is something for `take` to look at."""
        return self._last_sequence >= self._cursor

    def add(self, sequence: int, sent: Sent) -> None:
        """Append a part.

        Raises:
            PushRejectedError: its number is taken, because an earlier part was refused since it was numbered.
        """
        if self._refused_at is not None or sequence != self.next_sequence:
            raise PushRejectedError(f"{self._where}: not sent, because the shard refused an earlier part meanwhile")
        self._last_sequence = sequence
        self._parts[sequence] = sent

    def rewind(self) -> None:
        """Begin a connection: everything goes out again."""
        self._cursor = next(iter(self._parts), self.next_sequence)

    def take(self) -> bytes | None:
        """Return the next part to send, or None where it was answered meanwhile."""
        sent = self._parts.get(self._cursor)
        self._cursor += 1
        return None if sent is None else sent.data

    def get(self, sequence: int) -> Sent | None:
        """Return a part that is not applied yet."""
        return self._parts.get(sequence)

    def answered(self, sequence: int, *, applied: bool) -> None:
        """Record that a part was accepted, or applied."""
        sent = self._parts[sequence]
        if not sent.accepted:
            sent.accepted = True
            self._n_accepted += 1
            self._last_accepted = max(self._last_accepted, sequence)
        if applied:
            del self._parts[sequence]
            self._n_accepted -= 1

    def refused(self, sequence: int) -> None:
        """Take out a part that will never be applied."""
        sent = self._parts.pop(sequence)
        if sent.accepted:  # and refused with all of its sync step: its sequence is used up
            self._n_accepted -= 1
            return
        # Of a push of several parts all are refused, one by one: the first one's number is the next to be used.
        first = self._refused_at = sequence if self._refused_at is None else min(sequence, self._refused_at)
        if not any(other > first for other in self._parts):  # parts before it will be accepted in their time
            self._refused_at, self._last_sequence = None, first - 1
            self._cursor = min(self._cursor, first)

    def reconcile(self, last_sequence: int) -> None:
        """After a break: the shard must still know every part that it has accepted, since those were in its journal.

        It may know more than we have heard of; those parts are sent again and answered as duplicates.

        Args:
            last_sequence: of the last part that the shard knows.

        Raises:
            ShardFailedError: it has forgotten acknowledged pushes.
        """
        if last_sequence >= self._last_accepted:
            return
        self.forgotten = True
        n_missing = self._last_accepted - last_sequence
        n_open = sum(sequence in self._parts for sequence in range(last_sequence + 1, self._last_accepted + 1))
        raise ShardFailedError(
            f"{self._where} was restarted and remembers {last_sequence} of the {self._last_accepted} parts that it had "
            f"acknowledged: {n_missing} acknowledged parts are missing from its journal. It had reported {n_missing - n_open} of them as "
            f"applied, and what these did to rows is not safe there either; {n_open} had not been reported as applied. Put the right data "
            "folder back if this one is an old copy or has lost its end. Close this cluster and connect again to go on from the rows in "
            "storage."
        )

    def resume(self, last_sequence: int) -> None:
        """Number on behind the last part that the shard knows, while nothing is open; raises as `reconcile`."""
        self.reconcile(last_sequence)
        self._last_sequence = self._last_accepted = last_sequence
        self._cursor, self._refused_at = last_sequence + 1, None

    def split(self, last_sequence: int) -> tuple[list[Sent], list[Sent]]:
        """Forget everything; return the parts up to this sequence, and those behind it, whose numbers are free again."""
        taken = [sent for sequence, sent in self._parts.items() if sequence <= last_sequence]
        self._last_sequence, self._refused_at = last_sequence, None
        return taken, self.clear()[len(taken) :]

    def clear(self) -> list[Sent]:
        """Forget everything; return what was left."""
        left, self._parts, self._n_accepted = list(self._parts.values()), {}, 0
        return left
