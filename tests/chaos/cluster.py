"""A local cluster with a proxy in front of every storage node and every shard, and with any other settings of kvemb.yaml that a test wants.

What must not live here: the faults themselves (proxy, processes, storage).
"""

import copy
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from types import TracebackType

import redis
import yaml

from chaos.proxy import PASS, FaultProxy, Flow
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import LocalProcess, LocalProcessError, accepts, free_ports
from kvemb.local_cluster.storage_servers import START_TIMEOUT_S, StorageServer
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import equal_runs

_NODE_TIMEOUT_MS = 5000  # after which a Redis Cluster calls a node failed
_SHARD_START_S = 90.0  # it may have a long journal to replay, on a machine that does much else


class FaultyCluster(LocalCluster):
    """A LocalCluster whose every connection goes through a proxy; a context manager.

    Args:
        store, nodes, shards, mode, trainers, memory_mb: see `LocalCluster`.
        storage: further keys of the storage section, e.g. {"timeout_s": 1}.
        servers: further keys of the parameter_servers section.
        shard_program: runs instead of `kvemb shard`, with the same options behind it.
        shard_flow: how bytes travel to and from shards while nothing is wrong.
    """

    def __init__(
        self,
        store: str = "redis",
        nodes: int = 3,
        *,
        shards: int = 2,
        mode: str = "async",
        trainers: int = 0,
        memory_mb: int = 256,
        storage: Mapping[str, object] | None = None,
        servers: Mapping[str, object] | None = None,
        shard_program: Sequence[str] = (),
        shard_flow: Flow = PASS,
    ) -> None:
        self._more_storage, self._more_servers = dict(storage or {}), dict(servers or {})
        self._shard_program, self._shard_flow = list(shard_program), shard_flow
        self._retired: list[LocalProcess] = []
        self._shard_targets: list[str] = []
        self.node_proxies: list[FaultProxy] = []
        self.named: list[str] = []  # nodes that kvemb.yaml names
        self.command: LocalProcess | None = None  # an operator's, the last
        self.shard_proxies: list[FaultProxy] = []
        self.slot_shards = [equal_runs(shards)]  # the writer of each slot, by every map so far, as far as an operator knows
        self._ended: set[int] = set()
        super().__init__(store, nodes, shards=shards, mode=mode, trainers=trainers, memory_mb=memory_mb)

    def launch_shard(self, index: int, *options: str) -> LocalProcess:
        """Start one shard without waiting; a process that runs for it already goes on, and ends with the cluster."""
        if index < len(self.shards) and self.shards[index].poll() is None:
            self._retired.append(self.shards[index])
        return super().launch_shard(index, "--listen", self._shard_targets[index], *options)

    def _await_shard(self, index: int) -> None:
        self.shards[index].wait_until(self._ready_file(index).exists, Deadline.after(_SHARD_START_S))

    @property
    def shard_numbers(self) -> list[int]:
        """The shards that run, or are to; some of them have not joined yet, or have left."""
        return [index for index in range(len(self.shards)) if index not in self._ended]

    @property
    def proxies(self) -> list[FaultProxy]:
        """Of all nodes and shards."""
        return [*self.node_proxies, *(self.shard_proxies[index] for index in self.shard_numbers)]

    def add_shard(self, index: int) -> None:
        """Start a further shard, which waits to be taken in, under the next number or one that was dropped."""
        target = f"127.0.0.1:{free_ports(1)[0]}"
        self._shard_targets[index : index + 1] = [target]
        self.shard_proxies[index : index + 1] = [self._shard_proxy(index)]
        self._ended.discard(index)
        self.start_shard(index)

    def drop_shard(self, index: int) -> None:
        """End a shard that is not needed any more, and delete its data folder."""
        self._ended.add(index)
        self.shards[index].kill()
        self.shard_proxies[index].close()
        shutil.rmtree(self.folder / "shards" / f"shard-{index}", ignore_errors=True)

    def move_shard(self, index: int) -> None:
        """Let the shard's next process listen on another port: the last one still has the old."""
        port = free_ports(1)[0]
        self._shard_targets[index] = f"127.0.0.1:{port}"
        self.shard_proxies[index].target = ("127.0.0.1", port)

    def restart_nodes(self, *indexes: int, snapshot: bool = False) -> None:
        """Kill nodes, all at once, and start them again: empty, or with the snapshots that `storage.snapshot` took."""
        servers = [self.servers[index] for index in indexes]
        for server in servers:
            server.process.kill()
        for server in servers:
            kept = server.snapshot_path.with_suffix(".kept")
            server.restart(snapshot=kept if snapshot else None, member=True)
        if self.store == "redis-cluster":
            for index in indexes:
                self._announce(self.servers[index], self.node_proxies[index])
            self._await_cluster()

    def add_node(self) -> str:
        """Start a further storage server, which is none of the cluster's yet; return its address."""
        if self.store == "redis-cluster":  # of no cluster yet, and without slots
            server = StorageServer(self.store, free_ports(1)[0], self.folder, self._memory_mb)
            server.process.wait_until(lambda: accepts(server.port), Deadline.after(START_TIMEOUT_S))
        else:
            (server,) = self._start_servers(self.store, 1, self.folder, self._memory_mb)
        proxy = FaultProxy(self._served_at(server), seed=server.port)
        if self.store == "redis-cluster":
            self._announce(server, proxy)
        self.servers.append(server)
        self.node_proxies.append(proxy)
        return proxy.address

    def drop_node(self, address: str) -> None:
        """End a storage server that is not needed any more."""
        node = self.node_at(address)
        server, proxy = self.servers.pop(node), self.node_proxies.pop(node)
        server.process.kill()
        proxy.close()

    def drop_left(self) -> None:
        """End the servers that have left a Redis Cluster, or never joined it."""
        for server, proxy in list(zip(self.servers, self.node_proxies, strict=True)):
            if server.process.poll() is None and len(_told(server)[1]) == 1:
                self.drop_node(proxy.address)

    def node_at(self, address: str) -> int:
        """Where a storage server stands in the list of them."""
        return [proxy.address for proxy in self.node_proxies].index(address)

    def write_config(self, nodes: Sequence[str] = (), shards: Sequence[str] = ()) -> None:
        """Have kvemb.yaml name these nodes and shards for processes started from now on; () for those that it names now."""
        self.named, self._addresses = list(nodes or self.named), list(shards or self._addresses)
        config = self._config(*self.named, shards=self._addresses)
        new = self.config_path.with_suffix(".new")
        new.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        new.replace(self.config_path)

    def heal(self) -> None:
        """Let every proxy pass everything on, and every stopped process go on."""
        for proxy in self.proxies:
            proxy.heal()
        for process in (*(server.process for server in self.servers), *self.shards, *self._retired):
            process.signal(signal.SIGCONT)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.heal()
        finally:
            super().__exit__(kind, error, trace)

    def _stop(self) -> None:
        for process in (*self._retired, *([self.command] if self.command is not None else [])):
            process.kill()
        super()._stop()
        for proxy in self.proxies:
            proxy.close()

    def _shard_command(self, index: int) -> list[str]:
        command = super()._shard_command(index)
        return [*self._shard_program, *command[command.index("--shard") :]] if self._shard_program else command

    def _node_addresses(self) -> list[str]:
        self.node_proxies = [FaultProxy(self._served_at(server), seed=index) for index, server in enumerate(self.servers)]
        if self.store == "redis-cluster":
            for server, proxy in zip(self.servers, self.node_proxies, strict=True):
                self._announce(server, proxy)
            self._await_cluster()
        self.named = [proxy.address for proxy in self.node_proxies]
        return self.named

    def _shard_addresses(self) -> list[str]:
        self._shard_targets = super()._shard_addresses()
        self.shard_proxies = [self._shard_proxy(index) for index in range(len(self._shard_targets))]
        return [proxy.address for proxy in self.shard_proxies]

    def _shard_proxy(self, index: int) -> FaultProxy:
        return FaultProxy(self._shard_targets[index], seed=100 + index, flow=self._shard_flow)

    def _config(self, *nodes: str, shards: list[str]) -> dict[str, object]:
        tree: dict[str, object] = copy.deepcopy(super()._config(*nodes, shards=shards))
        for name, more in (("storage", self._more_storage), ("parameter_servers", self._more_servers)):
            section = tree[name]
            assert isinstance(section, dict)
            section.update(more)
        return tree

    def _announce(self, server: StorageServer, proxy: FaultProxy) -> None:
        """Let a Redis Cluster's node tell clients and other nodes that it is where its proxy is."""
        with closing(redis.Redis(port=server.port, protocol=2, socket_timeout=10)) as client:
            client.config_set("cluster-announce-port", proxy.port)
            client.config_set("cluster-node-timeout", _NODE_TIMEOUT_MS)

    def _await_cluster(self) -> None:
        """Wait until all nodes of the cluster know each other by their proxies, and serve every slot."""
        deadline = Deadline.after(START_TIMEOUT_S)
        while not self._together():
            if deadline.expired:
                raise LocalProcessError("the nodes of the Redis Cluster do not know each other by their proxies, or miss a slot")
            time.sleep(0.05)

    def _together(self) -> bool:
        told = {}
        for server, proxy in zip(self.servers, self.node_proxies, strict=True):
            if server.process.poll() is None:
                told[proxy.port] = _told(server)
        members = {port for port, (_, known) in told.items() if len(known) > 1}  # others have not joined, or have left
        return all(told[port][0] == "ok" and members <= told[port][1] for port in members)


def _told(server: StorageServer) -> tuple[str, set[int]]:
    """What a node says: the cluster's state, and the ports of those that it knows."""
    with closing(redis.Redis(port=server.port, protocol=2, socket_timeout=10, decode_responses=True)) as client:
        state = client.execute_command("CLUSTER INFO")
        nodes = client.execute_command("CLUSTER NODES")
    return str(state["cluster_state"]), {int(address.rpartition(":")[2]) for address in nodes}  # by "host:port", a dict
