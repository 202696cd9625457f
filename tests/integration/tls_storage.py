"""Storage servers that speak TLS: beside each one's plain port, which tests use to mishandle them, one that asks for certificates."""

from dataclasses import replace
from pathlib import Path

from kvemb.config import StorageConfig
from kvemb.local_cluster.processes import accepts, free_ports
from kvemb.local_cluster.storage_servers import START_TIMEOUT_S, StorageServer, create_redis_cluster
from kvemb.net.certificate_authority import Authority, Issued
from kvemb.net.deadline import Deadline
from kvemb.net.tls_config import TlsConfig
from tests.real_servers import ServerNodes


class TlsServer(StorageServer):
    """One server with two ports.

    Args:
        kind, port, folder, memory_mb: see `StorageServer`.
        authority: whose certificates it takes.
        issued: its own.
    """

    def __init__(self, kind: str, port: int, folder: Path, memory_mb: int, *, authority: Authority, issued: Issued) -> None:
        self._authority, self._issued = authority, issued
        self.tls_port = free_ports(1)[0]
        self.tls_address = f"127.0.0.1:{self.tls_port}"
        super().__init__(kind, port, folder, memory_mb)

    def _command(self) -> list[str]:
        command, ca = super()._command(), str(self._authority.ca)
        cert, key = str(self._issued.cert), str(self._issued.key)
        if self.kind == "memcached":
            command[command.index("-l") + 1] = f"notls:127.0.0.1:{self.port},127.0.0.1:{self.tls_port}"
            return [*command, "-Z", "-o", f"ssl_chain_cert={cert},ssl_key={key},ssl_ca_cert={ca},ssl_verify_mode=2"]
        tls = ["--tls-port", str(self.tls_port), "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca]
        return [*command, *tls, *(["--tls-cluster", "yes"] if self.kind == "redis-cluster" else [])]


def start_tls_servers(kind: str, n: int, folder: Path, memory_mb: int, *, authority: Authority, issued: Issued) -> list[StorageServer]:
    """Start n servers with two ports each, and wait for both; a Redis Cluster is put together."""
    servers = [TlsServer(kind, port, folder, memory_mb, authority=authority, issued=issued) for port in free_ports(n)]
    deadline = Deadline.after(START_TIMEOUT_S)
    for server in servers:
        server.process.wait_until(lambda server=server: accepts(server.port) and accepts(server.tls_port), deadline)  # type: ignore[misc]
    if kind == "redis-cluster":
        create_redis_cluster([server.port for server in servers], deadline)
    return list[StorageServer](servers)


class TlsNodes(ServerNodes):
    """Nodes that a store reaches over TLS.

    Args:
        kind, n, folder: see `ServerNodes`.
    """

    def __init__(self, kind: str, n: int, folder: Path) -> None:
        self.authority = Authority(folder / "tls")
        self.server_cert = self.authority.issue("node", purposes=("client", "server"))  # members of a Redis Cluster call each other
        self.client_cert = self.authority.issue("client", purposes=("client",))
        for path in (self.authority.folder, *self.authority.folder.iterdir()):
            path.chmod(0o755)  # memcached gives up root for nobody, and tests have no secrets
        super().__init__(kind, n, folder, start=self._start_all)

    def _start_all(self, kind: str, n: int, folder: Path, memory_mb: int) -> list[StorageServer]:
        return start_tls_servers(kind, n, folder, memory_mb, authority=self.authority, issued=self.server_cert)

    @property
    def tls(self) -> TlsConfig:
        return TlsConfig(str(self.authority.ca), str(self.client_cert.cert), str(self.client_cert.key))

    def _config(self) -> StorageConfig:
        addresses = tuple(server.tls_address for server in self.servers if isinstance(server, TlsServer))
        return replace(super()._config(), nodes=addresses, tls=self.tls)
