"""Storage servers in containers, in the place of processes of this machine: what the store contract needs to mishandle them."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from docker.errors import NotFound
from testcontainers.core.container import DockerContainer

from kvemb.errors import KvembError
from kvemb.local_cluster.processes import LocalProcessError, free_ports
from kvemb.local_cluster.storage_servers import MEMCACHED_OPTIONS, START_TIMEOUT_S, StorageServer, create_redis_cluster
from kvemb.net.deadline import Deadline
from tests.real_servers import ServerNodes, memcached_client, redis_client

# The images of docker-compose.yml, by the same variables.
IMAGES = {
    "memcached": ("MEMCACHED_IMAGE", "memcached:1.6"),
    "redis": ("REDIS_IMAGE", "redis:7.2"),
    "redis-cluster": ("REDIS_IMAGE", "redis:7.2"),
    "valkey": ("VALKEY_IMAGE", "valkey/valkey:8"),
}


class ContainerProcess:
    """A running container, by the verbs of `kvemb.local_cluster.processes.LocalProcess`.

    Args:
        container: not started yet.
    """

    def __init__(self, container: DockerContainer) -> None:
        self._container = container.start()

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        try:
            running = self._container.get_wrapped_container()
            running.reload()
        except NotFound:
            return -1
        return None if running.status in ("running", "paused") else int(running.attrs["State"]["ExitCode"])

    def wait_until(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        """Wait until `ready()` holds."""
        while not ready():
            if self.poll() is not None or deadline.expired:
                raise LocalProcessError("\n".join(part.decode() for part in self._container.get_logs()))
            time.sleep(0.05)

    def pause(self) -> None:
        """Let it hang."""
        self._container.get_wrapped_container().pause()

    def signal(self, number: signal.Signals) -> None:
        """Let it go on, if it hangs."""
        assert number == signal.SIGCONT
        running = self._container.get_wrapped_container()
        if self.poll() is None and running.status == "paused":
            running.unpause()

    def kill(self) -> None:
        """End it at once, and remove the container."""
        if self.poll() != -1:
            self._container.stop()


class ContainerServer(StorageServer):
    """One storage server in a container, on a loopback port of this machine."""

    process: ContainerProcess  # type: ignore[assignment]

    def restart(self, *, snapshot: Path | None = None, member: bool = False) -> None:
        """See `StorageServer.restart`."""
        super().restart(snapshot=snapshot, member=member)
        self.await_answer()

    def await_answer(self) -> None:
        """Wait until the server answers; Docker's proxy listens before it does."""
        self.process.wait_until(self._answers, Deadline.after(START_TIMEOUT_S))

    def _answers(self) -> bool:
        try:
            if self.kind == "memcached":
                with closing(memcached_client(self)) as client:
                    client.version()
            else:
                with redis_client(self) as client:
                    client.ping()
        except Exception:
            return False
        return True

    def _start(self) -> ContainerProcess:  # type: ignore[override]
        variable, default = IMAGES[self.kind]
        container = DockerContainer(os.environ.get(variable) or default)
        options: dict[str, object] = {"init": True, "cap_drop": ["ALL"], "read_only": True, "labels": {"kvemb.test": "store"}}
        if self.kind == "redis-cluster":
            options["network_mode"] = "host"  # its nodes tell clients where they are
        else:
            container.ports[f"{self._inner_port}/tcp"] = ("127.0.0.1", self.port)  # type: ignore[assignment]
        if self.kind != "memcached":
            options["user"] = "valkey" if self.kind == "valkey" else "redis"
            container.with_volume_mapping(self._folder, "/data", "rw")
        return ContainerProcess(container.with_command(self._command()).with_kwargs(**options))

    @property
    def _inner_port(self) -> int:
        return 11211 if self.kind == "memcached" else self.port if self.kind == "redis-cluster" else 6379

    def _command(self) -> list[str]:
        if self.kind == "memcached":
            return ["memcached", *MEMCACHED_OPTIONS, "-m", str(self._memory_mb), "-c", "4096"]
        program = "valkey-server" if self.kind == "valkey" else "redis-server"
        settings = {
            "port": str(self._inner_port), "save": "", "appendonly": "no", "maxmemory-policy": "noeviction",
            "maxmemory": f"{self._memory_mb}mb", "dir": "/data", "dbfilename": self.snapshot_path.name, "protected-mode": "no",
        }  # fmt: skip
        if self.kind == "redis-cluster":
            settings |= {"bind": "127.0.0.1", "cluster-enabled": "yes", "cluster-port": str(self._bus_port)}
            settings |= {"cluster-config-file": f"nodes-{self.port}.conf"}
        return [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]


class ContainerNodes(ServerNodes):
    """Nodes that are containers.

    Args:
        kind: one of `kvemb.stores.storage_kinds.KINDS`.
        n: how many.
        folder: for their files; every user may write there.
    """

    def __init__(self, kind: str, n: int, folder: Path) -> None:
        super().__init__(kind, n, folder, start=start_containers)

    def pause(self, index: int) -> None:
        """See `Nodes.pause`."""
        self.servers[index].process.pause()

    def resume(self, index: int) -> None:
        """See `Nodes.resume`."""
        self.servers[index].process.signal(signal.SIGCONT)


def start_containers(kind: str, n: int, folder: Path, memory_mb: int) -> list[ContainerServer]:
    """Start n servers and wait until they answer; a Redis Cluster is put together."""
    servers: list[ContainerServer] = []
    try:
        for port in free_ports(n):
            servers.append(ContainerServer(kind, port, folder, memory_mb))
        for server in servers:
            server.await_answer()
        if kind == "redis-cluster":
            create_redis_cluster([server.port for server in servers], Deadline.after(START_TIMEOUT_S))
    except (KvembError, OSError):
        for server in servers:
            server.process.kill()
        raise
    return servers
