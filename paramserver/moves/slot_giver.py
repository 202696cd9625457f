"""The giver's side of a hand-over of slots: tells takers of their rows, page by page, and forgets them.

While slots are read ahead, the entries are the index's as of the first page; once the shard has drained they are final. docs/adr/0062 says
when they are given, and when forgotten. What must not live here: the phases of a plan.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvemb.protocol.move_messages import SlotEntriesReply, SlotEntriesRequest
from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.move_plan import DRAINING, MOVING, SHARDS

from ..model.tables import Slots, Tables, TableState
from ..row_log.run_set import Runs
from ..row_log.run_writer import NO_RECORDS, RunWriter, dropped_on_error
from ..row_log.sorted_run import ERASED
from ..row_log.state_file import ShardState
from .slot_entries import SlotEntries, entries_of


@dataclass(frozen=True, eq=False)
class _Farewell:
    """A run that says of one table's rows that they are gone, written ahead; `n_rows` of them existed as of a version."""

    run: RunWriter
    n_rows: int
    as_of: int


class SlotGiver:
    """Hands slots of one shard over; a taker that gives them back after an abort is one, too. Apply thread only.

    Args:
        tables: of the shard.
        runs: its row log.
        state: returns the shard's, as of the last batch applied.
        applied: returns the version of that batch.
    """

    def __init__(self, tables: Tables, runs: Runs, state: Callable[[], ShardState], applied: Callable[[], int]) -> None:
        self._tables, self._runs, self._state, self._applied = tables, runs, state, applied
        self._ahead: dict[str, _Farewell] = {}  # by the table's key

    def forget(self, *, changes: bool = True) -> None:
        """Forget what was written ahead, and, unless somebody may ask for them, which rows have changed."""
        self._runs.give_up([one.run for one in self._ahead.values()])
        self._ahead = {}
        for state in self._tables.all() if changes else ():
            state.forget_changes()

    def prepare(self, slots: Slots) -> Iterator[int]:
        """Write ahead what `drop` is to say, where it is not done yet, a portion for each value: how many rows it was.

        Raises:
            JournalFullError: call again.
        """
        for state in self._tables.all():
            if state.definition.key not in self._ahead:
                yield from self._prepare(state, slots)

    def drop(self, slots: Slots) -> int:
        """Forget every row of these slots, durably; return how many. Called again it changes nothing.

        The row log notes that they are gone. Otherwise a row that comes back with its slot, erased and created again elsewhere, would be
        reconstructed from this shard's old records. The index forgets them later (`TableState.settle`).

        Raises:
            JournalFullError, FencedError: nothing changed; call again.
        """
        for _ in self.prepare(slots):
            pass
        states = [state for state in self._tables.all() if state.definition.key in self._ahead]
        late: list[RunWriter] = []
        with dropped_on_error(late):
            now, n_rows = self._state(), [self._add_late(state, slots, late) for state in states]
            for state, n in zip(states, n_rows, strict=True):
                table = now.of(state.definition)
                now = now.with_table(replace(table, n_rows=table.n_rows - n))
            if any(n_rows):
                self._runs.publish([*(one.run for one in self._ahead.values()), *late], now)
        for state, n in zip(states, n_rows, strict=True):
            state.gave(slots, n)
        self.forget()
        return sum(n_rows)

    def settle(self, came: Slots) -> Iterator[int]:
        """Let indexes follow what the row log says by now, a portion for each value; see `TableState.settle`."""
        for state in self._tables.all():
            yield from state.settle(came)

    def _prepare(self, state: TableState, slots: Slots) -> Iterator[int]:
        as_of, n_rows, definition = self._applied(), 0, state.definition
        state.note_changes(as_of)
        with dropped_on_error([self._runs.begin(definition)]) as (run,):
            for ids, _ in state.portions(slots):
                run.add(ERASED, definition.order.keys(ids), np.full(len(ids), self._applied(), np.uint64), NO_RECORDS)
                n_rows += len(ids)
                yield len(ids)
            run.finish()
            self._ahead[definition.key] = _Farewell(run, n_rows, as_of)

    def _add_late(self, state: TableState, slots: Slots, late: list[RunWriter]) -> int:
        """Say it of the rows that have changed since, too; return how many rows of these slots exist."""
        ahead, definition = self._ahead[state.definition.key], state.definition
        changed = state.changed(ahead.as_of, slots)
        assert changed is not None
        late.append(self._runs.begin(definition))
        late[-1].add_erased(changed, self._applied())
        noted, _ = self._runs.written([ahead.run]).versions(definition, changed)
        return ahead.n_rows + int(np.count_nonzero(state.versions(changed))) - int(np.count_nonzero(noted))


