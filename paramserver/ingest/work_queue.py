"""Accepted work that is not applied yet: its bounds, its order, and which pushes become one batch.

A batch is the segment sum of its pushes; docs/adr/0006 says why tables that reduce by "mean" are never merged in async mode. No I/O: the
time is passed in, and `Ingest` holds the lock.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.segment_sum import Groups, group_by_id
from kvemb.errors import PushRejectedError, to_wire
from kvemb.schema.table_def import TableDef

from ..model.batch import APPLY, Batch, CheckedRows, PartTicket, Push, ReceivedPart, RefusedStep, RowsWork, Work
from .ingest_state import IngestState
from .sessions import Session
from .step_waits import check_overdue, deadline_s, lacking
from .sync_steps import SyncSteps

MAX_MERGED_BYTES = 64 << 20
"""Of the pushes that are merged into one batch; one push alone may be larger."""
HeldBack = Callable[[TableDef, Groups], NDArray[np.bool_] | None]
"""(table, the rows of a batch grouped by id) -> which of their n ids are held back, bool [n]; None: none."""


@dataclass(frozen=True)
class Limits:
    """Bounds of the work that waits to be applied.

    In sync mode a trainer with no push waiting is always let in, so that the barrier gets its push.

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
    """Complete pushes and row changes that are not applied yet, in the order in which they came, numbered from 1."""

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
        parts = [*session.incomplete, new]  # an abandoned push's parts count, too: they go when this one is taken
        if len(parts) > self._limits.push_parts or sum(part.ticket.size_bytes for part in parts) > self._limits.push_bytes:
            raise PushRejectedError(
                f"trainer {session.trainer!r}: a push of more than {self._limits.push_parts} parts or {self._limits.push_bytes} bytes; "
                "push in smaller steps"
            )

    def describe(self) -> str:
        """Describe the work that is not applied, for the last log line of a shard that could not drain."""
        items = self.all()
        who = sorted({f"{item.trainer} (to step {item.step})" for item in items if isinstance(item, Push)})
        n_changes = sum(isinstance(item, RowsWork) for item in items)
        return f"{len(items)} accepted changes are not applied: pushes of {', '.join(who) or 'nobody'}, {n_changes} assigns or erases"


class WorkQueue:
    """Pushes and row changes on their way to the committer, in the order in which they came."""

    def __init__(self, state: IngestState) -> None:
        self._state = state
        self._queue: deque[Work] = deque()

    def add(self, item: Push | RowsWork) -> None:
        """Append an item; in sync mode a push waits for the others of its step first."""
        if isinstance(item, RowsWork):
            self._queue.append(item)
        elif self._state.steps is None:
            self._queue.append([item])
        else:
            self._state.become(self._state.steps.add(item))

    def take(self, limit: int, now_s: float) -> list[Work]:
        """Return at most `limit` pieces of work."""
        if self._state.steps is not None:
            self._release_steps(self._state.steps)
            if not self._queue:
                check_overdue(self._state.steps, now_s)
        return [self._pop() for _ in range(limit) if self._queue]

    def due_s(self) -> float | None:
        """The time at which the next lease in a sync step ends, on the clock of `Push.arrived_s`; None while no lease runs."""
        return None if self._state.steps is None else deadline_s(self._state.steps)

    def in_unfinished_steps(self) -> list[Push]:
        """Return the pushes that wait for the others of their sync step."""
        return [] if self._state.steps is None else self._state.steps.waiting

    def lacking(self) -> tuple[list[Push], str]:
        """Return the pushes whose step lacks another member's push, and say whose; see `step_waits.lacking`."""
        return ([], "") if self._state.steps is None else lacking(self._state.steps)

    def forget_unfinished(self) -> None:
        """Forget the pushes that wait for the others of their sync step."""
        if self._state.steps is not None:
            self._state.become(self._state.steps.clear())

    def clear(self) -> None:
        self._queue.clear()
        self.forget_unfinished()

    def _release_steps(self, steps: SyncSteps) -> None:
        while (out := steps.next_step())[1]:
            steps, step = out
            self._state.become(steps)
            try:
                hyper_by_table(part for push in step for part in push.parts)
                self._queue.append([*step])
            except PushRejectedError as error:
                self._queue.append(RefusedStep(step, to_wire(error)))

    def _pop(self) -> Work:
        first = self._queue.popleft()
        if not isinstance(first, list) or self._state.steps is not None:
            return first
        pushes = list(first)
        for item in self._queue:
            if not isinstance(item, list):
                break
            pushes += item
        n = n_mergeable(pushes) if len(pushes) > 1 else 1
        for _ in range(n - 1):
            self._queue.popleft()
        return pushes[:n]


