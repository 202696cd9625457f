"""A shard inside this process that may die at any write: its store, its journal, its life, and batches drawn by hypothesis."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
from hypothesis import strategies as st
from memory_store import MemoryStore

import kvemb.init
import kvemb.optim
from kvemb.arrays.record_cache import CacheBudget
from kvemb.config import StorageConfig
from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, WritePart, WriteResult
from paramserver.engine import storage_pace
from paramserver.engine.engine import Engine
from paramserver.ingest.sessions import Sessions
from paramserver.ingest.sync_steps import Membership
from paramserver.journal import BatchEntry, Entry, Position, encode_entry
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows
from paramserver.model.tables import Tables, TableState
from paramserver.model.transition import Timeline
from paramserver.recovery.replay import Recovered, Recovery
from tests.unit.lonely_engine import ALONE
from tests.unit.run_states import all_rows

NUMBERS = count()
EPOCH = 3
MOMENTUM = TableDef("momentum", 2, kvemb.optim.sgd(0.5, momentum=0.9), kvemb.init.normal(std=1.0), seed=4)
HALF = TableDef("half", 3, kvemb.optim.adam(lr=0.1), kvemb.init.uniform(), dtype="float16")
TABLES = {table.name: table for table in (MOMENTUM, HALF)}
IDS = np.arange(5, dtype=np.uint64)
NOTHING = np.empty(0, np.uint64)


class KilledError(Exception):
    """The shard died."""


class MortalStore(MemoryStore):
    """Storage in memory; the process dies when it has changed so many more rows (None: it lives)."""

    left: int | None = None

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._until_death(parts, lambda some: MemoryStore.write(self, some, deadline))

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[np.ndarray]:
        return self._until_death(parts, lambda some: MemoryStore.erase(self, some, deadline))

    def _until_death(self, parts: Sequence[WritePart], act: Callable[[list[WritePart]], Any]) -> Any:
        if self.left is None or self.left >= sum(len(part.keys) for part in parts):
            self.left = None if self.left is None else self.left - sum(len(part.keys) for part in parts)
            return act(list(parts))
        for part in parts:
            some = slice(0, self.left)
            tokens = None if part.tokens is None else part.tokens[some]
            act([WritePart(RowKeys(part.keys.tag, part.keys.ids[some]), part.records[some], tokens)])
            self.left -= min(self.left, len(part.keys))
        raise KilledError


class MemoryJournal:
    """Entries in a list; position i is behind the i-th of them."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._payloads = [b"".join(bytes(piece) for piece in encode_entry(entry)) for entry in entries]
        self.start = Position(1, 0)

    def read(self, start: Position) -> Iterator[tuple[Position, memoryview]]:
        for at in range(start.offset, len(self._payloads)):
            yield Position(1, at + 1), memoryview(self._payloads[at])


def find(name: str, schema: int) -> TableDef:
    return TABLES[name]


def make_store() -> MortalStore:
    number = next(NUMBERS)
    store = MortalStore(StorageConfig("memory", (f"replay-{number}-a:1", f"replay-{number}-b:1")), role="shard:0")
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
    store.open(Deadline.after(60))
    return store


def rows(table: TableDef, kind: str, ids: Sequence[int], seed: int) -> CheckedRows:
    values = np.random.default_rng(seed).standard_normal((len(ids), table.dim)).astype(np.float32)
    hyper = table.optimizer.check_hyper({})
    return CheckedRows(table, np.array(sorted(ids), np.uint64), values[:, : 0 if kind == ERASE else None], NOTHING, hyper)


def never(error: StorageError, pause_s: float) -> None:
    raise error


