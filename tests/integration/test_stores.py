"""The store contract on memory and on real servers; then what is special to memcached, Redis and Valkey.

Redis Cluster while its slots move has a file of its own.
"""

import itertools
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import redis
from memory_store import memory_node
from pymemcache.client.base import Client
from pymemcache.exceptions import MemcacheError

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME
from kvemb.coordination.markers import MARKER_KEY
from kvemb.errors import ConfigError, DeadlineExceededError, MapChangedError, NodeFullError, NodeSuspectError, StorageError, UnsafeNodeError
from kvemb.local_cluster.processes import LocalProcess, accepts, free_ports
from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.stores.row_io import ReadResult, WritePart
from kvemb.stores.standalone.node_store import NodeStore
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store
from kvemb.testing.bucket_contract import BucketedStoreContract
from kvemb.testing.contract_nodes import own_node_of
from kvemb.testing.repair_contract import RepairContract
from kvemb.testing.store_contract import (
    CLUSTER,
    GENERATION,
    SIZE,
    Nodes,
    PagedStoreContract,
    StoreContract,
    bucket_keys,
    keys_for,
    read,
    records_of,
    require_rows,
    row_keys,
    within,
    write,
)
from tests.real_servers import ServerNodes, redis_client

_numbers = itertools.count()


class MemoryNodes(Nodes):
    """Two nodes inside this process."""

    over_wire = finds_others = False

    def __init__(self) -> None:
        number = next(_numbers)
        self._saved: dict[int, dict[bytes, tuple[bytes, int]]] = {}
        super().__init__(StorageConfig("memory", (f"memory-{number}-0:1", f"memory-{number}-1:1")))

    def put_foreign(self, key: bytes, value: bytes) -> None:
        memory_node(self.config.nodes[own_node_of(key, 2)]).put(key, value)

    def put_markers(self, values: Sequence[bytes]) -> None:
        for address, value in zip(self.config.nodes, values, strict=True):
            memory_node(address).put(MARKER_KEY, value)

    def flush(self, index: int) -> None:
        memory_node(self.config.nodes[index]).flush()

    def restart(self, index: int, *, saved: bool = False) -> None:
        node = memory_node(self.config.nodes[index])
        node.run_id = f"process-{next(_numbers)}"
        node.values = dict(self._saved[index]) if saved else {}

    def save(self, index: int) -> None:
        self._saved[index] = dict(memory_node(self.config.nodes[index]).values)

    def stop(self, index: int) -> None:
        memory_node(self.config.nodes[index]).down = True


class TestMemoryStore(RepairContract):
    @pytest.fixture
    def nodes(self, memory_kind: None) -> Nodes:
        return MemoryNodes()


class _Servers(StoreContract):
    kind = ""
    n_nodes = 2

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]) -> Iterator[ServerNodes]:
        if cls.kind != "valkey":
            require_server({"memcached": "memcached"}.get(cls.kind, "redis-server"))
        folder = tmp_path_factory.mktemp(cls.kind)
        folder.chmod(0o755)  # memcached gives up root for nobody
        nodes = ServerNodes(cls.kind, cls.n_nodes, folder)
        yield nodes
        nodes.close()

    @pytest.fixture
    def nodes(self, running: ServerNodes) -> Iterator[Nodes]:
        running.reset()
        yield running
        for index in range(self.n_nodes):
            if running.servers[index].process.poll() is None:
                running.resume(index)


