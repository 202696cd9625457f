"""The trainer's cache of rows: what a pull may take from it is what the shards said, and not longer than they allow."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvemb import init, optim
from kvemb.arrays.rounding import round_nearest
from kvemb.datapath.row_cache import HEARD_WITHIN_S, ExpectedRows, RowCache, check_options
from kvemb.errors import InvalidInputError, MessageError
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import PushReply
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef

USER = TableDef("user", 2, optim.sgd(lr=0.5), init.zeros())
ITEM = TableDef("item", 3, optim.sgd(lr=0.5), init.zeros(), dtype="bfloat16")
NOTHING = np.empty((0, 0), np.float32)
EPOCH = 4


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def new(clock: Clock) -> Callable[..., RowCache]:
    def make(max_staleness: int = 2, n_shards: int = 2, limit_bytes: int = 1 << 20) -> RowCache:
        cache = RowCache(limit_bytes, max_staleness, clock)
        cache.add_table(USER)
        cache.add_table(ITEM)
        return cache

    return make


def u64(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.uint64)


def want(cache: RowCache, shard: int = 0, **tables: list[int]) -> ExpectedRows:
    return cache.want(shard, [TableRows(name, 0, u64(ids), NOTHING) for name, ids in tables.items()])


def rows_of(table: TableDef, ids: list[int], value: float) -> np.ndarray:
    return np.full((len(ids), table.dim), value, np.float32)


def reply(k: int, others: int = 0, rows: list[tuple[TableDef, np.ndarray]] | None = None, **fields: Any) -> PushReply:
    data = [round_nearest(values, table.dtype).tobytes() for table, values in rows or []]
    return PushReply(1, "applied", k, **{"epoch": EPOCH, "others": others, "rows": data, **fields})


def put(cache: RowCache, ids: list[int], value: float, k: int, others: int = 0, shard: int = 0, **fields: Any) -> None:
    cache.applied(want(cache, shard, user=ids), reply(k, others, [(USER, rows_of(USER, ids, value))], **fields))


def kept(cache: RowCache, ids: list[int], table: TableDef = USER) -> dict[int, float]:
    """The value of every row that may be used."""
    out = np.full((len(ids), table.dim), np.nan, np.float32)
    found = cache.fill(table, u64(ids), out)
    if found is None:
        return {}
    assert found.versions[~found.rows].tolist() == [0] * int((~found.rows).sum())
    assert (out[found.rows] == out[found.rows][:, :1]).all()
    return {row_id: float(out[i, 0]) for i, row_id in enumerate(ids) if found.rows[i]}


def test_rows_of_an_ack_are_found_with_their_versions(new: Callable[..., RowCache]) -> None:
    cache = new()
    put(cache, [5, 3, 9], 1.5, k=7, shard=1)
    out = np.empty((3, 2), np.float32)
    found = cache.fill(USER, u64([3, 4, 5]), out)
    assert found is not None
    assert found.rows.tolist() == [True, False, True]
    assert found.versions.tolist() == [make_version(EPOCH, 7), 0, make_version(EPOCH, 7)]
    assert out[found.rows].tolist() == [[1.5, 1.5]] * 2
    assert (cache.stats.n_lookups, cache.stats.n_hits) == (3, 2)
    assert cache.stats.used_bytes > 0


def test_tables_are_apart_and_16_bit_rows_are_exact(new: Callable[..., RowCache]) -> None:
    cache = new()
    both = want(cache, user=[1, 2], item=[2, 3])
    cache.applied(both, reply(3, rows=[(USER, rows_of(USER, [1, 2], 0.1)), (ITEM, rows_of(ITEM, [2, 3], -0.375))]))
    assert kept(cache, [1, 2, 3]) == {1: np.float32(0.1), 2: np.float32(0.1)}
    assert kept(cache, [1, 2, 3], ITEM) == {2: -0.375, 3: -0.375}


def test_the_newest_ack_of_a_row_counts(new: Callable[..., RowCache]) -> None:
    cache = new()
    put(cache, [1, 2], 1.0, k=1)
    put(cache, [2, 3], 2.0, k=2)
    assert kept(cache, [1, 2, 3]) == {1: 1.0, 2: 2.0, 3: 2.0}


def test_own_batches_make_nothing_old(new: Callable[..., RowCache]) -> None:
    cache = new(max_staleness=1)
    put(cache, [1], 1.0, k=1)
    for k in range(2, 1000):
        put(cache, [2], float(k), k=k)
    assert kept(cache, [1, 2]) == {1: 1.0, 2: 999.0}


def test_what_is_remembered_of_a_shard_does_not_grow(new: Callable[..., RowCache]) -> None:
    cache = new(max_staleness=3)
    for k in range(1, 500):
        put(cache, [1], 1.0, k=k, others=k // 2)
        assert len(cache._shards[0].counts) <= 4


@pytest.mark.parametrize("max_staleness", [1, 2, 5])
def test_a_row_is_used_until_more_batches_of_others_than_allowed_are_known(new: Callable[..., RowCache], max_staleness: int) -> None:
    cache = new(max_staleness)
    put(cache, [1], 1.0, k=10, others=4)
    for step in range(1, max_staleness + 1):
        put(cache, [2], 2.0, k=10 + step, others=4 + step)
        assert kept(cache, [1]) == {1: 1.0}
    put(cache, [2], 2.0, k=11 + max_staleness, others=5 + max_staleness)
    assert kept(cache, [1, 2]) == {2: 2.0}


def test_shards_grow_old_on_their_own(new: Callable[..., RowCache]) -> None:
    cache = new(max_staleness=1)
    put(cache, [1], 1.0, k=500, others=400, shard=0)
    put(cache, [2], 2.0, k=1, others=0, shard=1)
    put(cache, [3], 3.0, k=600, others=500, shard=0)
    assert kept(cache, [1, 2, 3]) == {2: 2.0, 3: 3.0}


def test_a_shard_that_was_not_heard_of_lately_is_not_trusted(new: Callable[..., RowCache], clock: Clock) -> None:
    cache = new()
    put(cache, [1], 1.0, k=1, shard=0)
    clock.now_s += HEARD_WITHIN_S
    put(cache, [2], 2.0, k=1, shard=1)
    assert kept(cache, [1, 2]) == {1: 1.0, 2: 2.0}
    clock.now_s += HEARD_WITHIN_S / 2
    assert kept(cache, [1, 2]) == {2: 2.0}
    put(cache, [3], 3.0, k=2, shard=0)  # heard again: what it says of others decides
    assert kept(cache, [1, 2, 3]) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_an_ack_without_rows_drops_what_its_part_changed(new: Callable[..., RowCache]) -> None:
    cache = new()
    put(cache, [1, 2], 1.0, k=1)
    cache.applied(want(cache, user=[2]), reply(2))
    assert kept(cache, [1, 2]) == {1: 1.0}
    cache.applied(want(cache, user=[1]), PushReply(3, "applied"))  # an answer that a restarted shard no longer knows
    assert kept(cache, [1, 2]) == {}


def test_nothing_that_was_on_its_way_comes_back_after_invalidate(new: Callable[..., RowCache]) -> None:
    cache = new()
    put(cache, [1], 1.0, k=1)
    on_its_way = want(cache, user=[2])
    cache.invalidate()
    assert (kept(cache, [1]), cache.stats.used_bytes) == ({}, 0)
    cache.applied(on_its_way, reply(2, rows=[(USER, rows_of(USER, [2], 2.0))]))
    assert kept(cache, [1, 2]) == {}
    put(cache, [2], 3.0, k=3)
    assert kept(cache, [1, 2]) == {2: 3.0}


def test_another_epoch_empties_it(new: Callable[..., RowCache]) -> None:
    cache = new()
    put(cache, [1], 1.0, k=7, shard=0)
    put(cache, [2], 2.0, k=7, shard=1)
    put(cache, [3], 3.0, k=1, shard=0, epoch=EPOCH + 1)
    assert kept(cache, [1, 2, 3]) == {}
    put(cache, [3], 4.0, k=2, shard=0, epoch=EPOCH + 1)
    put(cache, [1], 5.0, k=9, shard=0)  # an answer of the old epoch: of no use, and the row has changed
    assert kept(cache, [1, 2, 3]) == {3: 4.0}


def test_rows_that_do_not_fit_their_ids_are_refused_and_change_nothing(new: Callable[..., RowCache]) -> None:
    cache = new()
    put(cache, [1], 1.0, k=1)
    for rows in ([bytes(8)], [bytes(8), b"", b""], [bytes(7), b""], [bytes(16), b""]):
        with pytest.raises(MessageError, match=r"tables came back|bytes came back"):
            cache.applied(want(cache, user=[1], item=[]), PushReply(1, "applied", 2, epoch=EPOCH, rows=rows))
    assert kept(cache, [1]) == {1: 1.0}


def test_ids_are_copied_when_a_part_is_sent(new: Callable[..., RowCache]) -> None:
    cache = new()
    ids = u64([1, 2])
    sent = cache.want(0, [TableRows("user", 0, ids, NOTHING)])
    ids[:] = 9
    cache.applied(sent, reply(1, rows=[(USER, rows_of(USER, [1, 2], 1.0))]))
    assert kept(cache, [1, 2, 9]) == {1: 1.0, 2: 1.0}


def test_memory_stays_within_the_limit_and_hot_rows_stay(new: Callable[..., RowCache]) -> None:
    cache = new(limit_bytes=300_000)
    hot = list(range(100))
    put(cache, hot, 1.0, k=1)
    for k in range(2, 60):
        cold = list(range(1000 * k, 1000 * k + 500))
        put(cache, cold, 2.0, k=k)
        assert len(kept(cache, hot)) == 100
        assert cache.stats.used_bytes <= 300_000
    assert 0 < len(kept(cache, list(range(60_000)))) < 10_000


def test_tables_that_were_never_opened_are_not_kept(clock: Clock) -> None:
    cache = RowCache(1 << 20, 1, clock)
    put(cache, [1], 1.0, k=1)
    assert kept(cache, [1]) == {}


def test_a_forked_child_finds_nothing_and_waits_for_nobody(new: Callable[..., RowCache]) -> None:
    cache = new()
    put(cache, [1], 1.0, k=1)
    cache._pid = os.getpid() + 1  # what a child sees
    cache._lock.acquire()  # held by a thread that the child does not have
    cache.add_table(USER)
    cache.invalidate()
    assert (kept(cache, [1]), cache.stats.n_lookups) == ({}, 0)


@pytest.mark.parametrize(
    ("max_staleness", "row_cache_mb", "message"),
    [(-1, None, "max_staleness"), (1.5, None, "max_staleness"), (True, 1, "max_staleness"), (1 << 17, None, "max_staleness"),
     (1, 0, "row_cache_mb"), (1, 0.5, "row_cache_mb"), (0, 64, "no effect")],
)  # fmt: skip
def test_unusable_options_are_refused(max_staleness: Any, row_cache_mb: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_options(max_staleness, row_cache_mb)


class Model:
    """One shard as it is, and what a trainer may make of its acks."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.history: list[dict[int, float]] = [{}]  # rows after each batch
        self.foreign: list[bool] = [False]  # whether that batch changed rows for others
        self.reported = [0]  # others, as of each batch

    def batch(self, changed: set[int], foreign: bool) -> int:
        self.history.append({**self.history[-1], **dict.fromkeys(changed, float(len(self.history)))})
        self.foreign.append(foreign)
        self.reported.append(self.reported[-1] + foreign)
        return len(self.history) - 1


