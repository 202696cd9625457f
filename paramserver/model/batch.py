"""The values that travel inside a shard: checked rows, parts, pushes, and batches. No behaviour beyond arithmetic."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvemb.protocol.messages import PushReply
from kvemb.schema.table_def import TableDef

Sink = Callable[[PushReply], None]
"""Takes the replies about one part; must not block."""

APPLY, ASSIGN, ERASE = "apply", "assign", "erase"
EVICTED, DROPPED = "evicted", "dropped"
"""Reasons of an erase that nobody asked for by the rows' ids."""


def dims_of(kind: str, definition: TableDef) -> tuple[int, ...]:
    """Return how many values a row of a change may have: none to erase it; to assign it, its state may lie after its weights."""
    if kind == ERASE:
        return (0,)
    dim, state_size = definition.dim, definition.record.state_size
    return (dim, dim + state_size) if kind == ASSIGN and state_size else (dim,)


@dataclass(frozen=True, eq=False)
class CheckedRows:
    """Rows of one table that passed every check.

    Args:
        definition: the table.
        ids: uint64 [n], unique, owned by this shard.
        rows: [n, dim] of the table's `row_dtype`, finite: gradients or weights; [n, 0] for erase, [n, dim + s] for an assign with state.
        versions: uint64 [n] as the pull saw them, or [0].
        hyper: every run-time value in force.
    """

    definition: TableDef
    ids: NDArray[np.uint64]
    rows: NDArray[np.float32]
    versions: NDArray[np.uint64]
    hyper: Mapping[str, float]

    @property
    def size_bytes(self) -> int:
        return self.ids.nbytes + self.rows.nbytes + self.versions.nbytes

    def take(self, which: NDArray[np.bool_] | slice) -> "CheckedRows":
        """Return the rows where `which` (bool [n], or a slice) selects, without their versions."""
        return replace(self, ids=self.ids[which], rows=self.rows[which], versions=np.empty(0, np.uint64))


@dataclass(eq=False)
class PartTicket:
    """A part that was taken, and its outcome. Used under ingest's lock only.

    Args:
        sequence, digest, size_bytes: of the part.
        final: its outcome, once it has one.
        accepted: whether its push is in the journal.
        sinks: called with "accepted" and with the outcome.
        released: whether its trainer was told to go on, because the batch is computed, though not stored yet.
        held_back: how many of its ids the tables' admission held back; set before its push is in the journal.
    """

    sequence: int
    digest: int
    size_bytes: int
    final: PushReply | None = None
    accepted: bool = False
    sinks: list[Sink] = field(default_factory=list)
    released: bool = False
    held_back: int = 0

    def hold_back(self, n_ids: int) -> None:
        """Count ids that were held back."""
        self.held_back += n_ids

    def answer(self, sink: Sink) -> None:
        """Tell a sink the present state, and later ones as they come: "accepted" when the push is in the journal, then the outcome."""
        if self.accepted:
            sink(PushReply(self.sequence, "accepted"))
        if self.final is None:
            self.sinks.append(sink)
        else:
            sink(self.final)

    def accept(self) -> None:
        """Record that the push is in the journal and tell the sinks."""
        self.accepted = True
        for sink in self.sinks:
            sink(PushReply(self.sequence, "accepted"))

    def release(self, reply: PushReply) -> None:
        """Tell the sinks that the batch is computed. A sink that is added later, after a lost answer, waits for the outcome."""
        self.released = True
        for sink in self.sinks:
            sink(reply)

    def finish(self, reply: PushReply) -> None:
        """Record the outcome and tell the sinks."""
        self.final = replace(reply, changed_rows=[]) if reply.changed_rows else reply  # a repeated part gets no rows
        sinks, self.sinks = self.sinks, []
        for sink in sinks:
            sink(reply)


@dataclass(frozen=True, eq=False)
class ReceivedPart:
    """One part of a push, with its ticket; `prefetched` are rows (without weights) that its trainer asks about.

    `tables_serial` is that of the registry of tables which the trainer knew.
    """

    tables: tuple[CheckedRows, ...]
    ticket: PartTicket
    prefetched: tuple[CheckedRows, ...] = ()
    tables_serial: int = 0


@dataclass(frozen=True, eq=False)
class Push:
    """A whole push of one trainer to this shard: all its parts."""

    trainer: str
    incarnation: int
    step: int
    parts: tuple[ReceivedPart, ...]
    arrived_s: float = field(default_factory=time.monotonic)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of merging: sums are reproducible because their order is."""
        return self.incarnation, self.parts[-1].ticket.sequence

    @property
    def size_bytes(self) -> int:
        return sum(part.ticket.size_bytes for part in self.parts)

    @property
    def table_keys(self) -> frozenset[str]:
        """Keys of the tables of which it has rows, or asks about rows."""
        return frozenset(rows.definition.key for part in self.parts for rows in (*part.tables, *part.prefetched))


@dataclass(frozen=True, eq=False)
class RefusedStep:
    """A sync step whose pushes do not fit each other: none of them is applied, and their sequences are used up.

    Args:
        pushes: all of the step.
        error: the reason, in the form of the wire.
    """

    pushes: tuple[Push, ...]
    error: Mapping[str, str]


@dataclass(eq=False)
class RowsWork:
    """An assign or erase, applied in order with pushes; `reason` is that of an erase, "" where the rows were named by their ids."""

    kind: str
    rows: CheckedRows
    reason: str = ""
    arrived_s: float = field(default_factory=time.monotonic)
    applied: bool = False
    n_existed: int = 0
    took_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        return self.rows.size_bytes

    def finish(self, n_existed: int, took_s: float = 0.0) -> None:
        """Record that it is applied, how many of its rows existed before, and how long the engine took."""
        self.n_existed, self.took_s, self.applied = n_existed, took_s, True


@dataclass(eq=False)
class EvictionWork(RowsWork):
    """An erase of rows by their table's policy: of those alone that no batch has changed since they were chosen.

    The committer finds them when the batch is numbered, before it is journaled; so a replay has no choice. `rows.versions` are the versions
    as of the choice.
    """

    unchanged: NDArray[np.bool_] | None = None

    def decide(self, unchanged: NDArray[np.bool_]) -> None:
        """Record which of the rows are erased: bool [n]."""
        self.unchanged = unchanged

    @property
    def rows_left(self) -> CheckedRows:
        """Those that are erased, once that is decided."""
        return self.rows.take(slice(0) if self.unchanged is None else self.unchanged)


Work = list[Push] | RowsWork | RefusedStep
"""The source of one batch: pushes to merge, an assign or erase, or a refused step, which changes no row."""


def items_of(work: Work) -> Sequence[Push | RowsWork]:
    """Return the items of a piece of work, as ingest counts them."""
    if isinstance(work, RowsWork):
        return [work]
    return work.pushes if isinstance(work, RefusedStep) else work


@dataclass(frozen=True, eq=False)
class Batch:
    """The changes that the engine applies as one batch k: one entry per table; `reason` as of its `RowsWork`, for the feed."""

    kind: str
    tables: tuple[CheckedRows, ...]
    reason: str = ""

    @property
    def n_rows(self) -> int:
        return sum(len(rows.ids) for rows in self.tables)
