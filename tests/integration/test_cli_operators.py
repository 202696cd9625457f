"""`kvemb status --json | --watch`, `kvemb tables` and `kvemb show`: what operators and their scripts see, on real servers."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import redis
from test_cli import ROOT, command, run

import kvemb
from kvemb.local_cluster import LocalCluster

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with


@pytest.fixture(scope="module")
def cluster(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2) as running:
        with kvemb.connect(running.url) as client:
            table = client.create_table("user", dim=2, optimizer=kvemb.optim.adam(), initializer=kvemb.init.zeros())
            table.push(np.arange(100), np.ones((100, 2)))
            client.create_table("word", dim=16, optimizer=kvemb.optim.sgd(), num_ids=50)
            table.flush()
        yield running


def shown(cluster: LocalCluster, *words: str) -> dict[str, object]:
    done = run("show", *words, "--json", "--config", str(cluster.config_path))
    assert not done.stderr
    return json.loads(done.stdout) | {"code": done.returncode}  # type: ignore[no-any-return]


def test_status_for_programs_is_one_line_of_json(cluster: LocalCluster) -> None:
    done = run("status", "--json", str(cluster.config_path))
    status = json.loads(done.stdout)
    assert (done.returncode, status["healthy"], len(done.stdout.splitlines())) == (0, True, 1)
    assert [node["address"] for node in status["nodes"]] == [server.address for server in cluster.servers]
    assert sum(shard["n_rows"] for shard in status["shards"]) == 100
    assert [shard["error"] for shard in status["shards"]] == ["", ""]


def test_status_for_programs_says_what_is_down_and_fails() -> None:
    with LocalCluster("valkey", 1, shards=1) as running:
        running.shards[0].kill()
        done = run("status", "--json", str(running.config_path))
    status = json.loads(done.stdout)
    assert (done.returncode, status["healthy"]) == (1, False)
    assert "no answer" in status["shards"][0]["error"]
    assert "k" not in status["shards"][0]


def test_status_watches_until_it_is_told_to_end(cluster: LocalCluster) -> None:
    words = command("status", "--json", "--watch", "1", str(cluster.config_path))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        looks = [json.loads(child.stdout.readline()) for _ in range(2)]
        child.send_signal(signal.SIGINT)
        assert child.wait(90) == 130
        assert child.stderr is not None
        assert "Traceback" not in child.stderr.read()
    assert all(look["healthy"] for look in looks)


def test_tables_are_listed_with_rows_and_bytes(cluster: LocalCluster) -> None:
    done = run("tables", "--config", str(cluster.config_path))
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert lines["user"][1:5] == ["2", "float32", "adam", "sum"]
    assert lines["user"][-6:] == ["100", "1", "100", "36", "B", "0.0"]
    assert "pages" in lines["word"]
    found = json.loads(run("tables", "--json", "--config", str(cluster.config_path)).stdout)
    assert [(table["name"], table["rows"], table["record_bytes"]) for table in found] == [("user", 100, 36), ("word", 0, 76)]


def test_the_tables_that_shards_have_had_most_work_with_come_first(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 1, shards=2) as running:
        with kvemb.connect(running.url) as client:
            tables = [client.create_table(name, dim=2, optimizer=kvemb.optim.sgd()) for name in ("a", "b", "c")]
            for table, n_times in zip(tables, (1, 3, 2), strict=True):
                for _ in range(n_times):
                    table.push(np.arange(50), np.ones((50, 2))).wait_applied()
        found = json.loads(run("tables", "--json", "--config", str(running.config_path)).stdout)
        assert [(table["name"], table["rows_applied"]) for table in found] == [("b", 150), ("c", 100), ("a", 50)]


def test_show_says_where_a_row_is_what_it_holds_and_that_all_agree(cluster: LocalCluster) -> None:
    row = shown(cluster, "user", "7")
    assert row["code"] == 0
    assert row["agrees"]
    assert row["verdict"] == "index, cache, storage agree"
    assert row["node"] in [server.address for server in cluster.servers]
    assert row["versions"] == {"index": [1, 1], "storage": [1, 1], "cache": [1, 1]}
    assert set(row["state"]) == {"exp_avg", "exp_avg_sq"}  # type: ignore[arg-type]
    with kvemb.connect(cluster.url, read_only=True) as client:
        assert row["weights"] == client.table("user").pull([7])[0].tolist()
    text = run("show", "user", "7", "--config", str(cluster.config_path)).stdout
    assert text.startswith("table 'user', id 7: index, cache, storage agree\n")
    assert f"shard {row['shard']} ({row['address']})" in text
    assert "epoch 1 batch 1" in text


def test_show_of_a_row_without_optimizer_state_has_its_weights_alone(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url) as client:
        client.create_table("plain", dim=2, optimizer=kvemb.optim.sgd()).assign([5], np.ones((1, 2)))
    row = shown(cluster, "plain", "5")
    assert (row["code"], row["weights"], row["state"]) == (0, [1.0, 1.0], {})


def test_show_names_the_trainers_of_the_batch_that_wrote_a_row_last(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url, trainer="anna") as client:
        client.table("user").push([3, 4], np.ones((2, 2))).wait_applied()
    with kvemb.connect(cluster.url, trainer="berta") as client:
        client.table("user").push([4], np.ones((1, 2))).wait_applied()
    assert shown(cluster, "user", "3")["trainers"] == ["anna"]
    assert shown(cluster, "user", "4")["trainers"] == ["berta"]
    assert shown(cluster, "user", "999")["trainers"] == []
    assert "batch    holds pushes of berta\n" in run("show", "user", "4", "--config", str(cluster.config_path)).stdout


def test_show_of_a_row_that_does_not_exist_says_what_it_would_begin_with(cluster: LocalCluster) -> None:
    row = shown(cluster, "user", "-5")
    assert (row["code"], row["exists"], row["weights"], row["state"]) == (0, False, [0.0, 0.0], {})
    assert "no such row" in str(row["verdict"])
    assert run("show", "nobody", "1", "--config", str(cluster.config_path)).stderr.startswith("kvemb show: UnknownTableError")


def test_show_tells_a_row_that_storage_has_lost_and_fails(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url) as client:
        definition = client.table("user").definition
        keys = definition.keys(np.array([9], np.uint64), pages=True)
        host, _, port = client.store.rows.node_of(keys).rpartition(":")
        with redis.Redis(host, int(port)) as node:
            for _ in range(5):  # once a minute the shard compares its rows with storage, and may have restored this one before it is shown
                assert node.hdel(keys.encode().tobytes(), keys.fields().tobytes()) == 1  # type: ignore[attr-defined]
                row = shown(cluster, "user", "9")
                if not row["agrees"]:
                    break
    assert (row["code"], row["agrees"], row["versions"]) == (1, False, {"index": [1, 1], "storage": None, "cache": [1, 1]})
    assert "storage has no row: the next batch or pull that touches it has it restored" in str(row["verdict"])
    assert row["exists"]
