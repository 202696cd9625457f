"""The question `evictions`: is a table through which ids drift held at its rows, and what does that cost its training?"""

import argparse
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks.ids import row_ids
from benchmarks.measure import Spread, Turn, cpu_s
from benchmarks.options import positive, whole
from benchmarks.report import Line, Report, Section
from benchmarks.train import STORES
from benchmarks.train_loop import TIMEOUT_S
from kvemb import evict
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.client.ack import Ack
from kvemb.local_cluster import LocalCluster

TARGET, HELD = 0.9, 0.02
_SEED = 3
_LEARNING_RATE = 0.01
_REST_S = 120.0


@dataclass(frozen=True)
class Drift:
    """Ids of which some are seen for the first time in every step, and the others were in one of the last.

    Args:
        n_ids: of a step, all different.
        n_new: of them, seen for the first time.
        window: ids back to which the others reach.
    """

    n_ids: int
    n_new: int
    window: int

    def step(self, number: int) -> NDArray[np.uint64]:
        """Return the ids of one step: uint64 [n_ids]."""
        behind = number * self.n_new  # ids that there were before
        new = np.arange(behind, behind + self.n_new)
        rng = np.random.default_rng((_SEED, number))
        reach = min(self.window, behind)
        old = behind - 1 - rng.choice(reach, min(self.n_ids - self.n_new, reach), replace=False) if reach else new[:0]
        return row_ids(np.concatenate([old, new]))


@dataclass(eq=False)
class Trained:
    """One table, on a cluster of its own, at some step of the drift."""

    cluster: LocalCluster
    opened: Cluster
    table: Table
    drift: Drift
    at: int = 0

    def turn(self, seconds: float) -> Turn:
        """Train for about so long; every push is applied when it ends."""
        start_s, start_cpu_s, n_rows = time.perf_counter(), time.process_time(), 0
        before: Ack | None = None
        while time.perf_counter() - start_s < seconds:
            ids = self.drift.step(self.at)
            rows = self.table.pull(ids, timeout_s=TIMEOUT_S)
            ack = self.table.push(ids, rows * 0.5 + 1, timeout_s=TIMEOUT_S)
            if before is not None:
                before.wait_applied(TIMEOUT_S)
            before, self.at, n_rows = ack, self.at + 1, n_rows + len(ids)
        self.table.flush(TIMEOUT_S)
        return Turn(n_rows, time.perf_counter() - start_s, time.process_time() - start_cpu_s)

    @property
    def n_seen(self) -> int:
        """Distinct ids so far."""
        return self.at * self.drift.n_new

    def figures(self) -> dict[str, float]:
        """Rows, MB of storage, of the shard's memory, of its disk; seconds of its processor so far."""
        (shard,) = self.cluster.shards
        resident = Path(f"/proc/{shard.pid}/statm").read_text(encoding="utf-8").split()[1]
        files = [path.stat().st_size for path in self.cluster.folder.rglob("*.run")]
        return {
            "ids seen": self.n_seen,
            "rows": len(self.table),
            "storage MB": self.opened.status().nodes[0].used_bytes / 1e6,
            "shard MB": int(resident) * 4096 / 1e6,
            "row log MB": sum(files) / 1e6,
            "shard CPU s": cpu_s([shard.pid]),
        }


def evictions(options: argparse.Namespace) -> Report:
    """Is a table through which ids drift held at its rows, and what does that cost its training?

    Two tables, each on a cluster of its own (one node, one shard), are trained by turns with Adam at dim 16: one is held by
    `evict.keep(--rows)`, the other has no policy. A step has --batch different ids, --new of them never seen before, the others from the
    last --rows / 2 ids. Each step's pull waits for the push of the last step but one; a turn ends with a flush. Turns begin to count when
    --rows ids have been seen, and end when ten times as many have. Read: rows/s is pulled, pushed and applied; "with / without" is taken
    within a round; "held" are the rows of the first table after each turn, divided by --rows. Memory and disk are those at the end of the
    first and the last turn: the index, the row log and storage are flat where the first table's have not grown. After: rows at rest, and
    every row that is there is one of those pushed last.
    """
    sections = [_on(store, options) for store in options.store]
    return Report("evictions", sections)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `evictions` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis"], help="storage kinds, in turn (redis)")
    parser.add_argument("--rows", type=whole(1), default=200_000, metavar="N", help="rows that the policy keeps (200000)")
    parser.add_argument("--batch", type=whole(2), default=20_000, metavar="N", help="ids of a step (20000)")
    parser.add_argument("--new", type=whole(1), default=1_000, metavar="N", help="of them never seen before (1000)")
    parser.add_argument("--seconds", type=positive, default=5.0, metavar="S", help="length of a turn (5)")
    parser.add_argument("--times", type=positive, default=10.0, metavar="X", help="ids in all, as a multiple of --rows (10)")


