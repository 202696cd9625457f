"""Storage nodes that hang, are full, may evict, or get a write late: no other part waits, nothing is lost, nothing lands twice."""

import time

import numpy as np
import pytest
from chaos import processes, storage
from chaos.cluster import FaultyCluster
from chaos.proxy import UP, Flow
from jobs import PATIENCE_S, add, counting_table, eventually, nodes_of, require

import kvemb
from kvemb.errors import DeadlineExceededError, NodeUnavailableError, ShardUnavailableError, UnsafeNodeError
from kvemb.net.deadline import Deadline

IDS = np.arange(3000)


def test_a_hung_node_costs_one_deadline_and_the_other_nodes_go_on_serving(local: FaultyCluster, connected: kvemb.Cluster) -> None:
    table = counting_table(connected, "hung")
    add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    elsewhere = IDS[nodes_of(table, 3, IDS) != 0]
    assert 1000 < len(elsewhere) < 3000
    with processes.paused(local.servers[0].process):
        for _ in range(2):
            deadline = Deadline.after(3 * 4)
            with pytest.raises((DeadlineExceededError, NodeUnavailableError), match=local.node_proxies[0].address) as caught:
                table.pull(IDS, timeout_s=4)
            assert not deadline.expired
            assert not any(proxy.address in str(caught.value) for proxy in local.node_proxies[1:])
            require(table, elsewhere, 1)
        ack = add(table, IDS)
        ack.wait(timeout_s=PATIENCE_S)
        with pytest.raises(ShardUnavailableError, match=local.node_proxies[0].address):
            ack.wait_applied(timeout_s=4)
    ack.wait_applied(timeout_s=PATIENCE_S)
    require(table, IDS, 2)


def test_a_full_node_delays_what_was_accepted_and_its_rows_are_read_as_they_were(kind: str) -> None:
    # It takes a while to refuse so many rows, one by one: that is no reason to speak of a deadline.
    with FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 2}) as local, kvemb.connect(local.url) as cluster:
        table = counting_table(cluster, "full")
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
        more, seen = np.arange(60_000), []

        def read() -> None:
            seen.extend(np.unique(table.pull(IDS, timeout_s=PATIENCE_S)).tolist())

        with storage.full(local.servers[0], record_bytes=table.definition.record.size_bytes):
            ack = add(table, more)
            eventually(lambda: any("is out of memory" in shard.reply.failure for shard in cluster.status().shards if shard.reply), "said")
            for _ in range(10):
                read()
            eventually(lambda: any("is out of memory" in shard.reply.failure for shard in cluster.status().shards if shard.reply), "said")
            if kind == "memcached":  # another server that is full refuses even the owner record that a shard begins with
                processes.kill(local.shards[0])
                read()
                local.launch_shard(0)  # which serves once its journal is applied
                eventually(lambda: "recovery waits for storage" in local.shards[0].log_tail(), "it has not come to its journal")
            read()
            assert not ack.applied
        ack.wait_applied(timeout_s=PATIENCE_S)
        require(table, IDS, 2)
        require(table, more[3000:], 1)
        assert set(seen) <= {1, 2}, "a row that was learned was read as one that does not exist"


def test_a_node_that_was_set_to_evict_is_refused(local: FaultyCluster, connected: kvemb.Cluster) -> None:
    if local.store == "memcached":
        pytest.skip("memcached cannot be told while it runs; tests/integration/test_stores.py starts it so")
    try:
        storage.set_policy(local.servers[1], "allkeys-lru")
        with pytest.raises(UnsafeNodeError, match=f"{local.node_proxies[1].address}.*maxmemory-policy"):
            kvemb.connect(local.url, timeout_s=PATIENCE_S)
    finally:
        storage.set_policy(local.servers[1], "noeviction")
    kvemb.connect(local.url, read_only=True, timeout_s=PATIENCE_S).close()


def test_a_write_that_lands_after_its_connection_was_given_up_changes_nothing(local: FaultyCluster, connected: kvemb.Cluster) -> None:
    table = counting_table(connected, "late")
    for _ in range(2):  # the shards hold the rows: their next batch is a write, and nothing else
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    for proxy in local.node_proxies:
        proxy.set_open(Flow(hold=True), UP)
    for _ in range(3):
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)  # over connections of their own, once the first are given up
    held = [proxy.held_bytes(UP) for proxy in local.node_proxies]
    assert sum(held) > len(IDS) * table.definition.record.size_bytes
    for proxy in local.node_proxies:
        proxy.heal()
    for proxy in local.node_proxies:
        eventually(lambda proxy=proxy: proxy.held_bytes(UP) == 0, "the held bytes do not land")  # type: ignore[misc]
    for _ in range(3):
        require(table, IDS, 5)
    add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
    require(table, IDS, 6)
    time.sleep(0.2)  # for whatever may still be under way in a server
    require(table, IDS, 6)
