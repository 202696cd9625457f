"""Memory of a shard's process: batches use it again without asking the system, and what a save or a load took is given back."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.api.table import Table
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc, and told by /proc")
PATIENCE_S, DIM = 60.0, 64
N_ROWS, BATCH_ROWS = 100_000, 20_000
RECORD_BYTES = 12 + 3 * 4 * DIM
Trained = tuple[LocalCluster, kvemb.Cluster, Table]


def page_faults(pid: int) -> int:
    """Pages that the system gave the process so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def memory_mb(pid: int) -> float:
    """What it holds now, its files apart."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("RssAnon"))


def train(table: Table, n_batches: int) -> None:
    for number in range(n_batches):
        ids = np.arange(BATCH_ROWS) + number * BATCH_ROWS % N_ROWS
        table.push(ids, np.ones((BATCH_ROWS, DIM), np.float32)).wait_applied(PATIENCE_S)


@pytest.fixture(scope="module")
def trained(require_server: Callable[[str], str]) -> Iterator[Trained]:
    """A shard whose cache has every row of a table."""
    require_server("redis-server")
    with LocalCluster("redis") as cluster, kvemb.connect(cluster.url) as opened:
        table = opened.create_table("rows", dim=DIM, optimizer=kvemb.optim.adam(lr=0.01))
        train(table, 2 * N_ROWS // BATCH_ROWS)
        yield cluster, opened, table


def test_a_shard_in_training_asks_the_system_for_no_memory(trained: Trained) -> None:
    cluster, _, table = trained
    pid, n_batches = cluster.shards[0].pid, 10
    before = page_faults(pid)
    train(table, n_batches)
    of_a_copy = BATCH_ROWS * RECORD_BYTES / 4096  # if each batch had one array of its records mapped
    assert (page_faults(pid) - before) / n_batches < of_a_copy / 4


def test_what_saves_and_a_load_took_of_a_shards_memory_is_given_back(trained: Trained, tmp_path: Path) -> None:
    cluster, opened, table = trained
    pid, records_mb = cluster.shards[0].pid, N_ROWS * RECORD_BYTES / 1e6
    before = memory_mb(pid)
    for name in ("once", "again"):
        opened.save(tmp_path / name)
        train(table, 2)
    becomes(lambda: memory_mb(pid) < before + records_mb / 2)
    opened.load(tmp_path / "once")  # the next cache is empty
    becomes(lambda: memory_mb(pid) < before)


def becomes(holds: Callable[[], bool]) -> None:
    deadline = Deadline.after(PATIENCE_S)
    while not holds():
        assert not deadline.expired
        time.sleep(0.05)
