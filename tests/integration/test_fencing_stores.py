"""Real servers and processes: a process that was taken over from writes nothing, and neither does a connection that was given up.

Tests common to all stores are in the contract (`kvemb.testing.repair_contract`); here are those that need servers of their own.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from kvemb.coordination.shard_owners import Owner, owner_name
from kvemb.errors import DeadlineExceededError, NodeLostError, NodeSuspectError, NodeUnavailableError
from kvemb.local_cluster.processes import free_ports
from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.stores.standalone import node_rows
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store
from kvemb.testing.repair_contract import LOST, eventually_reads, lost, own, repair, rows_for, rows_of
from kvemb.testing.store_contract import CLUSTER, GENERATION, read, records_of, require_rows, within, write
from tests.real_servers import ServerNodes, redis_client

_ZOMBIE = """
import sys
from contextlib import suppress
from kvemb.config import StorageConfig
from kvemb.errors import FencedError, NodeUnavailableError
from kvemb.stores.storage_kinds import open_store
from kvemb.testing.repair_contract import own
from kvemb.testing.store_contract import keys_for, read, records_of, within
from kvemb.stores.store import WritePart

with open_store(StorageConfig(sys.argv[1], tuple(sys.argv[2:])), role="shard:0") as store:
    keys = keys_for(store, 20_000)
    records = [records_of(keys, salt=salt) for salt in (1, 2)]
    store.open(within())
    own(store, 1)
    # Tokens are those of its own last write, as in a shard's cache: it reads no rows that could tell it of a successor.
    tokens = read(store, keys, tokens=True).tokens if store.capabilities.cas else None
    print("writing", flush=True)
    try:
        for turn in range(10**6):
            with suppress(NodeUnavailableError):
                written = store.rows.write([WritePart(keys, records[turn % 2], tokens)], within())[0]
                tokens = written.tokens
                if not written.stored.all():
                    store.fence(0, 1, within())  # a conflict: is there another owner?
    except FencedError as error:
        print(f"fenced: {error}", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path, require_server: Callable[[str], str]) -> Iterator[Callable[[str, int], ServerNodes]]:
    """`start(kind, n)`: empty servers of a test's own."""
    started: list[ServerNodes] = []
    tmp_path.chmod(0o755)

    def make(kind: str, n: int) -> ServerNodes:
        if kind != "valkey":
            require_server("memcached" if kind == "memcached" else "redis-server")
        started.append(ServerNodes(kind, n, tmp_path))
        return started[-1]

    yield make
    for nodes in started:
        nodes.close()


@contextmanager
def opened(nodes: ServerNodes, role: str = "shard:0", *, provision: bool = True, on_lost_node: str = "wait") -> Iterator[Store]:
    with open_store(replace(nodes.config, on_lost_node=on_lost_node), role=role) as store:
        if provision:
            store.provision(CLUSTER, GENERATION, within())
        store.open(within())
        yield store


@pytest.mark.parametrize(("kind", "n"), [("redis", 2), ("valkey", 1), ("memcached", 2), ("redis-cluster", 3)])
def test_a_stopped_writer_that_wakes_after_a_takeover_changes_nothing(start: Callable[[str, int], ServerNodes], kind: str, n: int) -> None:
    nodes = start(kind, n)
    with opened(nodes) as successor, ExitStack() as stack:
        command = [sys.executable, "-c", _ZOMBIE, kind, *nodes.config.nodes]
        zombie = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(zombie.kill)
        assert zombie.stdout is not None
        assert zombie.stdout.readline() == "writing\n"
        time.sleep(0.3)  # somewhere in the middle of a batch
        os.kill(zombie.pid, signal.SIGSTOP)
        own(successor, 2)
        successor.kill_other_writers(within())
        keys = rows_for(successor)
        while not write(successor, keys, records_of(keys, salt=7)).all():
            pass
        os.kill(zombie.pid, signal.SIGCONT)
        assert "fenced: shard 0: a process with epoch 2" in zombie.stdout.readline()
        assert zombie.wait(90) == 0
        require_rows(successor, keys, records_of(keys, salt=7))
        assert successor.kill_other_writers(within()) == 0


def test_a_takeover_ends_connections_to_replicas_too(start: Callable[[str, int], ServerNodes]) -> None:
    primary, replica = start("redis", 1), start("redis", 1)
    with redis_client(replica.servers[0]) as client, opened(primary) as store:
        client.replicaof("127.0.0.1", primary.servers[0].port)
        _until(lambda: client.info("replication")["master_link_status"] == "up")
        with redis.Redis(port=replica.servers[0].port, client_name="kvemb-shard-0", single_connection_client=True) as older:
            number = older.client_id()
            own(store, 2)
            assert store.kill_other_writers(within()) == 1
            assert number not in {int(entry["id"]) for entry in client.client_list()}


def test_a_connection_in_doubt_of_an_earlier_server_process_is_no_reason_to_end_a_strangers(
    start: Callable[[str, int], ServerNodes],
) -> None:
    nodes = start("redis", 1)
    with opened(nodes) as store, ExitStack() as stack:
        rows = rows_for(store)
        write(store, rows, records_of(rows))
        with redis_client(nodes.servers[0]) as client:
            (number,) = {int(entry["id"]) for entry in client.client_list() if entry["name"] == "kvemb-shard-0"}
        nodes.pause(0)
        with pytest.raises(DeadlineExceededError):
            write(store, rows, records_of(rows), deadline=within(0.2))
        nodes.resume(0)
        nodes.restart(0)
        strangers: dict[int, redis.Redis] = {}
        while number not in strangers:
            stranger = stack.enter_context(redis.Redis(port=nodes.servers[0].port, single_connection_client=True))
            strangers[int(stranger.client_id())] = stranger
            assert len(strangers) < 500
        with pytest.raises(NodeLostError):
            read(store, rows)
        assert int(strangers[number].client_id()) == number


