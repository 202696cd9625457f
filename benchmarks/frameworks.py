"""The question `frameworks`: what does a step of DeepFM cost in each framework with rows in storage, beside the framework's own embeddings?

What must not live here: frameworks. Each works in a process of its own (in_frameworks/): their pools of threads do not bear one another.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

import kvemb
from benchmarks.deepfm import example
from benchmarks.in_frameworks.problem import Problem
from benchmarks.measure import Spread, cpu_s
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from benchmarks.tfra import peer
from benchmarks.worker_process import ROOT, WorkerProcess, running
from kvemb.errors import KvembError
from kvemb.local_cluster import LocalCluster

FRAMEWORKS = ("torch", "tensorflow", "jax", "keras-tensorflow", "keras-jax", "keras-torch", "tfra")
MOST_RATIO = 1.15
_OWN, _AHEAD = "own", "ours, ahead"
_SEED, _LR, _HIDDEN, _FACTOR_STD = 0, 0.002, (64, 32), 0.01
_LEAD = 4
# With gradients applied 2 and 3 steps late Adam's loss ends 9 and 12 % higher here (simulated, see deepfm_rounds).
_LOSS_TOLERANCE, _STALE_LOSS_TOLERANCE = 0.06, 0.12
# Each framework has one thread, as torch has in `deepfm`: servers and shards need cores, too.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "NPROC": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


_OTHER_RULE = ("keras-tensorflow",)
"""Where Keras' Adam squares each gradient of a repeated id by itself, not their sum: its own embeddings learn otherwise."""


class WrongFrameworkLossError(AssertionError):
    """A contender did not learn what the framework's own embeddings learn from the same batches."""


@dataclass(frozen=True)
class FrameworkTurn:
    """Per step: wall time, CPU time of the trainer and of the others; and the mean loss."""

    step_s: float
    trainer_cpu_s: float
    others_cpu_s: float
    loss: float


@dataclass(eq=False)
class Framework:
    """A framework at work: the results of each of its contenders, by round."""

    name: str
    worker: WorkerProcess
    turns: dict[str, list[FrameworkTurn]] = field(default_factory=dict)


