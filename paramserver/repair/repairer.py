"""Repair: brings a node that lost its rows, or single rows, back to exactly the versions of this shard's index. Apply thread only.

The index knows every row that exists and its version; the records come from the cache or are reconstructed from the row log and
the journal. Because the apply thread itself does this, nothing else writes the shard's rows meanwhile. The protocol between the shards
stands on the damaged node (`kvemb.stores.store_repair`): every shard restores its rows everywhere first, and only then waits for the
others. So two shards that begin with different nodes never wait for each other.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.replicated_values import Change
from kvemb.errors import LostRowError, NodeLostError, RecordError, StorageError
from kvemb.net.deadline import Deadline, pauses
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.store import Store

from ..engine.row_access import Exist, RowAccess
from ..engine.storage_pace import NO_BATCH, PASSING, AheadOfIndex, Pause
from ..model.batch import Batch
from ..model.bucket_settings import settle_limits
from ..model.tables import Tables, TableState
from ..model.transition import Timeline, may_exist, refuse_later_epoch
from ..row_log import WantedVersions

Ids = NDArray[np.uint64]
T = TypeVar("T")
Reconstruct = Callable[[Sequence[WantedVersions]], list[NDArray[np.uint8]]]
"""Returns the records as they were at these versions, uint8 [n, record bytes]; raises LostRowError when that cannot be done."""
_BLOCK_ROWS, _BLOCK_BYTES = 1 << 16, 32 << 20  # of one read or write, at most
_LEAST_TIMEOUT_S = 20.0  # of one call: nothing else can be done meanwhile, and markers of a Redis Cluster come by the thousand
_RECONSTRUCT_BYTES = 256 << 20  # of records in one pass over the journal
_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_LOOK_S = 0.05, 0.25, 1.0  # this shard's pushes wait meanwhile
log = logging.getLogger("paramserver")


@dataclass
class RepairFigures:
    """Counts of the repairs since the shard started, for status and logs."""

    nodes: int = 0
    rows: int = 0
    erased: int = 0
    now: str = ""


class _RowCallsInRepair:
    """Reads and writes at one node in repair; removes values that another program has put under keys of pages, where they are in the
    way.
    """

    def __init__(self, store: Store, address: str, nonce: str, deadline: Callable[[], Deadline]) -> None:
        self._store, self._address, self._nonce, self._deadline = store, address, nonce, deadline

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        """See `RowCalls`."""
        return self._store.repair.read(self._address, self._nonce, parts, deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        """See `RowCalls`."""
        return self._making_way(self._store.repair.write, parts, deadline)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        """See `RowCalls`."""
        return self._making_way(self._store.repair.erase, parts, deadline)

    def _making_way(
        self, call: Callable[[str, str, Sequence[WritePart], Deadline], T], parts: Sequence[WritePart], deadline: Deadline
    ) -> T:
        try:
            return call(self._address, self._nonce, parts, deadline)
        except RecordError as error:
            repair = self._address, self._nonce
            n_changed = sum(self._store.repair.make_way(part.keys, self._deadline(), repair=repair) for part in parts)
            if n_changed:  # else another shard was faster
                log.error("%s; %d such pages rebuilt", error, n_changed)
            return call(*repair, parts, self._deadline())


class Repairer:
    """Restores rows of one shard that storage has lost, from cache, row log and journal."""

    def __init__(
        self,
        store: Store,
        tables: Tables,
        shard: int,
        *,
        timeline: Timeline,
        reconstruct: Reconstruct,
        timeout_s: float,
        metas: Callable[[], Iterable[tuple[str, Change]]],
        still_ours: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._tables, self._shard, self._still_ours = store, tables, shard, still_ours
        self._timeline = timeline
        self._reconstruct, self._timeout_s, self._metas = reconstruct, max(timeout_s, _LEAST_TIMEOUT_S), metas
        self._access = RowAccess(store, self._timeout_s, error=LostRowError)
        self.figures = RepairFigures()
        self._own_s = 0.0  # of the repair under way, without waiting

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every node."""
        return self._store.nodes.addresses

    def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
        """Repair every node that is lost, and wait until the other shards have done their part; return how many.

        Raises:
            LostRowError: a row cannot be reconstructed; its node stays out of use.
        """
        started_s, before, self._own_s = time.monotonic(), self.figures.rows, 0.0
        asked, restored = set(suspects), dict[str, tuple[str, bytes]]()
        for pause_s in pauses(_PAUSE_S, _LONGEST_PAUSE_S):
            looked_s = time.monotonic() - self._own_s
            try:
                open_ = self._restore_all(asked, restored, ahead)
                if not open_:
                    break
                waiting: StorageError = NodeLostError(
                    f"node {', '.join(open_)}: in repair; other shards have not restored their rows there yet"
                )
            except PASSING as error:
                waiting = error
            self.figures.now = str(waiting)
            looked_s = time.monotonic() - self._own_s - looked_s  # at thousands of markers, perhaps, while others need the time
            pause(waiting, min(max(pause_s, looked_s), _LONGEST_LOOK_S))
        took_s, n_rows = time.monotonic() - started_s, self.figures.rows - before
        self.figures.nodes += len(restored)
        self.figures.now = ""
        if restored:
            log.warning("repaired %s: %d rows rewritten in %.1f s (%.0f rows/s); in use again after %.1f s, all shards done",
                        ", ".join(restored), n_rows, self._own_s, n_rows / max(self._own_s, 1e-3), took_s)  # fmt: skip
        return len(restored)

    def rows(self, batch: Batch, ahead: AheadOfIndex) -> int:
        """Compare the rows of a batch with the index and restore those that differ, on nodes that are in order; return how many."""
        found: list[tuple[TableState, Ids, Ids, NDArray[np.bool_]]] = []  # all are looked at before any is written
        for rows in batch.tables:
            state = self._tables.state(rows.definition)
            n_long = self._store.repair.make_way(self._access.keys(rows.definition, rows.ids), self._access.deadline())
            if n_long:
                log.error("table %r: %d pages had bytes of another program behind their end; cut off", rows.definition.name, n_long)
            for block in self._blocks(rows.definition, len(rows.ids)):
                ids = rows.ids[block]
                wanted = state.versions(ids)
                if ahead.tail is not None:  # 0: a row that is to be erased; a foreign value there would keep it from that
                    wanted = ahead.tail.wanted(rows.definition, ids, wanted)
                found.append((state, ids, wanted, self._differs(state, ids, wanted, ahead, self._access)))
        self._bring_back([(state, ids[wrong], wanted[wrong]) for state, ids, wanted, wrong in found], self._access)
        n_rows = sum(int((wrong & (wanted != 0)).sum()) for *_, wanted, wrong in found)
        if n_rows:
            log.error("%d rows of a batch were missing, old or overwritten in storage and have been restored", n_rows)
        return n_rows

    def compare(self, state: TableState, ids: Ids, timeout_s: float) -> int:
        """Compare rows with the index, between batches and on nodes that are in order; restore those that differ, and return how many.

        Args:
            ids: uint64 [n], unique; those that the index does not have are passed over.
        """
        wanted = state.versions(ids)
        ids, wanted = ids[wanted != 0], wanted[wanted != 0]
        if not len(ids):
            return 0
        wrong = self._differs(state, ids, wanted, NO_BATCH, self._access, Deadline.after(timeout_s))
        n_rows = int(np.count_nonzero(wrong))
        if n_rows:
            self._store.repair.make_way(self._access.keys(state.definition, ids[wrong]), self._access.deadline())
            self._bring_back([(state, ids[wrong], wanted[wrong])], self._access)
            name, first = state.definition.name, state.definition.shown_id(int(ids[np.argmax(wrong)]))
            log.error("table %r: %d rows were missing, old or overwritten in storage, the first was id %s; they have been restored",
                      name, n_rows, first)  # fmt: skip
        return n_rows

    def _restore_all(self, asked: set[str], restored: dict[str, tuple[str, bytes]], ahead: AheadOfIndex) -> list[str]:
        """Restore this shard's rows on every lost node and try to finish; return the nodes that still wait for other shards."""
        lost = {node.address for node in self._store.repair.lost_nodes(self._access.deadline())}
        still_open, trouble = [], list[StorageError]()
        for address in sorted(lost | asked):
            try:
                still_open += [address] if self._is_open(address, asked, restored, ahead) else []
            except PASSING as error:  # the others do not wait for this one
                trouble.append(error)
        if trouble:
            raise trouble[0]
        return still_open

    def _is_open(self, address: str, asked: set[str], restored: dict[str, tuple[str, bytes]], ahead: AheadOfIndex) -> bool:
        """Restore this shard's rows on a node and try to finish; return whether it still waits for other shards."""
        nonce = self._store.repair.begin(address, self._access.deadline(), even_if_whole=address in asked)
        asked.discard(address)
        if nonce is None:
            return False
        begun = nonce, self._store.repair.begun_with(address)
        reported = restored.get(address) != begun
        if reported:
            begun_s = time.monotonic()
            self._restore_node(address, nonce, ahead)
            self._own_s += time.monotonic() - begun_s
            restored[address] = begun
        if self._store.repair.finish(address, nonce, self._store.nodes.cluster_map.shard_numbers, self._access.deadline()):
            return False
        if not reported:  # another program may have written over our report
            self._store.repair.report(address, nonce, self._shard, self._access.deadline())
        return True

    def _restore_node(self, address: str, nonce: str, ahead: AheadOfIndex) -> None:
        store = self._store
        access = self._access.by(_RowCallsInRepair(store, address, nonce, self._access.deadline))
        log.warning("node %s: restoring this shard's rows (repair %s)", address, nonce)
        self.figures.now = f"node {address}: this shard's rows are being compared and restored"
        for definition, _ in ahead.tail.written() if ahead.tail is not None else ():
            self._tables.state(definition)  # of tables that only the journal knows so far
        settle_limits(store, [address], [state.definition for state in self._tables.all()], self._timeout_s)
        for name, change in self._metas():
            store.repair.update_value(address, nonce, name, change, self._access.deadline())
        self._restore_tables(address, ahead, access)
        self._erase_strangers(address, access, ahead)
        self._still_ours()
        store.repair.report(address, nonce, self._shard, self._access.deadline())

    def _restore_tables(self, address: str, ahead: AheadOfIndex, access: RowAccess) -> None:
        """Find the rows of this node that differ, then restore them in as few passes over the journal as memory allows."""
        wrong, n_bytes = [], 0
        for state, ids, versions in self._on_node(address, ahead):
            differ = self._differs(state, ids, versions, ahead, access)
            wrong.append(WantedVersions(state, ids[differ], versions[differ]))
            n_bytes += len(wrong[-1].ids) * state.definition.record.size_bytes
            if n_bytes >= _RECONSTRUCT_BYTES:
                self._rewrite(wrong, access)
                wrong, n_bytes = [], 0
        self._rewrite(wrong, access)

    def _on_node(self, address: str, ahead: AheadOfIndex) -> Iterator[tuple[TableState, Ids, Ids]]:
        """Yield the rows that are to be on a node, and their versions, block by block."""
        for state in self._tables.all():
            for ids, versions in _existing(state, ahead):
                here = self._store.repair.keys_of(address, self._access.keys(state.definition, ids))
                ids, versions = ids[here], versions[here]
                yield from ((state, ids[block], versions[block]) for block in self._blocks(state.definition, len(ids)))

    def _bring_back(self, rows: Sequence[tuple[TableState, Ids, Ids]], access: RowAccess) -> None:
        """Rewrite rows at the versions that they should have; erase those that should not exist."""
        for state, ids, wanted in rows:
            self._erase(state, ids[wanted == 0], access)
        self._rewrite([WantedVersions(state, ids[wanted != 0], wanted[wanted != 0]) for state, ids, wanted in rows], access)

    def _differs(
        self, state: TableState, ids: Ids, known: Ids, ahead: AheadOfIndex, access: RowAccess, deadline: Deadline | None = None
    ) -> NDArray[np.bool_]:
        """Return which rows storage does not hold at the version that it should: bool [n]."""
        with access.pace.exchange(len(ids) * state.definition.record.size_bytes):
            seen = access.look(state.definition, ids, tokens=False, deadline=deadline)
        stored, foreign = seen.versions, seen.foreign
        refuse_later_epoch(state.definition, ids, stored, self._timeline.epoch, known)
        if foreign.any():
            where = self._store.rows.whereabouts(self._access.keys(state.definition, ids))(int(np.argmax(foreign)))
            log.error("%d values of another program lie under keys of rows; they are written over; the first: %s", foreign.sum(), where)
        written_ahead = (stored >= np.uint64(ahead.first)) & (stored <= np.uint64(ahead.newest)) & (ahead.tail is None)
        self._timeline.refuse_lost(state.definition, ids, np.where(written_ahead, np.uint64(0), stored), known)
        differs: NDArray[np.bool_] = ((stored != known) | foreign) & ~written_ahead
        return differs

    def _rewrite(self, wanted: Sequence[WantedVersions], access: RowAccess) -> None:
        wanted = [one for one in _by_table(wanted) if len(one.ids)]
        if wanted:
            self._still_ours()  # before row log and journal are read
        for one, records in zip(wanted, self._records(wanted), strict=True):
            cache = one.table.cache
            for block in self._blocks(one.table.definition, len(one.ids)):
                self._still_ours()
                judge = partial(self._refuse_if_later, one.table.definition)
                access.write_over(one.table.definition, one.ids[block], records[block], judge)
            cache.forget(one.ids)  # memcached's tokens have changed
            self.figures.rows += len(one.ids)

    def _records(self, wanted: Sequence[WantedVersions]) -> list[NDArray[np.uint8]]:
        """The records at these versions: from the cache where it has them, the others reconstructed."""
        found = [kept_records(one) for one in wanted]
        lacking = [(one, records, ~kept) for one, (records, kept) in zip(wanted, found, strict=True) if not kept.all()]
        if lacking:
            made = self._reconstruct([WantedVersions(one.table, one.ids[which], one.versions[which]) for one, _, which in lacking])
            for (_, records, which), rows in zip(lacking, made, strict=True):
                records[which] = rows
        return [records for records, _ in found]

    def _erase_strangers(self, address: str, access: RowAccess, ahead: AheadOfIndex) -> None:
        """Delete rows that an old snapshot brought back: this shard's that the index does not know, or that are elsewhere now."""
        ours = self._store.nodes.cluster_map.slot_shards == self._shard  # bool [16384]
        found = self._store.repair.keys_on(address, ours, self._access.deadline())
        by_tag = {state.definition.tag: state for state in self._tables.all()}
        for keys in found if found is not None else ():
            state = by_tag.get(keys.tag)
            if state is None:
                continue
            ids = np.unique(state.definition.rows_under(keys, pages=self._store.capabilities.pages).ids)
            ids = ids[ours[state.definition.placement.slots(ids)]]
            if self._store.nodes.cluster_map.n_nodes:  # a cluster that moves its own slots brings no rows of others back
                here = self._store.repair.keys_of(address, self._access.keys(state.definition, ids))
                for block in self._blocks(state.definition, len(left := ids[~here])):
                    access.erase_blindly([WritePart(self._access.keys(state.definition, left[block]), np.empty((0, 0), np.uint8))])
                self.figures.erased += len(left)
                ids = ids[here]
            known = state.versions(ids)
            ids = ids[(known if ahead.tail is None else ahead.tail.wanted(state.definition, ids, known)) == 0]
            for block in self._blocks(state.definition, len(ids)):
                none = np.zeros(len(ids[block]), np.uint64)
                wrong = self._differs(state, ids[block], none, ahead, access)
                self._erase(state, ids[block][wrong], access, exist=partial(may_exist, state, ahead.tail))

    def _refuse_if_later(self, definition: TableDef, ids: Ids, stored: Ids, to_write: Ids) -> None:
        refuse_later_epoch(definition, ids, stored, self._timeline.epoch, to_write)

    def _erase(self, state: TableState, ids: Ids, access: RowAccess, exist: Exist | None = None) -> None:
        if len(ids):
            state.cache.forget(ids)
        for block in self._blocks(state.definition, len(ids)):
            access.erase(state.definition, ids[block], exist=exist)
        self.figures.erased += len(ids)

    def _blocks(self, definition: TableDef, n: int) -> Iterator[slice]:
        """Cut n rows into blocks of the size of one read or write."""
        step = max(1, min(_BLOCK_ROWS, min(_BLOCK_BYTES, self._access.pace.n_bytes) // definition.record.size_bytes))
        return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _existing(state: TableState, ahead: AheadOfIndex) -> Iterator[tuple[Ids, Ids]]:
    """Yield the rows of a table that are to be in storage, and their versions, portion by portion."""
    tail = ahead.tail
    if tail is None:
        yield from state.portions()
        return
    created = (ids for definition, ids in tail.written() if definition.key == state.definition.key)
    for ids in chain((ids for ids, _ in state.portions()), (ids[state.versions(ids) == 0] for ids in created)):
        versions = tail.wanted(state.definition, ids, state.versions(ids))
        yield ids[versions != 0], versions[versions != 0]


def _by_table(wanted: Sequence[WantedVersions]) -> list[WantedVersions]:
    """Join the wanted rows of the same table; ids in ascending order."""
    merged = []
    for table in {id(one.table): one.table for one in wanted}.values():
        parts = [one for one in wanted if one.table is table]
        ids, versions = np.concatenate([one.ids for one in parts]), np.concatenate([one.versions for one in parts])
        order = np.argsort(ids)
        merged.append(WantedVersions(table, ids[order], versions[order]))
    return merged


def kept_records(wanted: WantedVersions) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Records uint8 [n, record bytes], filled in where the cache has the version wanted; and which rows those are, bool [n]."""
    record, cache = wanted.table.definition.record, wanted.table.cache
    at = cache.find(wanted.ids)
    kept = at >= 0
    if kept.any():
        kept[kept] = record.versions(cache.records[at[kept]]) == wanted.versions[kept]
    records = np.empty((len(wanted.ids), record.size_bytes), np.uint8)
    records[kept] = cache.records[at[kept]]
    return records, kept
