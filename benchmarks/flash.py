"""The question `flash`: what does training cost when rows lie on the flash file of memcached, and not in its memory?"""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from pymemcache.client.base import Client

import kvemb
from benchmarks.ids import DISTRIBUTIONS, row_ids, sampler
from benchmarks.measure import Spread, Turn
from benchmarks.options import positive, whole
from benchmarks.report import Line, Report, Section
from benchmarks.train_loop import TIMEOUT_S
from kvemb.api.table import Table
from kvemb.client.ack import Ack
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import accepts, free_ports
from kvemb.local_cluster.storage_servers import START_TIMEOUT_S, StorageServer
from kvemb.net.deadline import Deadline

TARGET = 0.5
_SEED = 5
_FILLED_AT_ONCE = 20_000
_MOST_IN_MEMORY = 0.25  # of the node's memory, of rows that are not on flash yet, while it is filled
_DROPPED_EVERY_S = 0.5


class FlashServer(StorageServer):
    """A memcached that moves rows to a file after a second."""

    flash: Path

    def _command(self) -> list[str]:
        return [*super()._command(), "-o", f"ext_path={self.flash}:64G,ext_item_size=128,ext_item_age=1,ext_threads=4"]

    def counted(self, name: str) -> int:
        with closing(Client(("127.0.0.1", self.port), connect_timeout=10, timeout=10)) as client:
            return int(client.stats()[name.encode()])


class FlashCluster(LocalCluster):
    """A memcached on flash, and a shard."""

    def _start_servers(self, store: str, n: int, folder: Path, memory_mb: int) -> list[StorageServer]:
        server = FlashServer(store, free_ports(1)[0], folder, memory_mb)
        server.process.wait_until(lambda: accepts(server.port), Deadline.after(START_TIMEOUT_S))
        return [server]


@dataclass(eq=False)
class Trained:
    """One table, on a cluster of its own."""

    cluster: LocalCluster
    table: Table

    def fill(self, n_rows: int) -> None:
        """Give every id its row; on flash no faster than rows go there: a node of this size has no memory for all of them."""
        for at in range(0, n_rows, _FILLED_AT_ONCE):
            ids = row_ids(np.arange(at, min(at + _FILLED_AT_ONCE, n_rows)))
            self.table.assign(ids, np.zeros((len(ids), self.table.dim), np.float32), timeout_s=TIMEOUT_S)
            (server,) = self.cluster.servers
            while isinstance(server, FlashServer) and self._waiting_bytes(server) > _MOST_IN_MEMORY * server.counted("limit_maxbytes"):
                time.sleep(0.1)

    def _waiting_bytes(self, server: FlashServer) -> int:
        return server.counted("bytes") - server.counted("extstore_bytes_used")

    def turn(self, batches: Iterator[np.ndarray], seconds: float) -> Turn:
        """Train for about so long, two pushes on their way; every push is applied when it ends."""
        start_s, start_cpu_s, n_rows = time.perf_counter(), time.process_time(), 0
        waiting: list[Ack] = []
        while time.perf_counter() - start_s < seconds:
            ids = next(batches)
            rows = self.table.pull(ids, timeout_s=TIMEOUT_S)
            waiting.append(self.table.push(ids, rows * 0.5 + 1, timeout_s=TIMEOUT_S))
            if len(waiting) > 2:
                waiting.pop(0).wait_applied(TIMEOUT_S)
            n_rows += len(ids)
        self.table.flush(TIMEOUT_S)
        return Turn(n_rows, time.perf_counter() - start_s, time.process_time() - start_cpu_s)


