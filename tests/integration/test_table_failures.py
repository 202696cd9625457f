"""A node or a shard that is down or hangs is named within the deadline, and steps of a sync job are applied at once."""

import signal
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import yaml
from matrix import one_of

import kvemb
from kvemb.errors import (
    DeadlineExceededError,
    KvembError,
    NodeUnavailableError,
    ShardUnavailableError,
)
from kvemb.local_cluster import LocalCluster
from tests.integration.table_clusters import NODES, ids_of, new_table, start


@pytest.fixture(params=["memcached", *one_of("valkey", "redis", "redis-cluster")])
def own_cluster(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    """For tests that break it."""
    with start(request.param, require_server) as local:
        yield local


def test_a_node_that_is_down_or_hangs_is_named_within_the_deadline(own_cluster: LocalCluster) -> None:
    with kvemb.connect(own_cluster.url) as cluster:
        table = new_table(cluster)
        ids = ids_of(1000)
        table.pull(ids)
        node = own_cluster.servers[1]
        node.process.signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceededError, match=node.address):
                table.pull(ids, timeout_s=0.5)
        finally:
            node.process.signal(signal.SIGCONT)
        assert table.pull(ids).shape == (1000, 4)
        node.process.kill()
        with pytest.raises((NodeUnavailableError, DeadlineExceededError), match=node.address):
            table.pull(ids, timeout_s=2)
        status = cluster.status(timeout_s=2)
        assert status.nodes_error or any(node.error for node in status.nodes) or len(status.nodes) < NODES[own_cluster.store]


def test_a_shard_that_is_down_is_named_and_its_restart_mends_the_client(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster("valkey", 1, shards=2) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        ids = ids_of(100)
        table.push(ids, np.ones((100, 4)))
        table.flush()
        local.shards[1].stop(30)
        ack = table.push(ids, np.ones((100, 4)))
        for call in (lambda: ack.wait(0.5), lambda: table.flush(0.5), lambda: table.assign([1], np.ones((1, 4)), timeout_s=0.5)):
            with pytest.raises(ShardUnavailableError, match="shard 1"):
                call()
        assert (table.pull(ids).shape) == (100, 4)
        assert [bool(shard.error) for shard in cluster.status(timeout_s=0.5).shards] == [False, True]
        with kvemb.connect(local.url, timeout_s=0.5) as another:
            assert another.table(table.name).pull(ids).shape == (100, 4)
        assert "connected without a shard that is away; pulls go on, and pushes wait for it: shard 1" in caplog.text
        local.shards[0].stop(30)
        with pytest.raises(ShardUnavailableError, match=r"shard 0 .* only pulls needs no shard: connect with read_only=True"):
            kvemb.connect(local.url, timeout_s=0.5)
        local.start_shard(0)
        local.start_shard(1)
        table.flush()
        assert (table.pull(ids) == -2).all()


def test_a_shard_may_be_away_for_as_long_as_kvemb_yaml_says() -> None:
    ids = ids_of(100)
    with LocalCluster("valkey", 1, shards=1) as local:
        tree = yaml.safe_load(local.config_path.read_text())
        tree["parameter_servers"]["away_timeout_s"] = 0.5
        with kvemb.connect(tree) as cluster:
            table = new_table(cluster)
            table.push(ids, np.ones((100, 4))).wait_applied(timeout_s=60)
            local.shards[0].stop(30)
            ack = table.push(ids, np.ones((100, 4)))
            for wait in (ack.wait, ack.wait_applied, table.flush, lambda: [table.push(ids, np.ones((100, 4))) for _ in range(20)]):
                with pytest.raises(ShardUnavailableError, match=r"within 0\.5 s"):
                    wait()
            assert (table.pull(ids) == -1).all()  # pulls go on
            local.start_shard(0)
            table.flush(timeout_s=60)
            assert (table.pull(ids) <= -2).all()


@pytest.mark.parametrize("read_only", [False, True])
def test_connecting_waits_as_long_as_it_was_told(read_only: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs, socket.create_server(("127.0.0.1", 0)) as hangs_too:
        node, shard = (f"127.0.0.1:{server.getsockname()[1]}" for server in (hangs, hangs_too))
        storage = {"kind": "redis", "nodes": [node], "timeout_s": 300}
        with pytest.raises(KvembError, match=r"(?i)(within|waited) 0\.3 s"):
            kvemb.connect(
                {"cluster": "c", "storage": storage, "parameter_servers": {"shards": [shard]}}, read_only=read_only, timeout_s=0.3
            )


@pytest.mark.parametrize(("reduce", "expected"), [("sum", [-1.0, -3.0, -2.0]), ("mean", [-0.5, -1.5, -1.0])])
def test_a_sync_step_applies_what_all_trainers_pushed_at_once(reduce: str, expected: list[float]) -> None:
    with (
        LocalCluster("valkey", 1, shards=2, mode="sync", trainers=2) as local,
        kvemb.connect(local.url, trainer="a") as first,
        kvemb.connect(local.url, trainer="b") as second,
    ):
        mine = new_table(first, dim=1, reduce=reduce)
        theirs = second.table(mine.name)
        early = mine.push([1, 2], np.ones((2, 1)))
        with pytest.raises(
            ShardUnavailableError, match="not accepted within 3 s: step 1 of a, which waits for 1 of 2 tr"
        ):  # a step is whole
            early.wait(3)
        late = theirs.push([2, 3], np.full((2, 1), 2.0))
        for ack in (early, late):
            ack.wait_applied()
        assert mine.pull([1, 2, 3])[:, 0].tolist() == expected
        for table in (mine, theirs):  # a step without rows is a step
            last = table.push([], [])
        last.wait_applied()
