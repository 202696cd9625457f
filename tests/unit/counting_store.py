"""A store that counts how often it is read, and two tables."""

from collections.abc import Iterator, Sequence
from uuid import uuid4

import numpy as np
import pytest
from memory_store import MemoryStore

from kvemb import init, optim
from kvemb.arrays.rounding import round_nearest
from kvemb.config import StorageConfig
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart

SOON = Deadline.after(60)
USER = TableDef("user", 4, optim.adam(), init.normal(std=0.1), seed=3)
ITEM = TableDef("item", 2, optim.sgd(), init.uniform(), dtype="bfloat16", id_dtype="uint64")


class CountingStore(MemoryStore):
    """Counts its reads, and remembers what they asked for."""

    reads: Sequence[Sequence[ReadPart]] = ()

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        self.reads = [*self.reads, parts]
        return super().read(parts, deadline)


@pytest.fixture
def store() -> Iterator[CountingStore]:
    addresses = tuple(f"{uuid4().hex}:1" for _ in range(3))
    with CountingStore(StorageConfig("memory", addresses), role="trainer") as store:
        store.provision(b"c" * 16, b"g" * 8, SOON)
        store.open(SOON)
        yield store


def write(store: MemoryStore, table: TableDef, ids: np.ndarray, rows: np.ndarray, version: int) -> None:
    bits = ids.view(np.uint64)
    state = np.full((len(ids), table.optimizer.state_size(table.dim)), 7, np.float32)
    records = table.record.encode(bits, version, round_nearest(rows.astype(np.float32), table.dtype), state)
    store.rows.write([WritePart(RowKeys(table.tag, bits), records)], SOON)
