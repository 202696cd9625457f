"""Rows that come back with acks, and gradients in 16 bits, between real processes."""

from collections.abc import Iterator

import numpy as np
import pytest

import kvemb
from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.cluster import Cluster
from kvemb.errors import InvalidInputError
from kvemb.local_cluster import LocalCluster

IDS = np.arange(1000)


@pytest.fixture(scope="module")
def one_shard() -> Iterator[LocalCluster]:
    with LocalCluster("valkey", shards=1) as local:
        yield local


@pytest.fixture(scope="module")
def two_shards() -> Iterator[LocalCluster]:
    with LocalCluster("valkey", 2, shards=2) as local:
        yield local


def sgd_table(cluster: Cluster, name: str, **options: object) -> kvemb.Table:
    options = {"optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros(), "exist_ok": True} | options
    return cluster.create_table(name, dim=4, **options)  # type: ignore[arg-type]


def add(table: kvemb.Table, ids: list[int], value: float) -> None:
    """Add to rows; returns once it is applied."""
    table.push(ids, np.full((len(ids), 4), -value, np.float32)).wait_applied()


def first_weights(table: kvemb.Table, ids: list[int]) -> list[float]:
    rows = table.pull(ids)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


def test_one_trainer_finds_exactly_what_storage_holds(two_shards: LocalCluster) -> None:
    rng = np.random.default_rng(0)
    with kvemb.connect(two_shards.url, max_staleness=1) as trainer, kvemb.connect(two_shards.url, read_only=True) as reader:
        for name, dtype in (("exact32", "float32"), ("exact16", "bfloat16")):
            trainer.create_table(name, dim=8, optimizer=kvemb.optim.adam(lr=0.1), dtype=dtype)
        for _ in range(30):
            ids = {name: rng.choice(IDS, 300, replace=name == "exact32") for name in ("exact32", "exact16")}
            pulled = trainer.pull_versions(ids)
            stored = reader.pull_versions(ids)
            for name in ids:
                assert np.array_equal(pulled[name][0], stored[name][0])
                assert np.array_equal(pulled[name][1], stored[name][1])
            versions = {name: pulled[name][1] for name in ids}
            ack = trainer.push({name: (ids[name], rng.normal(size=(300, 8))) for name in ids}, versions=versions)
            ack.wait_applied()
            assert ack.staleness is not None
            assert ack.staleness.changed_fraction == 0
        assert trainer.row_cache is not None
        assert trainer.row_cache.n_hits > 0.5 * trainer.row_cache.n_lookups
        everything = trainer.table("exact32").pull(IDS), reader.table("exact32").pull(IDS)
        assert np.array_equal(*everything)


def test_a_row_lags_behind_others_for_as_long_as_allowed(one_shard: LocalCluster) -> None:
    with kvemb.connect(one_shard.url, max_staleness=2) as ours, kvemb.connect(one_shard.url) as theirs:
        mine, other = sgd_table(ours, "lag"), sgd_table(theirs, "lag")
        add(mine, [1, 2], 1)
        for _ in range(3):
            add(other, [1], 10)
        assert first_weights(mine, [1, 2, 3]) == [1, 1, 0]  # nothing was heard of the others yet
        assert first_weights(other, [1, 2, 3]) == [31, 1, 0]
        add(mine, [3], 1)
        assert first_weights(mine, [1, 2, 3]) == [31, 1, 1]  # three batches of others are more than two
        add(mine, [1], 1)
        add(other, [1], 10)
        add(other, [2], 10)
        add(mine, [3], 1)
        assert first_weights(mine, [1, 3]) == [32, 2]  # two are not: its own pushes are in, the other's may not be
        add(mine, [1], 1)
        assert first_weights(mine, [1, 2, 3]) == [43, 11, 2]


def test_after_its_own_flush_assign_or_erase_a_client_sees_everything(one_shard: LocalCluster) -> None:
    with kvemb.connect(one_shard.url, max_staleness=9) as ours, kvemb.connect(one_shard.url) as theirs:
        mine, other = sgd_table(ours, "flush"), sgd_table(theirs, "flush")
        add(mine, [1, 2], 1)
        add(other, [1], 10)
        assert first_weights(mine, [1]) == [1]
        mine.flush()
        assert first_weights(mine, [1]) == [11]
        add(mine, [1, 2], 1)
        mine.assign([1], np.full((1, 4), 5.0))
        assert first_weights(mine, [1, 2]) == [5, 2]
        add(mine, [1, 2], 1)
        assert first_weights(mine, [1, 2]) == [6, 3]
        assert mine.erase([1]) == 1
        assert first_weights(mine, [1, 2]) == [0, 3]


def test_without_max_staleness_every_pull_reads_storage(one_shard: LocalCluster) -> None:
    with kvemb.connect(one_shard.url) as ours, kvemb.connect(one_shard.url) as theirs:
        mine, other = sgd_table(ours, "fresh"), sgd_table(theirs, "fresh")
        add(mine, [1], 1)
        add(other, [1], 10)
        assert first_weights(mine, [1]) == [11]
        assert ours.row_cache is None


def test_a_small_row_cache_keeps_fewer_rows(one_shard: LocalCluster) -> None:
    ids, hits = np.arange(40_000), []
    for row_cache_mb in (1, 64):
        with kvemb.connect(one_shard.url, max_staleness=9, row_cache_mb=row_cache_mb) as trainer:
            table = sgd_table(trainer, "room")
            table.push(ids, np.zeros((len(ids), 4))).wait_applied()
            table.pull(ids)
            assert trainer.row_cache is not None
            hits.append(trainer.row_cache.n_hits)
    few, all_of_them = hits
    assert 0 < few < len(ids) // 2
    assert all_of_them == len(ids)


def test_options_without_an_effect_are_refused(one_shard: LocalCluster) -> None:
    with pytest.raises(InvalidInputError, match="row_cache_mb has no effect"):
        kvemb.connect(one_shard.url, row_cache_mb=4)
    with pytest.raises(InvalidInputError, match="read_only"):
        kvemb.connect(one_shard.url, read_only=True, max_staleness=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_gradients_are_summed_in_float32(two_shards: LocalCluster, dtype: str) -> None:
    with kvemb.connect(two_shards.url) as cluster:
        table = sgd_table(cluster, f"wire-{dtype}")
        table.set_wire_dtype(dtype)
        assert table.wire_dtype == dtype
        rng = np.random.default_rng(1)
        expected, exact = np.zeros((1000, 4), np.float32), np.zeros((1000, 4))
        for push in range(20):
            grads = rng.normal(size=(1000, 4)).astype(np.float32)
            if push % 2:
                table.push(IDS, grads)
            else:
                cluster.push({table.name: (IDS, grads)})
            cluster.flush()
            expected -= to_float32(round_nearest(grads, dtype), dtype)
            exact -= grads
        rows = table.pull(IDS)
        assert np.array_equal(rows, expected)
        assert not np.array_equal(rows, exact.astype(np.float32))
        assert np.abs(rows - exact).max() < 20 * 4 * {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        with pytest.raises(InvalidInputError, match="unknown storage dtype 'float8'"):
            table.set_wire_dtype("float8")
