"""What `apply` pushes, and the proof that it was applied: batches of distinct ids, and sums that come out exactly."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks.ids import row_ids
from benchmarks.measure import cpu_s
from benchmarks.servers import ids_of
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.errors import KvembError
from kvemb.protocol.messages import StatusReply

TIMEOUT_S = 120.0
_SUM_ROWS = 20_000


class WrongApplyError(AssertionError):
    """Storage does not hold what the pushes must have made of it."""


@dataclass(frozen=True)
class Pass:
    """One pass of a contender over all rows.

    Args:
        n_rows: rows written (of GETs: read).
        wall_s: from the first push to the end of the flush.
        server_cpu_s, client_cpu_s, ps_cpu_s: CPU time in it; the last is 0 for peers.
        n_lookups, n_hits: of the shard's cache.
        n_batches: into which the shard merged the pushes.
        journal_bytes: by which the shard's journal grew.
    """

    n_rows: int
    wall_s: float
    server_cpu_s: float
    client_cpu_s: float
    ps_cpu_s: float = 0.0
    n_lookups: int = 0
    n_hits: int = 0
    n_batches: int = 0
    journal_bytes: int = 0

    @property
    def rows_per_s(self) -> float:
        """Rows per second of the whole pass."""
        return self.n_rows / self.wall_s


@dataclass(frozen=True, eq=False)
class Load:
    """Pushes of one pass over a table.

    Args:
        table: to push to.
        batches: uint64 [m] each, distinct in all of them together.
        grads: float32 [m, dim], the same ones for every batch.
    """

    table: Table
    batches: list[NDArray[np.uint64]]
    grads: NDArray[np.float32]

    @property
    def n_rows(self) -> int:
        """Rows of a pass."""
        return sum(len(ids) for ids in self.batches)

    def push_all(self) -> None:
        """Push every batch, and wait until all of it is applied."""
        for ids in self.batches:
            self.table.push(ids, self.grads[: len(ids)], timeout_s=TIMEOUT_S)
        self.table.flush(TIMEOUT_S)


def make_load(table: Table, n_rows: int, batch_rows: int) -> Load:
    """Deal n rows, in random order, to batches."""
    rng = np.random.default_rng(0)
    ids = ids_of(table.definition, rng.permutation(n_rows))
    batches = np.split(ids, range(batch_rows, n_rows, batch_rows))
    return Load(table, batches, rng.standard_normal((min(n_rows, batch_rows), table.dim), dtype=np.float32))


def our_pass(load: Load, server: Sequence[int], shard: Sequence[int]) -> Pass:
    """Push every row once; `server` and `shard` are the processes whose CPU time counts."""
    before = shard_status(load.table.cluster)
    server_s, shard_s = cpu_s(server), cpu_s(shard)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    load.push_all()
    wall_s, client_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    server_s, shard_s = cpu_s(server) - server_s, cpu_s(shard) - shard_s
    after = shard_status(load.table.cluster)
    n_rows, n_lookups = after.rows_applied - before.rows_applied, after.cache_lookups - before.cache_lookups
    hits, journal_bytes = after.cache_hits - before.cache_hits, after.journal_bytes - before.journal_bytes
    return Pass(n_rows, wall_s, server_s, client_s, shard_s, n_lookups, hits, after.k - before.k, journal_bytes)


def check_written(load: Load) -> None:
    """Refuse a table in which a pushed row does not exist, or another one does.

    Raises:
        WrongApplyError: with the numbers.
    """
    n_known = len(load.table)
    stored = [load.table.pull(ids, return_versions=True, timeout_s=TIMEOUT_S)[1] for ids in load.batches]
    n_missing = sum(int((versions == 0).sum()) for versions in stored)
    if n_missing or n_known != load.n_rows:
        raise WrongApplyError(f"{load.n_rows} distinct ids were pushed; {n_missing} of them have no row, the shard knows {n_known}")


def check_sums(opened: Cluster) -> None:
    """Push overlapping batches of whole gradients to a table of plain SGD; rows must be the exact sums.

    Raises:
        WrongApplyError: naming an id.
    """
    table = opened.create_table("sums", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.constant(0.0), id_dtype="uint64")
    rng = np.random.default_rng(5)
    expected = np.zeros((_SUM_ROWS, 4), np.float32)
    for _ in range(6):
        positions = rng.permutation(_SUM_ROWS)[: _SUM_ROWS * 3 // 4]
        grads = rng.integers(-8, 9, (len(positions), 4)).astype(np.float32)
        expected[positions] -= grads
        table.push(row_ids(positions), grads)
    table.flush(TIMEOUT_S)
    require_equal(table.pull(row_ids(np.arange(_SUM_ROWS))), expected)


def require_equal(rows: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Refuse rows that are not the sums.

    Raises:
        WrongApplyError: naming the first.
    """
    wrong = (rows != expected).any(axis=1)
    if wrong.any():
        first = int(row_ids(np.flatnonzero(wrong)[:1])[0])
        raise WrongApplyError(f"{int(wrong.sum())} rows are not the sum of their gradients; the first is id {first}")


def shard_status(opened: Cluster) -> StatusReply:
    """What the one shard says of itself.

    Raises:
        KvembError: it did not answer.
    """
    (shard,) = opened.status().shards
    if shard.reply is None:
        raise KvembError(f"shard {shard.address}: {shard.error}")
    return shard.reply


def cache_mb_for(n_rows: int, record_bytes: int) -> int:
    """Memory in which a shard keeps every row, those of `check_sums` too."""
    return math.ceil((n_rows * (record_bytes + 80) + _SUM_ROWS * 256) / (1 << 20)) + 1