def test_a_batch_that_spans_loss_and_repair_fails(start: Callable[[str, int], ServerNodes], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = start("memcached", 1)
    with opened(nodes) as store, opened(nodes, "trainer", provision=False, on_lost_node="fail") as trainer:
        rows = rows_for(store)
        write(store, rows, records_of(rows))
        require_rows(trainer, rows, records_of(rows))
        real = node_rows.run

        def with_a_repair_before(*batch: object) -> None:
            monkeypatch.setattr(node_rows, "run", real)
            nodes.flush(0)
            repair(store, nodes.config.nodes[0])
            real(*batch)  # type: ignore[arg-type]

        monkeypatch.setattr(node_rows, "run", with_a_repair_before)
        with pytest.raises(NodeSuspectError, match="meanwhile"):
            read(trainer, rows)
        require_rows(trainer, rows, records_of(rows))


@pytest.mark.parametrize("kind", ["redis", "memcached"])
def test_trainers_wait_for_a_repair_or_fail_at_once(start: Callable[[str, int], ServerNodes], kind: str) -> None:
    nodes = start(kind, 2)
    with (
        opened(nodes) as store,
        opened(nodes, "trainer", provision=False) as patient,
        opened(nodes, "trainer", provision=False, on_lost_node="fail") as impatient,
    ):
        rows = rows_for(store)
        write(store, rows, records_of(rows))
        for trainer in (patient, impatient):
            require_rows(trainer, rows, records_of(rows))
        nodes.restart(0)
        address = lost(store)[0].address
        for _ in range(2):
            with pytest.raises((*LOST, NodeUnavailableError), match=address) as failure:
                read(impatient, rows)
            assert "Waited" not in str(failure.value)
        store.repair.begin(address, within())
        with pytest.raises(NodeLostError, match=rf"{address}.*repair .*Waited 3 s .*A longer timeout_s") as failure:
            read(patient, rows, deadline=within(3))
        assert "on_lost_node" not in str(failure.value)  # it is set to wait already
        got: list[bool] = []
        waiter = threading.Thread(target=lambda: got.append(bool(read(patient, rows).found.all())), name="waiter")
        waiter.start()
        repair(store, address)
        waiter.join(90)
        assert got == [True]
        with opened(nodes, "trainer", provision=False) as late:
            require_rows(late, rows, records_of(rows))


@pytest.mark.full
def test_a_replica_that_takes_over_is_suspect_until_its_rows_were_compared(start: Callable[[str, int], ServerNodes]) -> None:
    nodes = start("redis-cluster", 3)
    with opened(nodes) as store, opened(nodes, "trainer", provision=False, on_lost_node="fail") as trainer, ExitStack() as stack:
        rows = rows_for(store)
        write(store, rows, records_of(rows))
        require_rows(trainer, rows, records_of(rows))
        replica, client = _replica_of(nodes, 0, stack)
        client.execute_command("CLUSTER FAILOVER", "TAKEOVER")
        assert [(node.address, node.why) for node in lost(store)] == [(replica.address, "suspect")]
        _until(lambda: _all_know(nodes, replica.port))
        with pytest.raises(NodeSuspectError, match=replica.address):
            read(trainer, rows)
        mine = rows_of(store, replica.address)
        assert 0 < len(mine) < len(rows)
        repair(store, replica.address, salt=1)
        assert store.repair.lost_nodes(within()) == []
        eventually_reads(trainer, 1, mine)
        with opened(nodes, "trainer", provision=False, on_lost_node="fail") as late:
            require_rows(late, mine, records_of(mine, salt=1))


def test_the_owner_record_is_read_on_the_slots_primary_wherever_it_moved(start: Callable[[str, int], ServerNodes]) -> None:
    nodes = start("redis-cluster", 3)
    with opened(nodes) as store:
        own(store, 3)
        assert store.values.owner_epoch(0, within()) == 3
        with opened(nodes, provision=False) as other:
            other.values.put(owner_name(0), Owner(4, 1).encode(), within())
            assert store.values.owner_epoch(0, within()) == other.values.owner_epoch(0, within()) == 4


def _all_know(nodes: ServerNodes, port: int) -> bool:
    """Whether every node knows of the new primary."""
    with ExitStack() as stack:
        clients = [stack.enter_context(redis_client(server)) for server in nodes.servers]
        return all(any(int(entry[2][1]) == port for entry in client.execute_command("CLUSTER SLOTS")) for client in clients)


def _replica_of(nodes: ServerNodes, index: int, stack: ExitStack) -> tuple[StorageServer, "redis.Redis"]:
    """Add a replica of one primary to a cluster and wait until it follows."""
    server = StorageServer("redis-cluster", free_ports(1)[0], nodes.servers[0].snapshot_path.parent, 256)
    stack.callback(server.process.kill)
    client = stack.enter_context(redis_client(server))
    primary = stack.enter_context(redis_client(nodes.servers[index]))
    name = primary.execute_command("CLUSTER MYID").decode()
    bus_port = primary.config_get("cluster-port")["cluster-port"]
    _until(lambda: bool(client.ping()))
    client.execute_command("CLUSTER MEET", "127.0.0.1", nodes.servers[index].port, bus_port)
    _until(lambda: client.execute_command("CLUSTER REPLICATE", name) in (True, b"OK"))
    _until(lambda: client.info("replication").get("master_link_status") == "up")
    _until(lambda: client.cluster("INFO")["cluster_state"] == "ok")
    return server, client


def _until(done: Callable[[], bool]) -> None:
    deadline = within()
    while True:
        with suppress(redis.RedisError):
            if done():
                return
        assert not deadline.expired
        time.sleep(0.05)
