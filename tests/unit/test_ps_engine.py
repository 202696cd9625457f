"""The engine against storage in memory: its writes, its refusals, and every half-written batch can be completed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from memory_store import MemoryStore, memory_node

from kvemb.arrays.record_cache import CacheBudget
from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.config import StorageConfig
from kvemb.errors import FencedError, LostRowError, NodeUnavailableError, RecordError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from paramserver.engine.batch_records import PreparedRows
from paramserver.engine.engine import Engine
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from tests.unit.engine_storage import ADAM, HALF, SGD, Storage, engine_on, make_store, never, node_of, read, rows, run
from tests.unit.lonely_engine import ALONE
from tests.unit.memory_nodes import unused_nodes


def first_rows(definition: TableDef, ids: list[int]) -> np.ndarray:
    first = definition.initializer.rows(np.array(ids, np.uint64), definition.dim, table=definition.name, seed=definition.seed)
    return to_float32(round_nearest(first, definition.dtype), definition.dtype)


def test_a_push_creates_rows_from_their_first_values() -> None:
    store = make_store()
    engine = engine_on(store)
    assert run(engine, Batch(APPLY, (rows(SGD, [1, 2**64 - 1]),)), never).k == 1
    found, versions, weights = read(store, SGD, [1, 2**64 - 1, 3])
    assert found.tolist() == [True, True, False]
    assert versions[:2].tolist() == [make_version(1, 1)] * 2
    np.testing.assert_array_equal(weights[:2], first_rows(SGD, [1, 2**64 - 1]) - np.float32(0.5))


def test_one_new_row_alone_works() -> None:
    store = make_store()
    run(engine_on(store), Batch(APPLY, (rows(SGD, [9]),)), never)
    np.testing.assert_array_equal(read(store, SGD, [9])[2], first_rows(SGD, [9]) - np.float32(0.5))


def test_a_narrow_row_is_created_from_the_value_that_a_pull_showed_before() -> None:
    store = make_store()
    ids = list(range(100))
    run(engine_on(store), Batch(APPLY, (rows(HALF, ids, 0.0),)), never)
    np.testing.assert_array_equal(read(store, HALF, ids)[2], first_rows(HALF, ids))


def test_optimizer_state_and_step_are_carried_from_batch_to_batch() -> None:
    store = make_store()
    engine = engine_on(store)
    for _ in range(3):
        run(engine, Batch(APPLY, (rows(ADAM, [7], 0.25),)), never)
    # With one constant gradient every Adam step is lr.
    np.testing.assert_allclose(read(store, ADAM, [7])[2], first_rows(ADAM, [7]) - np.float32(0.3), rtol=1e-5)


def test_a_batch_that_names_a_table_without_rows_counts_as_its_step() -> None:
    store = make_store()
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(ADAM, []),)), never)
    assert (engine.k, engine._tables.state(ADAM).step) == (1, 1)


def test_narrow_rows_replay_to_the_same_bits() -> None:
    values = []
    for _ in range(2):
        store = make_store()
        run(engine_on(store), Batch(APPLY, (rows(HALF, list(range(50)), 0.1),)), never)
        values.append(read(store, HALF, list(range(50)))[2].tobytes())
    assert values[0] == values[1]


def test_a_batch_without_a_reply_is_tried_again_under_the_same_version() -> None:
    store, tries = make_store(), []
    engine = engine_on(store)

    def half_written(parts: Sequence[WritePart]) -> list[WriteResult]:
        (part,) = parts
        some = np.arange(len(part.keys)) % 2 == 0
        MemoryStore.write(store, [WritePart(part.keys[np.flatnonzero(some)], part.records[some], part.tokens[some])], Deadline.after(60))
        raise NodeUnavailableError("node x: connection reset")

    store.spoil = half_written
    applied = run(engine, Batch(APPLY, (rows(SGD, list(range(20))),)), lambda error, pause_s: tries.append((str(error), pause_s)))
    assert (applied.k, tries) == (1, [("node x: connection reset", 0.05)])
    _, versions, weights = read(store, SGD, list(range(20)))
    assert set(versions.tolist()) == {make_version(1, 1)}
    np.testing.assert_array_equal(weights, first_rows(SGD, list(range(20))) - np.float32(0.5))  # applied once, not twice


def test_pauses_grow_and_giving_up_leaves_the_index_alone() -> None:
    store, pauses = make_store(), []
    engine = engine_on(store)
    memory_node(store.nodes.addresses[0]).down = memory_node(store.nodes.addresses[1]).down = True

    def pause(error: StorageError, pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 8:
            raise error

    with pytest.raises(NodeUnavailableError):
        run(engine, Batch(APPLY, (rows(SGD, [1]),)), pause)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert (engine.k, engine._tables.state(SGD).n_rows) == (0, 0)


def test_a_write_of_our_own_that_landed_late_is_no_conflict() -> None:
    store = make_store()

    def landed_before(parts: Sequence[WritePart]) -> None:
        MemoryStore.write(store, parts, Deadline.after(60))

    store.spoil = landed_before  # every write now finds its row changed: by itself
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    np.testing.assert_array_equal(read(store, SGD, [1, 2])[2], first_rows(SGD, [1, 2]) - np.float32(0.5))


def test_a_conflict_with_the_same_version_is_retried_with_a_fresh_token() -> None:
    store = make_store()
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    node, key = node_of(store, SGD, 1)

    def touch(parts: Sequence[WritePart]) -> None:
        node.put(key, node.values[key][0])  # an older write of ours that landed again

    store.spoil = touch
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    np.testing.assert_array_equal(read(store, SGD, [1, 2])[2], first_rows(SGD, [1, 2]) - np.float32(0.5) - np.float32(0.5))


def test_a_batch_is_told_once_when_all_of_it_is_computed_and_none_stored() -> None:
    store = make_store()
    engine, told = engine_on(store), list[list[list[int]]]()
    batch = Batch(APPLY, (rows(SGD, [1, 2, 3]), rows(ADAM, []), rows(HALF, [4])))

    def computed(prepared: Sequence[PreparedRows]) -> None:
        told.append([one.rows.ids.tolist() for one in prepared])
        assert not read(store, SGD, [1, 2, 3])[0].any()

    def dropped(parts: Sequence[WritePart]) -> list[WriteResult]:
        raise NodeUnavailableError("the connection broke")

    store.spoil = dropped
    engine.run(batch, make_version(1, 1), lambda error, pause_s: None, computed=computed)
    assert told == [[[1, 2, 3], [4]]], "not once more for the second try"
    assert read(store, SGD, [1, 2, 3])[0].all()
    engine.run(Batch(APPLY, ()), make_version(1, 2), never, computed=computed)
    engine.run(Batch(APPLY, (rows(SGD, [1]),)), make_version(1, 3), never)
    assert len(told) == 1


def test_a_batch_that_an_earlier_try_stored_in_part_is_not_told() -> None:
    store = make_store()
    run(engine_on(store), Batch(APPLY, (rows(SGD, [1]),)), never)  # what a process wrote that was killed then
    again, told = engine_on(store), list[Sequence[PreparedRows]]()
    again.run(Batch(APPLY, (rows(SGD, [1, 2]),)), make_version(1, 1), never, computed=told.append)
    assert told == []
    assert read(store, SGD, [1, 2])[0].all()


def test_rows_that_change_under_every_try_are_given_up() -> None:
    store = make_store()
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(SGD, [1]),)), never)
    store.rows.write = lambda parts, deadline: [WriteResult(np.zeros(len(part.keys), bool)) for part in parts]  # type: ignore[method-assign]
    with pytest.raises(StorageError, match=r"'sgd'.*another program"):
        run(engine, Batch(APPLY, (rows(SGD, [1]),)), never)


def test_a_missing_row_is_lost_not_new() -> None:
    store = make_store()
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    node, key = node_of(store, SGD, 2)
    del node.values[key]
    with pytest.raises(LostRowError, match=r"'sgd', id 2: no row in storage, expected version \(1, 1\)"):
        run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    assert key not in node.values
    assert read(store, SGD, [1])[1].tolist() == [make_version(1, 1)]  # nothing of the batch was written


def test_a_row_that_the_index_does_not_know_is_refused() -> None:
    store = make_store()
    run(engine_on(store), Batch(APPLY, (rows(SGD, [2**64 - 5]),)), never)
    with pytest.raises(LostRowError, match=r"id -5: version \(1, 1\) in storage, expected no row"):
        run(engine_on(store, epoch=2), Batch(APPLY, (rows(SGD, [2**64 - 5]),)), never)


def test_a_row_of_an_older_version_is_refused() -> None:
    store = make_store()
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(SGD, [1]),)), never)
    node, key = node_of(store, SGD, 1)
    old = node.values[key][0]
    run(engine, Batch(APPLY, (rows(SGD, [1]),)), never)
    node.put(key, old)
    with pytest.raises(LostRowError, match=r"version \(1, 1\) in storage, expected version \(1, 2\)"):
        run(engine, Batch(ASSIGN, (rows(SGD, [1]),)), never)


def test_a_row_of_a_later_epoch_fences() -> None:
    store = make_store()
    run(engine_on(store, epoch=3), Batch(APPLY, (rows(SGD, [1]),)), never)
    with pytest.raises(FencedError, match="epoch"):
        run(engine_on(store, epoch=2), Batch(APPLY, (rows(SGD, [1]),)), never)


def test_a_foreign_value_is_refused() -> None:
    store = make_store()
    node, key = node_of(store, SGD, 1)
    node.put(key, bytes(SGD.record.size_bytes))
    with pytest.raises(RecordError, match="id 1"):
        run(engine_on(store), Batch(APPLY, (rows(SGD, [1]),)), never)


def test_assign_sets_rows_and_begins_their_optimizer_state_anew() -> None:
    store = make_store()
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(HALF, [1]),)), never)
    assert run(engine, Batch(ASSIGN, (rows(HALF, [1, 2], 1 / 3),)), never).n_existed == 1
    _, versions, weights = read(store, HALF, [1, 2])
    assert versions.tolist() == [make_version(1, 2)] * 2
    assert (weights == to_float32(round_nearest(np.float32([1 / 3]), "bfloat16"), "bfloat16")).all()
    size, keys = HALF.record.size_bytes, RowKeys(HALF.tag, np.array([1, 2], np.uint64))
    got = store.rows.read([ReadPart(keys, size, size)], Deadline.after(60))[0]
    assert not HALF.record.state(got.records).any()
    assert engine._tables.state(HALF).step == 1


def test_assign_sets_the_state_that_lies_behind_the_weights() -> None:
    store = make_store()
    wide = np.arange(2 * (HALF.dim + HALF.record.state_size), dtype=np.float32).reshape(2, -1)
    run(engine_on(store), Batch(ASSIGN, (replace(rows(HALF, [1, 2]), rows=wide),)), never)
    size, keys = HALF.record.size_bytes, RowKeys(HALF.tag, np.array([1, 2], np.uint64))
    got = store.rows.read([ReadPart(keys, size, size)], Deadline.after(60))[0].in_key_order()
    assert HALF.record.weights(got.records).tolist() == wide[:, : HALF.dim].tolist()
    assert HALF.record.state(got.records).tolist() == wide[:, HALF.dim :].tolist()


def test_erase_counts_what_existed_and_a_row_can_come_back() -> None:
    store = make_store()
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    assert run(engine, Batch(ERASE, (rows(SGD, [2, 3], dim=0),)), never).n_existed == 1
    assert read(store, SGD, [1, 2])[0].tolist() == [True, False]
    run(engine, Batch(APPLY, (rows(SGD, [2]),)), never)
    np.testing.assert_array_equal(read(store, SGD, [2])[2], first_rows(SGD, [2]) - np.float32(0.5))


def test_all_tables_of_a_batch_are_applied_together() -> None:
    store = make_store()
    engine = engine_on(store)
    run(engine, Batch(APPLY, (rows(SGD, [1]), rows(ADAM, [1]), rows(HALF, []))), never)
    assert read(store, SGD, [1])[1].tolist() == read(store, ADAM, [1])[1].tolist() == [make_version(1, 1)]


# --- with the cache of records ------------------------------------------------------------------------------------------------------


def cached_engine(store: Storage) -> Engine:
    return Engine(store, Tables([], CacheBudget(1 << 20)), Timeline(1), k=0, timeout_s=5, repair=ALONE)


def count_reads(store: Storage) -> list[int]:
    """How many rows each read asks for, from now on."""
    asked: list[int] = []
    read_rows = store.rows.read

    def counted(parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        asked.append(sum(len(part.keys) for part in parts))
        return read_rows(parts, deadline)

    store.rows.read = counted  # type: ignore[method-assign]
    return asked


def test_rows_written_lately_are_not_fetched_again_and_come_out_the_same() -> None:
    plain, cached = make_store(), make_store()
    engines = engine_on(plain), cached_engine(cached)
    asked = count_reads(cached)
    for ids in ([1, 2, 3], [2, 3, 4], [1, 4]):
        for engine in engines:
            run(engine, Batch(APPLY, (rows(ADAM, ids, 0.5),)), never)
    assert asked == [3, 1]  # the third batch was all cached
    everything = [1, 2, 3, 4]
    for got, expected in zip(read(cached, ADAM, everything), read(plain, ADAM, everything), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_an_assign_does_not_look_for_rows_that_the_index_does_not_know_and_leaves_the_cache_to_those_that_are_trained() -> None:
    store = make_store()
    engine = cached_engine(store)
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    asked = count_reads(store)
    run(engine, Batch(ASSIGN, (rows(SGD, [3, 4], 0.25),)), never)
    assert asked == []
    run(engine, Batch(ASSIGN, (rows(SGD, [3], 0.5),)), never)
    assert asked == [1], "a row that exists is compared with the index"
    run(engine, Batch(ASSIGN, (rows(SGD, [2], 0.5),)), never)
    assert asked == [1], "one that is trained was in the cache, and is"
    run(engine, Batch(APPLY, (rows(SGD, [2, 3, 4], 0.0),)), never)
    assert asked == [1, 2]
    assert read(store, SGD, [2, 3, 4])[2].tolist() == [[0.5] * SGD.dim, [0.5] * SGD.dim, [0.25] * SGD.dim]


def test_an_assign_whose_answer_was_lost_is_completed_and_a_row_of_a_later_owner_is_refused() -> None:
    store = make_store()
    engine = cached_engine(store)

    def landed_without_a_reply(parts: Sequence[WritePart]) -> list[WriteResult]:
        MemoryStore.write(store, parts, Deadline.after(60))
        raise NodeUnavailableError("node x: connection reset")

    store.spoil = landed_without_a_reply
    run(engine, Batch(ASSIGN, (rows(SGD, [1, 2], 0.25),)), lambda error, pause_s: None)
    assert read(store, SGD, [1, 2])[1].tolist() == [make_version(1, 1)] * 2
    run(engine_on(store, epoch=3), Batch(ASSIGN, (rows(SGD, [7], 0.5),)), never)
    with pytest.raises(FencedError, match="epoch"):  # this storage has tokens: what must not exist yet is not written over
        run(engine_on(store, epoch=2), Batch(ASSIGN, (rows(SGD, [7], 0.75),)), never)
    assert read(store, SGD, [7])[2].tolist() == [[0.5] * SGD.dim]


def test_rows_of_an_unanswered_write_are_fetched_before_the_next_try() -> None:
    store = make_store()
    engine = cached_engine(store)
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    asked = count_reads(store)

    def landed_without_a_reply(parts: Sequence[WritePart]) -> list[WriteResult]:
        MemoryStore.write(store, parts, Deadline.after(60))
        raise NodeUnavailableError("node x: connection reset")

    store.spoil = landed_without_a_reply
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), lambda error, pause_s: None)
    assert asked == [2]
    np.testing.assert_allclose(read(store, SGD, [1, 2])[2], first_rows(SGD, [1, 2]) - 1.0, rtol=1e-6)


def test_a_row_changed_behind_the_cache_is_a_lost_row_on_storage_with_tokens() -> None:
    store = make_store()
    engine = cached_engine(store)
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    node, key = node_of(store, SGD, 1)
    node.values.pop(key)  # type: ignore[attr-defined]
    with pytest.raises(LostRowError, match="id 1"):
        run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)


def test_an_erase_that_meets_a_newer_owner_takes_nothing() -> None:
    store = make_store()
    engine = engine_on(store)
    create = Batch(APPLY, (rows(SGD, [1, 2, 3]),))
    engine.run(create, make_version(1, 1), never)
    newer = engine_on(store, epoch=2)
    newer._tables.state(SGD).applied(np.array([1, 2, 3], np.uint64), make_version(1, 1))
    newer.run(Batch(APPLY, (rows(SGD, [2]),)), make_version(2, 2), never)
    with pytest.raises(FencedError, match=r"id 2: version \(2, 2\) in storage is of a later epoch"):
        engine.run(Batch(ERASE, (rows(SGD, [1, 2, 3], dim=0),)), make_version(1, 2), never)
    assert sum(len(memory_node(address).values) for address in store.nodes.addresses) == 3 + 2 * len(store.nodes.addresses)


def test_rows_that_change_while_they_are_erased_are_looked_at_again() -> None:
    class Busy(Storage):
        """Another program writes one of the rows between the read and the erase, so many times."""

        left = 0

        def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[np.ndarray]:
            if self.left:
                self.left -= 1
                for part in parts:
                    key = bytes(part.keys.encode()[0])
                    node = next(node for node in map(memory_node, self.nodes.addresses) if key in node.values)
                    node.put(key, node.values[key][0])
            return super().erase(parts, deadline)

    store = Busy(StorageConfig("memory", unused_nodes()), role="shard:0")
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
    store.open(Deadline.after(60))
    engine = engine_on(store)
    engine.run(Batch(APPLY, (rows(SGD, [1, 2, 3]),)), make_version(1, 1), never)
    store.left = 3
    assert engine.run(Batch(ERASE, (rows(SGD, [1, 2, 9], dim=0),)), make_version(1, 2), never).n_existed == 2
    assert store.left == 0
    assert sum(len(memory_node(address).values) for address in store.nodes.addresses) == 1 + 2 * len(store.nodes.addresses)
    store.left = 1000
    with pytest.raises(StorageError, match="1 row changed between every read and write"):
        engine.run(Batch(ERASE, (rows(SGD, [3], dim=0),)), make_version(1, 3), never)


def test_erased_rows_leave_the_cache() -> None:
    store = make_store()
    engine = cached_engine(store)
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    run(engine, Batch(ERASE, (rows(SGD, [1], dim=0),)), never)
    run(engine, Batch(APPLY, (rows(SGD, [1, 2]),)), never)
    weights = read(store, SGD, [1, 2])[2]
    np.testing.assert_allclose(weights, first_rows(SGD, [1, 2]) - np.array([[0.5], [1.0]]), rtol=1e-6)


def test_what_is_applied_counts_in_the_old_epoch_while_batches_of_it_are_still_to_come() -> None:
    """A flush that began then took the new epoch for its cut, above such batches: their rows were never flushed, and left the index."""
    engine = engine_on(make_store(), epoch=1)
    engine.k = 125
    engine.rise(2, 127)  # 126 and 127 are in the journal
    assert (engine.epoch, engine.version) == (2, make_version(1, 125))
    engine.k = 126
    engine.rise(3, 127)
    assert engine.version == make_version(1, 126)
    engine.k = 127
    assert engine.version == make_version(3, 127)
    engine.rise(4, 127)
    assert engine.version == make_version(4, 127)
