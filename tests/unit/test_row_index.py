"""The row index behaves as a dict of id to version, with any order of puts, erases and rebuilds."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.arrays import hash_probe, row_index
from kvemb.arrays.hash_probe import Homes, probe
from kvemb.arrays.hashing import KeyOrder
from kvemb.arrays.row_index import END, RowIndex
from kvemb.schema.slots import N_SLOTS

IDS = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))
STEP = st.tuples(st.sampled_from(["put", "erase"]), st.lists(IDS, unique=True, max_size=30))


def u64(values: object) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(st.lists(STEP, max_size=30))
def test_an_index_is_a_dict(steps: list[tuple[str, list[int]]]) -> None:
    index, model = RowIndex(), {}
    for number, (verb, ids) in enumerate(steps, start=1):
        if verb == "put":
            versions = [number * 1000 + place for place in range(len(ids))]
            index.put(u64(ids), u64(versions))
            model.update(zip(ids, versions, strict=True))
        else:
            assert index.erase(u64(ids)) == sum(model.pop(row, None) is not None for row in ids)
        seen = sorted({row for _, batch in steps for row in batch})
        assert index.get(u64(seen)).tolist() == [model.get(row, 0) for row in seen]
        assert len(index) == len(model)
    found, versions, _ = index.portion(0)
    assert dict(zip(found.tolist(), versions.tolist(), strict=True)) == model


@given(st.lists(STEP, max_size=20), st.data())
def test_what_was_found_stays_good_whatever_happens_to_the_index(steps: list[tuple[str, list[int]]], data: st.DataObject) -> None:
    index, model = RowIndex(), {}
    looked_up: list[tuple[list[int], object]] = [([], index.find(u64([])))]
    for number, (verb, ids) in enumerate(steps, start=1):
        looked_up.append((ids, index.find(u64(ids))))
        if verb == "erase":
            index.erase(u64(ids))
            model = {row: version for row, version in model.items() if row not in ids}
        else:
            ids, found = data.draw(st.sampled_from(looked_up))
            index.set_at(found, number)
            model.update(dict.fromkeys(ids, number))
        if number % 5 == 0:  # a growth or two, in which rows move
            more = range(1000 * number, 1000 * number + 900)
            index.put(u64(more), u64(more))
            model.update(zip(more, more, strict=True))
        for seen, found in looked_up:
            assert index.at(found).tolist() == [model.get(row, 0) for row in seen]
        assert len(index) == len(model)
    found_ids, versions, _ = index.portion(0, n_rows=1 << 20)
    assert dict(zip(found_ids.tolist(), versions.tolist(), strict=True)) == model


@pytest.mark.parametrize("few", [0, 10, 1 << 30])
def test_crowded_buckets_are_searched_to_their_end_one_by_one_and_several_at_once(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose bucket is the last or the one before it run over into the first ones, some of them after rows of those."""
    monkeypatch.setattr(hash_probe, "_FEW", few)
    index, many = RowIndex(), _spread(0, 40_000)
    homes = index._homes.of(KeyOrder().hashes(many))[0]
    n_buckets = len(index._tags)
    crowd = np.concatenate([many[homes == bucket][:30] for bucket in (n_buckets - 1, 0, n_buckets - 2, 5)])
    model: dict[int, int] = {}
    for start in range(0, len(crowd), 7):
        some = crowd[start : start + 7]
        index.put(some, some | np.uint64(1))
        model.update(zip(some.tolist(), (some | np.uint64(1)).tolist(), strict=True))
    assert len(index._tags) == n_buckets  # it did not grow
    assert index.erase(crowd[::3]) == len(crowd[::3])
    for row in crowd[::3].tolist():
        del model[row]
    assert index.get(many).tolist() == [model.get(row, 0) for row in many.tolist()]
    found = index.find(crowd)
    index.set_at(found, 3)
    assert (index.at(found) == 3).all()
    assert len(index) == len(crowd)


def test_erased_places_are_used_again() -> None:
    index = RowIndex()
    for round_ in range(50):
        ids = np.arange(600, dtype=np.uint64) + np.uint64(1000 * round_)
        index.put(ids, ids + np.uint64(1))
        assert index.erase(ids) == 600
    assert len(index) == 0
    assert index.size_bytes <= 16 * 2**11


@pytest.mark.parametrize("bad", [0, 2**64 - 1])
def test_versions_that_mean_empty_or_erased_are_never_stored(bad: int) -> None:
    with pytest.raises(AssertionError):
        RowIndex().put(u64([1]), u64([bad]))


