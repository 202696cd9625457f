"""All that a cluster of one release keeps, small: data folders, what its storage nodes hold, checkpoints, kvemb.yaml, and the rows by it.

    python tests/upgrade/golden_data.py RELEASE       writes golden/RELEASE.tar.xz

Run it once for a release, by the release itself, and keep the file: every later build starts from it (test_golden_data.py). The shards
were killed after acknowledged pushes that storage never saw. There are runs of the row log, a dropped table, and slots that moved.
"""

import os
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import yaml

import kvemb
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import StorageServer
from tests.real_servers import redis_client

GOLDEN = Path(__file__).with_name("golden")
IDS = {"user": np.arange(-40, 200) * 2**33, "item": np.arange(300), "half": np.arange(120) * 7}
"""Of every table, with some that were never pushed."""
_WRITTEN = {"user": IDS["user"][:200], "item": IDS["item"][50:250], "half": IDS["half"][:100]}
Values = list[list[Any]]
"""[key, bytes] or [key, {field: bytes}] of one node, in the order of keys."""


class KeptCluster(LocalCluster):
    """A local cluster whose kvemb.yaml names a table, and that may begin with another one's nodes and folders.

    Args:
        start_from: a folder of golden data, unpacked; None for a new cluster.
    """

    def __init__(self, start_from: Path | None = None) -> None:
        self._from = start_from
        super().__init__("redis", 2, shards=2, memory_mb=64, journal_max_mb=1)

    def _start_servers(self, store: str, n: int, folder: Path, memory_mb: int) -> list[StorageServer]:
        servers = super()._start_servers(store, n, folder, memory_mb)
        if self._from is not None:
            shutil.copytree(self._from / "shards", folder / "shards")
            for server, values in zip(servers, facts(self._from)["nodes"], strict=True):
                fill(server, values)
        return servers

    def _config(self, *nodes: str, shards: list[str]) -> dict[str, object]:
        tree = super()._config(*nodes, shards=shards)
        if self._from is None:
            return tree | {"tables": {"user": {"dim": 4, "optimizer": {"kind": "adam", "lr": 0.01}, "initializer": {"kind": "normal"}}}}
        kept: dict[str, Any] = yaml.safe_load((self._from / "kvemb.yaml").read_text(encoding="utf-8"))
        kept["storage"]["nodes"], kept["parameter_servers"]["shards"] = list(nodes), shards
        kept["parameter_servers"]["data_dir"] = str(self.folder / "shards")
        return kept


def facts(folder: Path) -> dict[str, Any]:
    """What golden data say of themselves: {"nodes": values of each, "rows", "saved_rows": raw float32 of `IDS` by table}."""
    found: dict[str, Any] = msgpack.unpackb((folder / "facts").read_bytes(), strict_map_key=False)
    return found


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of ours into a folder."""
    with tarfile.open(archive) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)  # since 3.11.4, and asked for from 3.12 on
        files.extractall(folder)


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Golden data in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="kvemb-golden-") as folder:
        unpack(archive, Path(folder))
        yield Path(folder)


def rows_of(client: kvemb.Cluster) -> dict[str, bytes]:
    """Every row of `IDS`, also of those that do not exist yet."""
    return {name: rows.astype("<f4").tobytes() for name, rows in client.pull(IDS).items()}


def dump(server: StorageServer) -> Values:
    """Return all that a storage server holds."""
    with closing(redis_client(server)) as redis:
        return [[key, redis.hgetall(key) if redis.type(key) == b"hash" else redis.get(key)] for key in sorted(redis.keys())]


def fill(server: StorageServer, values: Values) -> None:
    """Put values that `dump` returned into an empty storage server."""
    with closing(redis_client(server)) as redis:
        for key, value in values:
            redis.hset(key, mapping=value) if isinstance(value, Mapping) else redis.set(key, value)


def _push(client: kvemb.Cluster, grad: float, part: slice = slice(None)) -> Any:
    dims = {name: client.table(name).definition.dim for name in _WRITTEN}
    return client.push({name: (ids[part], np.full((len(ids[part]), dims[name]), grad)) for name, ids in _WRITTEN.items()})


def make(archive: Path) -> None:
    """Make golden data by this release."""
    with tempfile.TemporaryDirectory() as temporary, KeptCluster() as cluster:
        folder = Path(temporary)
        saved = folder / "checkpoints"
        with kvemb.connect(cluster.url, trainer="golden") as client:
            client.create_table("item", dim=3, optimizer=kvemb.optim.adagrad(lr=0.1), initializer=kvemb.init.uniform(-1, 1), num_ids=300)
            client.create_table(
                "half", dim=8, optimizer=kvemb.optim.rowwise_adagrad(lr=0.1), initializer=kvemb.init.normal(std=0.1), dtype="bfloat16",
                expected_rows=2000, layout="compact",
            )  # fmt: skip
            gone = client.create_table("gone", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            gone.push(np.arange(50), np.ones((50, 2))).wait_applied()
            client.drop_table("gone")
            _push(client, 0.5).wait_applied()
            client.save((saved / "first").as_uri())
            while not all(any((path / "snapshot").glob("*.run")) for path in (cluster.folder / "shards").glob("shard-*")):
                _push(client, 0.25).wait_applied()
            client.table("user").erase(_WRITTEN["user"][:10])
            client.save((saved / "second").as_uri(), base=(saved / "first").as_uri())
            saved_rows = rows_of(client)
            client.shards.begin(client.shards.rebalance({client.shards.addresses()[0]: 2.0}))
            client.shards.wait(timeout_s=60)
            client.table("user").set_hyper(lr=0.02)
            _push(client, -1.0, slice(0, None, 2)).wait_applied()
            for server in cluster.servers:
                server.process.signal(signal.SIGSTOP)
            _push(client, 1.0, slice(0, None, 3)).wait(timeout_s=30)
            for shard in cluster.shards:
                shard.kill()
            for server in cluster.servers:
                server.process.signal(signal.SIGCONT)
        nodes = [dump(server) for server in cluster.servers]
        shutil.copytree(cluster.folder / "shards", folder / "shards", ignore=shutil.ignore_patterns("lock", "*.last-words"))
        shutil.copy(cluster.config_path, folder / "kvemb.yaml")
        for shard in range(2):
            cluster.start_shard(shard)
        with kvemb.connect(cluster.url) as client:
            client.flush()
            rows = rows_of(client)
        (folder / "facts").write_bytes(msgpack.packb({"nodes": nodes, "rows": rows, "saved_rows": saved_rows}))
        _pack(folder, archive)


def _pack(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=9) as files:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            files.add(path, path.relative_to(folder))
    print(f"{archive}: {archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    os.umask(0o077)
    make(GOLDEN / f"{sys.argv[1]}.tar.xz")
