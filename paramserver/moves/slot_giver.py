"""The giver's side of a hand-over of slots: gives takers their entries, page by page, and forgets them.

While slots are read ahead, the entries are the index's as of the first page; once the shard has drained they are final. docs/adr/0062 says
when they are given, and when forgotten. What must not live here: the phases of a plan.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.protocol.move_messages import SlotEntriesReply, SlotEntriesRequest
from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.move_plan import DRAINING, MOVING, SHARDS

from ..model.tables import Tables, TableState
from ..snapshot.run_set import Runs
from .slot_entries import GivenRows, Ids, SlotEntries

_LOOKED_AT = 64  # rows: all of a table are noted at once


class SlotGiver:
    """Hands slots of one shard over; a taker that gives them back after an abort is one, too. Apply thread only.

    Args:
        tables: of the shard.
        runs: its local snapshot.
        rows: finds the rows of the slots.
        note_gone: notes durably that the index has no row of some slots any more, bool [16384].
        applied: returns the version of the last batch applied.
    """

    def __init__(
        self,
        tables: Tables,
        runs: Runs,
        rows: GivenRows,
        note_gone: Callable[[NDArray[np.bool_]], None],
        applied: Callable[[], int],
    ) -> None:
        self._tables, self._runs, self._rows, self._note_gone, self._applied = tables, runs, rows, note_gone, applied

    def forget(self) -> None:
        """Forget the rows found for slots that were to move."""
        self._rows.clear()

    def drop(self, slots: NDArray[np.bool_]) -> int:
        """Forget every row of these slots, durably; return how many. Called again it changes nothing.

        The local snapshot notes that they are gone. Otherwise a row that comes back with its slot, erased and created again elsewhere,
        would be reconstructed from this shard's old records. Between the note and the end of this call none of them can be reconstructed
        here: a shard that dies there must call it again before it repairs anything.

        Raises:
            JournalFullError: nothing changed; call again.
            OSError, FencedError: they are forgotten, and not durably; call again.
        """
        known = {one.definition.key: one.ids for one in self._rows.entries(slots)}
        dropped = [(state, known[state.definition.key]) for state in self._tables.all() if state.definition.key in known]
        self._write_notes([(state, ids) for state, ids in dropped if len(ids)])
        self._rows.clear()
        for state, ids in dropped:
            state.erased(ids, self._applied())
            state.cache.forget(ids)
        self._note_gone(slots)
        return sum(len(ids) for _, ids in dropped)

    def begun(self, slots: NDArray[np.bool_]) -> bool:
        """Whether a `drop` of these slots was broken off: their rows are noted as gone, and the index has them still."""
        for known in self._rows.entries(slots):
            ids, versions = known.ids[:_LOOKED_AT], known.versions[:_LOOKED_AT]
            noted = self._runs.find(known.definition, ids)
            if (~noted.exists & (noted.versions >= versions)).any():
                return True
        return False

    def _write_notes(self, dropped: Sequence[tuple[TableState, Ids]]) -> None:
        writers = [self._runs.begin(state.definition) for state, _ in dropped]
        try:
            for writer, (_, ids) in zip(writers, dropped, strict=True):
                order = writer.definition.order
                writer.add_erased(order.ids(np.sort(order.keys(ids))), np.full(len(ids), self._applied(), np.uint64))
            if writers:
                self._runs.publish(writers, self._runs.cut)
        except BaseException:
            for writer in writers:
                writer.drop()
            raise


PAGE_ROWS = 1 << 19
Members = tuple[tuple[str, int], ...]


class SlotOffers:
    """The entries that one shard hands over. Thread-safe.

    Args:
        maps: says which map is in force.
        rows: finds those that move.
        shard: number.
        epoch: returns that of the shard's process.
        members: returns those of a sync job.
    """

    def __init__(
        self, maps: MapSource, rows: GivenRows, shard: int, epoch: Callable[[], int], members: Callable[[], Members] = tuple
    ) -> None:
        self._maps, self._rows, self._shard, self._epoch, self._members = maps, rows, shard, epoch, members
        self._lock = threading.Lock()
        self._drained = 0  # version of the map under which the shard has written all that it had taken
        self._made: dict[tuple[int, int], list[SlotEntries]] = {}  # by the map's version and the taker

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
            if (version, request.shard) not in self._made or (start == 0 and not final):
                gives, takes = cluster_map.gives(self._shard), cluster_map.takes(request.shard)
                known = self._rows.entries(gives, final=final)
                self._made[version, request.shard] = known if (takes >= gives).all() else [one.within(takes) for one in known]
            entries = self._made[version, request.shard]
        tables = [{"definition": one.definition.to_dict(), "step": one.step, "rows": len(one.ids)} for one in entries]
        ids, versions = (_rows(entries, name, start) for name in ("ids", "versions"))
        members = self._members()
        trainers, incarnations = [name for name, _ in members], [incarnation for _, incarnation in members]
        return SlotEntriesReply(True, self._epoch(), tables, ids, versions, trainers, incarnations)


def _rows(entries: list[SlotEntries], name: str, start: int) -> bytes:
    """A page of the rows of all tables, one after the other."""
    pieces, left = [], PAGE_ROWS
    for one in entries:
        array = getattr(one, name)
        some = array[start : start + left]
        start, left = max(0, start - len(array)), left - len(some)
        pieces.append(np.ascontiguousarray(some, dtype="<u8").tobytes())
    return b"".join(pieces)
