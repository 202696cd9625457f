"""A shard that writes behind, on storage inside this process that may fail."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from memory_store import MemoryStore, memory_node

import kvemb.init
import kvemb.optim
from kvemb.config import StorageConfig
from kvemb.errors import DeadlineExceededError, NodeUnavailableError, StorageError
from kvemb.index.record_cache import CacheBudget
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version, split_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, WritePart, WriteResult
from paramserver.engine.engine import Applied, Engine
from paramserver.engine.engine_ports import EnginePorts, WriteObserver
from paramserver.engine.repair_port import RepairPort
from paramserver.engine.write_behind import Bound, WriteBehind
from paramserver.model.batch import APPLY, ERASE, Batch, CheckedRows
from paramserver.model.tables import Tables
from paramserver.model.timeline import Timeline
from paramserver.repair.repairer import Reconstruct, Repairer
from paramserver.snapshot.snapshotter import from_storage
from tests.unit.lonely_engine import NO_OBSERVER, NO_REPAIR
from tests.unit.memory_nodes import unused_nodes
from tests.unit.mortal_shard import (
    MortalStore,
)

ADAM = TableDef("adam", 2, kvemb.optim.adam(lr=0.1), kvemb.init.uniform())
FOREVER = Bound(10**6, 1e6)
Ids = Sequence[int]


def never(error: StorageError, pause_s: float) -> None:
    raise error


def patient(error: StorageError, pause_s: float) -> None:
    """Try again."""


def provisioned(store: MemoryStore) -> None:
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(5))
    store.open(Deadline.after(5))


def nodes() -> StorageConfig:
    return StorageConfig("memory", unused_nodes())


def make_store() -> MortalStore:
    store = MortalStore(nodes(), role="shard:0")
    provisioned(store)
    return store


Spoil = Callable[["Faulty", list[WritePart]], list[WriteResult]]


class Faulty(MemoryStore):
    """Storage in memory that counts the rows written, and whose next write can be spoilt."""

    spoil: Spoil | None = None
    n_written = n_writes = 0

    @staticmethod
    def made() -> "Faulty":
        store = Faulty(nodes(), role="shard:0")
        provisioned(store)
        return store

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        spoil, self.spoil = self.spoil, None
        self.n_written += sum(len(part.keys) for part in parts)
        self.n_writes += 1
        return super().write(parts, deadline) if spoil is None else spoil(self, list(parts))


def unanswered(store: Faulty, parts: list[WritePart]) -> list[WriteResult]:
    """All is written, and nobody hears of it."""
    MemoryStore.write(store, parts, Deadline.after(5))
    raise NodeUnavailableError("node x: connection reset")


def half_answered(store: Faulty, parts: list[WritePart]) -> list[WriteResult]:
    """Every other row is written, and nobody hears of it."""
    for part in parts:
        some = np.arange(0, len(part.keys), 2)
        tokens = None if part.tokens is None else part.tokens[some]
        MemoryStore.write(store, [WritePart(part.keys.take(some), part.records[some], tokens)], Deadline.after(5))
    raise DeadlineExceededError("node x: no answer")


class Shard:
    """Store, tables and an engine that writes behind, unless `bound` is None; with the repairer where it is told how to reconstruct."""

    def __init__(
        self,
        bound: Bound | None = FOREVER,
        cache_bytes: int = 1 << 20,
        *,
        reconstruct: Reconstruct | None = None,
        observer: WriteObserver = NO_OBSERVER,
        wake: Callable[[], None] | None = None,
        clock_s: Callable[[], float] | None = None,
    ) -> None:
        self.store = Faulty.made()
        self.tables = Tables([], CacheBudget(cache_bytes))
        self.now_s, self.woken = 0.0, threading.Event()
        repair: RepairPort = NO_REPAIR
        if reconstruct is not None:
            repair = self.repairer = Repairer(
                self.store, self.tables, 0, timeline=Timeline(1), reconstruct=reconstruct, timeout_s=5, metas=lambda: []
            )
        self.behind = WriteBehind(
            self.store,
            self.tables,
            bound or FOREVER,
            epoch=1,
            timeout_s=5,
            repair=repair,
            wake=wake or self.woken.set,
            clock_s=clock_s or (lambda: self.now_s),
        )
        ports = EnginePorts(repair, observer, self.behind if bound else None)
        self.engine = Engine(self.store, self.tables, Timeline(1), k=0, timeout_s=5, ports=ports)

    def run(self, ids: Ids, kind: str = APPLY, value: float = 1.0) -> Applied:
        return self.engine.run(batch(kind, ids, value), make_version(1, self.engine.k + 1), never)

    def records(self, ids: Ids) -> np.ndarray:
        """What a row is now, wherever it is: from the cache, or storage."""
        state = self.tables.state(ADAM)
        records, found = from_storage(self.store, 5)(state, np.array(ids, np.uint64))
        assert found.all()
        return records

    def k_of(self, ids: Ids) -> list[int]:
        """k of the rows in storage."""
        return [split_version(int(version))[1] for version in read(self.store, ADAM, np.array(ids, np.uint64))[1]]


def batch(kind: str, ids: Ids, value: float = 1.0) -> Batch:
    values = np.full((len(ids), 0 if kind == ERASE else ADAM.dim), value, np.float32)
    hyper = ADAM.optimizer.check_hyper({})
    return Batch(kind, (CheckedRows(ADAM, np.array(ids, np.uint64), values, np.empty(0, np.uint64), hyper),))


def read(store: MemoryStore, table: TableDef, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """found, versions, whole records."""
    size = table.record.size_bytes
    got = store.read([ReadPart(table.keys(ids, pages=False), size, size)], Deadline.after(5))[0].in_key_order()
    return got.found, np.where(got.found, table.record.versions(got.records), np.uint64(0)), got.records


@pytest.fixture
def shard() -> Shard:
    made = Shard()
    made.run([0, 1, 2, 3])
    return made


def put(store: MemoryStore, row_id: int, version: int) -> None:
    """Write another record of this row, as nobody should."""
    ids = np.array([row_id], np.uint64)
    record = read(store, ADAM, ids)[2].copy()
    ADAM.record.encode(ids, np.array([version], np.uint64), np.zeros((1, 2), np.float32), ADAM.record.state(record), record)
    address, key = place(store, row_id)
    memory_node(address).put(key, record.tobytes())


def delete(store: MemoryStore, row_id: int) -> None:
    address, key = place(store, row_id)
    del memory_node(address).values[key]


def place(store: MemoryStore, row_id: int) -> tuple[str, bytes]:
    keys = ADAM.keys(np.array([row_id], np.uint64), pages=False)
    address = next(one for one in store.addresses if store.keys_of(one, keys)[0])
    return address, bytes(keys.encode()[0])
