"""A node whose settings are made unsafe while it runs: the shard notices rows that were thrown away, and stops."""

import time

import grpc
import numpy as np
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvemb
import kvemb.init
from kvemb.errors import ShardFailedError
from kvemb.local_cluster import LocalCluster
from kvemb.protocol.messages import SERVICE
from kvemb.stores.store_nodes import NodeStats
from paramserver.repair.node_watch import NodeWatch
from paramserver.rpc.service import LIVE

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with


class CountingStore:
    """A store and its nodes, with counters that a test sets."""

    counters: tuple[int, ...] = ()
    addresses = ("node-0:1", "node-1:1")
    moved = 0  # of each node
    unsafe = ""

    @property
    def nodes(self) -> "CountingStore":
        return self

    def open_slots(self, deadline: object) -> list[int]:
        return []

    def stats(self, deadline: object) -> list[NodeStats]:
        return [
            NodeStats(f"node-{i}:1", "memory", 0, 0, 0, evicted, moved=self.moved, unsafe=self.unsafe)
            for i, evicted in enumerate(self.counters)
        ]


def test_counters_that_rise_are_lost_rows_and_counters_that_begin_anew_are_not() -> None:
    store = CountingStore()
    said: list[str] = []
    watch = NodeWatch(store, 1.0, evicted=lambda address, error: said.append(f"{address}: {error}"))
    for counters in ((5, 0), (5, 0), (0, 0)):
        store.counters = counters
        watch.look_for_evictions()
        assert not said
    store.counters = (0, 3)
    watch.look_for_evictions()
    assert said[0].startswith("node-1:1: node node-1:1: has thrown 3 keys away")


def test_a_node_that_is_set_to_throw_rows_away_while_it_runs_is_told_of_at_the_next_look() -> None:
    store = CountingStore()
    store.counters = (0, 0)
    said: list[str] = []
    watch = NodeWatch(store, 1.0, unsafe=lambda error: said.append(str(error)))
    watch.look_for_evictions()
    assert not said
    store.unsafe = "node node-1:1: maxmemory-policy is allkeys-lru: rows would be evicted"
    watch.look_for_evictions()
    assert set(said) == {store.unsafe}


def test_where_evictions_are_allowed_only_rows_that_went_with_slab_pages_are_looked_for() -> None:
    store = CountingStore()
    said: list[str] = []
    watch = NodeWatch(store, 1.0, evicted=lambda address, error: said.append(str(error)), moves_only=True)
    for counters, moved in (((5, 0), 0), ((9, 0), 0), ((12, 0), 3)):
        assert not said
        store.counters, store.moved = counters, moved
        watch.look_for_evictions()
    assert "node-0:1: has thrown 3 keys away" in said[0]


def test_a_shard_stops_when_a_node_is_set_to_evict_before_it_does_and_trainers_go_on_once_it_is_mended() -> None:
    with LocalCluster("redis", 1, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push([1], np.ones((1, 4))).wait_applied(timeout_s=20)
        with redis.Redis(port=local.servers[0].port) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            assert any("maxmemory-policy is allkeys-lru" in node.unsafe for node in cluster.status().nodes)
            for _ in range(600):  # the shard looks every few seconds
                if any(shard.reply is not None and shard.reply.failure for shard in cluster.status().shards):
                    break
                time.sleep(0.05)
            with pytest.raises(ShardFailedError, match="maxmemory-policy is allkeys-lru"):
                table.push([1], np.ones((1, 4))).wait_applied(timeout_s=20)
            assert client.info("stats")["evicted_keys"] == 0
            client.config_set("maxmemory-policy", "noeviction")
        assert "maxmemory-policy is allkeys-lru" in local.shards[0].log_tail()
        local.shards[0].kill()
        local.start_shard(0)
        table.push([1], np.ones((1, 4))).wait_applied(timeout_s=60)
        np.testing.assert_array_equal(table.pull([1]), np.full((1, 4), -2.0, np.float32))


def test_a_shard_stops_when_a_node_evicts_and_is_then_live_but_not_ready() -> None:
    with LocalCluster("redis", 1, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=64, optimizer=kvemb.optim.sgd(lr=1.0))
        table.push(np.arange(1000), np.ones((1000, 64)))
        table.flush()
        with redis.Redis(port=local.servers[0].port) as client:
            # Only keys with an end are evicted: the rows and the marker stay, so that it is the counter that tells.
            client.config_set("maxmemory-policy", "volatile-ttl")
            client.config_set("maxmemory", "4mb")
            for number in range(5000):
                client.set(f"stranger:{number}", b"x" * 1000, ex=1000)
            assert client.info("stats")["evicted_keys"] > 0
        for _ in range(600):  # the shard looks every few seconds
            if any(shard.reply is not None and shard.reply.failure for shard in cluster.status().shards):
                break
            time.sleep(0.05)
        with pytest.raises(ShardFailedError, match="maxmemory-policy is volatile-ttl"):
            table.push([1], np.ones((1, 64))).wait_applied(timeout_s=20)
        states = health_pb2.HealthCheckResponse
        with grpc.insecure_channel(cluster.config.servers.shards[0]) as channel:
            ask = health_pb2_grpc.HealthStub(channel).Check
            answers = {name: ask(health_pb2.HealthCheckRequest(service=name), timeout=200).status for name in ("", SERVICE, LIVE)}
        assert answers == {"": states.NOT_SERVING, SERVICE: states.NOT_SERVING, LIVE: states.SERVING}