event = st.tuples(st.sampled_from(["own", "own", "other", "both", "silent", "drop"]), st.sets(st.integers(0, 12), min_size=1, max_size=5))


@settings(max_examples=300, deadline=None)
@given(st.lists(event, max_size=60), st.integers(1, 4))
def test_a_row_that_is_used_lags_by_no_more_than_allowed(events: list[tuple[str, set[int]]], max_staleness: int) -> None:
    cache, shard = RowCache(1 << 20, max_staleness, Clock()), Model(max_staleness)
    cache.add_table(USER)
    heard = 0
    for kind, chosen in events:
        ids = sorted(chosen)
        if kind == "drop":
            cache.invalidate()
        elif kind == "other":
            shard.batch(chosen, True)
        else:
            k = heard = shard.batch(chosen, kind == "both")
            rows = [] if kind == "silent" else [(USER, np.array([[shard.history[k][i]] * 2 for i in ids], np.float32))]
            cache.applied(want(cache, user=ids), reply(k, shard.reported[k], rows))
        for row_id, value in kept(cache, list(range(13))).items():
            since = next(k for k in range(heard, 0, -1) if shard.history[k].get(row_id) == value)
            lag = [k for k in range(since + 1, heard + 1) if shard.history[k].get(row_id) != shard.history[k - 1].get(row_id)]
            assert all(shard.foreign[k] for k in lag)  # every own push that was reported is in it
            assert sum(shard.foreign[since + 1 : heard + 1]) <= max_staleness


@pytest.mark.parametrize("fields", [{"k": 1 << 48}, {"k": -1}, {"k": 1, "epoch": 70_000}, {"k": 1, "others": -1}])
def test_numbers_out_of_range_are_refused_and_change_nothing(new: Callable[..., RowCache], fields: dict[str, int]) -> None:
    cache = new()
    put(cache, [1], 1.0, k=1)
    with pytest.raises(MessageError, match="reply to part"):
        cache.applied(want(cache, user=[1]), PushReply(1, "applied", rows=[b""], **fields))
    assert kept(cache, [1]) == {1: 1.0}
