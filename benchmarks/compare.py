"""The question `compare`: what does a row cost in this checkout, beside another revision of it?"""

import argparse
import pstats
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compared_checkout import LOOPS
from benchmarks.measure import Spread
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from benchmarks.worker_process import ROOT, WorkerProcess, running
from kvemb.errors import KvembError

PROCESSES = ("client", "shard", "storage")
_PROFILES = Path(__file__).parent / "profiled"
_N_FUNCTIONS = 5


def compare(options: argparse.Namespace) -> Report:
    """What does a row cost in this checkout, beside another revision of it?

    Two programs, one of REV in a worktree of its own, each with a Redis server and a shard, take turns of --seconds in every loop, --rounds
    times. A row of the table is a loop: rows a second, and CPU time a row of each process, here / there, median of the rounds (lowest
    .. highest); minor page faults a row, here. Read: a ratio above --limit whose lowest is above 1 is a loss. Then the loop runs
    again in both, profiled, and the command ends with 1 and names the functions that take more.
    """
    with tempfile.TemporaryDirectory(prefix="kvemb-compare-") as folder, _checkout(options.rev, Path(folder)) as other:
        checkouts = {"here": ROOT, options.rev: other}
        with ExitStack() as stack:
            workers = {name: stack.enter_context(_running(name, path))[0] for name, path in checkouts.items()}
            lines, losses = list[Line](), list[tuple[str, int, str]]()
            for loop, dim in ((loop, dim) for loop in options.loops for dim in options.dims):
                rounds = [{name: worker.ask(loop=loop, dim=dim, seconds=options.seconds) for name, worker in workers.items()}
                          for _ in range(options.rounds + 1)][1:]  # fmt: skip  # the first warms up
                line, dear = _line(loop, dim, options.rev, rounds, options.limit)
                lines.append(line)
                losses += [(loop, dim, process) for process in dear]
        notes = [_grown(checkouts, loss, options.seconds) for loss in losses]
    section = Section({"beside": options.rev, "limit": options.limit}, lines=lines, notes=notes)
    return Report("compare", [section], failed=bool(losses))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `compare` can be asked."""
    parser.add_argument("rev", metavar="REV", help="a commit, tag or branch of this repository")
    parser.add_argument("--rounds", type=whole(1), default=5, metavar="N", help="of turns (5)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of one turn (2)")
    parser.add_argument("--dims", type=whole(1), nargs="+", default=[16, 64], metavar="N", help="of rows (16 64)")
    parser.add_argument("--loops", choices=LOOPS, nargs="+", default=list(LOOPS), metavar="LOOP", help=f"of {', '.join(LOOPS)} (all)")
    parser.add_argument("--limit", type=float, default=1.08, metavar="X", help="the largest ratio of CPU time that is no loss (1.08)")


@contextmanager
def _checkout(rev: str, folder: Path) -> Iterator[Path]:
    path = folder / "checkout"
    added = subprocess.run(["git", "worktree", "add", "--detach", str(path), rev], cwd=ROOT, capture_output=True, text=True, check=False)
    if added.returncode:
        raise KvembError(f"{rev}: no checkout of it can be made: {added.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(path)], cwd=ROOT, capture_output=True, check=False)


@contextmanager
def _running(name: str, checkout: Path, path: Sequence[Path] = (), **environment: str) -> Iterator[tuple[WorkerProcess, Mapping[str, int]]]:
    command = [sys.executable, str(Path(__file__).with_name("compared_checkout.py"))]
    with running(name, command, {"PYTHONPATH": ":".join(map(str, [checkout, *path])), **environment}) as worker:
        began = worker.reply()
        if began["product"] != str(checkout):
            raise KvembError(f"{name}: its program uses the product in {began['product']}, not that in {checkout}")
        yield worker, began["pids"]
        worker.end()


def _line(loop: str, dim: int, rev: str, rounds: Sequence[Mapping[str, Any]], limit: float) -> tuple[Line, list[str]]:
    """The line of a loop, and the processes in which a row costs more."""
    figures: dict[str, Spread | float | str] = {"rows/s": Spread.of([one["here"]["rows_per_s"] / one[rev]["rows_per_s"] for one in rounds])}
    dear = []
    for process in PROCESSES:
        (here, before) = ([one[name]["spent"][process][0] for one in rounds] for name in ("here", rev))
        if min(*here, *before) <= 0:
            figures[process] = "-"  # it did nothing that can be measured
            continue
        ratios = Spread.of([now / then for now, then in zip(here, before, strict=True)])
        figures[process], figures[f"{process} µs"] = ratios, Spread.of(here)
        if ratios.median > limit and ratios.low > 1.0:
            dear.append(process)
    for process in ("client", "shard"):
        figures[f"{process} faults"] = median(one["here"]["spent"][process][1] for one in rounds)
    return Line(f"{loop}, dim {dim}", figures), dear


def _grown(checkouts: Mapping[str, Path], loss: tuple[str, int, str], seconds: float) -> str:
    """Say which functions of a process take more time a row than they did."""
    loop, dim, process = loss
    times: list[dict[str, float]] = []
    for name, checkout in checkouts.items():
        with tempfile.TemporaryDirectory() as folder:
            with _running(name, checkout, [_PROFILES], KVEMB_COMPARE_PROFILES=folder) as (worker, pids):
                n_rows = worker.ask(loop=loop, dim=dim, seconds=2 * seconds)["rows"]
            if process == "storage":
                return f"{loop}, dim {dim}: storage takes more; what it is asked has changed (redis-cli INFO commandstats tells)"
            times.append(_seconds_by_function(f"{folder}/{pids[process]}", checkout, n_rows))
    here, before = times
    grown = sorted(here, key=lambda function: before.get(function, 0.0) - here[function])[:_N_FUNCTIONS]
    words = ", ".join(f"{function} {before.get(function, 0.0) * 1e6:.3f} -> {here[function] * 1e6:.3f} µs" for function in grown)
    return f"{loop}, dim {dim}: {process} takes more, profiled a row: {words}"


def _seconds_by_function(file: str, checkout: Path, n_rows: int) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for (path, _, function), (_, _, own_s, _, _) in pstats.Stats(file).stats.items():  # type: ignore[attr-defined]
        found[f"{path.removeprefix(str(checkout) + '/')}:{function}".removeprefix("~:")] += own_s / n_rows
    return found