def _on(store: str, options: argparse.Namespace) -> Section:
    drift = Drift(options.batch, options.new, options.rows // 2)
    with ExitStack() as stack:
        held, free = (_started(stack, store, drift, policy, options) for policy in (evict.keep(options.rows), evict.never()))
        for one in (held, free):
            while one.n_seen < options.rows:
                one.turn(options.seconds)
        begin = [one.figures() for one in (held, free)]
        speeds: list[tuple[float, float]] = []
        ratios: list[float] = []
        shares: list[float] = []
        while min(held.n_seen, free.n_seen) < options.times * options.rows:
            pair = [held, free] if len(ratios) % 2 else [free, held]
            turns = {id(one): one.turn(options.seconds) for one in pair}
            with_, without = (turns[id(one)].n_rows / turns[id(one)].wall_s for one in (held, free))
            speeds.append((with_, without))
            ratios.append(with_ / without)
            shares.append(len(held.table) / options.rows)
        end = [one.figures() for one in (held, free)]
        at_rest = _at_rest(held, options.rows)
    lines = []
    for name, at, first, last in (("with", 0, begin[0], end[0]), ("without", 1, begin[1], end[1])):
        figures: dict[str, Spread | float | str] = {"rows/s": Spread.of([pair[at] for pair in speeds])}
        figures |= {what: f"{first[what]:,.0f} -> {last[what]:,.0f}" for what in first}
        lines.append(Line(f"{name} the policy", figures))
    of_both: dict[str, Spread | float | str] = {"with / without": Spread.of(ratios), "target": f">= {TARGET}"}
    of_both |= {"held": Spread.of(shares), "held target": f"1 ± {HELD}", "held at rest": at_rest / options.rows}
    settings = {"store": store, "dim": 16, "optimizer": "adam", "rows": options.rows, "batch": options.batch, "new": options.new}
    return Section({**settings, "seconds": options.seconds}, lines=[*lines, Line("both", of_both)])


def _started(stack: ExitStack, store: str, drift: Drift, policy: evict.Eviction, options: argparse.Namespace) -> Trained:
    memory_mb = max(1024, round(2 * options.times * options.rows * 500 / (1 << 20)))
    cluster = stack.enter_context(LocalCluster(store, shards=1, memory_mb=memory_mb, journal_max_mb=256, durability="os"))
    opened = stack.enter_context(kvemb.connect(cluster.url))
    spec = kvemb.optim.adam(lr=_LEARNING_RATE)
    return Trained(cluster, opened, opened.create_table("bench", dim=16, optimizer=spec, id_dtype="uint64", eviction=policy), drift)


def _at_rest(held: Trained, n_kept: int) -> int:
    """Wait until no row goes; check which there are, and return how many.

    Raises:
        RuntimeError: a row is there that was pushed longer ago than one that is not, or it does not come to rest.
    """
    end_s, n_rows = time.monotonic() + _REST_S, -1
    while (now := len(held.table)) != n_rows:
        if time.monotonic() > end_s:
            raise RuntimeError(f"{now} rows after {_REST_S:g} s, and still fewer by the second; {n_kept} are to be kept")
        n_rows = now
        time.sleep(3)
    last = row_ids(np.arange(held.n_seen - n_kept // 2, held.n_seen))
    _, versions = held.table.pull(last, return_versions=True, timeout_s=TIMEOUT_S)
    if not versions.all():
        raise RuntimeError(f"{int((versions == 0).sum())} of the {len(last)} ids seen last have no row")
    return n_rows
