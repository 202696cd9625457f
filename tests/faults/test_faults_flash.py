"""Rows on memcached's flash file (`ext_path`): trained as in memory, brought back; a lack of memory, or of file, loses none of them."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from chaos.cluster import FaultyCluster
from jobs import PATIENCE_S, eventually

import kvemb
from kvemb.errors import KvembError, NodeUnavailableError
from kvemb.local_cluster.storage_servers import StorageServer
from tests.real_servers import memcached_client

N, DIM = 60_000, 128
IDS = np.arange(N)
ROW_BYTES = DIM * 4  # and a header
MEMORY_MB = 24  # of some 35 MB of rows


class Flash:
    """The flash file that nodes are started with."""

    def __init__(self, folder: Path) -> None:
        self.path, self.size_mb = folder / "rows", 256

    def words(self) -> list[str]:
        # Pages as small as these rows: 64 MB each is what a real file has.
        return ["-o", f"ext_page_size=4,ext_wbuf_size=2,ext_path={self.path}:{self.size_mb}M,ext_item_size=128,ext_item_age=1"]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch, require_server: Callable[[str], str]) -> Iterator[Flash]:
    """Nodes with a flash file, which memcached's own user can write."""
    require_server("memcached")
    folder = Path(tempfile.mkdtemp(prefix="kvemb-flash-"))
    folder.chmod(0o777)
    made, plain = Flash(folder), StorageServer._command
    monkeypatch.setattr(StorageServer, "_command", lambda self: plain(self) + made.words())
    yield made
    shutil.rmtree(folder)


def stat(server: StorageServer, name: str) -> int:
    with closing(memcached_client(server)) as client:
        return int(client.stats()[name.encode()])


def add(table: kvemb.Table, ids: np.ndarray) -> None:
    table.push(ids, np.full((len(ids), DIM), -1.0, np.float32), timeout_s=PATIENCE_S).wait_applied(timeout_s=PATIENCE_S)


def wide_table(cluster: kvemb.Cluster) -> kvemb.Table:
    sgd, zeros = kvemb.optim.sgd(lr=1.0), kvemb.init.zeros()
    return cluster.create_table("wide", dim=DIM, optimizer=sgd, initializer=zeros, exist_ok=True)


def fill(table: kvemb.Table, server: StorageServer, ids: np.ndarray) -> None:
    """Write rows no faster than memcached moves them: what it has moved none of has all of its memory."""
    add(table, ids)
    eventually(lambda: stat(server, "curr_items") - stat(server, "extstore_objects_used") < 10_000, "rows do not go to flash")


def require(table: kvemb.Table, counts: np.ndarray) -> None:
    """Every weight of every row has the value of its row: in parts, since memory for rows on their way from flash is what is scarce."""
    for ids in np.array_split(IDS, 12):
        rows = table.pull(ids, timeout_s=PATIENCE_S)
        wrong = np.flatnonzero((rows != counts[ids, None]).any(1))
        assert not len(wrong), (len(wrong), ids[wrong[:3]], rows[wrong[:3], 0], counts[ids[wrong[:3]]])


def pull_on(table: kvemb.Table) -> None:
    """Pull rows that lie on flash, more at once than there is memory for, for as long as a test may wait."""
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        table.pull(IDS[:15_000], timeout_s=3)


def push_on(table: kvemb.Table) -> None:
    """Push the same ids for ever."""
    while True:
        add(table, IDS[:100])


def test_more_rows_than_memory_are_trained_exactly(flash: Flash) -> None:
    settings = {"timeout_s": 5}
    with (
        FaultyCluster("memcached", 1, shards=1, storage=settings, servers={"cache_mb": 0}, memory_mb=MEMORY_MB) as local,
        kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster,
    ):
        table, server = wide_table(cluster), local.servers[0]
        assert N * ROW_BYTES > MEMORY_MB << 20
        counts, rng = np.zeros(N), np.random.default_rng(0)
        for ids in np.array_split(IDS, 12):
            fill(table, server, ids)
            counts[ids] += 1
        for _ in range(20):
            ids = np.unique(rng.integers(0, N, 4000))
            table.pull(ids, timeout_s=PATIENCE_S)
            add(table, ids)
            counts[ids] += 1
        require(table, counts)
        eventually(lambda: stat(server, "extstore_objects_used") > N // 2, "rows are not on flash")
        assert stat(server, "get_extstore") > N // 2
        assert stat(server, "curr_items") >= N
        [node] = cluster.status().nodes
        assert not node.unsafe
        assert node.evicted == 0
        assert 0 < node.used_bytes <= node.limit_bytes


@pytest.mark.full
def test_a_node_without_memory_for_its_rows_on_flash_says_so_and_loses_none(flash: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"timeout_s": 2}
    with (
        FaultyCluster("memcached", 1, shards=1, storage=settings, servers={"cache_mb": 0}, memory_mb=MEMORY_MB) as local,
        kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster,
    ):
        table, server = wide_table(cluster), local.servers[0]
        fill(table, server, IDS[:15_000])
        for ids in np.array_split(IDS[15_000:], 3):  # faster than they are moved
            table.push(ids, np.full((len(ids), DIM), -1.0, np.float32), timeout_s=PATIENCE_S).wait(timeout_s=PATIENCE_S)
        eventually(lambda: "out of memory" in str(cluster.status().shards[0].reply), "the shard does not say that the node is full")
        with pytest.raises(NodeUnavailableError, match="no memory to read from flash"):
            pull_on(table)
        [node] = cluster.status().nodes
        assert node.used_bytes > 0.9 * node.limit_bytes
        monkeypatch.setattr(server, "_memory_mb", 64)
        local.restart_nodes(0)
        cluster.flush(timeout_s=PATIENCE_S)
        require(table, np.ones(N))


@pytest.mark.full
def test_a_flash_file_that_fills_up_stops_shards_before_a_row_is_lost(flash: Flash) -> None:
    flash.size_mb = 48
    assert 0.6 * (flash.size_mb << 20) < N * ROW_BYTES
    with (
        FaultyCluster("memcached", 1, shards=1, storage={"timeout_s": 5}, servers={"cache_mb": 0}, memory_mb=64) as local,
        kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster,
    ):
        table, server = wide_table(cluster), local.servers[0]
        for ids in np.array_split(IDS, 12):
            fill(table, server, ids)
        eventually(lambda: "flash file" in cluster.status().nodes[0].unsafe, "nobody says that the file is full")
        with pytest.raises(KvembError, match=r"flash file of .* MB: .*larger file"):
            push_on(table)
        assert stat(server, "extstore_objects_evicted") == 0
        flash.size_mb = 256
        local.shards[0].kill()
        local.restart_nodes(0)
        local.start_shard(0)
        # What was accepted when the shard stopped is applied now: the first hundred rows are alike, the others are as they were.
        with kvemb.connect(local.url, timeout_s=PATIENCE_S) as again:
            table = wide_table(again)
            more = table.pull(IDS[:1], timeout_s=PATIENCE_S)[0, 0]
            assert more >= 1
            require(table, np.where(IDS < 100, more, 1.0))
