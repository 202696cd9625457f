"""A shard on storage inside this process whose nodes may lose rows, and its repairer."""

from collections.abc import Sequence
from itertools import count

import numpy as np
from memory_store import MemoryStore

import kvemb.init
import kvemb.optim
from kvemb.arrays.record_cache import CacheBudget
from kvemb.config import StorageConfig
from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from paramserver.engine.engine import Engine
from paramserver.engine.storage_pace import Pause
from paramserver.model.batch import APPLY, ERASE, Batch, CheckedRows
from paramserver.model.tables import Tables, TableState
from paramserver.model.transition import Timeline
from paramserver.repair.repairer import Repairer
from paramserver.row_log import WantedVersions
from tests.owners import shard_of
from tests.unit.lonely_engine import ALONE

_NUMBERS = count()
ADAM = TableDef("adam", 2, kvemb.optim.adam(lr=0.1), kvemb.init.uniform(), tag_attempt=1)
SGD = TableDef("sgd", 3, kvemb.optim.sgd(0.5), kvemb.init.normal(std=1.0), tag_attempt=2)
IDS = np.arange(3000, dtype=np.uint64)


class Shard:
    """One shard's engine and repairer, with a `reconstruct` that knows the records by heart."""

    def __init__(self, addresses: tuple[str, ...], shard: int = 0, n_shards: int = 1, cache_bytes: int = 0) -> None:
        self.store = MemoryStore(StorageConfig("memory", addresses), role=f"shard:{shard}")
        self.tables = Tables([], CacheBudget(cache_bytes))
        self.number, self.n_shards = shard, n_shards
        self.remembered: dict[tuple[str, int, int], bytes] = {}
        self.reconstructed = 0
        self.k = 0

    def open(self) -> "Shard":
        self.store.open(Deadline.after(60))
        self.engine = Engine(self.store, self.tables, Timeline(1), k=0, timeout_s=5, repair=ALONE)
        self.repairer = Repairer(
            self.store,
            self.tables,
            self.number,
            timeline=Timeline(1),
            reconstruct=self.reconstruct,
            timeout_s=5,
            metas=lambda: [("kvemb:tables", lambda found: b"registry")],
        )
        return self

    def apply(self, definition: TableDef, ids: np.ndarray, kind: str = APPLY, pause: Pause | None = None) -> None:
        ids = ids[shard_of(ids, self.n_shards) == self.number]
        self.k += 1
        version = make_version(1, self.k)
        values = np.ones((len(ids), 0 if kind == ERASE else definition.dim), np.float32)
        rows = CheckedRows(definition, ids, values, np.empty(0, np.uint64), definition.optimizer.check_hyper({}))
        self.engine.run(Batch(kind, (rows,)), version, pause or fail)
        if kind == APPLY:
            for row_id, record in zip(ids.tolist(), self.read(definition, ids)[1], strict=True):
                self.remembered[definition.name, row_id, version] = record.tobytes()

    def read(self, definition: TableDef, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """found, whole records."""
        size = definition.record.size_bytes
        got = self.store.rows.read([ReadPart(definition.keys(ids, pages=False), size, size)], Deadline.after(60))[0].in_key_order()
        return got.found, got.records.copy()

    def reconstruct(self, wanted: Sequence[WantedVersions]) -> list[np.ndarray]:
        return [self._reconstruct(one.table, one.ids, one.versions) for one in wanted]

    def _reconstruct(self, state: TableState, ids: np.ndarray, versions: np.ndarray) -> np.ndarray:
        self.reconstructed += len(ids)
        name = state.definition.name
        known = [self.remembered[name, int(i), int(v)] for i, v in zip(ids, versions, strict=True)]
        return np.frombuffer(b"".join(known), np.uint8).reshape(len(ids), state.definition.record.size_bytes)


def fail(error: StorageError, pause_s: float) -> None:
    raise error


def addresses() -> tuple[str, ...]:
    number = next(_NUMBERS)
    return tuple(f"repair-{number}-{name}:1" for name in "ab")


def provision(nodes: tuple[str, ...], n_shards: int = 1) -> None:
    MemoryStore(StorageConfig("memory", nodes), role="shard:0").provision(b"c" * 16, b"g" * 8, Deadline.after(60), n_shards)
