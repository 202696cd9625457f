"""Rows that policies erase, on real servers: gone from storage, index and row log; they begin anew, exactly once, whatever dies."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from matrix import one_of

import kvemb
from kvemb import evict
from kvemb.errors import InvalidInputError
from kvemb.life.eviction_messages import EVICTIONS, EvictionsRequest
from kvemb.local_cluster import LocalCluster
from tests.integration.counting_trainers import KINDS
from tests.integration.table_clusters import new_table
from tests.shard_moves import ShardMoves
from tests.warm_clusters import warm

WAIT_S, DIM = 90.0, 4
IDS = np.arange(0, 6000, dtype=np.int64)


@pytest.fixture(scope="module", params=one_of("redis", "memcached"))
def local(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server(KINDS[request.param])
    with warm(request.param, 2, shards=2, journal_max_mb=1) as running:
        yield running


def push(table: kvemb.Table, ids: np.ndarray) -> None:
    """Count one push of each."""
    table.push(ids, np.full((len(ids), DIM), -1.0, np.float32)).wait_applied(WAIT_S)


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def until_at_rest(table: kvemb.Table) -> int:
    """Wait until no row has gone for two seconds; return how many there are."""
    n_rows, since_s, end_s = len(table), time.monotonic(), time.monotonic() + WAIT_S
    while time.monotonic() - since_s < 2:
        assert time.monotonic() < end_s
        time.sleep(0.1)
        if (now := len(table)) != n_rows:
            n_rows, since_s = now, time.monotonic()
    return n_rows


def stored_ids(table: kvemb.Table) -> set[int]:
    """The ids whose rows stand in storage, whatever the shards know of them: a row that was pushed is not 0."""
    return set(IDS[(table.pull(IDS) != 0).any(axis=1)].tolist())


def shown(local: LocalCluster, *options: str) -> list[dict]:
    command = [sys.executable, "-m", "kvemb.cli", "tables", *options, "--json", "--config", str(local.config_path)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)  # type: ignore[no-any-return]


def test_a_table_is_held_at_its_rows_and_those_that_went_begin_anew_once_though_shards_are_killed(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        for part in np.split(IDS, 6):
            push(table, part)
        push(table, IDS[:500])  # the first ones are young again
        dry = {
            shard: reply.tables for shard, reply in cluster.questions.ask_each(EVICTIONS, EvictionsRequest(True, WAIT_S), WAIT_S).items()
        }
        assert all(one["table"] != table.name for tables in dry.values() for one in tables)  # it has no policy yet
        table.set_policies(eviction=evict.keep(2000))
        until(lambda: len(table) <= 2010)
        n_rows = until_at_rest(table)
        assert 1960 <= n_rows <= 2010
        there = stored_ids(table)
        assert len(there) == n_rows
        assert {*IDS[:500].tolist(), *IDS[5000:].tolist()} <= there  # they were pushed last
        gone = np.array(sorted(set(IDS.tolist()) - there))
        assert set(gone.tolist()) >= set(IDS[500:3900].tolist())
        assert (table.pull(gone) == 0).all()
        for shard in (0, 1):
            local.shards[shard].kill()
            local.start_shard(shard)
        assert len(table) == n_rows
        assert stored_ids(table) == there
        push(table, gone[:50])
        local.shards[0].kill()
        local.start_shard(0)
        assert (table.pull(gone[:50]) == 1).all()
        push(table, gone[:50])
        assert (table.pull(gone[:50]) == 2).all()
        rows = table.pull(IDS[:500])
        assert (rows == 2).all()


def test_the_report_says_by_which_policy_how_many_and_how_old_and_a_dry_run_what_would_go(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        push(table, IDS[:1000])
        for _ in range(3):
            push(table, IDS[1000:1100])  # of norm 6
        table.set_policies(eviction=evict.l2_below(2.5) & evict.older_than(batches=10**6))  # sends none
        (of_both,) = ([one for one in shown(local, "--dry-run") if one["table"] == table.name and one["shard"] == shard] for shard in (0,))
        assert [one["evicted"] for one in of_both] == [0]
        table.set_policies(eviction=evict.older_than(days=30) | evict.l2_below(2.5))
        until(lambda: len(table) == 100)
        report = [one for one in shown(local, "--evictions") if one["table"] == table.name]
        assert {one["shard"] for one in report} == {0, 1}
        assert sum(one["by_policy"].get("l2_below(2.5)", 0) for one in report) == 1000
        assert sum(one["bytes"] for one in report) == 1000 * table.definition.record.size_bytes
        assert {one["rows"] for one in report} == {one["rows"] for one in shown(local, "--dry-run") if one["table"] == table.name}
        assert all(one["oldest_batch"] > 0 and one["walks"] > 0 for one in report)
        assert (table.pull(IDS[1000:1100]) == 3).all()
        command = [sys.executable, "-m", "kvemb.cli", "tables", "--evictions", "--config", str(local.config_path)]
        text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        assert "l2_below(2.5)" in text


def test_a_save_and_an_increment_around_evictions_bring_equal_rows_back(local: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        push(table, IDS)
        base, then = (tmp_path / "base").as_uri(), (tmp_path / "then").as_uri()
        cluster.save(base)
        push(table, IDS[:100])
        table.set_policies(eviction=evict.keep(1000))
        until(lambda: len(table) <= 1005)
        table.set_policies(eviction=evict.never())
        n_rows = until_at_rest(table)
        rows = table.pull(IDS)
        cluster.save(then, base=base)
        push(table, IDS[::3])
        cluster.load(then)
        assert len(table) == n_rows
        np.testing.assert_array_equal(table.pull(IDS), rows)
        cluster.load(base)
        assert (table.pull(IDS) == 1).all()
        table.set_policies(eviction=evict.older_than(batches=200))
        until_at_rest(table)
        assert len(table) == len(IDS)  # rows that were loaded count as pushed then
        table.set_policies(eviction=evict.never())


def test_rows_are_evicted_while_their_slots_change_shards_and_none_that_is_young(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = new_table(cluster, eviction=evict.keep(1500))
        stop, counts, errors = threading.Event(), np.zeros(len(IDS)), []

        def train() -> None:
            rng = np.random.default_rng(3)
            at = 0
            try:
                while not stop.is_set():
                    ids = np.unique((at + rng.integers(0, 700, 300)) % len(IDS))
                    push(table, IDS[ids])
                    counts[ids] += 1
                    at += 23
            except Exception as error:
                errors.append(error)

        trainer, moves = threading.Thread(target=train), ShardMoves(local.url)
        trainer.start()
        before = moves.now().slot_shards.copy()
        try:
            for owners in (np.where(np.arange(16384) % 3 == 0, 1, before), np.zeros(16384), before):
                time.sleep(2)
                moves.begin(np.asarray(owners))
                moves.wait()
            time.sleep(2)
        finally:
            stop.set()
            trainer.join(WAIT_S)
            moves.close()
        assert not errors
        until(lambda: len(table) <= 1.02 * 1500)
        n_rows = until_at_rest(table)
        assert 0.98 * 1500 <= n_rows <= 1.02 * 1500
        rows = table.pull(IDS)
        assert (rows != 0).any(axis=1).sum() == n_rows
        assert (rows[:, 0] <= counts).all()  # an id that returned has counted anew
        local.shards[1].kill()
        local.start_shard(1)
        np.testing.assert_array_equal(table.pull(IDS), rows)


def test_a_table_of_dense_ids_takes_no_eviction(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        with pytest.raises(InvalidInputError, match="num_ids"):
            new_table(cluster, num_ids=100, eviction=evict.keep(10))
        table = new_table(cluster, num_ids=100)
        with pytest.raises(InvalidInputError, match="num_ids"):
            table.set_policies(eviction=evict.keep(10))


def test_a_policy_that_could_do_nothing_for_a_table_is_refused(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        with pytest.raises(InvalidInputError, match="frozen table takes no gradients"):
            cluster.create_table("held", dim=4, frozen=True, admission=kvemb.admit.after(2))
        opaque = cluster.create_table("opaque", dtype="bytes:8", eviction=evict.keep(10))
        with pytest.raises(InvalidInputError, match="have no norm"):
            opaque.set_policies(eviction=evict.keep(10) & evict.l2_below(0.1))


def test_shards_of_a_sync_job_evict_between_two_steps(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with warm("redis", 1, shards=2, mode="sync", trainers=1) as local, kvemb.connect(local.url, trainer="a") as cluster:
        table = new_table(cluster)
        for part in np.split(IDS[:3000], 10):
            push(table, part)
        table.set_policies(eviction=evict.keep(500))
        time.sleep(4)
        assert len(table) == 3000  # without a step nothing goes

        def one_more_step() -> bool:
            push(table, IDS[:1])
            return 490 <= len(table) <= 505

        until(one_more_step)
        assert ((table.pull(IDS) != 0).any(axis=1)).sum() == len(table)
