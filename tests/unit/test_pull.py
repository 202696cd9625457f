"""Pull, on storage inside this process."""

from collections.abc import Iterator, Sequence
from uuid import uuid4

import numpy as np
import pytest
from memory_store import MemoryStore, memory_node

import kvemb.datapath.pull
from kvemb import init, optim
from kvemb.config import StorageConfig
from kvemb.datapath.pull import prepare_pull, pull
from kvemb.errors import DeadlineExceededError, InvalidInputError, RecordError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult
from tests.unit.counting_store import ITEM, SOON, USER, CountingStore, store, write

__all__ = ["store"]  # the fixture


def pull_one(store: MemoryStore, table: TableDef, ids: object, out: np.ndarray | None = None) -> np.ndarray:
    return pull(store, [prepare_pull(table, ids, out)], SOON)[0].rows  # type: ignore[arg-type]


@pytest.mark.parametrize("table", [USER, ITEM])
def test_rows_that_do_not_exist_are_the_initializer_s_and_nothing_is_written(store: CountingStore, table: TableDef) -> None:
    before = [dict(memory_node(address).values) for address in store.nodes.addresses]
    ids = np.arange(50, dtype=np.uint64)
    rows = pull_one(store, table, ids)
    assert np.array_equal(rows, table.initial_rows(ids))
    assert np.array_equal(rows, pull_one(store, table, ids))
    assert [memory_node(address).values for address in store.nodes.addresses] == before


def test_stored_rows_and_new_ones_come_back_each_in_its_place(store: CountingStore) -> None:
    stored = np.array([-5, 3, 2**62, 8])
    weights = np.arange(16.0).reshape(4, 4)
    write(store, USER, stored, weights, 77)
    ids = np.array([[8, 100, -5], [3, 8, 2**62]])
    result = pull(store, [prepare_pull(USER, ids)], SOON, versions=True)[0]
    assert result.rows.shape == (2, 3, 4)
    assert np.array_equal(result.rows[0, 0], weights[3])
    assert np.array_equal(result.rows[0, 1], USER.initial_rows(np.array([100], np.uint64))[0])
    assert np.array_equal(result.rows[0, 2], weights[0])
    assert np.array_equal(result.rows[1], weights[[1, 3, 2]])
    assert result.versions.tolist() == [[77, 0, 77], [77, 77, 77]]


def test_several_tables_are_one_read_of_distinct_ids_and_prefixes(store: CountingStore) -> None:
    requests = [prepare_pull(USER, [1, 1, 2]), prepare_pull(ITEM, []), prepare_pull(ITEM, [[9]])]
    results = pull(store, requests, SOON)
    assert [result.rows.shape for result in results] == [(3, 4), (0, 2), (1, 1, 2)]
    assert len(store.reads) == 1
    parts = store.reads[0]
    assert [(len(part.keys), part.prefix_bytes) for part in parts] == [(2, 12 + 16), (1, 12 + 4)]


def test_an_empty_pull_asks_nobody(store: CountingStore) -> None:
    assert pull_one(store, USER, []).shape == (0, 4)
    assert store.reads == ()


def test_a_pull_takes_header_and_weights_and_leaves_the_slots(store: CountingStore) -> None:
    write(store, USER, np.array([1]), np.ones((1, 4)), 1)
    assert pull_one(store, USER, [1]).tolist() == [[1, 1, 1, 1]]
    assert store.reads[0][0].prefix_bytes == USER.record.prefix_bytes


@pytest.mark.parametrize("strided", [False, True])
def test_out_is_filled_and_returned(store: CountingStore, strided: bool) -> None:
    out = np.zeros((2, 3, 8), np.float32)[:, :, ::2] if strided else np.zeros((2, 3, 4), np.float32)
    ids = np.arange(6).reshape(2, 3)
    assert pull_one(store, USER, ids, out) is out
    assert np.array_equal(out, pull_one(store, USER, ids))


@pytest.mark.parametrize(
    "out",
    [np.zeros((2, 4)), np.zeros((2, 3), np.float32), np.zeros((1, 4), np.float32), [[0.0] * 4] * 2],
)
def test_an_unusable_out_is_refused_before_any_io(store: CountingStore, out: object) -> None:
    with pytest.raises(InvalidInputError, match=r"expected a writable float32 array of shape \(2, 4\)"):
        pull_one(store, USER, [1, 2], out)  # type: ignore[arg-type]
    assert store.reads == ()