class _OwnMap(_Servers, RepairContract):
    """Nodes under a map of ours, which trainers follow."""

    @pytest.mark.parametrize("on_lost_node", ["wait", "fail"])
    @pytest.mark.parametrize("case", ["another thread was first", "one map after another", "markers before maps"])
    def test_a_trainers_read_follows_newer_maps(
        self, store: Store, nodes: Nodes, on_lost_node: str, case: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys, markers = self.keys(50), store.open(within())
        write(store, keys, records_of(keys))
        maps = [store.nodes.cluster_map]

        def renew(published: int = 1) -> None:
            maps.append(replace(maps[-1], version=maps[-1].version + 1, serial=maps[-1].serial + 1))
            if published:
                store.values.put(MAP_NAME, maps[-1].encode(), within())
            nodes.put_markers([marker.naming(maps[-1]).encode() for marker in markers])

        with open_store(replace(nodes.config, on_lost_node=on_lost_node), role="trainer") as trainer:
            assert isinstance(trainer, NodeStore)
            trainer.open(within())
            tries, read = itertools.count(1), trainer.rows._batches.read

            def read_meanwhile(*args: Any) -> list[ReadResult]:
                n = next(tries)
                if case == "one map after another" and n < 8:
                    renew()
                if case == "markers before maps" and n in (1, 3):
                    renew(published=n - 1)
                try:
                    return read(*args)
                except MapChangedError:
                    if case == "another thread was first":
                        trainer.nodes.refresh_map(within())
                    raise

            if case == "another thread was first":
                renew()
            monkeypatch.setattr(trainer.rows._batches, "read", read_meanwhile)
            require_rows(trainer, keys, records_of(keys))
            assert trainer.nodes.cluster_map.serial == maps[-1].serial


class _RedisCluster(_Servers):
    """Provisioned for the first test; for others the same 16,384 markers and more are written at once, in a tenth of the time."""

    kind = "redis-cluster"
    n_nodes = 3
    provisioned: ClassVar[dict[tuple[int, ...], list[bytes]]] = {}  # by the servers' processes: what SETs the keys of each

    @pytest.fixture
    def store(self, nodes: ServerNodes) -> Iterator[Store]:
        processes = tuple(server.process.pid for server in nodes.servers)
        with nodes.store() as store:
            if processes not in self.provisioned:
                store.provision(CLUSTER, GENERATION, within())
                self.provisioned[processes] = [setting_all_keys(server) for server in nodes.servers]
            else:
                for server, requests in zip(nodes.servers, self.provisioned[processes], strict=True):
                    with socket.create_connection(("127.0.0.1", server.port)) as sock, sock.makefile("rb") as replies:
                        sock.sendall(requests)
                        assert {replies.readline() for _ in range(requests.count(b"*3\r\n$3\r\nSET\r\n"))} == {b"+OK\r\n"}
            store.open(within())
            yield store


def setting_all_keys(server: StorageServer) -> bytes:
    """The requests that write every key that a Redis holds."""
    with redis_client(server) as client, client.pipeline(transaction=False) as pipeline:
        keys = client.keys()
        for key in keys:
            pipeline.get(key)
        pairs = zip(keys, pipeline.execute(), strict=True)
        return b"".join(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(key), key, len(value), value) for key, value in pairs)


class TestMemcachedStore(_OwnMap):
    kind = "memcached"


class TestValkeyStore(_Servers, RepairContract, BucketedStoreContract):
    kind = "valkey"


class TestRedisStore(_OwnMap, BucketedStoreContract):
    kind = "redis"


class TestRedisClusterStore(_RedisCluster, RepairContract, BucketedStoreContract):
    pass


class TestPagedValkeyStore(_Servers, PagedStoreContract):
    kind = "valkey"


@pytest.mark.full  # pages as on one Valkey, nodes as in TestRedisClusterStore
class TestPagedRedisClusterStore(_RedisCluster, PagedStoreContract):
    pass


# --- one server with settings of its own ----------------------------------------------------------------------------------------


class Launcher:
    """Starts single servers with any arguments, and ends them."""

    def __init__(self, folder: Path, require_server: Callable[[str], str]) -> None:
        self.folder = folder
        self._require = require_server
        self.started: list[LocalProcess] = []

    def memcached(self, *arguments: str) -> str:
        user = ["-u", "nobody"] if os.getuid() == 0 else []
        return self._start(lambda port: [self._require("memcached"), *user, "-l", "127.0.0.1", "-p", str(port), *arguments])

    def redis(self, *arguments: str, port: int | None = None) -> str:
        fixed = ["--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "", *arguments]
        return self._start(lambda port: [self._require("redis-server"), "--port", str(port), *fixed], port)

    def _start(self, command: Callable[[int], list[str]], port: int | None = None) -> str:
        port = port or free_ports(1)[0]
        self.started.append(LocalProcess(f"server on {port}", command(port), self.folder / f"{port}.log"))
        self.started[-1].wait_until(lambda: accepts(port), within(20))
        return f"127.0.0.1:{port}"


@pytest.fixture
def launch(tmp_path: Path, require_server: Callable[[str], str]) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, require_server)
    yield launcher
    for process in launcher.started:
        process.kill()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that memcached can reach after it has given up root for nobody; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@contextmanager
