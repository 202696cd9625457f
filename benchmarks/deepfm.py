"""The question `deepfm`: what does a training step of the example cost with rows in storage, beside torch's own embeddings?"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import kvemb
from benchmarks.measure import Spread, cpu_s
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from kvemb.errors import KvembError
from kvemb.local_cluster import LocalCluster

STORES = ("redis", "valkey", "memcached")
MODES = ("async", "sync")
MOST_RATIO = 1.5
N_SHARDS = 2
MAX_UNAPPLIED = 2
_LR, _HIDDEN, _SEED = 0.002, (64, 32), 0
_TIMEOUT_S = 120.0
_LOSS_TOLERANCE = 0.02


class TorchAbsentError(KvembError):
    """This benchmark needs torch."""


class WrongLossError(AssertionError):
    """A contender did not learn what torch's own embeddings learn from the same batches."""


@dataclass
class Steps:
    """Somebody who trains, and what every step took.

    Args:
        name: for the table.
        step: train on batch i of the shared order; return the loss.
        settle: wait until everything is applied.
        pids: of servers and shards, which work beside the trainer.
    """

    name: str
    step: Callable[[int], float]
    settle: Callable[[], None]
    pids: Sequence[int] = ()

    def round(self, indices: Sequence[int]) -> "Round":
        """Train on these batches; the last step is followed by what settles it, whose time is shared by all."""
        wall_s, losses = [], []
        others_s, cpu_before_s = cpu_s(self.pids), time.process_time()
        for index in indices:
            start_s = time.perf_counter()
            losses.append(self.step(index))
            wall_s.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        self.settle()
        settle_s = (time.perf_counter() - start_s) / len(indices)
        return Round(wall_s, settle_s, (time.process_time() - cpu_before_s), cpu_s(self.pids) - others_s, losses)


@dataclass(frozen=True)
class Round:
    """Steps of one turn: wall time of each and of settling (per step), CPU time of the trainer and of the others, losses."""

    wall_s: list[float]
    settle_s: float
    trainer_cpu_s: float
    others_cpu_s: float
    losses: list[float]

    @property
    def step_s(self) -> float:
        """The median step, with its share of settling."""
        return median(self.wall_s) + self.settle_s


