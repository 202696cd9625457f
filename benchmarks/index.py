"""The question `index`: what does it cost to look versions up in a shard's runs on disk, at numbers of rows that no memory holds?"""

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks.disk import folder_bytes
from benchmarks.measure import Spread
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from kvemb.arrays.hashing import mix64
from kvemb.arrays.record_cache import CacheBudget
from kvemb.schema.table_def import TableDef
from paramserver.journal import Journal
from paramserver.recovery.known_rows import known_tables
from paramserver.row_log import Runs, sorted_run
from paramserver.row_log.sorted_run import BLOCK_ROWS, ROWS, SortedRun
from paramserver.row_log.state_file import LoggedTable, SavedState, ShardState
from paramserver.shard_process.data_dir import DataDir

Ids = NDArray[np.uint64]
_TABLE = TableDef("index", 1, kvemb.optim.sgd(lr=1.0), kvemb.init.zeros())
_AT_ONCE = 1 << 20
_SEED, _ZIPF = 7, 1.05
_SCATTER = 2_654_435_761  # prime: ranks times this, modulo the number of rows, are spread over all of them


def index(options: argparse.Namespace) -> Report:
    """What does a look-up of a row's version cost in runs on disk, by number of rows, and what memory, time and traffic do they take?

    Each line draws ids, writes them as a run (32 bytes a row, records of 16 among them) and asks for the versions of batches: of ids that
    exist, uniform and Zipf (1.05), and of new ones. µs are wall time per id of a batch, medians of the rounds; pages lie in the system's
    cache, and blocks are checked. First: the file was dropped from that cache (as far as the system does so), and every block is read whole
    and checked when it is met. Cold: dropped again, with the blocks checked. No filter: of new ids, with the runs' filters left out. New,
    cold: the filters' pages are in the cache, and nothing else of the file is. B/row is the memory that the runs take beside that cache.
    Merge: three runs with a thirtieth of the rows each, half of them known, are merged into the large one; MB/s counts what is read and
    what is written. Start: a shard's tables are made from such a log with room for a tenth of the rows in memory, and an empty journal, as
    after kill -9.
    """
    return Report("index", [Section({"batch": options.batch, "repeats": options.repeats}, lines=[_line(n, options) for n in options.rows])])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `index` can be asked."""
    rows = [1_000_000, 10_000_000, 100_000_000]
    parser.add_argument(
        "--rows",
        nargs="+",
        type=whole(1000),
        default=rows,
        metavar="N",
        help="in the runs (1e6 1e7 1e8); 32 bytes of disk each, and twice that for the merge",
    )
    parser.add_argument("--batch", type=whole(1), default=30_000, metavar="N", help="ids asked for at a time (30000)")
    parser.add_argument("--dir", type=Path, default=None, metavar="DIR", help="where the runs lie (the system's folder of temporary files)")
    parser.add_argument("--repeats", type=whole(1), default=9, metavar="N", help="batches of each kind (9)")


def _line(n: int, options: argparse.Namespace) -> Line:
    rng = np.random.default_rng(_SEED)

    def uniform() -> Ids:
        return _known(rng.integers(0, n, options.batch), n)

    def zipf() -> Ids:
        return _known(_zipf(rng, n, options.batch), n)

    def new() -> Ids:
        ids: Ids = rng.integers(0, 1 << 64, options.batch, np.uint64)  # of 1e9 rows one in 2e10 exists
        return ids

    with tempfile.TemporaryDirectory(dir=options.dir) as temporary:
        folder, data = Path(temporary) / "snapshot", DataDir(Path(temporary), 0)
        saved = SavedState(data, ShardState(b"benchmark index.", 0, 1, tables=(LoggedTable(_TABLE, n_rows=n),)))
        begun_s = time.perf_counter()
        runs = Runs(folder, saved)
        _write(runs, saved, _keys(n), 1)
        figures: dict[str, Spread | float | str] = {"write MB/s": folder_bytes(folder) / 1e6 / (time.perf_counter() - begun_s)}
        runs.close()
        _forget(folder)
        figures["start s"] = _start_s(Path(temporary), saved, n)
        runs = Runs(folder, saved, limit=1)
        figures["B/row"] = sum(map(_memory_bytes, runs._open.values())) / n
        figures["first µs"] = _us(runs, uniform, 1)
        runs.versions(_TABLE, _known(np.arange(0, n, BLOCK_ROWS), n))  # one of each block
        figures |= {f"{name} µs": _us(runs, draw, options.repeats) for name, draw in (("uniform", uniform), ("zipf", zipf), ("new", new))}
        with _no_filters():
            figures["new, no filter µs"] = _us(runs, new, options.repeats)
        _forget_all_but_filters(folder, runs)
        figures["new, cold µs"] = _us(runs, new, 1)
        _forget_all_but_filters(folder, runs)
        with _no_filters():
            figures["new, cold, no filter µs"] = _us(runs, new, 1)
        _forget(folder, runs)
        figures["cold µs"] = _us(runs, uniform, 1)
        figures["merge MB/s"] = _merge(runs, saved, n, folder)
        runs.close()
        data.close()
        return Line(f"{n:,} rows", figures)


def _keys(n: int) -> Iterator[Ids]:
    """Keys that look drawn at random, ascending and unique: one of each n-th part of all."""
    return (_key_of(np.arange(start, min(start + _AT_ONCE, n)), n) for start in range(0, n, _AT_ONCE))


def _key_of(positions: NDArray[np.int64], n: int) -> Ids:
    width, at = np.uint64((1 << 64) // n), positions.astype(np.uint64)
    keys: Ids = at * width + mix64(at) % width
    return keys


def _known(positions: NDArray[np.int64], n: int) -> Ids:
    return _TABLE.order.ids(_key_of(np.unique(positions), n))


def _zipf(rng: np.random.Generator, n: int, size: int) -> NDArray[np.int64]:
    """Draw positions, p(rank) ~ rank ** -1.05: the distribution without steps, since a table of the sums of 1e9 would take 8 GB."""
    rest = 1 - _ZIPF
    ranks = (1 + rng.random(size) * ((n + 1.0) ** rest - 1)) ** (1 / rest)
    positions: NDArray[np.int64] = np.minimum(ranks.astype(np.int64) - 1, n - 1) * _SCATTER % n
    return positions


def _memory_bytes(run: SortedRun) -> int:
    return sum(one.nbytes for some in (run._blocks, run._fences, run._starts, run._checked) for one in some)


def _start_s(folder: Path, saved: SavedState, n: int) -> float:
    """Return how long a shard takes to know its tables, from opening the files on."""
    begun_s = time.perf_counter()
    runs, journal = Runs(folder / "snapshot", saved), Journal(folder / "journal", "os")
    (state,) = known_tables(saved.now, runs, journal, lambda *_: _TABLE, budget=CacheBudget(0), index_bytes=24 * n // 10)
    state.versions(_known(np.zeros(1, np.int64), n))
    took_s = time.perf_counter() - begun_s
    runs.close()
    journal.close()
    return took_s


def _write(runs: Runs, saved: SavedState, keys: Iterator[Ids], version: int) -> None:
    writer = runs.begin(_TABLE)
    for some in keys:
        writer.add(ROWS, some, np.full(len(some), version, np.uint64), np.zeros((len(some), _TABLE.record.size_bytes), np.uint8))
    runs.publish([writer], replace(saved.now, cut=version))


def _us(runs: Runs, draw: Callable[[], Ids], repeats: int) -> Spread:
    """Return the µs an id takes, in batches."""
    times = []
    for _ in range(repeats):
        ids = draw()
        begun_s = time.perf_counter()
        runs.versions(_TABLE, ids)
        times.append(1e6 * (time.perf_counter() - begun_s) / len(ids))
    return Spread.of(times)


def _merge(runs: Runs, saved: SavedState, n: int, folder: Path) -> float:
    """Return the MB/s that are read and written when runs of 3 % as many rows, half of them known, are merged into the large one."""
    for version in range(2, 5):
        some = (keys[version::30] + (np.arange(len(keys[version::30]), dtype=np.uint64) & np.uint64(1)) for keys in _keys(n))
        _write(runs, saved, some, version)
    before, begun_s = folder_bytes(folder), time.perf_counter()
    for _ in runs.merge(_TABLE):
        pass
    return (before + folder_bytes(folder)) / 1e6 / (time.perf_counter() - begun_s)


@contextmanager
def _no_filters() -> Iterator[None]:
    """Leave filters out, whatever share of the ids is new."""
    before = sorted_run._FEW_ABSENT
    sorted_run._FEW_ABSENT = 2.0
    try:
        yield
    finally:
        sorted_run._FEW_ABSENT = before


def _forget_all_but_filters(folder: Path, runs: Runs) -> None:
    """Let the system drop the pages of keys, versions and records, as far as it does; filters of the next batches were read before."""
    (run,), (path,) = runs.view.of(_TABLE), folder.glob("*.run")
    _forget_mapped(run)
    with path.open("rb") as file:
        for offset, n in run._blocks[ROWS][:, 1:3].tolist():
            os.posix_fadvise(file.fileno(), offset, 16 * n, os.POSIX_FADV_DONTNEED)


def _forget_mapped(run: SortedRun) -> None:
    mapped: Any = run._words.base
    mapped.obj.madvise(mmap.MADV_DONTNEED)


def _forget(folder: Path, runs: Runs | None = None) -> None:
    """Let the system drop the pages of the files, as far as it does; of open runs also the pages that this process has mapped."""
    for run in runs._open.values() if runs is not None else ():
        _forget_mapped(run)
    for path in folder.glob("*.run"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
