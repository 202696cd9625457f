"""An engine on storage inside this process: tables, batches' rows, and what storage holds."""

from collections.abc import Callable, Sequence

import numpy as np
from memory_store import MemoryStore, memory_node

import kvemb.init
import kvemb.optim
from kvemb.config import StorageConfig
from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, WritePart, WriteResult
from paramserver.engine.engine import Applied, Engine, Pause
from paramserver.model.batch import Batch, CheckedRows
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from tests.unit.lonely_engine import ALONE
from tests.unit.memory_nodes import unused_nodes

SGD = TableDef("sgd", 3, kvemb.optim.sgd(0.5), kvemb.init.normal(std=1.0), seed=4)
ADAM = TableDef("adam", 2, kvemb.optim.adam(lr=0.1), kvemb.init.uniform())
HALF = TableDef("half", 4, kvemb.optim.adagrad(), kvemb.init.normal(std=1.0), dtype="bfloat16")


class Storage(MemoryStore):
    """Storage in memory whose next writes can be spoilt."""

    spoil: Callable[[Sequence[WritePart]], list[WriteResult] | None] | None = None

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        spoil, self.spoil = self.spoil, None
        results = spoil(parts) if spoil is not None else None
        return super().write(parts, deadline) if results is None else results


def make_store() -> Storage:
    store = Storage(StorageConfig("memory", unused_nodes()), role="shard:0")
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
    store.open(Deadline.after(60))
    return store


def engine_on(store: Storage, epoch: int = 1) -> Engine:
    return Engine(store, Tables([]), Timeline(epoch), k=0, timeout_s=5, repair=ALONE)


def rows(definition: TableDef, ids: list[int], value: float = 1.0, dim: int | None = None) -> CheckedRows:
    values = np.full((len(ids), definition.dim if dim is None else dim), value, np.float32)
    hyper = definition.optimizer.check_hyper({})
    return CheckedRows(definition, np.array(ids, np.uint64), values, np.empty(0, np.uint64), hyper)


def never(error: StorageError, pause_s: float) -> None:
    raise error


def run(engine: Engine, batch: Batch, pause: Pause) -> Applied:
    """Apply the engine's next batch."""
    return engine.run(batch, make_version(engine.epoch, engine.k + 1), pause)


def read(store: Storage, definition: TableDef, ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """found, versions, weights."""
    size, keys = definition.record.size_bytes, RowKeys(definition.tag, np.array(ids, np.uint64))
    got = store.rows.read([ReadPart(keys, size, size)], Deadline.after(60))[0].in_key_order()
    return got.found, definition.record.versions(got.records), definition.record.weights(got.records)


def node_of(store: Storage, definition: TableDef, row_id: int) -> tuple[object, bytes]:
    keys = RowKeys(definition.tag, np.array([row_id], np.uint64))
    return memory_node(store.nodes.addresses[store.nodes.map.slot_nodes[keys.slots()[0]]]), bytes(keys.encode()[0])
