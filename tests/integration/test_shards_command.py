"""`kvemb shards`, and `cluster.shards`, against a real cluster."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from matrix import one_of

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.stores.storage_kinds import KINDS

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with

IDS = np.arange(5000)
PATIENCE_S = 200.0


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvemb.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)


def refused(says: str, *words: str) -> None:
    done = run("shards", *words)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", one_of("redis", "redis-cluster"))
def test_a_shard_joins_by_one_command_and_another_leaves_from_python(kind: str, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster(kind, max(2, KINDS[kind].least_nodes), shards=2, memory_mb=64) as local:
        path, address = str(local.config_path), f"127.0.0.1:{free_ports(1)[0]}"
        with kvemb.connect(local.url) as cluster:
            table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.adam(lr=0.1))
            table.push(IDS, np.ones((len(IDS), 4), np.float32)).wait_applied(PATIENCE_S)
            before = table.pull(IDS)
            base = cluster.save(f"{local.folder}/saves/base")
            first, second = cluster.config.servers.shards
            refused("is none of the cluster's", "remove", path, "127.0.0.1:1", "--yes")
            refused("is one of the cluster's already", "add", path, second, "--yes")
            refused("is shard 0, which carries moves and stays", "remove", path, first, "--yes")
            refused("give host:port of the shard", "add", path)

            refused(f"kvemb shard --config kvemb.yaml --shard 2 --listen {address}", "add", path, address, "--yes")
            local.start_shard(2, "--listen", address)
            dry = run("shards", "add", path, address, "--dry-run")
            assert f"joins: {address}" in dry.stdout, dry.stderr
            assert address not in run("shards", path).stdout
            done = run("shards", "add", path, address, "--yes")
            assert done.returncode == 0, done.stderr
            assert "shards 0, 1, 2 (cluster map" in done.stdout
            assert done.stdout.splitlines()[-1].endswith(f"parameter_servers.shards: [{first}, {second}, {address}]")
            shown = run("shards", path).stdout
            assert address in shown
            assert "nothing moves" in shown
            assert address in run("config", "show", path).stdout
            np.testing.assert_array_equal(table.pull(IDS), before)
            after = cluster.save(f"{local.folder}/saves/after")
            assert (base.manifest.n_shards, after.manifest.n_shards) == (2, 3)

            plan = cluster.shards.remove(second)
            cluster.shards.begin(plan)
            seen: list[str] = []
            state = cluster.shards.wait(timeout_s=PATIENCE_S, progress=lambda state: seen.append(state.phase))
            assert state.map.shard_numbers == (0, 2)
            assert seen[-1] == ""
            table.push(IDS, np.ones((len(IDS), 4), np.float32)).wait_applied(PATIENCE_S)
            last = cluster.save(f"{local.folder}/saves/last")
            moved = table.pull(IDS)
            assert run("verify", last.url).returncode == 0
            assert {line.split()[-2] for line in run("ls", f"{local.folder}/saves").stdout.splitlines()[1:]} == {"2", "3"}
            local.config_path.write_text(local.config_path.read_text().replace(second, address))  # two entries, for shards 0 and 2
            local.shards[2].stop(PATIENCE_S)
            local.start_shard(2)
            assert run("shards", path).returncode == 0
            assert "\nshard 2: " in run("repair", "--all", "--config", path).stdout
            for url, rows in ((base.url, before), (after.url, before), (last.url, moved)):
                cluster.load(url)
                np.testing.assert_array_equal(table.pull(IDS, timeout_s=PATIENCE_S), rows)


def test_a_shard_that_came_back_at_another_address_is_looked_at_there_though_kvemb_yaml_has_its_old_one(
    require_server: Callable[[str], str],
) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 1, shards=2, memory_mb=64) as local:
        path, address = str(local.config_path), f"127.0.0.1:{free_ports(1)[0]}"
        with kvemb.connect(local.url) as cluster:
            old = cluster.config.servers.shards[1]
        assert run("shards", "remove", path, old, "--yes").returncode == 0
        local.shards[1].stop(PATIENCE_S)
        local.start_shard(1, "--listen", address)
        assert run("shards", "add", path, address, "--yes").returncode == 0
        status = run("status", path)
        assert status.returncode == 0, status.stdout
        assert re.search(rf"^1 +{address} .* ok$", status.stdout, re.MULTILINE)
        assert run("doctor", path).returncode == 0
        local.shards[0].kill()
        assert re.search(rf"^1 +{address} .* ok$", (said := run("status", path).stdout), re.MULTILINE), said
        assert f"shard 1 ({old})" not in run("doctor", path).stdout


def test_connections_that_were_idle_while_a_shard_joined_ask_all_shards(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2, memory_mb=64) as local, ExitStack() as stack:
        mover, *idle = (stack.enter_context(kvemb.connect(local.url)) for _ in range(4))
        table = mover.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0))
        table.push(IDS, np.ones((len(IDS), 4), np.float32)).wait_applied(PATIENCE_S)
        saves, looks, counts = idle
        counted = counts.table("t")
        address = f"127.0.0.1:{free_ports(1)[0]}"
        local.start_shard(2, "--listen", address)
        mover.shards.begin(mover.shards.add(address))
        mover.shards.wait(timeout_s=PATIENCE_S)
        assert int(mover.shards.sizes().rows.sum()) == len(IDS)
        back = mover.shards.remove(address)
        assert back.n_rows > 0
        assert saves.save(f"{local.folder}/saves/after").manifest.n_shards == 3
        assert [shard.shard for shard in looks.status().shards] == [0, 1, 2]
        assert len(counted) == len(IDS)
        mover.shards.begin(back)
        assert mover.shards.wait(timeout_s=PATIENCE_S).map.shard_numbers == (0, 1)


@pytest.mark.timeout(600)
def test_on_a_redis_cluster_kvemb_moves_tells_of_nodes_and_of_shards(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis-cluster", 3, shards=2, memory_mb=64) as local:
        path, second = str(local.config_path), local.shards[1]
        assert run("moves", path).stdout.splitlines() == ["nothing moves"]
        with kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
            table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0))
            table.push(IDS, np.ones((len(IDS), 4), np.float32)).wait_applied(PATIENCE_S)
            plan = cluster.shards.remove(cluster.config.servers.shards[1])
            second.signal(signal.SIGSTOP)
            cluster.shards.begin(plan)
            nodes, shards, *_ = run("moves", path).stdout.splitlines()
            assert nodes == "nothing moves"
            assert shards.startswith("8,192 slots move between shards: moving")
            done = run("moves", "abort", path)
            assert "the move was taken back, and everything is as before" in done.stdout, done.stderr
            second.signal(signal.SIGCONT)
            assert run("moves", path).stdout.splitlines() == ["nothing moves"]


def test_in_a_sync_job_a_shard_joins_and_leaves_again_and_again_and_rows_are_as_without(
    require_server: Callable[[str], str],
) -> None:
    require_server("redis-server")
    changed, n_steps = trained_with_changes()
    with sync_job() as (_, _, step, table):
        for _ in range(n_steps):
            step()
        np.testing.assert_array_equal(changed, table.pull(IDS))


def trained_with_changes() -> tuple[np.ndarray, int]:
    """The rows of a job of which a shard joins and leaves, and how many steps it made."""
    n_steps, address = 0, f"127.0.0.1:{free_ports(1)[0]}"
    with sync_job() as (local, cluster, step, table):

        def train(n: int) -> None:
            nonlocal n_steps
            for _ in range(n):
                step()
            n_steps += n

        train(10)
        for folder in ("new", "its own", "emptied"):
            if folder == "emptied":
                shutil.rmtree(local.folder / "shards" / "shard-2")
            local.start_shard(2, "--listen", address)
            for plan, there in ((lambda: cluster.shards.add(address), (0, 1, 2)), (lambda: cluster.shards.remove(address), (0, 1))):
                cluster.shards.begin(plan())
                while cluster.shards.state().map.plan is not None:
                    train(1)
                assert cluster.shards.state().map.shard_numbers == there
                train(10)
            local.shards[2].stop(PATIENCE_S)
        return table.pull(IDS), n_steps


@contextmanager
def sync_job() -> Iterator[tuple[LocalCluster, kvemb.Cluster, Callable[[], None], kvemb.Table]]:
    """A cluster, one of its two trainers, a step of both whose gradients follow from what they pull, and the table."""
    with (
        LocalCluster("redis", 2, shards=2, memory_mb=64, mode="sync", trainers=2) as local,
        kvemb.connect(local.url, trainer="a") as one,
        kvemb.connect(local.url, trainer="b") as other,
    ):
        adam, normal = kvemb.optim.adam(lr=0.1), kvemb.init.normal(std=1.0)
        tables = [cluster.create_table("t", dim=4, optimizer=adam, initializer=normal, exist_ok=True) for cluster in (one, other)]
        random = np.random.default_rng(3)

        def step() -> None:
            drawn = [random.choice(IDS, 500, replace=False) for _ in tables]
            grads = [table.pull(ids, timeout_s=PATIENCE_S) for table, ids in zip(tables, drawn, strict=True)]
            acks = [table.push(ids, rows, timeout_s=PATIENCE_S) for table, ids, rows in zip(tables, drawn, grads, strict=True)]
            for ack in acks:
                ack.wait_applied(PATIENCE_S)

        yield local, one, step, tables[0]


def test_an_incremental_checkpoint_knows_what_was_erased_while_slots_were_elsewhere(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 1, shards=2, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push(IDS, np.ones((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)
        base = cluster.save(f"{local.folder}/saves/base")
        there = cluster.shards.rebalance().before

        def move(owners: np.ndarray) -> None:
            cluster.shards.begin(replace(cluster.shards.rebalance(), after=owners.astype(np.uint16)))
            cluster.shards.wait(timeout_s=PATIENCE_S)

        move(np.zeros_like(there))
        assert table.erase(IDS[::2]) == len(IDS[::2])
        move(there)
        table.push(IDS[1::2], np.ones((len(IDS) // 2, 2), np.float32)).wait_applied(PATIENCE_S)
        above = cluster.save(f"{local.folder}/saves/above", base=base.url)
        cluster.load(above.url)
        assert len(table) == len(IDS) // 2
        np.testing.assert_array_equal(table.pull(IDS[1::2], timeout_s=PATIENCE_S), -2)