def hyper_by_table(parts: Iterable[ReceivedPart]) -> dict[str, Mapping[str, float]]:
    """Return the run-time values in force for each table that the parts name."""
    found: dict[str, Mapping[str, float]] = {}
    for part in parts:
        for rows in part.tables:
            name = rows.definition.name
            if found.setdefault(name, rows.hyper) != rows.hyper:
                raise PushRejectedError(
                    f"table {name!r}: {dict(found[name])} and {dict(rows.hyper)} in one step; use the same run-time values in all "
                    "parts of a push and, in sync mode, on all trainers"
                )
    return found


def n_mergeable(pushes: Sequence[Push]) -> int:
    """Return how many pushes from the first on may be applied as one batch in async mode: at least 1.

    The order of pushes is kept. Counting stops at the first push that shares a table with an earlier one under other run-time values, or a
    table that reduces by "mean". It also stops where the batch would become large, because each of its pushes waits for all of it.
    """
    seen: dict[str, Mapping[str, float]] = {}
    size_bytes = 0
    for count, push in enumerate(pushes):
        size_bytes += push.size_bytes
        if count and size_bytes > MAX_MERGED_BYTES:
            return count
        here = {rows.definition.name: rows for part in push.parts for rows in part.tables}
        for name, rows in here.items():
            if name in seen and (rows.definition.reduce == "mean" or seen[name] != rows.hyper):
                return count
        seen.update({name: rows.hyper for name, rows in here.items()})
    return len(pushes)


def merge_pushes(pushes: Sequence[Push], *, sync: bool, held_back: Sequence[HeldBack] = ()) -> Batch:
    """Make one batch of pushes: gradients of equal ids are summed in (incarnation, sequence) order.

    Returns:
        Rows of each table, in ascending order of ids. A table that was named without rows is in it with 0 rows.
    """
    parts = [part for push in sorted(pushes, key=lambda push: push.order) for part in push.parts]
    by_table: dict[str, list[tuple[CheckedRows, PartTicket]]] = {}
    for part in parts:
        for rows in part.tables:
            by_table.setdefault(rows.definition.name, []).append((rows, part.ticket))
    return Batch(APPLY, tuple(_sum(named, len(pushes) if sync else 1, held_back) for _, named in sorted(by_table.items())))


def _sum(named: list[tuple[CheckedRows, PartTicket]], n_members: int, held_back: Sequence[HeldBack]) -> CheckedRows:
    rows = [some for some, _ in named]
    definition = rows[0].definition
    one = len(rows) == 1
    # [m] ids and float32 [m, d] gradients of all parts, one part after the other; an id may stand in several.
    ids = rows[0].ids if one else np.concatenate([r.ids for r in rows])
    grads = rows[0].rows if one else np.concatenate([r.rows for r in rows])
    groups = group_by_id(ids)
    with np.errstate(over="ignore"):  # a sum beyond float32 is infinity, which optimizers cut to the largest gradient that they take
        ids, grads = groups.ids, groups.sum(grads)  # uint64 [n], unique and ascending, and float32 [n, d], the sum of each id's gradients
    if held_by := [held for judge in held_back if (held := judge(definition, groups)) is not None]:
        held = np.logical_or.reduce(held_by)
        ids, grads, left_out = ids[~held], grads[~held], held[groups.inverse]  # left_out: bool [m]
        for some, ticket in named:
            ticket.hold_back(int(np.count_nonzero(left_out[: len(some.ids)])))
            left_out = left_out[len(some.ids) :]
    if definition.reduce == "mean" and n_members > 1:
        grads = grads / np.float32(n_members)
    return CheckedRows(definition, ids, grads, np.empty(0, np.uint64), rows[0].hyper)