class Life:
    """One process of the shard, from a saved state on."""

    def __init__(
        self,
        store: MortalStore,
        saved: "Saved",
        *,
        epoch: int,
        cache_bytes: int,
    ) -> None:
        budget = CacheBudget(cache_bytes)
        self.tables = Tables([TableState(TABLES[name], step, arrays, budget) for name, (step, arrays) in saved.tables.items()], budget)
        self.engine = Engine(store, self.tables, Timeline(epoch), k=saved.k, timeout_s=5, repair=ALONE)
        self.sessions, self.members = Sessions(True), Membership(2)
        self.saved = saved

    def recover(self, entries: Sequence[Entry]) -> Recovered:
        recovery = Recovery(MemoryJournal(entries), Position(1, self.saved.k), self.saved.k, find).scan()  # type: ignore[arg-type]
        done = recovery.run(self.engine, self.tables, self.sessions, self.members, never)
        self.members = done.members
        return done

    def step(self, table: TableDef) -> int:
        return self.tables.state(table).step

    def save(self) -> "Saved":
        tables = {state.definition.name: (state.step, all_rows(state)) for state in self.tables.all()}
        return Saved(self.engine.k, tables)


class Saved:
    """What a saved state holds of rows."""

    def __init__(self, k: int = 0, tables: dict[str, tuple[int, tuple[Any, Any]]] | None = None) -> None:
        self.k, self.tables = k, tables or {}


def live_on(life: Life, entries: Sequence[Entry]) -> list[Saved]:
    """Apply batches as a shard does that nothing happens to; return its state before each, and at the end."""
    states = []
    for entry in entries:
        assert isinstance(entry, BatchEntry)
        states.append(life.save())
        life.engine.run(entry.batch, entry.version, never)
    return [*states, life.save()]


def journal_of(batches: Sequence[Batch]) -> list[Entry]:
    """The entries of batches 1, 2, 3, …"""
    steps = dict.fromkeys(TABLES, 0)
    entries: list[Entry] = []
    for k, batch in enumerate(batches, 1):
        before = tuple(steps[one.definition.name] for one in batch.tables)
        entries.append(BatchEntry(make_version(EPOCH, k), batch, before, ()))
        if batch.kind == APPLY:
            steps.update({one.definition.name: step + 1 for one, step in zip(batch.tables, before, strict=True)})
    return entries


def stored(store: MemoryStore) -> dict[str, bytes]:
    """Every table's rows, bit for bit."""
    found = {}
    for name, table in TABLES.items():
        size = table.record.size_bytes
        got = MemoryStore.read(store, [ReadPart(RowKeys(table.tag, IDS), size, size)], Deadline.after(60))[0].in_key_order()
        found[name] = got.found.tobytes() + np.where(got.found[:, None], got.records, 0).tobytes()
    return found


def known(life: Life) -> dict[str, tuple[int, list[int]]]:
    """Every table's step and index."""
    return {name: (life.step(table), life.tables.state(table).versions(IDS).tolist()) for name, table in TABLES.items()}


def drawn_batch(kind: str, parts: dict[str, set[int]], seed: int) -> Batch:
    return Batch(kind, tuple(rows(TABLES[name], kind, sorted(ids), seed) for name, ids in sorted(parts.items())))


IDS_OF_A_BATCH = st.sets(st.sampled_from(IDS.tolist()), max_size=4)
PARTS = st.dictionaries(st.sampled_from(sorted(TABLES)), IDS_OF_A_BATCH, min_size=1)
KINDS = st.sampled_from([APPLY, APPLY, ASSIGN, ERASE, ERASE])
BATCHES = st.lists(st.builds(drawn_batch, KINDS, PARTS, st.integers(0, 99)), min_size=1, max_size=9)
PIECES = st.sampled_from([128, 300, storage_pace.MOST_BYTES])  # one row, two, or all of a batch


@contextmanager
def cut_at(most_bytes: int) -> Iterator[None]:
    """Let engines made meanwhile cut batches in pieces of so many bytes."""
    before, storage_pace.MOST_BYTES = storage_pace.MOST_BYTES, most_bytes
    try:
        yield
    finally:
        storage_pace.MOST_BYTES = before


def die_in(store: MortalStore, data: st.DataObject, act: Callable[[], Any]) -> None:
    """Let the process die after a number of row writes, if it makes so many."""
    store.left = data.draw(st.integers(0, 12))
    try:
        act()
    except KilledError:
        pass
    finally:
        store.left = None
