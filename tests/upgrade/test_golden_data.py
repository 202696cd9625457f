"""Data that releases have left: this build starts from them, and rows are what they were. golden_data.py says what they are."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from golden_data import GOLDEN, KeptCluster, facts, rows_of, unpacked

import kvemb
from kvemb import config

RELEASES = ("0.1",)


@pytest.fixture(params=RELEASES)
def golden(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[Path]:
    require_server("redis-server")
    with unpacked(GOLDEN / f"{request.param}.tar.xz") as folder:
        yield folder


def test_shards_start_from_the_folders_and_nodes_of_an_older_release_and_its_checkpoints_load(golden: Path) -> None:
    kept = facts(golden)
    with KeptCluster(golden) as cluster, kvemb.connect(cluster.url, trainer="golden") as client:
        client.flush()
        assert rows_of(client) == kept["rows"]
        assert client.tables() == ["half", "item", "user"]
        before = len(client.table("user"))
        client.push({"user": ([3, 2**33], [[1.0] * 4] * 2)}).wait_applied()
        assert len(client.table("user")) == before + 1
        client.load((golden / "checkpoints" / "second").as_uri())
        assert rows_of(client) == kept["saved_rows"]


def test_a_kvemb_yaml_with_every_key_of_release_0_1_is_read_as_it_was() -> None:
    read = config.load(GOLDEN / "0.1-kvemb.yaml", {"USER": "u", "PASSWORD": "p"})
    assert (read.cluster, read.storage.kind, read.storage.nodes) == ("ads", "redis", ("10.0.0.1:6379", "10.0.0.2:6379"))
    assert (read.storage.username, read.storage.password, read.storage.on_lost_node, read.storage.timeout_s) == ("u", "p", "fail", 2.0)
    assert (read.storage.allow_row_loss, read.storage.insecure, read.servers.insecure) == (True, True, True)
    assert (read.servers.mode, read.servers.trainers, read.servers.on_lost_trainer) == ("sync", 4, "wait")
    assert (read.servers.barrier_timeout_s, read.servers.away_timeout_s) == (30.0, 300.0)
    assert (read.servers.cache_mb, read.servers.durability, read.servers.journal_max_mb) == (64, "os", 512)
    assert (read.servers.data_dir, read.servers.metrics_port) == ("/var/lib/kvemb", 9470)
    assert [(table.name, table.dim, table.dtype, table.num_ids, table.n_buckets, table.layout) for table in read.tables] == [
        ("user", 16, "float32", None, 1 << 15, "compact"), ("item", 17, "bfloat16", 1000, None, "fast"),
    ]  # fmt: skip