def test_ids_of_one_shard_do_not_cluster() -> None:
    """Routing and the index must not use the same bits: with the ids of one of 64 shards, lookups would take thousands of rounds."""
    from tests.owners import shard_of

    ids = np.arange(1 << 20, dtype=np.uint64)
    ids = ids[shard_of(ids, 64) == 3]
    index = RowIndex()
    index.put(ids, ids + np.uint64(1))
    rows_per_bucket = np.bincount(index._homes.of(KeyOrder().hashes(ids))[0], minlength=len(index._tags))
    assert (rows_per_bucket == 0).mean() < 0.02
    assert rows_per_bucket.max() < 24


@pytest.mark.parametrize("ids_per_group", [1, 53])
@pytest.mark.parametrize("share", [1, 2, 64])
def test_portions_list_the_rows_of_a_range_in_order_whatever_happens_in_between(ids_per_group: int, share: int) -> None:
    """A shard that has every slot, every other run of slots, or few; then slots come whose rows it has no buckets for."""
    rng, order = np.random.default_rng(share), KeyOrder(ids_per_group)
    index, ids = RowIndex(order=order), rng.permutation(400_000).astype(np.uint64)
    mine = order.keys(ids) >> np.uint64(56) & np.uint64(63) < np.uint64(64 // share)
    mine, others = ids[mine], ids[~mine]
    stay, leave, come = mine[: len(mine) // 2], mine[len(mine) // 2 : -100], mine[-100:]
    index.put(stay, stay + np.uint64(1))
    index.put(leave, leave + np.uint64(1))
    seen, low, n_portions = [], 0, 0
    while low < END:
        some, versions, next_ = index.portion(low, n_rows=3000)
        keys = order.keys(some)
        assert (keys[1:] > keys[:-1]).all()
        assert not len(keys) or (low <= int(keys[0]) and int(keys[-1]) < next_)
        assert (versions == some + np.uint64(1)).all()
        assert len(some) < 10_000
        seen.append(some)
        low, n_portions = next_, n_portions + 1
        if n_portions == 3:
            index.erase(leave)
        if n_portions == 5:
            index.put(come, come + np.uint64(1))
            index.put(others[:100_000], others[:100_000] + np.uint64(1))  # the table grows, and rows move
    listed = np.concatenate(seen)
    assert len(np.unique(listed)) == len(listed)
    assert np.isin(stay, listed).all()
    half = 1 << 63
    expected = stay[order.keys(stay) >= np.uint64(half)]
    some = [index.portion(half, n_rows=1 << 20)[0], index.portion(0, half, n_rows=1 << 20)[0]]
    assert np.isin(expected, some[0]).all()
    assert len(some[0]) + len(some[1]) == len(index)
    most = np.uint64(2000)
    assert sorted(index.portion(0, n_rows=1 << 20, above=int(most))[0]) == sorted(row for row in index.arrays()[0] if row >= most)


def test_slots_that_come_do_not_crowd() -> None:
    """Their hashes have no buckets until the table is laid out anew."""
    from tests.owners import shard_of

    ids = np.arange(1 << 20, dtype=np.uint64)
    shards, index = shard_of(ids, 16), RowIndex()
    index.put(ids[shards < 8], ids[shards < 8] + np.uint64(1))
    come = ids[shards == 12]
    for start in range(0, len(come), 1000):
        index.put(come[start : start + 1000], come[start : start + 1000] + np.uint64(1))
    n_full = np.flatnonzero(index._tags <= hash_probe.LAST_TAKEN)
    assert np.diff(n_full).max() < 300
    assert (index.get(come) == come + np.uint64(1)).all()


def _spread(start: int, n: int) -> np.ndarray:
    return np.arange(start, start + n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


@pytest.mark.parametrize("batch", [1000, 30_000, 700_000])
def test_a_row_takes_at_most_24_bytes_at_every_size(batch: int) -> None:
    index, n = RowIndex(), 0
    while n < 700_000:
        index.put(_spread(n, batch), _spread(n, batch) | np.uint64(1))
        n += batch
        assert n < 10_000 or index.size_bytes <= 24 * n
    assert index.size_bytes == index._pairs.nbytes + index._tags.nbytes
    assert (index.get(_spread(0, n)) == (_spread(0, n) | np.uint64(1))).all()


def test_putting_known_rows_takes_no_room() -> None:
    index, ids = RowIndex(), _spread(0, 300_000)
    index.put(ids, ids | np.uint64(1))
    for n_new in (1, 1000):
        known = np.concatenate([_spread(index.get(ids).size, n_new), ids])
        index.put(known, known | np.uint64(1))
    assert index.size_bytes <= 24 * len(index)


def test_growth_happens_in_place() -> None:
    """The peak while an index grows is its new size and a little: not the old and the new size together."""
    n, more = 1_200_000, _spread(1_200_000, 1000)
    ids = _spread(0, n)
    tracemalloc.start()
    try:
        index = RowIndex()
        index.put(ids, ids | np.uint64(1))
        before = index.size_bytes
        tracemalloc.reset_peak()
        while index.size_bytes == before:
            more += np.uint64(0x9E3779B97F4A7C15 * 1000 % 2**64)
            index.put(more, more | np.uint64(1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < index.size_bytes + (8 << 20)


def test_rows_erased_and_put_again_over_and_over_take_no_more_room() -> None:
    index, n = RowIndex(), 100_000
    index.put(_spread(0, n), _spread(0, n) | np.uint64(1))
    size = index.size_bytes
    for round_ in range(12):  # the same rows, then others in the place of some
        assert index.erase(_spread(0, n)) == n
        index.put(_spread(0, n), _spread(round_, n) | np.uint64(1))
    assert index.size_bytes == size
    for round_ in range(40):
        first = round_ * 10_000
        assert index.erase(_spread(first, 10_000)) == 10_000
        index.put(_spread(first + n, 10_000), _spread(first + n, 10_000) | np.uint64(1))
        assert len(index) == n
        assert index.size_bytes <= 24 * n
    ids = _spread(400_000, n)
    assert (index.get(ids) == (ids | np.uint64(1))).all()
    assert not index.get(_spread(0, 400_000)).any()


def test_an_index_that_lost_most_of_its_rows_shrinks_with_its_next_growth() -> None:
    index, n = RowIndex(), 200_000
    index.put(_spread(0, n), _spread(0, n) | np.uint64(1))
    assert index.erase(_spread(0, n - 1000)) == n - 1000
    index.put(_spread(n, n // 2), _spread(n, n // 2) | np.uint64(1))
    assert index.size_bytes <= 24 * len(index)
    ids = _spread(n - 1000, 1000 + n // 2)
    assert (index.get(ids) == (ids | np.uint64(1))).all()
    assert len(index) == len(ids)


def test_erased_ids_that_come_back_among_many_new_ones_find_room() -> None:
    index = RowIndex()
    for n in (1000, 2000, 5000):
        ids = np.arange(n, dtype=np.uint64)
        index.put(ids, ids + np.uint64(1))
        index.erase(ids)
    ids = np.arange(12_000, dtype=np.uint64)
    index.put(ids, ids + np.uint64(1))
    assert (index.get(ids) == ids + np.uint64(1)).all()
    assert len(index) == 12_000


def test_rows_that_were_looked_up_are_put_without_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counted(homes: Homes, tags: np.ndarray, pairs: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        looked.append(len(ids))
        return probe(homes, tags, pairs, ids)

    monkeypatch.setattr(row_index, "probe", counted)
    index, ids = RowIndex(growth=4.0), np.arange(3000, dtype=np.uint64)
    found = index.find(ids[:2000])
    index.set_at(found, ids[:2000] + np.uint64(1))  # the table grows, so that their places are looked for once more
    assert sum(n for n in looked if n >= 1000) == 2 * 2000
    looked.clear()
    found = index.find(ids[2000:])
    index.set_at(found.take(np.arange(1000)), ids[2000:] + np.uint64(1))
    assert looked == [1000]
    assert np.array_equal(index.get(ids), ids + np.uint64(1))


@pytest.mark.parametrize("ascending", [True, False])
def test_rows_of_pages_lie_near_their_bucket_in_whatever_order_they_come(ascending: bool) -> None:
    order, ids = KeyOrder(53), np.arange(600_000, dtype=np.uint64)
    coming = ids if ascending else np.random.default_rng(0).permutation(ids)
    index = RowIndex(order=order)
    for at in range(0, len(ids), 40_000):
        some = coming[at : at + 40_000]
        index.put(some, some + np.uint64(1))
    buckets, n_buckets = index._homes.of(order.hashes(ids))[0], len(index._tags)
    away = (index.find(ids).places // 8 - buckets) % n_buckets
    assert away.max() < 50, "slots have a few pages each, some many more than others"
    assert (index.get(ids) == ids + np.uint64(1)).all()


@pytest.mark.parametrize("n_rows", [30_000, 300_000])
def test_rows_lie_near_their_bucket_while_an_eviction_sweeps_through_the_keys(n_rows: int) -> None:
    """Where it has been, few rows are left; new ones come everywhere. An even layout left no room in the rest."""
    index, per_step, furthest = RowIndex(), n_rows // 60, 0
    index.put(_spread(0, n_rows), np.full(n_rows, 1, np.uint64))
    low, age = 0, 1
    for step in range(2, 400):
        coming = _spread(n_rows + step * per_step, per_step)
        index.put(coming, np.full(per_step, step, np.uint64))
        ids, versions, low = index.portion(low, n_rows=2 * per_step)
        index.erase(ids[versions <= age])
        if low >= END:
            low, age = 0, step - 20
        if step % 10 == 0:
            ids, versions = index.arrays()
            buckets, n_buckets = index._homes.of(KeyOrder().hashes(ids))[0], len(index._tags)
            furthest = max(furthest, int(((index.find(ids).places // 8 - buckets) % n_buckets).max()))
            assert np.array_equal(index.get(ids), versions)
    assert furthest < 200


@pytest.mark.parametrize("some_slots", [False, True], ids=["all slots", "slots here and there"])
def test_rows_that_come_in_the_order_of_keys_do_not_have_the_table_laid_out_anew_each_time(
    some_slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that an eviction erases, and those that another shard hands over: some thousand at a time."""
    laid_out = Counter[str]()
    rebuild = RowIndex._rebuild
    monkeypatch.setattr(RowIndex, "_rebuild", lambda self, *args: laid_out.update(["times"]) or rebuild(self, *args))
    ids = _spread(0, 1 << 19)
    if some_slots:
        ids = ids[np.random.default_rng(0).random(N_SLOTS)[KeyOrder().keys(ids) >> np.uint64(50)] < 0.4]
    ids, index = ids[np.argsort(KeyOrder().keys(ids))], RowIndex()
    for start in range(0, len(ids), 1000):
        index.put(ids[start : start + 1000], ids[start : start + 1000] | np.uint64(1))
    assert (index.get(ids) == ids | np.uint64(1)).all()
    assert index.size_bytes <= 24 * len(ids)
    assert laid_out["times"] < 100


def test_many_rows_in_the_order_of_keys_do_not_crowd_behind_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start of a shard whose journal has newer rows: the table has room for the first rows, but not where they belong."""
    n_looks = 0

    def counted(pairs: np.ndarray, ids: np.ndarray, *rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nonlocal n_looks
        n_looks += len(ids)
        return look(pairs, ids, *rest)

    look = hash_probe._look
    index, few, many = RowIndex(growth=4.0), _spread(0, 60_000), _spread(60_000, 400_000)
    index.put(few, few | np.uint64(1))
    monkeypatch.setattr(hash_probe, "_look", counted)
    many = many[np.argsort(KeyOrder().keys(many))]
    index.put(many, many | np.uint64(1))
    assert n_looks < 4 * len(many)
    assert np.array_equal(index.get(many), many | np.uint64(1))


@pytest.mark.parametrize("late", [0, 1, 100_000], ids=["all in order", "one out of order", "many out of order"])
@pytest.mark.parametrize("ids_per_group", [1, 53])
def test_rows_in_the_order_of_keys_are_placed_without_looking(ids_per_group: int, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    order = KeyOrder(ids_per_group)
    index, ids = RowIndex(order=order), np.arange(300_000, dtype=np.uint64)
    ids = ids[np.argsort(order.keys(ids))]
    ids = np.concatenate([ids[late:], ids[:late]])
    n_looked = 0

    def counted(homes: Homes, tags: np.ndarray, pairs: np.ndarray, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nonlocal n_looked
        n_looked += len(some)
        return probe(homes, tags, pairs, some)

    monkeypatch.setattr(row_index, "probe", counted)
    index.put(ids, ids + np.uint64(1))
    if ids_per_group == 1:  # the rows of a page come in the order of their ids
        assert n_looked <= (late and late + (2 << 16))
    assert len(index) == len(ids)
    assert np.array_equal(index.get(ids), ids + np.uint64(1))
    assert not index.get(ids + np.uint64(len(ids))).any()
    assert index.erase(ids[::2]) == len(ids) // 2
    index.put(ids[::4], ids[::4] + np.uint64(7))
    assert np.array_equal(index.get(ids[::4]), ids[::4] + np.uint64(7))
    assert len(index) == len(ids) * 3 // 4
    listed = index.portion(0, n_rows=1 << 20)[0]
    assert len(listed) == len(index)
    assert (np.diff(order.keys(listed).astype(object)) > 0).all()
