"""A local cluster in which everything is encrypted, and everybody shows a certificate: trainers, shards, storage nodes."""

import os
import tempfile
from pathlib import Path
from types import TracebackType
from unittest import mock

from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.net.certificate_authority import Authority, Issued
from tests.integration.tls_storage import TlsServer, start_tls_servers

KINDS_WITH_TLS = ("redis", "memcached")
"""Of which this machine's servers are built with TLS, and take a proxy in front of it."""
_CERT, _KEY = "KVEMB_TEST_CERT", "KVEMB_TEST_KEY"


class EncryptedCluster(LocalCluster):
    """A LocalCluster with TLS everywhere; a context manager. Trainers find their certificate by this process's environment."""

    _certificates: "tempfile.TemporaryDirectory[str]"
    _authority: Authority
    _node: Issued
    _client: Issued

    def _start_servers(self, store: str, n: int, folder: Path, memory_mb: int) -> list[StorageServer]:
        if not hasattr(self, "_authority"):  # otherwise further ones of the same cluster
            self._issue(folder)
        return start_tls_servers(store, n, folder, memory_mb, authority=self._authority, issued=self._node)

    def further_server(self) -> TlsServer:
        """Start a storage server that is none of the cluster's; whoever asks for it ends it."""
        (server,) = self._start_servers(self.store, 1, self.folder, self._memory_mb)
        assert isinstance(server, TlsServer)
        return server

    def _issue(self, folder: Path) -> None:
        self._certificates = tempfile.TemporaryDirectory()
        self._authority = Authority(Path(self._certificates.name))
        self._node = self._authority.issue("node", purposes=("server",))
        self._client = self._authority.issue("client", purposes=("client",))
        for path in (self._authority.folder, *self._authority.folder.iterdir()):
            path.chmod(0o755)  # memcached gives up root for nobody, and tests have no secrets
        cluster = f"kvemb://{folder.name}"
        trainer = self._authority.issue("trainer", f"{cluster}/trainer/*", f"{cluster}/admin/tests", purposes=("client",))
        self._environ = mock.patch.dict(os.environ, {_CERT: str(trainer.cert), _KEY: str(trainer.key)})
        self._environ.start()

    def _served_at(self, server: StorageServer) -> str:
        assert isinstance(server, TlsServer)
        return server.tls_address

    def _shard_command(self, index: int) -> list[str]:
        issued = Issued(self._authority.folder, f"shard-{index}")
        if not issued.cert.exists():
            self._authority.issue(f"shard-{index}", f"kvemb://{self.folder.name}/shard/{index}", purposes=("server", "client"))
        return ["env", f"{_CERT}={issued.cert}", f"{_KEY}={issued.key}", *super()._shard_command(index)]

    def _config(self, *nodes: str, shards: list[str]) -> dict[str, object]:
        tree = super()._config(*nodes, shards=shards)
        if not hasattr(self, "_authority"):  # only looked at before anything is started
            return tree
        ca = str(self._authority.ca)
        for name, tls in (
            ("storage", {"ca": ca, "cert": str(self._client.cert), "key": str(self._client.key)}),
            ("parameter_servers", {"ca": ca, "cert_env": _CERT, "key_env": _KEY}),
        ):
            section = tree[name]
            assert isinstance(section, dict)
            section["tls"] = tls
        return tree

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._environ.stop()
            self._certificates.cleanup()
