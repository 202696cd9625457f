"""The question `deepfm`: what does a step of the example cost with rows in storage, beside torch's own embeddings? Turns: deepfm_rounds."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import kvemb
from benchmarks.deepfm_rounds import Round, Steps, lines_of, require_same_loss
from benchmarks.memory_ps_client import started
from benchmarks.options import whole
from benchmarks.report import Report, Section
from kvemb.config import DURABILITIES
from kvemb.errors import KvembError
from kvemb.local_cluster import LocalCluster

STORES = ("redis", "valkey", "memcached")
MODES = ("async", "sync")
_LR, _HIDDEN, _SEED = 0.002, (64, 32), 0


class TorchAbsentError(KvembError):
    """This benchmark needs torch."""


def deepfm(options: argparse.Namespace) -> Report:
    """What does a step of the DeepFM example cost with rows in storage, beside torch's own embeddings in one process?

    The example's model, optimizer bridge and synthetic clicks (20 fields), one thread of torch everywhere. Contenders train on the same
    batches in turns of --steps steps: (a) torch's nn.Embedding in this process, with sparse gradients and SparseAdam, and with dense
    gradients and Adam; (b) a classic parameter server, --shards shards that keep rows in their own memory and serve pulls and pushes over
    gRPC, with our messages and update rules and nothing else (benchmarks/memory_ps.py); (c) ours over Redis and (d) over memcached, one
    node, as many shards (one trainer on two cores needs one: a second one takes a seventh more CPU time); (b), (c) and (d) sync (a step
    returns when it is applied) and async (at most 2 pushes unapplied, waited for inside the step); "ahead": the rows of the next batch are
    pulled by a thread meanwhile (kvemb.torch.prepare; "exact" in sync mode, "stale" in async). Read: ms/step is the median of a
    turn's steps plus its share of the flush that ends the turn; ratio is this line's step divided by the faster of (a)'s, within a round:
    below 1 is faster than torch alone; / (b) is the same with (b) of the same mode; trainer and other ms are CPU time per step of this
    process, and of shards and storage together. Values are medians of the rounds with (smallest..largest). Everybody begins with the same
    rows (ahead: drawn alike); at the end the mean loss of the last round must be that of (a) with sparse gradients within 2 % (async: rows
    may be two pushes old; 6 % where they are pulled ahead, too). --durability is of our shards' journal; a killed shard of (b) loses
    everything.
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
    parser.add_argument("--shards", type=whole(1), default=1, metavar="N", help="parameter servers of (b), (c) and (d) (1)")
    parser.add_argument("--durability", choices=DURABILITIES, default="os", help="of the shards (os)")
    parser.add_argument("--dim", type=whole(1), default=8, metavar="N", help="weights per factor (8)")
    parser.add_argument("--batch", nargs="+", type=whole(1), default=[1024, 4096], metavar="N", help="lines per step (1024 4096)")
    parser.add_argument("--lines", type=whole(1), default=100_000, metavar="N", help="lines of the log (100000)")
    parser.add_argument("--steps", type=whole(1), default=20, metavar="N", help="steps of one turn (20)")
    parser.add_argument("--repeats", type=whole(1), default=8, metavar="N", help="rounds, after one to warm up (8)")