def flash(options: argparse.Namespace) -> Report:
    """What does training cost when rows lie on the flash file of memcached, and not in its memory?

    Two tables of --rows rows with Adam, each on a cluster of its own (a memcached 1.6, a shard): one node has memory for all of its rows,
    the other --memory-mb, and a flash file (`-o ext_path`, ext_item_age=1). They train by turns. A step has the distinct ids of --batch
    draws; its pull waits for the push of the last step but two; a turn ends with a flush. Read: rows/s is pulled, pushed and applied;
    "flash / memory" is taken within a round. With --cold the kernel is told every half second to forget the pages of the file, so that rows
    come from the disk. "resident MB" is the server process, "read from flash" the rows that it brought back, of those that it found.
    """
    return Report("flash", [_of(kind, options) for kind in options.ids])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `flash` can be asked."""
    parser.add_argument("--rows", type=whole(1), default=1_000_000, metavar="N", help="rows (1000000)")
    parser.add_argument("--dim", type=whole(1), default=64, metavar="N", help="weights of a row (64)")
    kinds = "how ids are drawn, in turn (zipf uniform)"
    parser.add_argument("--ids", nargs="+", choices=DISTRIBUTIONS, default=["zipf", "uniform"], help=kinds)
    parser.add_argument("--batch", type=whole(1), default=40_000, metavar="N", help="draws of a step (40000)")
    parser.add_argument("--memory-mb", type=whole(64), default=300, metavar="MB", help="memory of the node with a flash file (300)")
    parser.add_argument("--cold", action="store_true", help="the kernel keeps no page of the file")
    parser.add_argument("--seconds", type=positive, default=8.0, metavar="S", help="length of a turn (8)")
    parser.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="rounds (5)")


def _of(kind: str, options: argparse.Namespace) -> Section:
    with tempfile.TemporaryDirectory(prefix="kvemb-flash-") as folder, ExitStack() as stack:
        Path(folder).chmod(0o777)  # memcached has a user of its own
        FlashServer.flash = Path(folder) / "rows"
        in_memory = _started(stack, LocalCluster, 4096 + 2 * options.rows * options.dim * 12 // (1 << 20), options)
        on_flash = _started(stack, FlashCluster, options.memory_mb, options)
        draw = sampler(kind, options.rows, _SEED)
        batches = (np.unique(row_ids(draw(options.batch))) for _ in count())
        if options.cold:
            stack.enter_context(_forgotten(FlashServer.flash))
        speeds: list[tuple[float, float]] = []
        for number in range(options.repeats + 1):
            pair = [on_flash, in_memory] if number % 2 else [in_memory, on_flash]
            turns = {id(one): one.turn(batches, options.seconds) for one in pair}
            speeds.append(tuple(turns[id(one)].n_rows / turns[id(one)].wall_s for one in (on_flash, in_memory)))  # type: ignore[arg-type]
        lines = []
        for at, (name, one) in enumerate((("on flash", on_flash), ("in memory", in_memory))):
            (server,) = one.cluster.servers
            figures: dict[str, Spread | float | str] = {"rows/s": Spread.of([pair[at] for pair in speeds[1:]])}
            figures["resident MB"] = _resident_bytes(server.process.pid) / 1e6
            if isinstance(server, FlashServer):
                figures["read from flash"] = server.counted("get_extstore") / max(1, server.counted("get_hits"))
                figures["thrown away"] = float(sum(server.counted(f"extstore_{what}") for what in ("objects_evicted", "compact_lost")))
            lines.append(Line(name, figures))
    ratio = Line("both", {"flash / memory": Spread.of([one / other for one, other in speeds[1:]]), "target": f">= {TARGET}"})
    settings = {"ids": kind, "rows": options.rows, "dim": options.dim, "optimizer": "adam", "batch": options.batch, "cold": options.cold}
    return Section({**settings, "memory MB": options.memory_mb, "seconds": options.seconds}, lines=[*lines, ratio])


def _started(stack: ExitStack, kind: type[LocalCluster], memory_mb: int, options: argparse.Namespace) -> Trained:
    cluster = stack.enter_context(kind("memcached", shards=1, memory_mb=memory_mb, durability="os"))
    opened = stack.enter_context(kvemb.connect(cluster.url))
    made = opened.create_table("bench", dim=options.dim, optimizer=kvemb.optim.adam(lr=0.01), id_dtype="uint64", expected_rows=options.rows)
    trained = Trained(cluster, made)
    trained.fill(options.rows)
    return trained


@contextmanager
def _forgotten(path: Path) -> Iterator[None]:
    """Let the kernel write the file's pages and forget them, again and again, until the block ends."""
    end = threading.Event()

    def forget() -> None:
        with path.open("rb") as file:
            while not end.wait(_DROPPED_EVERY_S):
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
