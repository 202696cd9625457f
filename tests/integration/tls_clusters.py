"""A real cluster with TLS: an authority, a storage server, shards as processes, and kvemb.yaml as each process sees it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kvemb.local_cluster.processes import free_ports
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.net.certificate_authority import Authority, Issued
from tests.integration.shard_processes import Process, until

NAME = "ads"


class TlsCluster:
    """One storage server, and shards that speak TLS.

    Args:
        folder: for everything.
        n_shards: how many.
        tls: more keys of `parameter_servers.tls`; with a token clients need no certificate.
        environ: of the shards, beside the test's own.
        storage: the section `storage`; a plain server is started unless given.
    """

    def __init__(
        self,
        folder: Path,
        *,
        n_shards: int = 1,
        tls: dict[str, str] | None = None,
        environ: dict[str, str] | None = None,
        storage: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.authority = folder, Authority(folder / "tls")
        self._servers: list[StorageServer] = []
        if storage is None:
            self._servers = start_servers("redis", 1, folder, 64)
            storage = {"kind": "redis", "nodes": [server.address for server in self._servers], "timeout_s": 3}
        ports = free_ports(n_shards)
        self.tree: dict[str, Any] = {
            "cluster": NAME,
            "storage": storage,
            "parameter_servers": {
                "shards": [f"127.0.0.1:{port}" for port in ports],
                "data_dir": str(folder / "data"),
                "tls": {"ca": "tls/ca.pem", "cert_env": "TLS_CERT", "key_env": "TLS_KEY", **(tls or {})},
            },
        }
        self.path = folder / "kvemb.yaml"
        self.write()
        self.environ, self.shards = environ or {}, list[Process]()
        self.options: list[str] = []  # of the shards' command line
        for shard in range(n_shards):
            self.authority.issue(f"shard-{shard}", f"kvemb://{NAME}/shard/{shard}", purposes=("server",))

    def write(self) -> None:
        """Write kvemb.yaml as `tree` says."""
        self.path.write_text(yaml.safe_dump(self.tree))

    def issue(self, *uris: str, name: str = "trainer", **options: Any) -> Issued:
        """A client's certificate."""
        return self.authority.issue(name, *(f"kvemb://{NAME}/{uri}" for uri in uris), purposes=("client",), **options)

    def as_seen_by(self, issued: Issued | None, **tls: str) -> dict[str, Any]:
        """kvemb.yaml as a dict, with a client's own certificate."""
        section: dict[str, str] = {"ca": str(self.authority.ca), **tls}
        if issued is not None:
            section |= {"cert": str(issued.cert), "key": str(issued.key)}
        return {**self.tree, "parameter_servers": {**self.tree["parameter_servers"], "tls": section}}

    def launch(self, shard: int, issued: Issued | None = None) -> Process:
        """Start a shard's process."""
        of_shard = issued or Issued(self.authority.folder, f"shard-{shard}")
        ready = self.folder / f"ready-{shard}"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "paramserver", "--config", str(self.path), "--shard", str(shard), "--ready-file", str(ready)]
        command += self.options
        variables = {**self.environ, "TLS_CERT": of_shard.cert, "TLS_KEY": of_shard.key}
        return Process(
            ["env", *(f"{name}={value}" for name, value in variables.items()), *command],
            self.folder / f"shard-{shard}-{len(self.shards)}.log",
        )

    def start(self) -> None:
        """Start every shard, and wait for it."""
        for shard in range(len(self.tree["parameter_servers"]["shards"])):
            self.shards.append(self.launch(shard))
        for shard, process in enumerate(self.shards):
            until((self.folder / f"ready-{shard}").exists, process)

    def close(self) -> None:
        for process in self.shards:
            process.end()
        for server in self._servers:
            server.process.kill()


@contextmanager
def running(cluster: TlsCluster) -> Iterator[TlsCluster]:
    """Run it for the length of a `with` block."""
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