def frameworks(options: argparse.Namespace) -> Report:
    """What does a step of the DeepFM example cost in each framework with rows in storage, beside the framework's own embeddings?

    The model, optimizer (Adam for rows and dense weights) and synthetic clicks (20 fields) of `deepfm`, written as a user of the framework
    would: a loop over jitted steps in JAX and TensorFlow, `fit` in Keras, torch as in `deepfm`. Each framework works in a process of its
    own, with one thread: with its own embeddings (own), with rows in one Redis and one shard, asynchronous, at most 2 pushes unapplied,
    pulled in the step (ours) or by a thread meanwhile (ours, ahead). TFRA 0.7.2 trains the same model in TensorFlow 2.15 on the same Redis,
    in a database of its own. All begin with the same weights and take turns of --steps steps on the same batches; after the first ones of a
    turn the clock starts, and it stops when everything is applied. Read: ms/step is that time by steps; / own is it divided by that of the
    framework's own embeddings, within a round; / TFRA the same by TFRA's; trainer and other ms are CPU time per step of the framework's
    process, and of shard and server together (of whole turns). Values are medians of the rounds with (smallest..largest). In the last
    round the mean loss must be that of the own embeddings within 6 % (rows may be two pushes old; 12 % where they are pulled ahead).
    """
    problem = problem_of(options)
    versions: dict[str, str] = {}
    notes: list[str] = []
    began_load = os.getloadavg()[0]
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster("redis", shards=1, mode="async", durability="os"))
        with kvemb.connect(cluster.url) as opened:
            versions["redis server"] = opened.status().nodes[0].server
        pids = [process.pid for process in (*(server.process for server in cluster.servers), *cluster.shards)]
        running_ones = _started(stack, problem, cluster, options.framework, versions, notes)
        if not running_ones:
            raise KvembError("none of the frameworks is installed. To set them up beside this checkout: make bench-peers")
        _take_turns(running_ones, pids, len(problem.labels), options)
    require_same_losses_as_own({one.name: one.turns for one in running_ones})
    settings = {
        "dim": options.dim,
        "batch": options.batch,
        "ids/step": problem.ids[0].size,
        "distinct/step": round(float(np.mean([len(np.unique(ids)) for ids in problem.ids]))),
        "steps": options.steps,
        "repeats": options.repeats,
        "load of the machine": f"{began_load:.1f} to {os.getloadavg()[0]:.1f}",
    }
    lines = lines_of({one.name: one.turns for one in running_ones})
    return Report("frameworks", [Section(settings, notes=notes, lines=lines)], versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `frameworks` can be asked."""
    parser.add_argument("--framework", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS), help="which (all that are installed)")
    parser.add_argument("--dim", type=whole(1), default=8, metavar="N", help="weights per factor (8)")
    parser.add_argument("--batch", type=whole(1), default=4096, metavar="N", help="lines per step (4096)")
    parser.add_argument("--lines", type=whole(1), default=100_000, metavar="N", help="lines of the log (100000)")
    parser.add_argument("--steps", type=whole(_LEAD + 1), default=24, metavar="N", help=f"steps of one turn, {_LEAD} before the clock (24)")
    parser.add_argument("--repeats", type=whole(1), default=8, metavar="N", help="rounds, after one to warm up (8)")


def problem_of(options: argparse.Namespace) -> Problem:
    """Draw the example's clicks and first weights.

    Raises:
        KvembError: fewer lines than a batch.
    """
    log, _ = example("synthetic").draw(options.lines, _SEED)
    rng = np.random.default_rng(_SEED)
    n_batches = options.lines // options.batch
    if not n_batches:
        raise KvembError(f"--lines {options.lines} is less than one batch of {options.batch}")
    order = rng.permutation(options.lines)[: n_batches * options.batch]
    batches = (n_batches, options.batch, log.n_fields)
    ids, values = (array.reshape(options.lines, -1)[order].reshape(batches) for array in (log.ids, log.values))
    known_ids = np.unique(log.ids)
    widths = [log.n_fields * options.dim, *_HIDDEN, 1]
    first, second, third = (rng.uniform(-1, 1, shape).astype(np.float32) * np.float32(shape[0] ** -0.5) for shape in pairwise(widths))
    return Problem(
        ids,
        np.searchsorted(known_ids, ids).astype(np.int32),
        values,
        log.labels[order].reshape(batches[:2]),
        known_ids,
        np.zeros((len(known_ids), 1), np.float32),
        rng.normal(0.0, _FACTOR_STD, (len(known_ids), options.dim)).astype(np.float32),
        first,
        second,
        third,
        np.array(_LR),
    )


def _started(
    stack: ExitStack, problem: Problem, cluster: LocalCluster, names: Sequence[str], versions: dict[str, str], notes: list[str]
) -> list[Framework]:
    """Start those that are installed; note the others."""
    started = []
    for name in names:
        one = _start(stack, name)
        if one is None:
            notes.append("Peer skipped: TFRA is not installed. To set it up beside this checkout: make bench-peers")
            continue
        path = one.worker.folder / "problem.npz"
        problem.save(path)
        where = peer.config_file(one.worker.folder, cluster.servers[0].port) if name == "tfra" else cluster.url
        said = one.worker.ask(do="open", problem=str(path), where=where)
        if "absent" in said:
            notes.append(f"{name} skipped: {said['absent']} is not installed. To set it up beside this checkout: make bench-peers")
            continue
        one.turns.update({contender: [] for contender in said["contenders"]})
        versions.update(said["versions"])
        started.append(one)
    return started


def _start(stack: ExitStack, name: str) -> Framework | None:
    module, _, backend = name.partition("-")
    python, path = sys.executable, [str(ROOT / ".frameworks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if name == "tfra":
        if not peer.PYTHON.exists():
            return None
        python, path = str(peer.PYTHON), []
    environment = {**_ONE_THREAD, "PYTHONPATH": os.pathsep.join(path), **({"KERAS_BACKEND": backend} if backend else {})}
    command = [python, "-m", "benchmarks.in_frameworks.worker", f"in_{module}"]
    return Framework(name, stack.enter_context(running(name, command, environment)))


def _take_turns(running_ones: Sequence[Framework], pids: Sequence[int], n_batches: int, options: argparse.Namespace) -> None:
    """Let all take turns on the same batches; the first round warms up and does not count."""
    for number in range(options.repeats + 1):
        indices = [(number * options.steps + i) % n_batches for i in range(options.steps)]
        for one in running_ones:
            for contender, turns in one.turns.items():
                others_s = cpu_s(pids)
                did = one.worker.ask(do="turn", contender=contender, indices=indices, lead=_LEAD)
                others_s = (cpu_s(pids) - others_s) / options.steps
                if number:
                    turns.append(FrameworkTurn(did["step_s"], did["cpu_s"], others_s, did["loss"]))


def lines_of(turns: Mapping[str, Mapping[str, Sequence[FrameworkTurn]]]) -> list[Line]:
    """Lay the rounds out.

    Args:
        turns: by framework and contender; "tfra" is compared with, too.
    """
    theirs = next(iter(turns["tfra"].values())) if "tfra" in turns else None
    lines = []
    for framework, contenders in turns.items():
        for contender, mine in contenders.items():
            figures: dict[str, Spread | float | str] = {
                "ms/step": Spread.of([one.step_s * 1e3 for one in mine]),
                "/ own": "–",
                "/ TFRA": "–",
                "trainer ms": Spread.of([one.trainer_cpu_s * 1e3 for one in mine]),
                "other ms": Spread.of([one.others_cpu_s * 1e3 for one in mine]),
                "loss": f"{mine[-1].loss:.4f}",
                "target": "–",
            }
            if _OWN in contenders:
                figures["/ own"] = _ratio(mine, contenders[_OWN])
            if theirs is not None and "tensorflow" in framework:
                figures["/ TFRA"] = _ratio(mine, theirs)
            if contender == (_AHEAD if _AHEAD in contenders else "ours"):
                figures["target"] = f"/ own <= {MOST_RATIO}" + (", / TFRA < 1" if "tensorflow" in framework else "")
            lines.append(Line(f"{framework}, {contender}", figures))
    return lines


def _ratio(mine: Sequence[FrameworkTurn], others: Sequence[FrameworkTurn]) -> Spread:
    return Spread.of([one.step_s / other.step_s for one, other in zip(mine, others, strict=True)])


def require_same_losses_as_own(turns: Mapping[str, Mapping[str, Sequence[FrameworkTurn]]]) -> None:
    """Refuse a contender whose last loss is not that of its framework's own embeddings, or where those learn otherwise another's.

    Raises:
        WrongFrameworkLossError: naming it.
    """
    own = {name: of[_OWN][-1].loss for name, of in turns.items() if _OWN in of and name not in _OTHER_RULE}
    for framework, contenders in turns.items():
        expected = own.get(framework, next(iter(own.values()), None))
        for contender, mine in contenders.items():
            if expected is None or (contender == _OWN and framework in _OTHER_RULE):
                continue
            if not abs(mine[-1].loss / expected - 1) <= (_STALE_LOSS_TOLERANCE if contender == _AHEAD else _LOSS_TOLERANCE):
                raise WrongFrameworkLossError(
                    f"{framework}, {contender}: mean loss {mine[-1].loss:.4f} in the last round, own embeddings have {expected:.4f}"
                )
