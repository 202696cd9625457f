"""What a shard does for a plan that moves slots between nodes: copies its rows to the nodes that are to have them, erases them where they
were. Apply thread only, between two batches, a slice at a time.

New writes go to both nodes by themselves (`paramserver.engine.row_access`) from the moment at which the shard follows a map with a plan. So
a phase is done once all rows that the index knew at some moment after that have been gone through. Whatever was done before a restart is
gone through again, and found done.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import LostRowError, StorageError
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import ABORTING, CLEANING, MOVING, NODES
from kvemb.stores.row_io import WritePart
from kvemb.stores.store import OtherNodes, Store

from ..engine.engine import Engine
from ..engine.row_access import RowAccess
from ..model.tables import Tables, TableState
from ..repair.repairer import Repairer, kept_records
from ..snapshot import WantedVersions

Ids = NDArray[np.uint64]
_SLICE_BYTES = 1 << 20  # of rows copied at once: so long a batch waits at most
_ERASE_ROWS = 1 << 13
_RETRY_S = 0.2
_LEFT_TO_BATCHES = 6.0  # times what a slice took
_TROUBLE_S = 3.0
log = logging.getLogger("paramserver")


@dataclass
class MoveFigures:
    """What was moved since the shard started."""

    copied: int = 0
    copied_bytes: int = 0
    erased: int = 0


@dataclass(frozen=True)
class MoveProgress:
    """How far the shard is in the phase of one version of the map."""

    version: int
    done: bool
    rows: int
    n_rows: int
    step: int = 0  # of a sync job, while all hold: the last one handed out


class SlotMover:
    """One shard's part in plans.

    Args:
        store: open; says which map is in force.
        tables: of the shard.
        engine: its rows that are held back are written before rows are copied.
        repairer: restores rows that are not what the index says.
        timeout_s: of one storage call.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        tables: Tables,
        engine: Engine,
        repairer: Repairer,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._tables, self._engine, self._repairer = store, tables, engine, repairer
        self._timeout_s, self._clock = timeout_s, clock
        self._access = RowAccess(store, timeout_s)
        self._map: ClusterMap | None = None  # whose phase is worked at
        self._slices: Iterator[int] = iter(())
        self._not_before_s, self._failing_since_s, self._why = 0.0, 0.0, ""
        self.figures = MoveFigures()
        self.progress = MoveProgress(0, True, 0, 0)

    @property
    def trouble(self) -> str:
        """Why this shard does not come further, if it has not for seconds; any thread."""
        since_s = self._failing_since_s
        if since_s and self._clock() - since_s >= _TROUBLE_S:
            return self._why
        second = self._store.second
        return "" if second is None else second.trouble(_TROUBLE_S)

    def due_in_s(self) -> float | None:
        """When there is something to do; None while there is not."""
        if self.progress.done and self._map is self._store.cluster_map:
            return None
        return max(0.0, self._not_before_s - self._clock())

    def step(self, *, loaded: bool = False) -> bool:
        """Do a slice of what the map in force asks for; return whether there is more at once.

        Args:
            loaded: whether batches came since the last slice: most of the time is theirs then.

        Raises:
            LostRowError: a row cannot be restored: the shard must stop.
        """
        cluster_map = self._store.cluster_map
        if cluster_map is not self._map:
            self._begin(cluster_map)
        if self.progress.done or self._clock() < self._not_before_s:
            return False
        begun_s = self._clock()
        try:
            n_rows = next(self._slices, None)
        except LostRowError:
            raise
        except StorageError as error:
            self._failing_since_s, self._why = self._failing_since_s or self._clock(), f"{type(error).__name__}: {error}"
            self._begin(cluster_map)  # from the first row: what is done is found done
            self._not_before_s = self._clock() + _RETRY_S
            return False
        self._failing_since_s = 0.0
        if loaded:
            self._not_before_s = max(self._not_before_s, self._clock() + _LEFT_TO_BATCHES * (self._clock() - begun_s))
        now = self.progress
        self.progress = MoveProgress(now.version, n_rows is None, now.rows + (n_rows or 0), now.n_rows)
        return n_rows is not None and self._clock() >= self._not_before_s

    def _begin(self, cluster_map: ClusterMap) -> None:
        self._map, plan = cluster_map, cluster_map.plan
        todo: list[tuple[TableState, Ids]] = []
        self._slices = iter(())
        if plan is not None and plan.kind == NODES and plan.phase in (MOVING, CLEANING, ABORTING):
            other = self._store.other
            assert other is not None
            todo = [(state, self._ids_at(other, state)) for state in self._tables.all()]
            copies = self._copy(todo, other, plan.max_bytes_per_s)
            self._slices = copies if plan.phase == MOVING else self._erase(todo, other)
        self.progress = MoveProgress(cluster_map.version, False, 0, sum(len(ids) for _, ids in todo))

    def _ids_at(self, other: OtherNodes, state: TableState) -> Ids:
        ids, _ = state.arrays()
        return ids[other.has(self._access.keys(state.definition, ids))]

    def _copy(self, todo: list[tuple[TableState, Ids]], other: OtherNodes, max_bytes_per_s: int) -> Iterator[int]:
        there = self._access.by(other)
        for state, ids in todo:
            size = state.definition.record.size_bytes
            n_block = max(1, _SLICE_BYTES // size)
            for start in range(0, len(ids), n_block):
                some = ids[start : start + n_block]
                n_copied = self._copy_rows(state, some, there)
                if max_bytes_per_s:
                    self._not_before_s = self._clock() + n_copied * size * len(self._store.cluster_map.shard_numbers) / max_bytes_per_s
                yield len(some)

    def _copy_rows(self, state: TableState, ids: Ids, there: RowAccess) -> int:
        """Copy those of these rows that the other node does not have as they are; return how many."""
        definition, wanted = state.definition, state.versions(ids)
        seen = there.look(definition, ids)
        differ = (seen.versions != wanted) | seen.foreign
        tokens = None if seen.tokens is None else seen.tokens[differ]
        ids, wanted = ids[differ], wanted[differ]
        gone = wanted == 0  # erased since the phase began, or brought by another's write
        if gone.any():
            there.erase(definition, ids[gone])
        ids, wanted = ids[~gone], wanted[~gone]
        if not len(ids):
            return 0
        records = self._records(state, ids, wanted)
        part = WritePart(there.keys(definition, ids).of_any_rows(), records, None if tokens is None else tokens[~gone])
        stored = there.write([part])[0].stored
        if not stored.all():
            there.write_over(definition, ids[~stored], records[~stored])
        self._count(state, len(ids))
        return len(ids)

    def _count(self, state: TableState, n_rows: int) -> None:
        self.figures.copied += n_rows
        self.figures.copied_bytes += n_rows * state.definition.record.size_bytes

    def _records(self, state: TableState, ids: Ids, wanted: Ids) -> NDArray[np.uint8]:
        """The records of rows at these versions: from the shard's cache, and for those that it lacks from where they are now."""
        records, kept = kept_records(WantedVersions(state, ids, wanted))
        lacking, definition = ~kept, state.definition
        if lacking.any():
            read = self._access.read([(definition, ids[lacking])])[0]
            if not (read.found & (definition.record.versions(read.records) == wanted[lacking])).all():
                self._repairer.compare(state, ids[lacking], self._timeout_s)
                read = self._access.read([(definition, ids[lacking])])[0]
            records[lacking] = read.records
        return records

    def _erase(self, todo: list[tuple[TableState, Ids]], other: OtherNodes) -> Iterator[int]:
        there = self._access.by(other)
        for state, ids in todo:
            for start in range(0, len(ids), _ERASE_ROWS):
                some = ids[start : start + _ERASE_ROWS]
                there.erase(state.definition, some)
                self.figures.erased += len(some)
                yield len(some)
