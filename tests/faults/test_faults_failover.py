"""A Redis Cluster that changes by itself under load: a replica that lags behind takes over, slots move slowly, a shard dies meanwhile."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
import redis
from chaos import processes
from chaos.cluster import FaultyCluster
from chaos.run import LedgerRun
from jobs import PATIENCE_S, eventually

from kvemb.local_cluster.processes import free_ports
from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.net.deadline import Deadline
from tests.real_servers import redis_client

pytestmark = pytest.mark.long


@pytest.fixture
def run(require_server: Callable[[str], str]) -> Iterator[LedgerRun]:
    """Two trainers at work on two shards and three primaries."""
    require_server("redis-server")
    with FaultyCluster("redis-cluster", 3, shards=2, storage={"timeout_s": 3}) as local, LedgerRun(local, n_trainers=2, seed=5) as run:
        run.wait_for_acks(20, Deadline.after(2 * PATIENCE_S))
        yield run


def succeeds(call: Callable[[], object]) -> bool:
    """Whether a server does it by now."""
    with suppress(redis.RedisError):
        return bool(call())
    return False


def replica_of(local: FaultyCluster, index: int, stack: ExitStack) -> tuple[StorageServer, "redis.Redis"]:
    """Start a server that follows one primary."""
    server = StorageServer("redis-cluster", free_ports(1)[0], local.folder, 256)
    stack.callback(server.process.kill)
    client = stack.enter_context(redis_client(server))
    primary = stack.enter_context(redis_client(local.servers[index]))
    name, bus_port = primary.execute_command("CLUSTER MYID").decode(), primary.config_get("cluster-port")["cluster-port"]
    eventually(lambda: succeeds(client.ping), "the replica does not start")
    client.execute_command("CLUSTER MEET", "127.0.0.1", local.servers[index].port, bus_port)
    eventually(lambda: succeeds(lambda: client.execute_command("CLUSTER REPLICATE", name)), "it does not become a replica")
    eventually(lambda: succeeds(lambda: client.info("replication")["master_link_status"] == "up"), "it does not follow")
    eventually(lambda: succeeds(lambda: client.cluster("INFO")["cluster_state"] == "ok"), "it does not know the cluster")
    return server, client


def n_rewritten(local: FaultyCluster, address: str) -> int:
    """Rows that the shards say they have brought back on that node."""
    found = 0
    for path in sorted(local.folder.glob("shard-*.log")):
        found += sum(map(int, re.findall(rf"repaired \S*{re.escape(address)}\S*: (\d+) rows rewritten", path.read_text(errors="replace"))))
    return found


def test_rows_that_a_lagging_replica_lacks_are_brought_back_when_it_takes_over(run: LedgerRun) -> None:
    local = run.cluster
    with ExitStack() as stack:
        replica, client = replica_of(local, 0, stack)
        primary = stack.enter_context(redis_client(local.servers[0]))
        processes.pause(replica.process)
        primary.client_kill_filter(_type="replica")  # it cannot connect again while it is stopped
        run.wait_for_acks(30, Deadline.after(2 * PATIENCE_S))
        reached = int(primary.info("replication")["master_repl_offset"])
        processes.kill(local.servers[0].process)
        processes.resume(replica.process)
        eventually(lambda: succeeds(lambda: int(client.info("replication")["slave_repl_offset"]) < reached), "the replica is not behind")
        eventually(lambda: succeeds(lambda: client.execute_command("CLUSTER FAILOVER", "TAKEOVER")), "the replica does not take over")
        run.wait_for_acks(20, Deadline.after(3 * PATIENCE_S))
        verdict = run.finish()
        assert verdict.kept, f"{verdict}\n{run.last_words()}"
        assert n_rewritten(local, replica.address) > 0


def test_slots_that_are_on_their_way_for_long_keep_their_rows_also_when_a_shard_dies_meanwhile(run: LedgerRun) -> None:
    local = run.cluster
    with ExitStack() as stack:
        clients = [stack.enter_context(redis_client(server)) for server in local.servers]
        names = [client.execute_command("CLUSTER MYID").decode() for client in clients]
        slots = range(0, 300, 6)
        for turn, (source, target) in enumerate(((0, 2), (2, 0))):
            port = local.servers[target].port
            for slot in slots:
                clients[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[source])
                clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[target])
            run.wait_for_acks(5, Deadline.after(2 * PATIENCE_S))
            for half in (2, 1):  # every second key of a slot, then the others
                for slot in slots:
                    keys = clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 10_000)[::half]
                    if keys:
                        clients[source].execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "REPLACE", "KEYS", *keys)
                if half == 2 and turn == 0:
                    processes.kill(local.shards[1])
                    local.start_shard(1)
                run.wait_for_acks(5, Deadline.after(2 * PATIENCE_S))
            for slot in slots:
                while keys := clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 1000):
                    clients[source].execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
                for client in (clients[target], clients[source], clients[1]):
                    client.execute_command("CLUSTER SETSLOT", slot, "NODE", names[target])
            run.wait_for_acks(5, Deadline.after(2 * PATIENCE_S))
        verdict = run.finish()
        assert verdict.kept, f"{verdict}\n{run.last_words()}"