def test_a_read_only_out_is_refused(store: CountingStore) -> None:
    out = np.zeros((1, 4), np.float32)
    out.flags.writeable = False
    with pytest.raises(InvalidInputError, match="writable"):
        pull_one(store, USER, [1], out)


def test_another_row_s_record_is_never_used(store: CountingStore) -> None:
    write(store, USER, np.array([1, 2]), np.ones((2, 4)), 1)
    keys = [bytes(key) for key in RowKeys(USER.tag, np.array([1, 2], np.uint64)).encode()]
    nodes = {key: node for node in map(memory_node, store.nodes.addresses) for key in node.values}
    nodes[keys[1]].put(keys[1], nodes[keys[0]].values[keys[0]][0])
    out = np.full((2, 4), -1, np.float32)
    with pytest.raises(RecordError, match="'user', id 2"):
        pull_one(store, USER, [1, 2], out)
    assert (out == -1).all()


def test_what_a_pull_returned_does_not_change_with_the_next_one(store: CountingStore) -> None:
    write(store, USER, np.array([1, 2, 3]), np.arange(12.0).reshape(3, 4), 9)
    first = pull(store, [prepare_pull(USER, [3, 1, 3])], SOON, versions=True)[0]
    rows, versions = first.rows.copy(), first.versions.copy()
    pull(store, [prepare_pull(USER, [2, 9, 2, 8])], SOON, versions=True)
    assert np.array_equal(first.rows, rows)
    assert np.array_equal(first.versions, versions)


