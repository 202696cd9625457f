"""A faulty cluster in which everything is encrypted, and everybody shows a certificate: trainers, shards, storage nodes."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from unittest import mock

from chaos.cluster import FaultyCluster
from kvemb.local_cluster.storage_servers import StorageServer
from tests.certificates import Authority, Issued
from tests.integration.tls_storage import TlsServer, start_tls_servers

KINDS_WITH_TLS = ("redis", "memcached")
"""Of which this machine's servers are built with TLS, and take a proxy in front of it."""


class TlsFaultyCluster(FaultyCluster):
    """The same with TLS everywhere; a context manager. Trainers find their certificate by this process's environment.

    Args:
        store, nodes, shards, storage: see `FaultyCluster`.
    """

    def __init__(self, store: str, nodes: int, *, shards: int, storage: Mapping[str, object]) -> None:
        self._certificates = tempfile.TemporaryDirectory()
        folder = Path(self._certificates.name)
        self._authority = Authority(folder)
        self._node = self._authority.issue("node", purposes=("server",))
        self._client = self._authority.issue("client", purposes=("client",))
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755)  # memcached gives up root for nobody, and tests have no secrets
        self._trainer: Issued | None = None
        self._environ = mock.patch.dict(os.environ)
        super().__init__(store, nodes, shards=shards, storage=storage)

    def _start_servers(self, store: str, n: int, folder: Path, memory_mb: int) -> list[StorageServer]:
        cluster = f"kvemb://{folder.name}"
        trainer = self._authority.issue("trainer", f"{cluster}/trainer/*", f"{cluster}/admin/chaos", purposes=("client",))
        self._environ.start()
        os.environ.update(CHAOS_CERT=str(trainer.cert), CHAOS_KEY=str(trainer.key))
        for shard in range(self._n_shards):
            self._authority.issue(f"shard-{shard}", f"{cluster}/shard/{shard}", purposes=("server",))
        return start_tls_servers(store, n, folder, memory_mb, authority=self._authority, issued=self._node)

    def _served_at(self, server: StorageServer) -> str:
        assert isinstance(server, TlsServer)
        return server.tls_address

    def _shard_command(self, index: int) -> list[str]:
        issued = Issued(self._authority.folder, f"shard-{index}")
        return ["env", f"CHAOS_CERT={issued.cert}", f"CHAOS_KEY={issued.key}", *super()._shard_command(index)]

    def _config(self, *nodes: str, shards: list[str]) -> dict[str, object]:
        tree = super()._config(*nodes, shards=shards)
        ca = str(self._authority.ca)
        for name, tls in (
            ("storage", {"ca": ca, "cert": str(self._client.cert), "key": str(self._client.key)}),
            ("parameter_servers", {"ca": ca, "cert_env": "CHAOS_CERT", "key_env": "CHAOS_KEY"}),
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