def _measure(batch_size: int, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    log, _ = example("synthetic").draw(options.lines, _SEED)
    order = np.random.default_rng(_SEED).permutation(len(log))
    batches = [log.take(order[at : at + batch_size]) for at in range(0, len(log) - batch_size + 1, batch_size)]
    if not batches:
        raise KvembError(f"--lines {options.lines} is less than one batch of {batch_size}")
    with ExitStack() as stack:
        contenders = _local(log, batches, options.dim)
        n_local = len(contenders)
        peers: dict[int, int] = {}
        ahead: dict[int, str] = {}
        for mode in options.mode:
            number = len(contenders)
            contenders.append(_in_memory(stack, mode, batches, options))
            for store in options.store:
                peers[len(contenders)] = number
                running, pids = _started(stack, store, mode, options, versions)
                name = f"({'d' if store == 'memcached' else 'c'}) ours, {store}, {mode}"
                contenders.append(_remote(name, running, batches, options.dim, pids))
                ahead[len(contenders)] = consistency = "exact" if mode == "sync" else "stale"
                contenders.append(_remote(f"{name}, ahead", running, batches, options.dim, pids, ahead=consistency))
        names = [one.name for one in contenders]
        rounds = _rounds(contenders, len(batches), options)
    require_same_loss(names, rounds, [index for index, consistency in ahead.items() if consistency == "stale"])
    settings = {
        "dim": options.dim,
        "batch": batch_size,
        "ids/step": len(batches[0].ids),
        "distinct/step": round(float(np.mean([len(np.unique(batch.ids)) for batch in batches]))),
        "shards": options.shards,
        "durability": options.durability,
        "steps": options.steps,
        "repeats": options.repeats,
    }
    return Section(settings, lines=lines_of(names, rounds, n_local, peers, ahead))


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
    torch, place = _torch(), _rows()
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until this is set
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


def _in_memory(stack: ExitStack, mode: str, batches: Sequence[Any], options: argparse.Namespace) -> Steps:
    """The classic parameter server."""
    cluster = stack.enter_context(started(options.shards, mode))
    return _remote(f"(b) in-memory PS, {mode}", cluster, batches, options.dim, cluster.pids)


def _started(stack: ExitStack, store: str, mode: str, options: argparse.Namespace, versions: dict[str, str]) -> tuple[Any, list[int]]:
    """Start a cluster of ours; return it, and the processes of its servers and shards."""
    trainers = 1 if mode == "sync" else 0
    cluster = stack.enter_context(LocalCluster(store, shards=options.shards, mode=mode, trainers=trainers, durability=options.durability))
    opened = stack.enter_context(kvemb.connect(cluster.url))
    versions[f"{store} server"] = opened.status().nodes[0].server
    return opened, [process.pid for process in (*(server.process for server in cluster.servers), *cluster.shards)]


def _remote(name: str, cluster: Any, batches: Sequence[Any], dim: int, pids: Sequence[int], *, ahead: str | None = None) -> Steps:
    """Rows in a cluster, ours or the peer's, in tables of this contender's own."""
    rows = _rows().stored_rows(cluster, _settings(dim), suffix=".ahead" if ahead else "")
    model, train = _model_and_step(rows, rows.optimizer, batches, dim)
    if not ahead:
        return Steps(name, lambda index: train(batches[index]), rows.settle, pids)
    return Steps(name, train, rows.settle, pids, _loader(model, batches, ahead))


def _loader(model: Any, batches: Sequence[Any], consistency: str) -> Callable[[Sequence[int]], Iterable[Any]]:
    """What yields batches whose rows were pulled ahead, one batch ahead: all rows are in every batch here, and Adam bears little delay."""
    from trainer.torch import prepare

    turn: list[Any] = []
    arrays = _torch().from_numpy
    features = {"linear": lambda batch: (arrays(batch.ids), arrays(batch.offsets[:-1])), "factors": lambda batch: arrays(batch.ids)}
    prepared = prepare(model, turn, features=features, consistency=consistency, capacity=1)

    def load(indices: Sequence[int]) -> Iterable[Any]:
        turn[:] = [batches[index] for index in indices]
        return prepared

    return load


def _stepper(rows: Any, optimizer: Any, batches: Sequence[Any], dim: int) -> Callable[[int], float]:
    _, train = _model_and_step(rows, optimizer, batches, dim)
    return lambda index: train(batches[index])


def _model_and_step(rows: Any, optimizer: Any, batches: Sequence[Any], dim: int) -> tuple[Any, Callable[[Any], float]]:
    torch, training = _torch(), example("training")
    to_batch = example("model").to_batch
    torch.manual_seed(_SEED)  # every contender begins with the same dense weights
    model = example("model").DeepFM(rows.linear, rows.factors, dim=dim, n_fields=batches[0].n_fields, hidden=_HIDDEN)
    optimizers = [optimizer, torch.optim.Adam(model.dense_parameters(), lr=_LR)]
    return model, lambda batch: float(training.train_step(model, to_batch(batch), optimizers))


def steps_of(cluster: Any, batches: Sequence[Any], dim: int) -> Callable[[Any], float]:
    """Return what trains a new model on one of these batches, with rows in a cluster, and returns the loss."""
    _torch().set_num_threads(1)
    rows = _rows().stored_rows(cluster, _settings(dim))
    return _model_and_step(rows, rows.optimizer, batches, dim)[1]


def _settings(dim: int) -> Any:
    return _rows().Settings(dim, "adam", _LR, _SEED)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise TorchAbsentError("deepfm needs torch, which is not installed: pip install 'kvemb[torch]'") from None
    return torch


def _rows() -> Any:
    """The module of the rows, which needs torch."""
    return import_module("benchmarks.deepfm_rows")


def example(name: str) -> Any:
    """Return a module of examples/deepfm, which is no package of ours but a program's folder."""
    folder = str(Path(__file__).resolve().parents[1] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module(f"deepfm.{name}")
