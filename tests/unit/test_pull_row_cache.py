"""A pull with the trainer's cache: rows from there and rows from storage, each in its place, and storage asked for the others only."""

import numpy as np
import pytest
from memory_store import memory_node

from kvemb.arrays.rounding import round_nearest
from kvemb.datapath.pull import prepare_pull, pull
from kvemb.datapath.row_cache import RowCache
from kvemb.errors import NodeUnavailableError, RecordError
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import PushReply
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from tests.unit.counting_store import ITEM, SOON, USER, CountingStore, store, write

__all__ = ["store"]  # the fixture
EPOCH, K = 3, 9


@pytest.fixture
def cache() -> RowCache:
    cache = RowCache(1 << 20, 1)
    cache.add_table(USER)
    cache.add_table(ITEM)
    return cache


def keep(cache: RowCache, table: TableDef, ids: np.ndarray, rows: np.ndarray) -> None:
    bits = ids.astype(np.int64).view(np.uint64)
    sent = cache.want(0, [TableRows(table.name, 0, bits, np.empty((len(ids), 0), np.float32))])
    data = round_nearest(rows.astype(np.float32), table.dtype).tobytes()
    cache.applied(sent, PushReply(1, "applied", K, epoch=EPOCH, rows=[data]))


def asked(store: CountingStore) -> list[int]:
    return [len(part.keys) for parts in store.reads for part in parts]


@pytest.mark.parametrize("table", [USER, ITEM])
@pytest.mark.parametrize("given", ["new", "out", "strided out"])
@pytest.mark.parametrize("ids", [[2, 5, 8, 11], [11, 2, 8, 5, 100, 3], [[8, 2, 8], [5, 5, 100]], [5, 8], [1, 3, 100]])
def test_every_row_comes_from_where_it_is(store: CountingStore, cache: RowCache, table: TableDef, given: str, ids: list[int]) -> None:
    stored = np.arange(12)
    write(store, table, stored, np.repeat(stored[:, None], table.dim, axis=1), make_version(EPOCH, 4))
    keep(cache, table, np.array([5, 8]), np.array([[-5] * table.dim, [-8] * table.dim]))
    wanted = np.array(ids)
    shape = (*wanted.shape, table.dim)
    strided = np.zeros((*shape[:-1], 2 * table.dim), np.float32)[..., ::2]
    out = {"new": None, "out": np.zeros(shape, np.float32), "strided out": strided}[given]
    got = pull(store, [prepare_pull(table, wanted, out)], SOON, versions=True, cache=cache)[0]
    expected = np.repeat(np.where(np.isin(wanted, [5, 8]), -wanted, wanted).astype(np.float32)[..., None], table.dim, axis=-1)
    expected[wanted == 100] = table.initial_rows(np.array([100], np.uint64))
    assert np.array_equal(got.rows, expected)
    assert got.rows is out or out is None
    version = np.where(np.isin(wanted, [5, 8]), make_version(EPOCH, K), make_version(EPOCH, 4))
    assert np.array_equal(got.versions, np.where(wanted == 100, 0, version))
    lacking = len(np.setdiff1d(wanted, [5, 8]))
    assert asked(store) == ([lacking] if lacking else [])
    without = pull(store, [prepare_pull(table, wanted)], SOON, cache=cache)[0]
    assert np.array_equal(without.rows, expected)
    assert without.versions.shape == (0,)


def test_tables_are_read_together_and_a_table_that_is_all_there_not_at_all(store: CountingStore, cache: RowCache) -> None:
    keep(cache, USER, np.array([1, 2]), np.ones((2, 4)))
    keep(cache, ITEM, np.array([7]), np.ones((1, 2)))
    requests = [prepare_pull(USER, [1, 2, 1]), prepare_pull(ITEM, [7, 9]), prepare_pull(ITEM, [])]
    rows = [pulled.rows for pulled in pull(store, requests, SOON, cache=cache)]
    assert asked(store) == [1]
    assert rows[0].tolist() == [[1] * 4] * 3
    assert rows[1][0].tolist() == [1, 1]
    assert np.array_equal(rows[1][1:], ITEM.initial_rows(np.array([9], np.uint64)))


def test_what_a_pull_returned_is_the_caller_s(store: CountingStore, cache: RowCache) -> None:
    keep(cache, USER, np.array([1, 2]), np.ones((2, 4)))
    first = pull(store, [prepare_pull(USER, [1, 2])], SOON, versions=True, cache=cache)[0]
    first.rows[:] = 7
    again = pull(store, [prepare_pull(USER, [2, 1, 2])], SOON, versions=True, cache=cache)[0]
    keep(cache, USER, np.array([1, 2]), np.zeros((2, 4)))
    pull(store, [prepare_pull(USER, [1, 1, 5])], SOON, versions=True, cache=cache)
    assert (first.rows == 7).all()
    assert (again.rows == 1).all()


def test_out_is_untouched_when_storage_fails(store: CountingStore, cache: RowCache, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(cache, USER, np.array([1, 2]), np.ones((2, 4)))
    out = np.full((3, 4), -1, np.float32)

    def down(*_: object) -> None:
        raise NodeUnavailableError("down")

    monkeypatch.setattr(store, "read", down)
    with pytest.raises(NodeUnavailableError):
        pull(store, [prepare_pull(USER, [1, 2, 3], out)], SOON, cache=cache)
    assert (out == -1).all()


def test_records_beside_kept_rows_are_checked(store: CountingStore, cache: RowCache) -> None:
    keep(cache, USER, np.array([5]), np.ones((1, 4)))
    write(store, USER, np.array([1, 2]), np.ones((2, 4)), 1)
    keys = [bytes(key) for key in RowKeys(USER.tag, np.array([1, 2], np.uint64)).encode()]
    nodes = {key: node for node in map(memory_node, store.addresses) for key in node.values}
    nodes[keys[1]].put(keys[1], nodes[keys[0]].values[keys[0]][0])
    with pytest.raises(RecordError, match="'user', id 2"):
        pull(store, [prepare_pull(USER, [5, 2, 1])], SOON, cache=cache)
