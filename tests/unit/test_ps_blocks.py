"""Large batches are computed block by block, in memory that is used again: the result must not show it."""

from itertools import count

import numpy as np
import pytest
from memory_store import MemoryStore, memory_node

import kvemb.init
import kvemb.optim
from kvemb.arrays.record_cache import CacheBudget
from kvemb.config import StorageConfig
from kvemb.errors import LostRowError, NodeUnavailableError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, WritePart
from paramserver.engine import batch_records as scratch_module
from paramserver.engine import piece_writer
from paramserver.engine.engine import Applied, Engine, Pause
from paramserver.model.batch import APPLY, ASSIGN, Batch, CheckedRows
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from tests.unit.lonely_engine import ALONE

_NUMBERS = count()
WIDE = TableDef("wide", 3, kvemb.optim.adam(lr=0.1), kvemb.init.normal(std=1.0))
HALF = TableDef("half", 2, kvemb.optim.adagrad(), kvemb.init.uniform(), dtype="bfloat16")
CACHE_BYTES = 1 << 20


def make_engine(cache_bytes: int) -> tuple[Engine, MemoryStore, Tables]:
    store = MemoryStore(StorageConfig("memory", (f"blocks-{next(_NUMBERS)}:1",)), role="shard:0")
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
    store.open(Deadline.after(60))
    tables = Tables([], CacheBudget(cache_bytes))
    return Engine(store, tables, Timeline(1), k=0, timeout_s=5, repair=ALONE), store, tables


def rows(definition: TableDef, ids: np.ndarray, seed: int) -> CheckedRows:
    values = np.random.default_rng(seed).standard_normal((len(ids), definition.dim)).astype(np.float32)
    return CheckedRows(definition, ids.astype(np.uint64), values, np.empty(0, np.uint64), definition.optimizer.check_hyper({}))


def never(error: StorageError, pause_s: float) -> None:
    raise error


def run(engine: Engine, batch: Batch, pause: Pause) -> Applied:
    """Apply the engine's next batch."""
    return engine.run(batch, make_version(engine.epoch, engine.k + 1), pause)


def stored(store: MemoryStore, definition: TableDef, n: int) -> np.ndarray:
    size = definition.record.size_bytes
    (read,) = store.rows.read([ReadPart(RowKeys(definition.tag, np.arange(n, dtype=np.uint64)), size, size)], Deadline.after(60))
    got = read.in_key_order()
    return np.where(got.found[:, None], got.records, 0)


def train(engine: Engine, tables: Tables) -> None:
    """Batches of both tables: rows that are new, cached, and fetched, side by side."""
    for step in range(6):
        rng = np.random.default_rng(step)
        ids = [np.sort(rng.permutation(60)[:size]) for size in (41, 23)]
        kind = ASSIGN if step == 3 else APPLY
        run(engine, Batch(kind, (rows(WIDE, ids[0], step), rows(HALF, ids[1], step + 10))), never)
        tables.state(WIDE).cache.forget(np.arange(0, 60, 3, dtype=np.uint64))


@pytest.mark.parametrize("cache_bytes", [0, CACHE_BYTES])
@pytest.mark.parametrize("block_weights", [1, 12, 1 << 17])
def test_blocks_of_any_size_and_any_cache_write_the_same_bytes(
    cache_bytes: int, block_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, expected, tables = make_engine(0)
    train(engine, tables)
    monkeypatch.setattr(piece_writer, "_BLOCK_WEIGHTS", block_weights)
    engine, store, tables = make_engine(cache_bytes)
    train(engine, tables)
    for definition in (WIDE, HALF):
        np.testing.assert_array_equal(stored(store, definition, 60), stored(expected, definition, 60))
    budget = tables.cache_budget
    assert (0 < budget.n_hits < budget.n_lookups) == (cache_bytes > 0)


def test_memory_that_is_not_kept_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, expected, tables = make_engine(CACHE_BYTES)
    train(engine, tables)
    monkeypatch.setattr(scratch_module, "_KEPT_BYTES", 41 * WIDE.record.size_bytes)  # for the first table only
    engine, store, tables = make_engine(CACHE_BYTES)
    train(engine, tables)
    for definition in (WIDE, HALF):
        np.testing.assert_array_equal(stored(store, definition, 60), stored(expected, definition, 60))


def test_what_the_cache_keeps_outlives_the_memory_in_which_it_was_made() -> None:
    engine, store, tables = make_engine(CACHE_BYTES)
    first, second = np.arange(20), np.arange(20, 50)
    for step, ids in enumerate((first, second, second)):
        run(engine, Batch(APPLY, (rows(WIDE, ids, step),)), never)
    cache = tables.state(WIDE).cache
    kept = cache.records[cache.find(np.arange(50, dtype=np.uint64))]
    np.testing.assert_array_equal(kept, stored(store, WIDE, 50))


def test_a_half_written_batch_is_completed_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_writer, "_BLOCK_WEIGHTS", 12)
    whole, expected, _ = make_engine(CACHE_BYTES)
    engine, store, _ = make_engine(CACHE_BYTES)
    before, batch = Batch(APPLY, (rows(WIDE, np.arange(30), 1),)), Batch(APPLY, (rows(WIDE, np.arange(45), 2),))
    for one in (whole, engine):
        run(one, before, never)
    run(whole, batch, never)
    write = store.rows.write

    def half(parts: list[WritePart], deadline: Deadline) -> None:
        (part,) = parts
        some = np.arange(len(part.keys)) % 5 < 2
        monkeypatch.setattr(store, "write", write)
        write([WritePart(RowKeys(part.keys.tag, part.keys.ids[some]), part.records[some], part.tokens[some])], deadline)
        raise NodeUnavailableError("went away")

    monkeypatch.setattr(store, "write", half)
    applied = run(engine, batch, lambda error, pause_s: None)
    assert applied.n_existed == 30
    np.testing.assert_array_equal(stored(store, WIDE, 45), stored(expected, WIDE, 45))


def test_a_row_lost_in_a_late_block_stops_the_batch_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_writer, "_BLOCK_WEIGHTS", 12)
    engine, store, _ = make_engine(0)
    run(engine, Batch(APPLY, (rows(WIDE, np.arange(30), 1),)), never)
    key = bytes(RowKeys(WIDE.tag, np.array([29], np.uint64)).encode()[0])
    memory_node(store.nodes.addresses[0]).values.pop(key)
    before = stored(store, WIDE, 30)
    with pytest.raises(LostRowError, match="id 29"):
        run(engine, Batch(APPLY, (rows(WIDE, np.arange(30), 2),)), never)
    np.testing.assert_array_equal(stored(store, WIDE, 30), before)
