"""The question `switch`: how soon do serving readers have another view, rows and dense part, and does any look-up mix two?"""

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

import kvemb
import kvemb.init
import kvemb.optim
import kvemb.serve
from benchmarks.measure import Spread
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from kvemb.errors import KvembError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import start_servers
from kvemb.projection.projection_target import TargetUrl
from kvemb.projection.views import TargetViews
from kvemb.serve.row_sources import ViewSource

DIM, LOOKUP_IDS = 16, 512
_ASSIGNED_AT_ONCE, _PATIENCE_S = 100_000, 600.0
_VALUES = {"v1": 1.0, "v2": 2.0}  # of every weight of the rows, and of the dense part


def switch(options: argparse.Namespace) -> Report:
    """How soon do serving readers have another view, rows and dense part, and does any look-up mix two?

    A table of --rows rows of dim 16, in two views of one Redis: in the first all weights of rows and dense part are 1, in the second 2. So
    each answer says which rows and which part it was made of. The dense part is a small tower of torch (4 MB, torch.export). Two readers
    answer requests of 512 random ids all the while, one of them without a cache, a third asks at once for what it is to see. Views are
    switched --switches times, forth and back, as soon as all have the one before, until the readers have made --lookups look-ups. Read:
    seconds from before `use` is called until the last reader answers by the new view, which the look after which view is in use bounds
    (every 0.1 s); `use` alone; and mixed look-ups. Views are switched once the readers have made the other one ready, which they do ahead.
    """
    return Report("switch", [_measured(options)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `switch` can be asked."""
    parser.add_argument("--rows", type=whole(1), default=1_000_000, metavar="N", help="rows of each view (1000000)")
    parser.add_argument("--lookups", type=whole(1), default=10_000, metavar="N", help="look-ups under switches, at least (10000)")
    parser.add_argument("--switches", type=whole(1), default=20, metavar="N", help="at least (20)")
    parser.add_argument("--dtype", choices=("float32", "float16", "int8"), default="int8", help="of the rows there (int8)")


class _Reader:
    """Answers requests until it is told to end, and notes by which view it does."""

    def __init__(self, url: str, n_rows: int, cache_mb: float) -> None:
        self._url, self._n_rows, self._cache_mb = url, n_rows, cache_mb
        self.end, self.view, self.n_lookups, self.n_mixed, self.ready = threading.Event(), "", 0, 0, False
        self.longest_s = 0.0

    def run(self) -> None:
        rng = np.random.default_rng()
        with kvemb.serve.connect(self._url, cache_mb=self._cache_mb) as client:
            assert isinstance(client.source, ViewSource)
            model = kvemb.serve.Model(client)
            while not self.end.is_set():
                ids, begun_s = rng.integers(0, self._n_rows, LOOKUP_IDS), time.perf_counter()
                found, view = model({"input": ids}, return_view=True)
                self.longest_s = max(self.longest_s, time.perf_counter() - begun_s)
                self.n_mixed += int((np.abs(found - DIM * _VALUES[view] ** 2) > 0.1).any())
                self.n_lookups, self.view = self.n_lookups + 1, view
                self.ready = self.ready or all(map(client.source.is_ready, _VALUES))


def _export(table: kvemb.Table, value: float, file: Path) -> None:
    """Write a part that sums a row's weights, each times a value; beside it is a megabyte of weights that count for nothing."""
    import torch
    from torch import nn

    from trainer.torch import Embedding, export_dense

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.head = Embedding(table), nn.Linear(DIM, 1, bias=False)
            self.wide = nn.Sequential(nn.Linear(DIM, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1))
            nn.init.constant_(self.head.weight, value)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            rows = self.rows(input)
            found: torch.Tensor = self.head(rows) + 0 * self.wide(rows[:1])
            return found

    export_dense(Tower(), {"input": torch.arange(3)}, file)


def _measured(options: argparse.Namespace) -> Section:
    with _two_views(options) as (url, views, sizes):
        readers = [_Reader(url, options.rows, cache_mb) for cache_mb in (256.0, 0.0)]
        took, used = list[float](), list[float]()
        with ThreadPoolExecutor(len(readers)) as pool:
            running = [pool.submit(reader.run) for reader in readers]
            try:
                _wait(lambda: all(reader.view == "v1" and reader.ready for reader in readers), running)
                while len(took) < options.switches or sum(reader.n_lookups for reader in readers) < options.lookups:
                    name, begun_s = ("v2", "v1")[len(took) % 2], time.perf_counter()
                    views.use(name)
                    used.append(time.perf_counter() - begun_s)
                    _wait(lambda name=name: all(reader.view == name for reader in readers), running)  # type: ignore[misc]
                    took.append(time.perf_counter() - begun_s)
            finally:
                for reader in readers:
                    reader.end.set()
            for one in running:
                one.result(_PATIENCE_S)
    figures: dict[str, Spread | float | str] = {
        "first s": took[0],
        "p50 s": median(took),
        "longest s": max(took),
        "use alone, p50 s": median(used),
        "look-ups": float(sum(reader.n_lookups for reader in readers)),
        "mixed": float(sum(reader.n_mixed for reader in readers)),
        "longest look-up s": max(reader.longest_s for reader in readers),
        "target": "< 1 s, 0 mixed",
    }
    setup = {"store": "redis", "dim": DIM, "rows": options.rows, "dtype": options.dtype, "switches": len(took), **sizes}
    return Section(setup, lines=[Line("switch and back", figures)])


def _wait(done: Callable[[], bool], running: "Sequence[Future[None]]") -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not done():
        for one in running:
            if one.done():
                one.result()
        if time.monotonic() > deadline_s:
            raise KvembError("benchmarks switch: not every reader has come to the other view")
        time.sleep(0.001)


@contextmanager
def _two_views(options: argparse.Namespace) -> Iterator[tuple[str, TargetViews, dict[str, object]]]:
    memory_mb = max(1024, options.rows * 400 >> 20)
    with LocalCluster("redis", 1, memory_mb=memory_mb, durability="os") as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table(
            "bench", dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), expected_rows=options.rows
        )
        (target,) = start_servers("redis", 1, local.folder, memory_mb)
        url, made = f"redis://{target.address}", dict[str, object]()
        try:
            for name, value in _VALUES.items():
                for start in range(0, options.rows, _ASSIGNED_AT_ONCE):
                    ids = np.arange(start, min(start + _ASSIGNED_AT_ONCE, options.rows))
                    table.assign(ids, np.full((len(ids), DIM), value, np.float32), timeout_s=_PATIENCE_S)
                file = Path(local.folder) / f"{name}.pt2"
                _export(table, value, file)
                words = [
                    "create",
                    str(local.config_path),
                    name,
                    "--to",
                    url,
                    "--tables",
                    "bench",
                    "--dtype",
                    options.dtype,
                    "--model",
                    str(file),
                ]
                begun_s = time.perf_counter()
                subprocess.run([sys.executable, "-m", "kvemb.cli", "view", *words], check=True, stdout=subprocess.DEVNULL)
                made |= {f"create {name} s": round(time.perf_counter() - begun_s, 1), "dense MB": round(file.stat().st_size / 1e6, 1)}
            views = TargetViews(target.address, TargetUrl.parse(url).access({}, "", None))
            views.use("v1")
            yield url, views, made
        finally:
            target.process.kill()
