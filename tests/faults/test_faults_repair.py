"""Nodes that lose rows in every way that nodes do: the shards bring back all acknowledged rows while trainers wait, without a restart."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing

import numpy as np
import pytest
from chaos import processes, storage
from chaos.cluster import FaultyCluster
from chaos.ledger import TABLE
from chaos.proxy import Flow
from jobs import PATIENCE_S, add, counting_table, eventually, nodes_of, require
from matrix import one_of
from training import Training

import kvemb
from kvemb.errors import NodeLostError, NodeUnavailableError
from kvemb.schema.keys import RowKeys
from tests.raw_shard import RawShard
from tests.real_servers import memcached_client

IDS = np.arange(2000)


def test_nodes_that_came_back_empty_or_were_flushed_while_training_get_their_rows_back(training: Training) -> None:
    processes.kill(training.cluster.servers[0].process)
    training.cluster.restart_nodes(0)
    training.goes_on()
    storage.flush(training.cluster.servers[1])
    training.goes_on()
    for server in training.cluster.servers:  # all at once
        storage.flush(server)
    training.goes_on()
    processes.kill(training.cluster.shards[0])  # and a shard that is away meanwhile
    storage.flush(training.cluster.servers[2])
    training.cluster.start_shard(0)
    training.goes_on()
    training.is_kept()


def test_a_node_flushed_in_the_middle_of_its_repair_is_repaired_again(training: Training) -> None:
    server, proxy = training.cluster.servers[0], training.cluster.node_proxies[0]
    storage.flush(server)
    for turn in range(3):
        proxy.set(Flow(delay_s=0.02 * turn))  # other moments of the repair
        eventually(lambda: is_repairing(server) or turn == 2, "no repair begins")  # noqa: B023
        storage.flush(server)
    proxy.heal()
    training.goes_on()
    training.is_kept()


def is_repairing(server: "storage.StorageServer") -> bool:
    """Whether the node holds anything again."""
    if server.kind == "memcached":
        with closing(memcached_client(server)) as client:
            return int(client.stats()[b"curr_items"]) > 0
    with storage.redis_client(server) as client:
        return int(client.dbsize()) > 0


def test_a_node_rolled_back_to_an_old_snapshot_is_brought_up_to_date(training: Training) -> None:
    if training.cluster.store == "memcached":
        pytest.skip("memcached keeps no snapshots; one that was told to (-e) is refused")
    storage.snapshot(training.cluster.servers[1])
    training.goes_on()
    training.cluster.restart_nodes(1, snapshot=True)
    training.goes_on()
    training.is_kept()


@pytest.mark.full
def test_nodes_whose_addresses_were_swapped_are_not_written_to_and_work_goes_on_when_they_are_right_again(training: Training) -> None:
    if training.cluster.store == "redis-cluster":
        pytest.skip("a Redis Cluster's nodes know themselves where they are")
    first, second = training.cluster.node_proxies[:2]

    def swap() -> None:
        first.target, second.target = second.target, first.target
        first.reset_all()
        second.reset_all()

    reader = kvemb.connect(training.cluster.url, read_only=True, timeout_s=PATIENCE_S)
    table = reader.table(TABLE)
    table.pull(IDS, timeout_s=PATIENCE_S)
    swap()
    with kvemb.connect(training.cluster.url, read_only=True, timeout_s=PATIENCE_S) as another:  # a reader goes by the markers
        another.table(TABLE).pull(IDS, timeout_s=PATIENCE_S)
    for proxy in training.cluster.shard_proxies:
        with RawShard(proxy.address) as shard:
            eventually(lambda shard=shard: "swapped" in shard.status().failure, "the shard does not notice")  # type: ignore[misc]
    table.pull(IDS, timeout_s=PATIENCE_S)
    swap()
    table.pull(IDS, timeout_s=PATIENCE_S)
    reader.close()
    training.goes_on()
    training.is_kept()


@pytest.fixture
def on_memcached(require_server: Callable[[str], str]) -> None:
    require_server("memcached")


@pytest.mark.usefixtures("on_memcached")
def test_rows_that_vanish_one_by_one_are_brought_back_by_the_next_push() -> None:
    # What a slab reassignment does: no marker tells of it, and memcached counts no eviction.
    with (
        FaultyCluster("memcached", 2, shards=2, storage={"timeout_s": 2}, servers={"cache_mb": 0}) as local,
        kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster,
    ):
        table = counting_table(cluster, "t")
        for _ in range(3):
            add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
        vanished = np.random.default_rng(1).permutation(IDS)[:700]
        node = nodes_of(table, 2, vanished)
        keys = RowKeys(table.definition.tag, vanished.astype(np.uint64)).encode()
        for index, server in enumerate(local.servers):
            with closing(memcached_client(server)) as client:
                client.delete_many([key.tobytes().decode() for key in keys[node == index]], noreply=False)
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
        require(table, IDS, 4)


@pytest.mark.full
def test_a_pull_from_a_lost_node_waits_or_fails_as_configured(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    for policy in ("wait", "fail"):
        settings = {"timeout_s": 2, "on_lost_node": policy}
        with FaultyCluster("redis", 1, shards=1, storage=settings) as local, kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
            table = counting_table(cluster, "t")
            add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
            processes.pause(local.shards[0])  # no repair for now
            storage.flush(local.servers[0])
            if policy == "fail":
                with pytest.raises(NodeLostError, match=local.node_proxies[0].address):
                    table.pull(IDS, timeout_s=PATIENCE_S)
            else:
                waker = threading.Timer(0.5, lambda local=local: processes.resume(local.shards[0]))
                waker.start()
                require(table, IDS, 1)
                waker.join()
            processes.resume(local.shards[0])
            add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
            eventually(lambda table=table: np.unique(table.pull(IDS, timeout_s=PATIENCE_S)).tolist() == [2], "not repaired")  # type: ignore[misc]


@pytest.mark.full
@pytest.mark.parametrize("policy", ["wait", "fail"])
@pytest.mark.parametrize("store", one_of("memcached", "redis"))
def test_connecting_to_a_node_that_is_down_waits_or_fails_as_configured(
    store: str, policy: str, require_server: Callable[[str], str]
) -> None:
    require_server({"memcached": "memcached", "redis": "redis-server"}[store])
    with FaultyCluster(store, 2, shards=1, storage={"timeout_s": 2, "on_lost_node": policy}) as local:
        with kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
            add(counting_table(cluster, "t"), IDS).wait_applied(timeout_s=PATIENCE_S)
        processes.kill(local.servers[1].process)
        with pytest.raises(NodeUnavailableError, match=local.node_proxies[1].address) as told:
            kvemb.connect(local.url, timeout_s=1 if policy == "wait" else PATIENCE_S)
        assert ("Waited 1 s for it" in str(told.value)) == (policy == "wait")
        if policy == "wait":
            waker = threading.Timer(0.5, lambda: local.restart_nodes(1))
            waker.start()
            with kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
                require(cluster.table("t"), IDS, 1)
            waker.join()


def test_slots_that_move_while_training_keep_their_rows(training: Training) -> None:
    if training.cluster.store != "redis-cluster":
        pytest.skip("only a Redis Cluster moves slots by itself")
    with ExitStack() as stack:
        clients = [stack.enter_context(storage.redis_client(server)) for server in training.cluster.servers]
        names = [client.execute_command("CLUSTER MYID") for client in clients]
        server = training.cluster.servers[2]
        for slot in range(0, 200, 5):  # of the first node, to the last
            clients[2].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[0])
            clients[0].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[2])
            while keys := clients[0].execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                clients[0].execute_command("MIGRATE", "127.0.0.1", server.port, "", 0, 5000, "KEYS", *keys)
            for client in (clients[2], clients[0], clients[1]):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", names[2])
    training.goes_on()
    training.is_kept()
