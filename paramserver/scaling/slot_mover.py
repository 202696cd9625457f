"""A shard's work for a plan that moves slots between nodes: it copies its rows to their new nodes, and erases them on the old ones. Apply
thread only, between two batches, a slice at a time.

New writes go to both nodes by themselves (`paramserver.engine.row_access`) from the moment at which the shard follows a map with a plan. So
a phase is done once all rows that the index knew at some moment after that have been gone through. After a restart all rows are gone
through again; finished ones are found done.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import LostRowError, StorageError
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import ABORTING, CLEANING, MOVING
from kvemb.stores.row_io import WritePart

from ..engine.row_access import RowAccess
from ..model.tables import TableState
from ..recovery.shard_parts import ShardParts
from ..row_log.log_flush import from_storage
from .phase_runner import PhaseProgress, PhaseWork

Ids = NDArray[np.uint64]
_SLICE_BYTES = 1 << 20  # of rows copied at once: so long a batch waits at most
_ERASE_ROWS = 1 << 13
_TROUBLE_S = 3.0


@dataclass
class MoveFigures:
    """Counts of moved rows since the shard started."""

    copied: int = 0
    copied_bytes: int = 0
    erased: int = 0


class SlotMover(PhaseWork):
    """One shard's part in plans that move slots between nodes."""

    def __init__(self, parts: ShardParts) -> None:
        self._store, self._tables, self._repairer, self._timeout_s = parts.store, parts.tables, parts.repairer, parts.timeout_s
        self._access, self._read = RowAccess(parts.store, parts.timeout_s), from_storage(parts.store, parts.timeout_s)
        self.figures = MoveFigures()

    @property
    def trouble(self) -> str:
        other = self._store.rows.moving
        return "" if other is None or not other.written else other.trouble(_TROUBLE_S)

    def held_up(self, error: Exception) -> str:
        if isinstance(error, LostRowError) or not isinstance(error, StorageError):
            raise error
        return f"{type(error).__name__}: {error}"

    def phase(self, cluster_map: ClusterMap, progress: PhaseProgress) -> Iterator[float]:
        plan = cluster_map.plan
        if plan is None or plan.phase not in (MOVING, CLEANING, ABORTING):
            return
        other = self._store.rows.moving
        assert other is not None
        copies = plan.phase == MOVING
        for _, ids in self._listed(other.slots):
            progress.expect(len(ids))
            yield 0.0
        bytes_per_s = plan.max_bytes_per_s / len(cluster_map.shard_numbers)
        there = self._access.by(other)
        for state, ids in self._listed(other.slots):
            row_bytes = state.definition.record.size_bytes
            n_slice = max(1, _SLICE_BYTES // row_bytes) if copies else _ERASE_ROWS
            for some in (ids[start : start + n_slice] for start in range(0, len(ids), n_slice)):
                n_bytes = self._copy_rows(state, some, there) * row_bytes if copies else 0
                if not copies:
                    there.erase_whole(state.definition, some)  # no row of these slots stays there
                    self.figures.erased += len(some)
                progress.gone_through(len(some))
                yield n_bytes / bytes_per_s if bytes_per_s else 0.0

    def _listed(self, slots: NDArray[np.bool_]) -> Iterator[tuple[TableState, Ids]]:
        for state in self._tables.all():
            yield from ((state, ids) for ids, _ in state.portions(slots))

    def _copy_rows(self, state: TableState, ids: Ids, there: RowAccess) -> int:
        """Copy those of these rows that the other node does not have at their version; return how many."""
        definition, wanted = state.definition, state.versions(ids)
        seen = there.look(definition, ids)  # of the n rows, as they are there; differ: bool [n], those to be copied or erased
        differ = (seen.versions != wanted) | seen.foreign
        tokens = None if seen.tokens is None else seen.tokens[differ]
        ids, wanted = ids[differ], wanted[differ]
        gone = wanted == 0  # erased since the phase began, or brought by another's write
        if gone.any():
            there.erase(definition, ids[gone], exist=state.known)
        ids, wanted = ids[~gone], wanted[~gone]
        if not len(ids):
            return 0
        records = self._records(state, ids, wanted)
        part = WritePart(there.keys(definition, ids).of_any_rows(), records, None if tokens is None else tokens[~gone])
        stored = there.write([part])[0].stored
        if not stored.all():
            there.write_over(definition, ids[~stored], records[~stored])
        self.figures.copied += len(ids)
        self.figures.copied_bytes += records.nbytes
        return len(ids)

    def _records(self, state: TableState, ids: Ids, wanted: Ids) -> NDArray[np.uint8]:
        """The records of rows at these versions: from the shard's cache, else from the node where they are now."""
        records, found = self._read(state, ids)
        if not (found & (state.definition.record.versions(records) == wanted)).all():
            self._repairer.compare(state, ids, self._timeout_s)
            records, _ = self._read(state, ids)
        return records
