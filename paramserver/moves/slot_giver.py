"""The giver's side of a hand-over of slots: tells takers of their rows, page by page, and forgets them.

While slots are read ahead, the entries are the index's as of the first page; once the shard has drained they are final. docs/adr/0062 says
when they are given, and when forgotten. What must not live here: the phases of a plan.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from kvemb.protocol.move_messages import SlotEntriesReply, SlotEntriesRequest
from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.move_plan import DRAINING, MOVING, SHARDS

from ..model.tables import Ids, Slots, Tables, TableState, all_of
from ..row_log.run_set import Runs
from ..row_log.run_writer import NO_RECORDS, RunWriter, dropped_on_error
from ..row_log.sorted_run import ERASED
from ..row_log.state_file import ShardState
from .slot_entries import entries_of


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
        # By the table's key: a run that says of its rows that they are gone; as of which version it was begun; how many rows it has.
        self._ahead: dict[str, tuple[RunWriter, int, int]] = {}

    def forget(self, *, changes: bool = True) -> None:
        """Forget what was written ahead, and which rows have changed."""
        self._runs.give_up(run for run, _, _ in self._ahead.values())
        self._ahead = {}
        for state in self._tables.all() if changes else ():
            state.forget_changes()

    def prepare(self, slots: Slots) -> Iterator[None]:
        """Write ahead what `drop` is to say, where it is not done yet; a portion for each value.

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
                self._runs.publish([*(run for run, _, _ in self._ahead.values()), *late], now)
        for state, n in zip(states, n_rows, strict=True):
            state.gave(slots, n)
        self.forget()
        return sum(n_rows)

    def settle(self, came: Slots) -> Iterator[int]:
        """Let indexes follow what the row log says by now, a portion for each value; see `TableState.settle`."""
        for state in self._tables.all():
            yield from state.settle(came)

    def _prepare(self, state: TableState, slots: Slots) -> Iterator[None]:
        as_of, n_rows, definition = self._applied(), 0, state.definition
        state.note_changes(as_of)
        with dropped_on_error([self._runs.begin(definition)]) as (run,):
            for ids, _ in state.portions(slots):
                run.add(ERASED, definition.order.keys(ids), np.full(len(ids), self._applied(), np.uint64), NO_RECORDS)
                n_rows += len(ids)
                yield
            run.finish()
            self._ahead[definition.key] = run, as_of, n_rows

    def _add_late(self, state: TableState, slots: Slots, late: list[RunWriter]) -> int:
        """Say it of the rows that have changed since, too; return how many rows of these slots exist."""
        definition, (run, as_of, n_rows) = state.definition, self._ahead[state.definition.key]
        changed = state.changed(as_of, slots)
        assert changed is not None
        late.append(self._runs.begin(definition))
        late[-1].add_erased(changed, self._applied())
        noted, _ = self._runs.written([run]).versions(definition, changed)
        return n_rows + int(np.count_nonzero(state.versions(changed))) - int(np.count_nonzero(noted))


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
        # By the map's version and the taker: as of which version, tables as an answer names them, ids and versions of all their rows.
        self._made: dict[tuple[int, int], tuple[int, list[dict[str, Any]], tuple[Ids, Ids]]] = {}

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
                entries = entries_of(self._tables, slots, applied, request.since)
                rows = all_of((one.ids, one.versions) for one in entries)
                tables = [
                    {"definition": one.definition.to_dict(), "step": one.step, "rows": len(one.ids), "changes": not one.whole.any()}
                    for one in entries
                ]
                self._made[version, request.shard] = applied, tables, rows
            as_of, tables, rows = self._made[version, request.shard]
        ids, versions = (array[start : start + PAGE_ROWS].astype("<u8", copy=False).tobytes() for array in rows)
        members = self._members()
        trainers, incarnations = [name for name, _ in members], [incarnation for _, incarnation in members]
        return SlotEntriesReply(True, self._epoch(), tables, ids, versions, trainers, incarnations, as_of)
