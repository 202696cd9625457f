"""`kvemb bench` against real clusters: what it measures, and that it changes nothing anywhere."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from test_cli import run

import kvemb
from kvemb.cli import main
from kvemb.commands.bench_command import _slow_nodes
from kvemb.local_cluster import LocalCluster
from kvemb.operate.pull_rates import PullRate
from tests.integration.tls_clusters import TlsCluster, running

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with

N_ROWS = 20_000


def fill(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url) as client:
        few = client.create_table("few", dim=2, optimizer=kvemb.optim.sgd(), num_ids=50)
        many = client.create_table("many", dim=16, optimizer=kvemb.optim.adam())
        few.push(np.arange(10), np.ones((10, 2)))
        many.push(np.arange(N_ROWS), np.ones((N_ROWS, 16)))
        client.flush()


@pytest.fixture(scope="module")
def cluster(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2) as made:
        fill(made)
        yield made


def measured(cluster: LocalCluster, *words: str) -> dict[str, Any]:
    done = run("bench", str(cluster.config_path), "--seconds", "0.6", "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_rows_that_exist_and_rows_that_do_not_are_pulled_from_all_nodes_and_from_each(cluster: LocalCluster) -> None:
    seen = measured(cluster, "--batch", "3000")
    assert (seen["table"], seen["layout"], seen["sampled"]) == ("many", "fast", N_ROWS)
    assert seen["all nodes"]["n_missing"] == 0
    assert seen["ids without rows"]["n_missing"] == seen["ids without rows"]["n_rows"] > 0
    for server in cluster.servers:
        rate = seen[f"node {server.address}"]
        assert rate["n_missing"] == 0
        assert rate["rows_per_s"] == pytest.approx(rate["n_rows"] / rate["seconds"])
        assert 0 < rate["p50_ms"] <= rate["p90_ms"] <= rate["p99_ms"] <= rate["longest_ms"]
    assert seen["all nodes"]["n_rows"] == 3000 * seen["all nodes"]["n_pulls"]
    assert seen["measured_elsewhere"] == 1.22e6  # of records of 204 bytes, in benchmarks/RESULTS.md


def test_another_table_may_be_named_and_its_ids_are_drawn_from_its_range(cluster: LocalCluster) -> None:
    seen = measured(cluster, "--table", "few")
    assert (seen["layout"], seen["sampled"]) == ("pages", 10)
    at_random = seen["ids at random"]
    assert 0 < at_random["n_missing"] < at_random["n_rows"]


def test_people_see_a_table_and_under_which_conditions_the_other_figure_was_measured(cluster: LocalCluster) -> None:
    done = run("bench", str(cluster.config_path), "--seconds", "0.3")
    lines = done.stdout.splitlines()
    assert lines[0] == f"table 'many': fast, records of 204 bytes, {N_ROWS:,} ids sampled, up to 10,000 ids a pull"
    assert [line.split("  ")[0] for line in lines[2:6]] == ["all nodes", "ids without rows"] + [
        f"node {address}" for address in sorted(server.address for server in cluster.servers)
    ]
    assert "Measured elsewhere: 1,220,000 rows/s of one node (benchmarks/RESULTS.md). There node and trainer shared 2 cores" in done.stdout


def commands(cluster: LocalCluster) -> dict[str, int]:
    found: dict[str, int] = {}
    for server in cluster.servers:
        with redis.Redis(port=server.port, protocol=2) as node:
            for name, stats in node.info("commandstats").items():
                found[name] = found.get(name, 0) + stats["calls"]
    return found


def test_it_writes_nothing_and_fills_no_cache_of_a_shard(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url) as client:
        before, asked = client.questions.status(), commands(cluster)
        measured(cluster)
        after, now = client.questions.status(), commands(cluster)
    for one, other in zip(before.values(), after.values(), strict=True):
        for figure in ("k", "rows_applied", "n_rows", "cache_bytes", "cache_lookups", "cache_hits", "journal_bytes"):
            assert getattr(one, figure) == getattr(other, figure), figure
    more = {name for name in now if now[name] > asked.get(name, 0)}
    assert "cmdstat_hmget" in more
    # Not "set": shards renew their notes by it every ten seconds. Rows of this table lie in hashes.
    assert not more & {f"cmdstat_{name}" for name in ("hset", "hmset", "del", "unlink", "hdel", "setrange", "append", "config|set")}


@pytest.mark.parametrize(("store", "nodes", "layout"), [("memcached", 2, "keys"), ("redis-cluster", 3, "fast"), ("valkey", 1, "fast")])
def test_every_kind_of_storage_is_measured_node_by_node(store: str, nodes: int, layout: str) -> None:
    with LocalCluster(store, nodes, shards=1) as made:
        fill(made)
        seen = measured(made)
    assert seen["layout"] == layout
    assert seen["measured_elsewhere"] > 0
    assert len([where for where in seen if where.startswith("node ")]) == nodes


def test_a_reader_may_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(TlsCluster(tmp_path)) as made:
        writer, reader = made.issue("trainer/t", name="t"), made.issue("reader/r", name="r")
        with kvemb.connect(made.as_seen_by(writer), trainer="t") as client:
            client.create_table("user", dim=2, optimizer=kvemb.optim.sgd()).push([1, 2], np.ones((2, 2), np.float32)).wait_applied()
        monkeypatch.setenv("TLS_CERT", str(reader.cert))
        monkeypatch.setenv("TLS_KEY", str(reader.key))
        assert main(["bench", str(made.path), "--seconds", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all nodes"]["n_missing"] == 0


def test_a_cluster_without_rows_is_told_so() -> None:
    with LocalCluster("valkey", 1, shards=1) as made:
        done = run("bench", str(made.config_path))
        assert (done.returncode, "this cluster has no tables" in done.stderr) == (1, True)
        with kvemb.connect(made.url) as client:
            client.create_table("empty", dim=2, optimizer=kvemb.optim.sgd())
        done = run("bench", str(made.config_path))
        assert (done.returncode, "table 'empty' has no rows" in done.stderr) == (1, True)


def test_a_node_far_behind_the_others_is_named() -> None:
    rates = {f"node {name}": PullRate(1, rows, 0, 1.0, 1, 1, 1, 1) for name, rows in (("a", 1000), ("b", 400), ("c", 900))}
    two = {where: rate for where, rate in rates.items() if where != "node c"}
    assert [line.startswith("node b gives 0.40") for line in _slow_nodes(two)] == [True]  # of two, the fast one is the measure
    (line,) = _slow_nodes(rates)
    assert line.startswith("node b gives 0.44 of what the node in the middle gives")