PAGE_ROWS = 1 << 19


class SlotOffers:
    """The entries that one shard hands over. Thread-safe.

    Args:
        maps: says which map is in force.
        tables: of the shard.
        shard: number.
        applied: returns the version of the last batch applied.
        epoch: returns that of the shard's process.
        members: returns those of a sync job.
    """

    def __init__(
        self,
        maps: MapSource,
        tables: Tables,
        shard: int,
        *,
        applied: Callable[[], int],
        epoch: Callable[[], int],
        members: Callable[[], tuple[tuple[str, int], ...]],
    ) -> None:
        self._maps, self._tables, self._shard, self._applied, self._epoch, self._members = maps, tables, shard, applied, epoch, members
        self._lock = threading.Lock()
        self._drained = 0  # version of the map under which the shard has written all that it had taken
        self._made: dict[tuple[int, int], tuple[int, list[SlotEntries]]] = {}  # by the map's version and the taker: as of, entries

    def drained(self, version: int) -> None:
        """Note that the index is final, and its rows in storage, while the map of this version is in force."""
        with self._lock:
            self._drained = version

    def is_final(self, version: int) -> bool:
        """Whether `drained` was called for this map, and it is still in force."""
        with self._lock:
            return self._drained == version == self._maps.cluster_map.version

    def clear(self) -> None:
        """Forget the entries made for an older map."""
        with self._lock:
            self._made = {}

    def page(self, request: SlotEntriesRequest) -> SlotEntriesReply:
        cluster_map = self._maps.cluster_map
        plan, version, start = cluster_map.plan, cluster_map.version, max(0, request.start)
        with self._lock:
            final = self._drained == version
            ready = plan is not None and plan.kind == SHARDS and (plan.phase == MOVING or (plan.phase == DRAINING and final))
            if not ready or version != request.version:
                return SlotEntriesReply(False, self._epoch(), [], b"", b"")
            if start == 0 or (version, request.shard) not in self._made:
                slots, applied = cluster_map.gives(self._shard) & cluster_map.takes(request.shard), self._applied()
                self._made[version, request.shard] = applied, entries_of(self._tables, slots, applied, request.since)
            as_of, entries = self._made[version, request.shard]
        tables = [
            {"definition": one.definition.to_dict(), "step": one.step, "rows": len(one.ids), "changes": not one.whole.any()}
            for one in entries
        ]
        ids, versions = (_rows(entries, name, start) for name in ("ids", "versions"))
        members = self._members()
        trainers, incarnations = [name for name, _ in members], [incarnation for _, incarnation in members]
        return SlotEntriesReply(True, self._epoch(), tables, ids, versions, trainers, incarnations, as_of)


def _rows(entries: list[SlotEntries], name: str, start: int) -> bytes:
    """A page of the rows of all tables, one after the other."""
    pieces, left = [], PAGE_ROWS
    for one in entries:
        array = getattr(one, name)
        some = array[start : start + left]
        start, left = max(0, start - len(array)), left - len(some)
        pieces.append(np.ascontiguousarray(some, dtype="<u8").tobytes())
    return b"".join(pieces)
