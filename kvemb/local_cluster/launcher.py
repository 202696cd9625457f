"""Puts a local cluster together: storage servers first, then the shards, one kvemb.yaml for all of them."""

import atexit
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import yaml

from kvemb.config import parse
from kvemb.errors import ConfigError
from kvemb.local_cluster.processes import LocalFolder, LocalProcess, accepts, free_ports, python_env
from kvemb.local_cluster.storage_servers import START_TIMEOUT_S, StorageServer, start_servers
from kvemb.net.deadline import Deadline
from kvemb.process import interrupts
from kvemb.stores.storage_kinds import DEFAULT_KIND, KINDS

_DRAIN_S = 10  # a local cluster has a person waiting for its end
_SHARD_GRACE_S = _DRAIN_S + 15.0  # joining its threads and a last storage call come on top
_NOT_DRAINED = 4  # exit code of a shard
_SERVER_GRACE_S = 5.0
log = logging.getLogger("kvemb")


class LocalCluster:
    """Real servers and shards on loopback, in a folder of their own, which the next start removes if the program was killed."""

    def __init__(
        self,
        store: str = DEFAULT_KIND,
        nodes: int = 1,
        *,
        shards: int = 1,
        mode: str = "async",
        trainers: int = 0,
        memory_mb: int = 1024,
        barrier_timeout_s: float | None = None,
        cache_mb: int | None = None,
        index_mb: int | None = None,
        durability: str | None = None,
        journal_max_mb: int | None = None,
        metrics_port: int | None = None,
    ) -> None:
        if store not in KINDS:
            raise ConfigError(f"store: got {store!r}, expected one of {', '.join(KINDS)}")
        for name, value, lowest in (("nodes", nodes, KINDS[store].least_nodes), ("shards", shards, 1), ("memory_mb", memory_mb, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ConfigError(f"a local {store} cluster: {name} is {value!r}; give a whole number of at least {lowest}")
        self.store = store
        self._n_nodes, self._n_shards, self._memory_mb = nodes, shards, memory_mb
        self._servers_section: dict[str, object] = {"mode": mode} | ({"trainers": trainers} if trainers else {})
        options: dict[str, object] = {"barrier_timeout_s": barrier_timeout_s, "cache_mb": cache_mb, "index_mb": index_mb}
        options |= {"durability": durability, "journal_max_mb": journal_max_mb, "metrics_port": metrics_port}
        self._servers_section |= {name: value for name, value in options.items() if value is not None}
        self.servers: list[StorageServer] = []
        self.shards: list[LocalProcess] = []
        self._addresses: list[str] = []
        self.folder = Path(tempfile.gettempdir()) / "kvemb-not-started"
        self._owned: LocalFolder | None = None
        parse(self._config("127.0.0.1:1", shards=["127.0.0.1:2"]), {})  # refuses a wrong mode and the like before anything is started

    @property
    def config_path(self) -> Path:
        """The kvemb.yaml that everything in this cluster was started with."""
        return self.folder / "kvemb.yaml"

    @property
    def url(self) -> str:
        """The URL that `kvemb.connect` takes."""
        return self.config_path.as_uri()

    def start_node(self) -> StorageServer:
        """Start one more storage server, empty, and wait until it listens. It is no node of the cluster until one is made of it."""
        server = StorageServer(self.store, free_ports(1)[0], self.folder, self._memory_mb)
        self.servers.append(server)
        server.process.wait_until(lambda: accepts(server.port), Deadline.after(START_TIMEOUT_S))
        return server

    def start_shard(self, index: int, *options: str) -> LocalProcess:
        """Start (again) one shard, with further options of its command line, and wait until it serves."""
        self.launch_shard(index, *options)
        self._await_shard(index)
        return self.shards[index]

    def launch_shard(self, index: int, *options: str) -> LocalProcess:
        """Start one shard as `start_shard`, without the wait."""
        self._ready_file(index).unlink(missing_ok=True)
        command = [*self._shard_command(index), *options]
        process = LocalProcess(f"shard {index}", command, self.folder / f"shard-{index}.log", python_env())
        self.shards[index : index + 1] = [process]
        return process

    def _shard_command(self, index: int) -> list[str]:
        """Program and arguments of a shard."""
        files = ["--config", str(self.config_path), "--ready-file", str(self._ready_file(index))]
        # -P: it must not import modules from the folder in which the program was started.
        return [sys.executable, "-P", "-m", "kvemb.cli", "shard", "--shard", str(index), *files, "--drain-timeout", str(_DRAIN_S)]

    def _await_shard(self, index: int) -> None:
        # A shard with much to replay reports its progress now and then.
        self.shards[index].wait_until(self._ready_file(index).exists, Deadline.after(START_TIMEOUT_S), while_it_talks=True)

    def _ready_file(self, index: int) -> Path:
        return self.folder / f"shard-{index}.ready"

    def __enter__(self) -> "LocalCluster":
        self._owned = LocalFolder()
        self.folder = self._owned.path
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _kill_shards(self) -> None:
        for shard in self.shards:
            shard.signal(signal.SIGKILL)

    def _start(self) -> None:
        self.servers = self._start_servers(self.store, self._n_nodes, self.folder, self._memory_mb)
        self._addresses = self._shard_addresses()
        config = self._config(*self._node_addresses(), shards=self._addresses)
        self.config_path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        for index in range(self._n_shards):
            self.launch_shard(index)
        for index in range(self._n_shards):
            self._await_shard(index)

    def _start_servers(self, store: str, n: int, folder: Path, memory_mb: int) -> list[StorageServer]:
        return start_servers(store, n, folder, memory_mb)

    def _node_addresses(self) -> list[str]:
        """Where the storage servers are reached."""
        return [self._served_at(server) for server in self.servers]

    def _served_at(self, server: StorageServer) -> str:
        """The address at which kvemb is to reach a server."""
        return server.address

    def _shard_addresses(self) -> list[str]:
        """Where the shards are to be reached."""
        return [f"127.0.0.1:{port}" for port in free_ports(self._n_shards)]

    def _config(self, *nodes: str, shards: list[str]) -> dict[str, object]:
        """The tree of the cluster's kvemb.yaml."""
        data_dir = str(self.folder / "shards")
        return {
            "cluster": self.folder.name,
            "storage": {"kind": self.store, "nodes": list(nodes)},
            "parameter_servers": {"shards": shards, "data_dir": data_dir, **self._servers_section},
        }

    def _stop(self) -> None:
        """End the shards, which drain into storage, then storage. A second Ctrl-C ends them at once; this method still finishes."""
        with _on_interrupt(self._kill_shards):
            if told := interrupts.deliver_to(self._addresses):
                log.warning("%s", told)
            for shard in self.shards:
                shard.signal(signal.SIGTERM)
            for shard in self.shards:
                if shard.stop(_SHARD_GRACE_S) == _NOT_DRAINED:
                    log.warning("%s was ended with accepted changes that it could not apply:\n%s", shard.name, shard.log_tail())
            for server in self.servers:
                server.process.signal(signal.SIGTERM)
            for server in self.servers:
                server.process.stop(_SERVER_GRACE_S)
            if self._owned is not None:
                self._owned.remove()


class Local:
    """A local cluster that is run by a `with` block, which gets its URL, or from `start` to `stop`, as in a notebook. While it runs,
    one may play with it: kill a shard, start it again, start a server more.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster, self._pid, self._started = cluster, 0, False

    def start(self) -> str:
        """Start it and return the URL for `kvemb.connect`; the same again while it runs: until `stop`, or the program's end."""
        if self._pid:
            return self._cluster.url
        if self._started:
            raise ConfigError("this local cluster was stopped, and its data deleted; kvemb.local(...) makes another one")
        self._cluster.__enter__()
        self._started, self._pid = True, os.getpid()
        atexit.register(self.stop)
        return self._cluster.url

    def stop(self) -> None:
        """End it, and delete its data. Idempotent; does nothing in a fork of the program that started it."""
        if self._pid == os.getpid():
            self._pid = 0
            atexit.unregister(self.stop)
            self._cluster.__exit__(None, None, None)

    def start_node(self) -> str:
        """Start one more storage server, empty, and return its address: `cluster.nodes.add(address)` plans how it joins."""
        return self._cluster.start_node().address

    def kill_shard(self, shard: int = 0) -> None:
        """End a shard as kill -9 does, to see what training makes of it; `start_shard` brings it back."""
        self._cluster.shards[shard].kill()

    def start_shard(self, shard: int = 0) -> None:
        """Start a shard that has ended, in its data folder, and wait until it serves. It goes on where its journal ends."""
        self._cluster.start_shard(shard)

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def local(
    store: str = "valkey",
    *,
    nodes: int = 1,
    shards: int = 1,
    mode: str = "async",
    trainers: int = 0,
    memory_mb: int = 1024,
    cache_mb: int | None = None,
    durability: str | None = None,
    journal_max_mb: int | None = None,
) -> Local:
    """Run a real cluster on this machine: `with kvemb.local() as url:`, or `started = kvemb.local()`, then `started.start()` and `.stop()`.

    Args:
        store: the kind of its storage: "valkey", "redis", "redis-cluster" or "memcached".
        nodes, shards: how many of each.
        mode, trainers, cache_mb, durability, journal_max_mb: as in kvemb.yaml's `parameter_servers`.
        memory_mb: of each node.

    Returns:
        An object that gives the URL for `kvemb.connect` when it is entered, or started.

    Raises:
        ConfigError: an argument is out of range, or a server program is missing.
    """
    return Local(
        LocalCluster(
            store,
            nodes,
            shards=shards,
            mode=mode,
            trainers=trainers,
            memory_mb=memory_mb,
            cache_mb=cache_mb,
            durability=durability,
            journal_max_mb=journal_max_mb,
        )
    )


@contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP call `act` instead of ending the block, where they can be caught (the main thread)."""
    before = {}
    with suppress(ValueError):  # not the main thread: signals do not come here
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: it was not set by Python, and could not be put back
                before[number] = signal.signal(number, lambda *_: act())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
