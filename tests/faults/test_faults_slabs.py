"""A memcached that moves a slab page throws rows away and counts no eviction: refused, or, where that was allowed, noticed and mended."""

import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from chaos.cluster import FaultyCluster
from jobs import PATIENCE_S, add, counting_table, eventually, nodes_of, require

import kvemb
from kvemb.errors import UnsafeNodeError
from kvemb.local_cluster.processes import LocalProcessError
from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from tests.real_servers import memcached_client

pytestmark = pytest.mark.full  # test_deleted_rows.py: rows that vanish one by one

N = 60_000
IDS = np.arange(N)


@pytest.fixture
def movable(monkeypatch: pytest.MonkeyPatch, require_server: Callable[[str], str]) -> None:
    """Nodes that are told to allow what ours are told not to."""
    require_server("memcached")
    safe = StorageServer._command

    def command(self: StorageServer) -> list[str]:
        return ["slab_reassign,slab_automove=0" if word == "no_slab_reassign" else word for word in safe(self)]

    monkeypatch.setattr(StorageServer, "_command", command)


def stat(server: StorageServer, name: str, *of: str) -> int:
    """One number of the server's statistics."""
    with closing(memcached_client(server)) as client:
        return int(client.stats(*of).get(name.encode(), 0))


def missing(table: kvemb.Table, servers: list[StorageServer]) -> int:
    """How many rows the nodes do not hold."""
    n_found, nodes = 0, nodes_of(table, len(servers), IDS)
    keys = RowKeys(table.definition.tag, IDS.astype(np.uint64)).encode()
    for index, server in enumerate(servers):
        with closing(memcached_client(server)) as client:
            n_found += len(client.get_many([key.tobytes().decode() for key in keys[nodes == index]]))
    return N - n_found


def move_pages(server: StorageServer, row_bytes: int) -> None:
    """Have the server take a page away from the rows' slab class, as an administrator or its automover does."""
    with closing(memcached_client(server)) as client:
        slabs = client.stats("slabs")
        sizes = {int(name.split(b":")[0]): int(size) for name, size in slabs.items() if name.endswith(b":chunk_size")}
        used = {number: int(slabs[b"%d:used_chunks" % number]) for number in sizes}
        source = max((number for number in sizes if sizes[number] >= row_bytes), key=lambda number: used[number])
        before = int(client.stats()[b"slabs_moved"])
        assert client.raw_command(f"slabs reassign {source} 0", b"\r\n") == b"OK"
        deadline = Deadline.after(PATIENCE_S)
        while int(client.stats()[b"slabs_moved"]) == before:
            assert not deadline.expired
            time.sleep(0.02)


@pytest.mark.usefixtures("movable")
def test_a_memcached_that_may_move_slabs_is_refused_by_shards_and_trainers() -> None:
    with pytest.raises(LocalProcessError, match="slab_reassign"), FaultyCluster("memcached", 1, shards=1):
        pass
    with FaultyCluster("memcached", 1, shards=1, storage={"allow_row_loss": True}) as local:
        kept = local.config_path.read_text(encoding="utf-8")
        assert "allow_row_loss: true" in kept
        local.config_path.write_text(kept.replace("allow_row_loss: true", "allow_row_loss: false"), encoding="utf-8")
        with pytest.raises(UnsafeNodeError, match=r"slab_reassign.*no_slab_reassign"):
            kvemb.connect(local.url, timeout_s=PATIENCE_S)


@pytest.mark.usefixtures("movable")
@pytest.mark.parametrize("cache_mb", [0, 64])
def test_rows_that_a_slab_move_threw_away_are_noticed_and_brought_back_without_a_push(cache_mb: int) -> None:
    settings = {"timeout_s": 5, "allow_row_loss": True}
    with (
        FaultyCluster("memcached", 2, shards=2, storage=settings, servers={"cache_mb": cache_mb}) as local,
        kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster,
    ):
        table = counting_table(cluster, "moved")
        for _ in range(2):
            add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
        server, n_lost = local.servers[0], 0
        for _ in range(8):  # free chunks take the rows of the first pages
            move_pages(server, table.definition.record.size_bytes)
            n_lost = stat(server, "slab_reassign_evictions_nomem") + stat(server, "slab_reassign_busy_deletes")
            if n_lost:
                break
        assert n_lost > 0
        assert stat(server, "evictions") == 0
        eventually(lambda: missing(table, local.servers) == 0, f"{n_lost} rows thrown away are not brought back")
        require(table, IDS, 2)
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
        require(table, IDS, 3)