def opened(config: StorageConfig, *, provision: bool = True) -> Iterator[Store]:
    with open_store(config, role="shard:0") as store:
        if provision:
            store.provision(CLUSTER, GENERATION, within())
        store.open(within())
        yield store


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ([], "evictions"),
        (["-M"], "slab_reassign"),
        (["-o", "no_slab_reassign"], "evictions"),
        (["-M", "-o", "no_slab_reassign", "-C"], "cas_enabled"),
        (["-M", "-o", "no_slab_reassign", "-e", "WARM"], "memory_file"),
    ],
)
def test_a_memcached_that_may_lose_rows_is_refused_unless_allowed(
    launch: Launcher, open_folder: Path, arguments: list[str], setting: str
) -> None:
    address = launch.memcached(*(str(open_folder / "restart") if word == "WARM" else word for word in arguments))
    config = StorageConfig("memcached", (address,))
    for call in ("open", "provision"):
        with open_store(config, role="shard:0") as store, pytest.raises(UnsafeNodeError, match=rf"{address}.*{setting}.*no_slab_reassign"):
            store.open(within()) if call == "open" else store.provision(CLUSTER, GENERATION, within())
    with opened(replace(config, allow_row_loss=True)) as store:
        assert store.nodes.stats(within())[0].address == address


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
def test_a_redis_that_may_evict_is_refused_unless_allowed(launch: Launcher, policy: str) -> None:
    address = launch.redis("--maxmemory", "100mb", "--maxmemory-policy", policy)
    config = StorageConfig("redis", (address,))
    with open_store(config, role="shard:0") as store, pytest.raises(UnsafeNodeError, match=f"{address}.*{policy}.*noeviction"):
        store.provision(CLUSTER, GENERATION, within())
    with opened(replace(config, allow_row_loss=True)) as store:
        write(store, bucket_keys(10), records_of(bucket_keys(10)))


def test_a_redis_that_comes_back_from_a_snapshot_is_suspect(launch: Launcher) -> None:
    address = launch.redis("--dbfilename", "snapshot.rdb")
    port = int(address.split(":")[1])
    config, keys = StorageConfig("redis", (address,)), bucket_keys(100)
    with opened(config) as store:
        write(store, keys, records_of(keys))
        with closing(redis.Redis(port=port)) as client:
            client.save()
        write(store, keys, records_of(keys, salt=1))  # what the snapshot has never seen
        launch.started[-1].kill()
        launch.redis("--dbfilename", "snapshot.rdb", port=port)
        with pytest.raises(NodeSuspectError, match=address):
            require_rows(store, keys, records_of(keys, salt=1))
        with pytest.raises(NodeSuspectError, match=address):
            store.rows.write([WritePart(keys, records_of(keys))], within())
    with pytest.raises(NodeSuspectError, match=address), opened(config, provision=False):
        pass


def test_the_password_of_the_configuration_is_used(launch: Launcher) -> None:
    address = launch.redis("--requirepass", "right")
    config, keys = StorageConfig("redis", (address,), password="right"), bucket_keys(1500)
    with opened(config) as store:
        write(store, keys, records_of(keys))
        require_rows(store, keys, records_of(keys))
        assert store.nodes.stats(within())[0].n_keys == 2 + len(np.unique(keys.encode(), axis=0))  # marker and cluster map
    for password in ("wrong", None):
        with pytest.raises(ConfigError, match=rf"storage\.password_env.*{address}") as failure, opened(replace(config, password=password)):
            pass
        assert "right" not in str(failure.value)
    with pytest.raises(ConfigError, match="username_env"), opened(replace(config, username="nobody")):
        pass


def test_the_user_of_the_configuration_is_used(launch: Launcher) -> None:
    address = launch.redis("--requirepass", "other", "--user", "trainer", "on", ">right", "~*", "&*", "+@all")
    config, keys = StorageConfig("redis", (address,), username="trainer", password="right"), bucket_keys(10)
    with opened(config) as store:
        write(store, keys, records_of(keys))
        require_rows(store, keys, records_of(keys))
    with pytest.raises(ConfigError, match=rf"storage\.password_env.*{address}.*username_env"), opened(replace(config, username=None)):
        pass  # the password of the default user is another


def test_a_standalone_redis_is_no_cluster_and_a_cluster_node_no_standalone(launch: Launcher) -> None:
    alone = launch.redis()
    with pytest.raises(ConfigError, match=rf"storage\.kind.*{alone}"), opened(StorageConfig("redis-cluster", (alone,))):
        pass
    (bus,) = free_ports(1)
    member = launch.redis("--cluster-enabled", "yes", "--cluster-port", str(bus))
    for provision in (True, False):
        with pytest.raises(ConfigError, match=rf"storage\.kind.*{member}"), opened(StorageConfig("redis", (member,)), provision=provision):
            pass