def deepfm(options: argparse.Namespace) -> Report:
    """What does a step of the DeepFM example cost with rows in storage, beside torch's own embeddings in one process?

    The example's model, optimizer bridge and synthetic clicks (20 fields), one thread of torch everywhere. Contenders train on the same
    batches in turns of --steps steps: (a) torch's nn.Embedding in this process, with sparse gradients and SparseAdam, and with dense
    gradients and Adam; (c) ours over Redis and (d) over memcached, one node, two shards, sync (a step returns when it is applied) and
    async (at most 2 pushes unapplied, waited for inside the step). Read: ms/step is the median of a turn's steps plus its share of
    the flush that ends the turn; ratio is this line's step divided by the faster of (a)'s, within a round: below 1 is faster than
    torch alone; trainer and other ms are CPU time per step of this process, and of shards and storage together. Values are medians of
    the rounds with (smallest..largest). Everybody begins with the same rows; at the end the mean loss of the last round must be that
    of (a) with sparse gradients within 2 % (async: rows may be two pushes old). (b), the in-memory store behind shards, does not
    exist yet.
    """
    _torch().set_num_threads(1)
    sections = []
    versions: dict[str, str] = {"torch": str(_torch().__version__)}
    for batch_size in options.batch:
        sections.append(_measure(batch_size, options, versions))
    return Report("deepfm", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `deepfm` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis", "memcached"], help="storage kinds (redis memcached)")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="of the shards (both)")
    parser.add_argument("--dim", type=whole(1), default=8, metavar="N", help="weights per factor (8)")
    parser.add_argument("--batch", nargs="+", type=whole(1), default=[1024, 4096], metavar="N", help="lines per step (1024 4096)")
    parser.add_argument("--lines", type=whole(1), default=100_000, metavar="N", help="lines of the log (100000)")
    parser.add_argument("--steps", type=whole(1), default=20, metavar="N", help="steps of one turn (20)")
    parser.add_argument("--repeats", type=whole(1), default=7, metavar="N", help="rounds, after one to warm up (7)")


def lines_of(names: Sequence[str], rounds: Sequence[Sequence[Round]], n_local: int) -> list[Line]:
    """Lay the rounds out.

    Args:
        names: of the contenders, torch's own first.
        rounds: of each contender.
        n_local: how many are torch's own.
    """
    best_s = [min(one.step_s for one in at) for at in zip(*rounds[:n_local], strict=True)]
    lines = []
    for index, (name, mine) in enumerate(zip(names, rounds, strict=True)):
        n_steps = len(mine[0].wall_s)
        figures: dict[str, Spread | float | str] = {
            "ms/step": Spread.of([one.step_s * 1e3 for one in mine]),
            "ratio": Spread.of([one.step_s / best for one, best in zip(mine, best_s, strict=True)]),
            "trainer ms": Spread.of([one.trainer_cpu_s * 1e3 / n_steps for one in mine]),
            "other ms": Spread.of([one.others_cpu_s * 1e3 / n_steps for one in mine]),
            "loss": f"{np.mean(mine[-1].losses):.4f}",
            "target": "–" if index < n_local else f"ratio <= {MOST_RATIO}",
        }
        lines.append(Line(name, figures))
    return lines


def require_same_loss(names: Sequence[str], rounds: Sequence[Sequence[Round]]) -> None:
    """Refuse a contender whose loss in the last round is not the first one's.

    Raises:
        WrongLossError: naming it.
    """
    expected = float(np.mean(rounds[0][-1].losses))
    for name, mine in zip(names, rounds, strict=True):
        loss = float(np.mean(mine[-1].losses))
        if not abs(loss / expected - 1) <= _LOSS_TOLERANCE:
            raise WrongLossError(f"{name}: mean loss {loss:.4f} in the last round, {names[0]} has {expected:.4f}")


def _measure(batch_size: int, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    log, _ = _example("synthetic").draw(options.lines, _SEED)
    order = np.random.default_rng(_SEED).permutation(len(log))
    batches = [log.take(order[at : at + batch_size]) for at in range(0, len(log) - batch_size + 1, batch_size)]
    if not batches:
        raise KvembError(f"--lines {options.lines} is less than one batch of {batch_size}")
    with ExitStack() as stack:
        contenders = _local(log, batches, options.dim)
        n_local = len(contenders)
        for mode in options.mode:
            contenders += [_stored(stack, store, mode, batches, options.dim, versions) for store in options.store]
        names = [one.name for one in contenders]
        rounds = _rounds(contenders, len(batches), options)
    require_same_loss(names, rounds)
    settings = {
        "dim": options.dim,
        "batch": batch_size,
        "ids/step": len(batches[0].ids),
        "distinct/step": round(float(np.mean([len(np.unique(batch.ids)) for batch in batches]))),
        "shards": N_SHARDS,
        "steps": options.steps,
        "repeats": options.repeats,
    }
    notes = ["(b) skipped: there is no server with the in-memory store yet."]
    return Section(settings, notes=notes, lines=lines_of(names, rounds, n_local))


def _rounds(contenders: Sequence[Steps], n_batches: int, options: argparse.Namespace) -> list[list[Round]]:
    """Let all take turns on the same batches; the first round warms up and does not count."""
    rounds: list[list[Round]] = [[] for _ in contenders]
    for number in range(options.repeats + 1):
        indices = [(number * options.steps + i) % n_batches for i in range(options.steps)]
        for one, mine in zip(contenders, rounds, strict=True):
            mine.append(one.round(indices))
    return [mine[1:] for mine in rounds]


def _local(log: Any, batches: Sequence[Any], dim: int) -> list[Steps]:
    """Torch's own embeddings, with sparse and with dense gradients."""
    torch, place = _torch(), _example("rows")
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until somebody decides
    known_ids = np.unique(log.ids)
    indexed = [place.indexed(batch, known_ids) for batch in batches]
    sparse, dense = (place.local_rows(known_ids, _settings(dim)) for _ in range(2))
    for module in (dense.linear, dense.factors):
        module.sparse = False
    adam = torch.optim.Adam([dense.linear.weight, dense.factors.weight], lr=_LR)
    return [
        Steps("(a) torch, SparseAdam", _stepper(sparse, sparse.optimizer, indexed, dim), lambda: None),
        Steps("(a) torch, dense Adam", _stepper(dense, adam, indexed, dim), lambda: None),
    ]


def _stored(stack: ExitStack, store: str, mode: str, batches: Sequence[Any], dim: int, versions: dict[str, str]) -> Steps:
    """Ours over a cluster of its own."""
    trainers = 1 if mode == "sync" else 0
    cluster = stack.enter_context(LocalCluster(store, shards=N_SHARDS, mode=mode, trainers=trainers))
    opened = stack.enter_context(kvemb.connect(cluster.url))
    versions[f"{store} server"] = opened.status().nodes[0].server
    rows = _example("rows").stored_rows(opened, _settings(dim))
    train_step = _stepper(rows, rows.optimizer, batches, dim)
    unapplied: deque[Any] = deque()

    def step(index: int) -> float:
        loss = train_step(index)
        unapplied.append(rows.optimizer.last_ack)
        while len(unapplied) > MAX_UNAPPLIED:
            unapplied.popleft().wait_applied(_TIMEOUT_S)
        return loss

    pids = [process.pid for process in (*(server.process for server in cluster.servers), *cluster.shards)]
    letter = "d" if store == "memcached" else "c"
    return Steps(f"({letter}) ours, {store}, {mode}", step, rows.settle, pids)


def _stepper(rows: Any, optimizer: Any, batches: Sequence[Any], dim: int) -> Callable[[int], float]:
    torch, training = _torch(), _example("training")
    torch.manual_seed(_SEED)  # every contender begins with the same dense weights
    model = _example("model").DeepFM(rows.linear, rows.factors, dim=dim, n_fields=batches[0].n_fields, hidden=_HIDDEN)
    optimizers = [optimizer, torch.optim.Adam(model.dense_parameters(), lr=_LR)]
    return lambda index: float(training.train_step(model, batches[index], optimizers))


def _settings(dim: int) -> Any:
    return _example("rows").Settings(dim, "adam", _LR, _SEED)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise TorchAbsentError("deepfm needs torch, which is not installed: pip install 'kvemb[torch]'") from None
    return torch


def _example(name: str) -> Any:
    """Return a module of examples/deepfm, which is no package of ours but a program's folder."""
    from importlib import import_module

    folder = str(Path(__file__).resolve().parents[1] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module(f"deepfm.{name}")
