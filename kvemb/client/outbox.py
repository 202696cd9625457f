"""The parts that one shard has not answered yet: in order, with their sequences and the window. Bookkeeping only.

No thread, no lock, no gRPC: the push stream has those. Every part is kept until it is applied: its answer may be lost with the
connection. Then it must be sent again under its old sequence. The parts of a push are accepted together, when the shard has the whole
push in its journal. A part that is refused leaves its sequence free. What was sent after it is refused too, as a gap; then numbering
goes on from the last accepted part, first with pushes that were refused as a gap alone, if they go again. Parts of one push that were
refused because slots moved, or a table was closed, are one push again, under its step, to be routed by the map in force: rows of its
tables side by side, whichever shards had refused them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvemb.client.ack import Ack, PartAck
from kvemb.datapath.prefetched_rows import PrefetchedRows
from kvemb.errors import KvembError, PushRejectedError, ShardFailedError, SlotsMovedError, TableDroppedError
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import PushPart
from kvemb.schema.slots import Placement

WINDOW_PARTS = 8
"""Parts on their way without an acceptance; a push waits while there are this many."""
MAX_UNAPPLIED_PARTS = 64
"""Parts accepted and not applied yet that are kept for sending again; a push waits while there are this many."""


@dataclass(eq=False)
class Sent:
    """A part that is not applied yet; `placements` of its tables, by name, and why it was refused, for the case that it goes anew."""

    data: bytes
    part: PartAck
    ack: Ack
    placements: Mapping[str, Placement] = field(default_factory=dict)
    refusal: KvembError | None = None
    accepted: bool = False


class Outbox:
    """The parts to one shard that it has not applied yet, in order.

    Attributes:
        next_sequence: of the next part.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts: dict[int, Sent] = {}  # by sequence, ascending
        self._last_accepted = self._n_accepted = 0
        self.next_sequence = self._cursor = 1  # the cursor: the next sequence to go out on this connection
        self._refused_at: int | None = None  # a part was refused, and those sent after it have not been answered yet
        self._again: list[Sent] = []  # of those that were answered: they go again when all are
        self.forgotten = False  # whether the shard has lost parts that it had acknowledged: nothing can follow them

    def __len__(self) -> int:
        return len(self._parts) + len(self._again)

    @property
    def has_room(self) -> bool:
        """Whether another push may be added."""
        return self._refused_at is None and self.n_unaccepted < WINDOW_PARTS and len(self._parts) < MAX_UNAPPLIED_PARTS

    @property
    def n_unaccepted(self) -> int:
        """Parts without an acceptance."""
        return len(self._parts) + len(self._again) - self._n_accepted

    def unaccepted(self) -> list[Ack]:
        """The pushes of the parts without an acceptance."""
        return [sent.ack for sent in (*self._parts.values(), *self._again) if not sent.accepted]

    @property
    def is_level(self) -> bool:
        """Whether all that was sent after a refused part has been answered, so that its number may be used."""
        return self._refused_at is None

    @property
    def has_next(self) -> bool:
        """Whether there is something for `take` to look at."""
        return self.next_sequence > self._cursor

    def add(self, sequence: int, sent: Sent) -> None:
        """Append a part."""
        if self._refused_at is not None or sequence != self.next_sequence:
            raise PushRejectedError(f"{self._where}: not sent, because the shard refused an earlier part meanwhile")
        self.next_sequence = sequence + 1
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

    def is_behind(self, sequence: int) -> bool:
        """Whether a part was sent after one that was refused: it is refused as a gap, whatever it holds."""
        return self._refused_at is not None and sequence > self._refused_at

    def refused(self, sequence: int, *, again: bool = False) -> None:
        """Take out a part that is not applied under this number; it goes again under another, or never."""
        sent = self._parts.pop(sequence)
        if sent.accepted:  # and refused with all of its sync step: its sequence is used up
            self._n_accepted -= 1
            return
        # Of a push of several parts all are refused, one by one: the first one's number is the next to be used.
        first = self._refused_at = sequence if self._refused_at is None else min(sequence, self._refused_at)
        self._again += [sent] if again else []
        if not any(other > first for other in self._parts):  # parts before it will be accepted in their time
            self._refused_at, self.next_sequence = None, first
            self._cursor = min(self._cursor, first)
            self._send_again()

    def _send_again(self) -> None:
        parts, self._again = self._again, []
        for sent in parts:
            sent.data = replace(PushPart.decode(sent.data), sequence=self.next_sequence).encode()
            self.add(self.next_sequence, sent)

    def reconcile(self, last_sequence: int) -> None:
        """After a break: the shard must still know every part that it has accepted, since those were in its journal.

        It may know more than we have heard of; those parts are sent again and answered as duplicates.
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
        """Number on after the last part that the shard knows, while nothing is open; raises as `reconcile`."""
        self.reconcile(last_sequence)
        self._last_accepted, self._refused_at = last_sequence, None
        self.next_sequence = self._cursor = last_sequence + 1

    def split(self, last_sequence: int) -> tuple[list[Sent], list[Sent]]:
        """Forget everything; return the parts up to this sequence, and those behind it, whose numbers are free again."""
        taken = [sent for sequence, sent in self._parts.items() if sequence <= last_sequence]
        self.next_sequence, self._refused_at = last_sequence + 1, None
        return taken, self.clear()[len(taken) :]

    def clear(self) -> list[Sent]:
        """Forget everything; return the parts that were not applied."""
        left, self._parts, self._again, self._n_accepted = [*self._parts.values(), *self._again], {}, [], 0
        return left


@dataclass(frozen=True, eq=False)
class RefusedPush:
    """The parts of one push that shards refused, or that came after a refused one."""

    ack: Ack  # the push's
    step: int  # its number
    refusals: tuple[KvembError, ...]  # why, of each part that has a reason
    serial: int  # of the newest map that it was routed by
    # tables_serial, load_serial: of the registry of tables and of loads, as its other parts have them
    tables_serial: int
    load_serial: int
    shards: frozenset[int]  # which have refused it
    parts: tuple[PartAck, ...]  # of the ack: new ones are to take their place
    tables: tuple[TableRows, ...]  # rows of each table, ids ascending
    prefetched: tuple[PrefetchedRows, ...]  # rows that the trainer holds, one entry per table

    @property
    def closed(self) -> TableDroppedError | None:
        """The refusal of rows of a table that was altered or dropped, if there is one."""
        return next((error for error in self.refusals if isinstance(error, TableDroppedError)), None)

    @property
    def outdated(self) -> bool:
        """Whether a part was refused because a table was altered, dropped or loaded."""
        return any(not isinstance(error, SlotsMovedError) for error in self.refusals)

    @property
    def moved(self) -> bool:
        """Whether a part was refused because slots have moved."""
        return any(isinstance(error, SlotsMovedError) for error in self.refusals)


def put_together(refused: Iterable[tuple[int, Sent]]) -> list[RefusedPush]:
    """Return the pushes of these parts, of each the shard that has refused it first, in the order in which they were made."""
    by_ack: dict[int, list[tuple[int, Sent]]] = {}
    for shard, sent in refused:
        by_ack.setdefault(id(sent.ack), []).append((shard, sent))
    return sorted((_push(parts) for parts in by_ack.values()), key=lambda push: push.step)


def _push(parts_of: Sequence[tuple[int, Sent]]) -> RefusedPush:
    shards, refused = frozenset(shard for shard, _ in parts_of), [sent for _, sent in parts_of]
    bodies = [PushPart.decode(sent.data) for sent in refused]
    tables: dict[str, list[TableRows]] = {}
    prefetched: dict[str, list[PrefetchedRows]] = {}
    for sent, body in zip(refused, bodies, strict=True):
        for rows in body.tables:
            tables.setdefault(rows.table, []).append(replace(rows, placement=sent.placements[rows.table]))
        for held in sent.part.prefetched:
            prefetched.setdefault(held.definition.key, []).append(held)
    parts = tuple(sent.part for sent in refused)
    joined = tuple(_joined(rows) for rows in tables.values()), tuple(_held(rows) for rows in prefetched.values())
    serials = max(body.map_serial for body in bodies), bodies[0].tables_serial, bodies[0].load_serial
    refusals = tuple(sent.refusal for sent in refused if sent.refusal is not None)
    return RefusedPush(refused[0].ack, bodies[0].step, refusals, *serials, shards, parts, *joined)


def _joined(pieces: Sequence[TableRows]) -> TableRows:
    some = [rows for rows in pieces if len(rows.ids)] or pieces[:1]
    ids = np.concatenate([rows.ids for rows in some])
    rows, versions = np.concatenate([rows.rows for rows in some]), np.concatenate([rows.versions for rows in some])
    return replace(some[0], ids=ids, rows=rows, versions=versions).take(np.argsort(ids, kind="stable"))


def _held(pieces: Sequence[PrefetchedRows]) -> PrefetchedRows:
    ids, versions = (np.concatenate([getattr(rows, name) for rows in pieces]) for name in ("ids", "versions"))
    return replace(pieces[0], ids=ids, versions=versions)
