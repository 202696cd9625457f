"""Real servers under the store contract: started once, emptied between tests, and all the ways to mishandle them."""

import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import redis
from pymemcache.client.base import Client

from kvemb.config import StorageConfig
from kvemb.coordination.markers import MARKER_KEY
from kvemb.local_cluster.storage_servers import START_TIMEOUT_S, StorageServer, start_servers
from kvemb.net.deadline import Deadline
from kvemb.stores.redis_cluster.slot_map import marker_keys
from kvemb.testing.contract_nodes import Nodes, own_node_of


class ServerNodes(Nodes):
    """Nodes that are processes of this machine.

    Args:
        kind: one of `kvemb.stores.storage_kinds.KINDS`.
        n: how many.
        folder: for their logs and files.
        memory_mb: of each.
        start: starts the servers, given the arguments above.
    """

    def __init__(
        self,
        kind: str,
        n: int,
        folder: Path,
        memory_mb: int = 256,
        *,
        start: Callable[[str, int, Path, int], Sequence[StorageServer]] = start_servers,
    ) -> None:
        self._start: Callable[[], Sequence[StorageServer]] = lambda: start(kind, n, folder, memory_mb)
        self.servers = self._start()
        self.own_map = kind != "redis-cluster"
        self._saved: dict[int, Path] = {}
        self._kept: dict[int, dict[bytes, bytes]] = {}  # the same keys, as DUMP has them
        super().__init__(self._config())

    def reset(self) -> None:
        """Make every node empty and well again."""
        for server in self.servers:
            server.process.signal(signal.SIGCONT)
        if not self.own_map and any(server.process.poll() is not None for server in self.servers):
            self.close()
            self.servers = self._start()
            self.config = self._config()
        for server in self.servers:
            if server.kind == "memcached" or server.process.poll() is not None:
                # memcached's flush_all counts in seconds: rows written in the same second could vanish later.
                server.restart()
            else:
                with redis_client(server) as client:
                    client.flushall()

    def close(self) -> None:
        """End the servers."""
        for server in self.servers:
            server.process.kill()

    def server_of(self, key: bytes) -> StorageServer:
        """Where a key belongs (not on a cluster, which knows that itself)."""
        return self.servers[own_node_of(key, len(self.servers))]

    def put_foreign(self, key: bytes, value: bytes) -> None:
        if not self.own_map:
            with redis.RedisCluster(host="127.0.0.1", port=self.servers[0].port) as cluster:
                cluster.set(key, value)
        else:
            self._put(self.server_of(key), key, value)

    def delete(self, key: bytes) -> None:
        if not self.own_map:
            with redis.RedisCluster(host="127.0.0.1", port=self.servers[0].port) as cluster:
                cluster.delete(key)
        else:
            with redis_client(self.server_of(key)) as client:
                client.delete(key)

    def put_markers(self, values: Sequence[bytes]) -> None:
        if self.own_map:
            for server, value in zip(self.servers, values, strict=True):
                self._put(server, MARKER_KEY, value)
            return
        with redis.RedisCluster(host="127.0.0.1", port=self.servers[0].port) as cluster:
            pipeline = cluster.pipeline()
            for key, value in zip(marker_keys(), values, strict=True):
                pipeline.set(key, value)
            pipeline.execute()

    def flush(self, index: int) -> None:
        server = self.servers[index]
        if server.kind == "memcached":
            with closing(memcached_client(server)) as client:
                client.flush_all(noreply=False)
        else:
            with redis_client(server) as client:
                client.flushall()

    def restart(self, index: int, *, saved: bool = False) -> None:
        server = self.servers[index]
        server.restart(snapshot=self._saved[index] if saved else None, member=not self.own_map)
        if not self.own_map:
            server.process.wait_until(self._cluster_serves, Deadline.after(START_TIMEOUT_S))

    def save(self, index: int) -> None:
        server = self.servers[index]
        if server.kind == "memcached":
            super().save(index)
        with redis_client(server) as client:
            client.save()
            keys = list(client.scan_iter(count=1000))
            self._kept[index] = dict(zip(keys, self._each(client, [("DUMP", key) for key in keys]), strict=True))
        self._saved[index] = server.snapshot_path.with_suffix(".saved")
        shutil.copyfile(server.snapshot_path, self._saved[index])

    def go_back(self, index: int) -> None:
        self.flush(index)
        with redis_client(self.servers[index]) as client:
            self._each(client, [("RESTORE", key, 0, dumped) for key, dumped in self._kept[index].items()])

    def stop(self, index: int) -> None:
        self.servers[index].process.kill()

    def pause(self, index: int) -> None:
        self.servers[index].process.signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        self.servers[index].process.signal(signal.SIGCONT)

    def _cluster_serves(self) -> bool:
        with ExitStack() as stack:
            clients = [stack.enter_context(redis_client(server)) for server in self.servers]
            return all(client.cluster("INFO")["cluster_state"] == "ok" for client in clients)

    def _each(self, client: "redis.Redis", commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        """Return the answers to commands about keys; of a slot that is on its way to a node, that one answers only whoever asks for it."""
        asking = [] if self.own_map else [("ASKING",)]
        with client.pipeline(transaction=False) as pipeline:
            for command in commands:
                for words in (*asking, command):
                    pipeline.execute_command(*words)
            return pipeline.execute()[len(asking) :: len(asking) + 1]

    def _put(self, server: StorageServer, key: bytes, value: bytes) -> None:
        if server.kind == "memcached":
            with closing(memcached_client(server)) as client:
                client.set(key, value, noreply=False)
        else:
            with redis_client(server) as client:
                client.set(key, value)

    def _config(self) -> StorageConfig:
        return StorageConfig(self.servers[0].kind, tuple(server.address for server in self.servers))


def redis_client(server: StorageServer) -> "redis.Redis":
    """An administrator's client of one Redis or Valkey server."""
    return redis.Redis(port=server.port, protocol=2, socket_timeout=10)


def memcached_client(server: StorageServer) -> Client:
    """A client of another program on one memcached server."""
    return Client(("127.0.0.1", server.port), connect_timeout=10, timeout=10)