def test_a_server_of_another_kind_is_no_hang(launch: Launcher) -> None:
    for kind, address in (("redis", launch.memcached()), ("memcached", launch.redis())):
        with pytest.raises(StorageError, match=address), open_store(StorageConfig(kind, (address,)), role="shard:0") as store:
            store.open(within())


@pytest.mark.parametrize("kind", ["redis", "memcached"])
def test_a_full_node_says_so_and_the_rows_before_it_are_whole(launch: Launcher, kind: str) -> None:
    full = "--maxmemory", "4mb", "--maxmemory-policy", "noeviction"
    address = launch.redis(*full) if kind == "redis" else launch.memcached("-M", "-o", "no_slab_reassign", "-m", "8")
    with opened(StorageConfig(kind, (address,))) as store:
        small = keys_for(store, 100)
        write(store, small, records_of(small))

        def fill() -> None:
            for first in range(1, 1000, 10):
                large = keys_for(store, 1000, first=10_000 * first)
                write(store, large, records_of(large, 2000))

        with pytest.raises(NodeFullError, match=rf"node {address}, id \d+.*memory"):
            fill()
        require_rows(store, small, records_of(small))  # and the connection is in step


def test_a_full_memcached_refuses_new_values_and_keeps_every_old_one(launch: Launcher) -> None:
    address = launch.memcached("-M", "-o", "no_slab_reassign", "-m", "4")
    with opened(StorageConfig("memcached", (address,))) as store:
        keys, names = keys_for(store, 300), [f"kvemb:note:{n:03}" for n in range(20)]
        write(store, keys, records_of(keys))
        for name in names:
            store.values.put(name, b"old" * 20, within())
        seen = read(store, keys, tokens=True)
        host, port = address.split(":")
        with closing(Client((host, int(port)))) as stranger:
            for size in (len(b"old" * 20), SIZE):
                with suppress(MemcacheError):
                    for n in range(1_000_000):
                        stranger.set(f"j{size:03}{n:010}", bytes(size), noreply=False)  # as long as a row's key
        for some in np.split(np.arange(300), 6):
            part = WritePart(keys[some], records_of(keys[some], salt=1), np.asarray(seen.tokens)[some])
            with pytest.raises(NodeFullError, match=f"{address}.*out of memory"):
                store.rows.write([part], within())
            require_rows(store, keys, records_of(keys))
        for name in names:
            with pytest.raises(NodeFullError, match=address):
                store.values.put(name, b"new" * 20, within())
            assert store.values.get(name, within()) == [b"old" * 20]
        with pytest.raises(NodeFullError, match=address):  # the marker of a repair is longer, and of the size of the junk
            store.repair.begin(address, within(), even_if_whole=True)
        require_rows(store, keys, records_of(keys))


def test_a_memcached_record_above_the_item_limit_says_so(launch: Launcher) -> None:
    address = launch.memcached("-M", "-o", "no_slab_reassign")
    keys = row_keys(2)
    with opened(StorageConfig("memcached", (address,))) as store:
        limit = store.nodes.max_record_bytes(address, within())
        assert limit is not None
        write(store, keys, records_of(keys, limit))
        require_rows(store, keys, records_of(keys, limit))
        with pytest.raises(NodeFullError, match=f"{address}.*-I"):
            write(store, row_keys(1, first=9), np.zeros((1, (1 << 20) + 1), dtype=np.uint8))
        require_rows(store, keys, records_of(keys, limit))


def test_a_link_dropped_in_the_middle_of_a_write_is_dead_before_the_next_write(
    tmp_path: Path, require_server: Callable[[str], str]
) -> None:
    require_server("redis-server")
    nodes = ServerNodes("redis", 1, tmp_path)
    server, keys = nodes.servers[0], bucket_keys(3000)

    def writers() -> set[str]:
        with redis_client(server) as client:
            return {entry["id"] for entry in client.client_list() if entry["name"] == "kvemb-shard-0"}

    try:
        with opened(nodes.config) as store:
            write(store, keys, records_of(keys))
            before = writers()
            assert len(before) == 1
            nodes.pause(0)
            with pytest.raises(DeadlineExceededError):
                write(store, keys, records_of(keys, salt=1), deadline=within(0.3))
            nodes.resume(0)
            one = bucket_keys(1, first=9999)
            write(store, one, records_of(one))
            assert not writers() & before
            write(store, keys, records_of(keys, salt=2))
            require_rows(store, keys, records_of(keys, salt=2))
    finally:
        nodes.close()
