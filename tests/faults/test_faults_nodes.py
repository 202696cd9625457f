"""Storage nodes that hang, are full, may evict, or get a write late: no other part waits, nothing is lost, nothing lands twice."""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import redis
from chaos import processes, storage
from chaos.cluster import FaultyCluster
from chaos.proxy import UP, Flow
from jobs import PATIENCE_S, add, counting_table, eventually, nodes_of, require
from matrix import one_of

import kvemb
from kvemb.errors import DeadlineExceededError, NodeUnavailableError, ShardUnavailableError, UnsafeNodeError
from kvemb.local_cluster.storage_servers import StorageServer
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


@pytest.mark.parametrize("fault", ["hangs", *one_of("is gone")])
def test_training_waits_for_a_node_as_long_as_for_a_shard_and_says_so(fault: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with FaultyCluster(kind, 3, shards=1, storage={"timeout_s": 0.5}) as local, kvemb.connect(local.url) as cluster:
        table = counting_table(cluster, "waited")
        add(table, IDS).wait_applied()
        with ThreadPoolExecutor() as pool:
            if fault == "hangs":
                processes.pause(local.servers[0].process)
            else:
                local.node_proxies[0].refuse()
                local.node_proxies[0].reset_all()
            waiting = [pool.submit(table.pull, IDS), pool.submit(kvemb.connect, local.url, read_only=True)]
            ack = add(table, IDS)
            said = lambda: [record.getMessage() for record in caplog.records if "is waited for" in record.getMessage()]  # noqa: E731
            eventually(lambda: len(said()) == 2, "the pull and the new connection do not say that they wait")
            assert all(local.node_proxies[0].address in text for text in said())
            assert not any(one.done() for one in waiting)
            processes.resume(local.servers[0].process)
            local.node_proxies[0].heal()
            rows, reader = (one.result() for one in waiting)
        assert set(np.unique(rows)) <= {1, 2}
        assert "storage answers again" in caplog.text
        ack.wait_applied()
        assert np.unique(reader.table("waited").pull(IDS)).tolist() == [2]
        reader.close()


def test_a_sync_step_waits_for_a_trainer_that_waits_for_a_node(
    require_server: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    require_server("redis-server")
    options = {"barrier_timeout_s": 4, "on_lost_trainer": "abort"}
    with (
        FaultyCluster("redis", 2, shards=1, mode="sync", trainers=2, storage={"timeout_s": 0.5}, servers=options) as local,
        ExitStack() as stack,
    ):
        a, b = (counting_table(stack.enter_context(kvemb.connect(local.url, trainer=name)), "steps") for name in "ab")
        for ack in [add(a, IDS), add(b, IDS)]:
            ack.wait_applied()
        with processes.paused(local.servers[0].process), ThreadPoolExecutor() as pool:
            first = add(a, IDS)
            pulled = pool.submit(b.pull, IDS)  # b pushes its part of the step once it has this
            eventually(lambda: "is waited for" in caplog.text, "the pull does not wait")
            processes.resume(local.servers[0].process)
            assert np.unique(pulled.result()).tolist() == [2]
            add(b, IDS).wait_applied()
            first.wait_applied()


def test_a_memcached_that_takes_no_more_connections_is_waited_for(
    require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_server("memcached")
    started_as = StorageServer._command
    monkeypatch.setattr(StorageServer, "_command", lambda it: ["40" if word == "4096" else word for word in started_as(it)])
    with FaultyCluster("memcached", 1, shards=1, storage={"timeout_s": 1}) as local, ExitStack() as stack:
        cluster = stack.enter_context(kvemb.connect(local.url))
        table = counting_table(cluster, "crowded")
        add(table, IDS).wait_applied()
        acks = []
        with ExitStack() as crowd:

            def shard_waits() -> bool:
                local.node_proxies[0].reset_all()  # what the cluster had is cut, and comes back behind twice as many as memcached takes
                for _ in range(80):
                    crowd.enter_context(socket.create_connection(("127.0.0.1", local.servers[0].port)))
                if not acks or acks[-1].applied:  # the shard was quicker than they
                    acks.append(add(table, IDS))
                # It says memcached's line, or, where the reset overtakes that, that the connection was closed.
                return any(one.reply.failure for one in cluster.status().shards if one.reply)

            eventually(shard_waits, "the shard does not say so")
        for ack in acks:
            ack.wait_applied()
        require(table, IDS, 1 + len(acks))


@pytest.mark.full  # a minute
@pytest.mark.parametrize("limit", ["client-output-buffer-limit=normal 262144 262144 0", "maxmemory-clients=2mb"])
def test_a_server_that_limits_what_waits_for_a_client_is_asked_for_less_at_a_time(limit: str, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with FaultyCluster("redis", 1, shards=1) as local, kvemb.connect(local.url) as cluster:
        table, ids = cluster.create_table("wide", dim=256, optimizer=kvemb.optim.adam(lr=1.0)), np.arange(6_000) * 7919
        ones = np.ones((len(ids), 256), np.float32)
        table.push(ids, ones).wait_applied()
        before = table.pull(ids)
        local.node_proxies[0].set(Flow(bytes_per_s=100e6, delay_s=0.001))  # the server is faster than the way to the trainer
        with redis.Redis(port=local.servers[0].port) as server:
            server.config_set(*limit.split("="))
        np.testing.assert_array_equal(table.pull(ids, timeout_s=PATIENCE_S), before)
        np.testing.assert_array_equal(table.pull(ids, timeout_s=PATIENCE_S), before)
        table.push(np.arange(9_000) * 7919, np.ones((9_000, 256), np.float32)).wait_applied(timeout_s=PATIENCE_S)
        assert not np.array_equal(table.pull(ids, timeout_s=PATIENCE_S), before)


def test_where_nodes_are_not_waited_for_a_hung_one_fails_a_pull_at_storages_time(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    storage = {"timeout_s": 0.5, "on_lost_node": "fail"}
    with FaultyCluster("redis", 2, shards=1, storage=storage) as local, kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
        table = counting_table(cluster, "failing")
        add(table, IDS).wait_applied()
        with processes.paused(local.servers[0].process), pytest.raises(DeadlineExceededError, match=local.node_proxies[0].address):
            table.pull(IDS)


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
