"""The updated weights that are at hand behind a batch are what storage holds, or are left out."""

from collections.abc import Sequence
from uuid import uuid4

import numpy as np
import pytest
from memory_store import MemoryStore

from kvemb.config import StorageConfig
from kvemb.errors import NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.stores.row_io import WritePart, WriteResult
from paramserver.apply.returned_rows import weights_at_hand
from paramserver.engine.engine import Engine
from paramserver.model.batch import APPLY, Batch
from tests.unit.engine_storage import ADAM, HALF, SGD, Storage, engine_on, read, rows

IDS = list(range(0, 300, 3))


def make_store() -> Storage:
    store = Storage(StorageConfig("memory", tuple(f"{uuid4().hex}:1" for _ in range(2))), role="shard:0")
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(5))
    store.open(Deadline.after(5))
    return store


def run(engine: Engine, batch: Batch) -> dict[str, np.ndarray]:
    applied = engine.run(batch, make_version(engine.epoch, engine.k + 1), lambda error, pause_s: None)
    return weights_at_hand(batch, applied.written)


def test_the_rows_of_every_table_are_those_in_storage() -> None:
    store = make_store()
    engine = engine_on(store)
    batch = Batch(APPLY, (rows(ADAM, IDS, 0.25), rows(HALF, [7, 9], 0.5), rows(SGD, [])))
    for _ in range(3):
        got = run(engine, batch)
        assert sorted(got) == ["adam", "half"]
        for table, ids in ((ADAM, IDS), (HALF, [7, 9])):
            stored = read(store, table, ids)[2]
            weights = table.record.weights(np.pad(got[table.name], ((0, 0), (12, 0))))
            assert np.array_equal(weights, stored)


def test_rows_outlive_the_next_batch() -> None:
    engine = engine_on(make_store())
    first = run(engine, Batch(APPLY, (rows(ADAM, IDS),)))["adam"]
    before = first.copy()
    run(engine, Batch(APPLY, (rows(ADAM, IDS),)))
    assert np.array_equal(first, before)


def half_written(store: Storage) -> None:
    def spoil(parts: Sequence[WritePart]) -> list[WriteResult]:
        (part,) = parts
        some = np.arange(len(part.keys)) % 2 == 0
        landed = WritePart(part.keys.take(np.flatnonzero(some)), part.records[some], part.tokens[some])
        MemoryStore.write(store, [landed], Deadline.after(5))
        raise NodeUnavailableError("half of it landed")

    store.spoil = spoil


def conflict(store: Storage) -> None:
    def spoil(parts: Sequence[WritePart]) -> list[WriteResult]:
        results = MemoryStore.write(store, parts, Deadline.after(5))
        stored = results[0].stored.copy()
        stored[5] = False
        return [WriteResult(stored, results[0].tokens)]

    store.spoil = spoil


@pytest.mark.parametrize("trouble", [half_written, conflict])
def test_a_table_that_took_several_tries_is_left_out_and_only_then(trouble: object) -> None:
    store = make_store()
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(ADAM, IDS),)))
    trouble(store)  # type: ignore[operator]
    assert run(engine, Batch(APPLY, (rows(ADAM, IDS),))) == {}
    assert run(engine, Batch(APPLY, (rows(SGD, []),))) == {}
    assert sorted(run(engine, Batch(APPLY, (rows(ADAM, IDS),)))) == ["adam"]