def test_a_pull_larger_than_the_kept_memory_is_as_any_other(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.arange(40)
    rows = pull_one(store, USER, ids)
    monkeypatch.setattr("kvemb.datapath.multi_table_read._KEPT_BYTES", 100)
    monkeypatch.setattr("kvemb.datapath.pull._memory", type(kvemb.datapath.pull._memory)())
    assert np.array_equal(pull_one(store, USER, np.append(ids, ids)), np.concatenate([rows, rows]))


def test_a_large_batch_with_many_duplicates_is_read_once_per_id(store: CountingStore) -> None:
    ids = np.random.default_rng(0).integers(0, 300, 5000)
    rows = pull_one(store, USER, ids)
    assert len(store.reads[0][0].keys) == len(np.unique(ids))
    assert np.array_equal(rows, USER.initial_rows(ids.view(np.uint64)))


SIMILAR = [TableDef(f"similar{i}", 4, optim.adam(), init.uniform(), dtype="float16" if i > 2 else "float32") for i in range(6)]


class OrderedStore(CountingStore):
    """Answers in the order of the keys, as one node does."""

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return [result.in_key_order() for result in super().read(parts, deadline)]


@pytest.fixture(params=[CountingStore, OrderedStore])
def any_store(request: pytest.FixtureRequest) -> Iterator[CountingStore]:
    with request.param(StorageConfig("memory", (f"{uuid4().hex}:1", f"{uuid4().hex}:1")), role="trainer") as store:
        store.provision(b"c" * 16, b"g" * 8, SOON)
        store.open(SOON)
        yield store


def test_tables_whose_records_are_alike_are_read_as_one(any_store: CountingStore) -> None:
    ids = [np.array(some) for some in ([5, 1, 9], [1, 1, 1, 5, 2], [[3], [9]], [7, 1], [2, 8, 2], [], [1, 5, 77])]
    tables = [*SIMILAR, USER]
    for salt, table in enumerate(tables):
        stored = np.array([1, 2, 3, 5, 7])
        write(any_store, table, stored, np.repeat(stored[:, None] + 100.0 * salt, 4, axis=1), 1 + salt)
    requests = [
        prepare_pull(table, some, np.full((*some.shape, 4), -1, np.float32) if index % 2 else None)
        for index, (table, some) in enumerate(zip(tables, ids, strict=True))
    ]
    results = pull(any_store, requests, SOON, versions=True)
    assert [len(part.keys) for part in any_store.reads[0]] == [3 + 3 + 2 + 3, 2 + 2]
    for salt, (table, some, request, got) in enumerate(zip(tables, ids, requests, results, strict=True)):
        there = np.isin(some, [1, 2, 3, 5, 7])
        expected = np.repeat(some[..., None] + np.float32(100 * salt), 4, axis=-1).astype(np.float32)
        expected[~there] = table.initial_rows(some[~there].astype(np.uint64))
        assert np.array_equal(got.rows, expected)
        assert got.rows is request.out or request.out is None
        assert np.array_equal(got.versions, np.where(there, 1 + salt, 0))
    for salt, (table, some, got) in enumerate(zip(tables, ids, results, strict=True)):  # each result is its own
        assert np.array_equal(pull_one(any_store, table, some), got.rows)
        got.rows[...] = -salt
    assert all((got.rows == -salt).all() for salt, got in enumerate(results))


def test_the_table_of_a_wrong_record_is_named_among_those_read_with_it(any_store: CountingStore) -> None:
    for table in SIMILAR[:3]:
        write(any_store, table, np.array([1, 2]), np.ones((2, 4)), 1)
    right, wrong = (bytes(RowKeys(table.tag, np.array([2], np.uint64)).encode()[0]) for table in SIMILAR[:2])
    nodes = {key: node for node in map(memory_node, any_store.nodes.addresses) for key in node.values}
    nodes[wrong].put(wrong, nodes[right].values[right][0])
    outs = [np.full((2, 4), -1, np.float32) for _ in range(3)]
    with pytest.raises(RecordError, match="'similar1', id 2"):
        pull(any_store, [prepare_pull(table, [1, 2], out) for table, out in zip(SIMILAR[:3], outs, strict=True)], SOON)
    assert all((out == -1).all() for out in outs)


def test_an_out_larger_than_what_is_gathered_at_once_is_filled(any_store: CountingStore) -> None:
    ids = np.random.default_rng(1).integers(0, 900, 3000)
    write(any_store, USER, np.arange(500), np.repeat(np.arange(500.0)[:, None], 4, axis=1), 3)
    out = np.zeros((3000, 4), np.float32)
    assert np.array_equal(pull_one(any_store, USER, ids, out), pull_one(any_store, USER, ids))
    assert np.array_equal(out[ids < 500, 0], ids[ids < 500])


@pytest.mark.parametrize("piece_bytes", [1, 500, 2000])
def test_a_pull_in_pieces_is_as_any_other(any_store: CountingStore, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    rng = np.random.default_rng(2)
    tables, ids = [*SIMILAR, USER], [rng.integers(0, 60, n) for n in (5, 0, 90, 1, 40, 40, 300)]
    for salt, table in enumerate(tables):
        stored = np.arange(0, 60, 3)
        write(any_store, table, stored, np.repeat(stored[:, None] + 100.0 * salt, 4, axis=1), 1 + salt)
    requests = [prepare_pull(table, some) for table, some in zip(tables, ids, strict=True)]
    whole = pull(any_store, requests, SOON, versions=True)
    assert len(any_store.reads) == 1
    monkeypatch.setattr("kvemb.datapath.pull.PIECE_BYTES", piece_bytes)
    outs = [None if index % 2 else np.zeros((len(some), 4), np.float32) for index, some in enumerate(ids)]
    requests = [prepare_pull(table, some, out) for table, some, out in zip(tables, ids, outs, strict=True)]
    pieces = pull(any_store, requests, SOON, versions=True)
    n_rows = sum(len(np.unique(some)) for some in ids)
    assert len(any_store.reads) > 2
    assert sum(len(part.keys) for parts in any_store.reads[1:] for part in parts) == n_rows
    for one, other, out in zip(whole, pieces, outs, strict=True):
        assert np.array_equal(one.rows, other.rows)
        assert np.array_equal(one.versions, other.versions)
        assert out is None or other.rows is out


class HungStore(CountingStore):
    """Hangs at its third read."""

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        self.deadlines = [*getattr(self, "deadlines", ()), deadline]
        if len(self.deadlines) == 3:
            raise DeadlineExceededError("no complete answer from node x")
        return super().read(parts, deadline)


@pytest.mark.parametrize("renewed", [False, True])
def test_every_piece_of_a_pull_has_the_whole_time_unless_the_caller_set_it(monkeypatch: pytest.MonkeyPatch, renewed: bool) -> None:
    monkeypatch.setattr("kvemb.datapath.pull.PIECE_BYTES", 10 * (USER.record.prefix_bytes + 64))
    out = np.full((50, 4), -1, np.float32)
    with HungStore(StorageConfig("memory", (f"{uuid4().hex}:1",)), role="trainer") as store:
        store.provision(b"c" * 16, b"g" * 8, SOON)
        store.open(SOON)
        with pytest.raises(DeadlineExceededError, match="20 of the 50 rows") as error:
            pull(store, [prepare_pull(USER, np.arange(50), out)], SOON, renewed=renewed)
    assert ("each piece" if renewed else "all of it") in str(error.value)
    assert [deadline.at_s > SOON.at_s for deadline in store.deadlines] == [renewed] * 3
    assert (out == -1).all()
