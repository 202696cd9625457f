"""The contenders of `dlrm`: the example's model on rows in this process, or in a cluster, pulled in the step or ahead of it.

What must not live here: turns and what comes of them (`dlrm_rounds`), servers and networks.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import kvemb
from benchmarks.dlrm_rounds import Spent, Trainer
from benchmarks.ids import sampler
from benchmarks.local_rows import LocalRows
from kvemb.api import Cluster
from kvemb.arrays.hashing import mix64
from kvemb.errors import KvembError

N_TABLES, DIM = 26, 64
MAX_UNAPPLIED = 2
_LR, _SEED = 0.001, 0
_FIRST = kvemb.init.uniform(-0.05, 0.05)


class TorchAbsentError(KvembError):
    """This benchmark needs torch."""


@dataclass(frozen=True, eq=False)
class Job:
    """What everybody trains on: batches (the example's), and the ids int64 [b, 26] in them."""

    batches: Sequence[Any]
    ids: Sequence[np.ndarray[Any, np.dtype[np.int64]]]
    n_ids: int

    @staticmethod
    def draw(batch_size: int, n_batches: int, n_ids: int) -> "Job":
        """Draw Zipf ids, of n_ids in every table, and clicks that depend on ids and numbers."""
        data, rng = _example("data"), np.random.default_rng(_SEED)
        draws = [sampler("zipf", n_ids, seed) for seed in range(N_TABLES)]
        batches, drawn = [], []
        for _ in range(n_batches):
            numbers = rng.standard_normal((batch_size, data.N_NUMBERS), dtype=np.float32)
            ids = np.stack([draw(batch_size) for draw in draws], axis=1)
            planted = (mix64(ids.astype(np.uint64)) >> np.uint64(40)).astype(np.float32) / (1 << 23) - 1  # between -1 and 1
            clicks = rng.random(batch_size) < 1 / (1 + np.exp(-8 * planted.mean(axis=1) - numbers[:, 0]))
            batches.append(data.Lines(numbers, ids, clicks.astype(np.float32))[list(range(batch_size))])
            drawn.append(ids)
        return Job(batches, drawn, n_ids)

    def ids_of(self, table: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Every id of a table that occurs, ascending."""
        return np.unique(np.concatenate([ids[:, table] for ids in self.ids])).astype(np.uint64)

    def first_rows(self, table: int) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], np.ndarray[Any, np.dtype[np.float32]]]:
        """These ids, and the rows that everybody begins with."""
        ids = self.ids_of(table)
        return ids, _FIRST.rows(ids, DIM, table=f"f{table}", seed=_SEED)

    @property
    def distinct_per_step(self) -> float:
        """Rows that a step looks up, on average."""
        return float(np.mean([sum(len(np.unique(ids[:, i])) for i in range(N_TABLES)) for ids in self.ids]))


def local(name: str, job: Job) -> Trainer:
    """Rows in this process's memory."""
    return _trainer(name, job, LocalRows(), exact=True)


def stored(name: str, job: Job, cluster: Cluster, pids: Mapping[str, Sequence[int]], *, ahead: str | None = None) -> Trainer:
    """Rows in a cluster, in tables of this trainer's own.

    Args:
        ahead: consistency of rows that are pulled ahead; None to pull them in the step.
    """
    return _trainer(name, job, cluster, pids, ahead, exact=cluster.mode == "sync")


def import_torch() -> Any:
    """Import torch, for one thread."""
    try:
        import torch
    except ImportError:
        raise TorchAbsentError("dlrm needs torch, which is not installed: pip install 'kvemb[torch]'") from None
    torch.set_num_threads(1)
    return torch


def _trainer(
    name: str, job: Job, cluster: Any, pids: Mapping[str, Sequence[int]] | None = None, ahead: str | None = None, *, exact: bool
) -> Trainer:
    torch = import_torch()
    from trainer.torch import SparseOptimizer, prepare

    torch.manual_seed(_SEED)  # everybody begins with the same dense weights
    model = _example("model").DLRM(_lookups(job, cluster, f"{ahead}."), n_features=N_TABLES, dim=DIM)
    sparse, dense = SparseOptimizer(model, max_unapplied=MAX_UNAPPLIED), torch.optim.Adagrad(model.dense_parameters(), lr=_LR)
    spent, turn = Spent(), list[Any]()
    loader = turn if ahead is None else prepare(model, turn, consistency=ahead)

    def batches(indices: Sequence[int]) -> Iterable[object]:
        turn[:] = [job.batches[index] for index in indices]
        return _timed(loader, spent)

    def step(batch: Any) -> float:
        before_s = sparse.shared.waited_s
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.numbers, batch.categories), batch.labels)
        spent.rows_s += sparse.shared.waited_s - before_s
        dense.zero_grad()
        loss.backward()
        dense.step()
        began_s = perf_counter()
        sparse.step()
        spent.push_s += perf_counter() - began_s
        return float(loss.detach())

    return Trainer(name, batches, step, cluster.flush, spent, pids or {}, exact)


def _lookups(job: Job, cluster: Any, prefix: str) -> Any:
    """A collection over tables of this prefix, which hold what everybody begins with."""
    from trainer.torch import EmbeddingBagCollection, EmbeddingBagConfig

    keys = _example("data").KEYS
    tables = [
        EmbeddingBagConfig(name=prefix + key, embedding_dim=DIM, num_embeddings=job.n_ids, feature_names=[key], optimizer=_optimizer())
        for key in keys
    ]
    collection = EmbeddingBagCollection(tables, cluster)
    for number, table in enumerate(tables):
        ids, rows = job.first_rows(number)
        cluster.table(table.name).assign(ids.astype(np.int64), rows)
    return collection


def _timed(loader: Iterable[object], spent: Spent) -> Iterator[object]:
    """Hand batches on; how long they took is time spent on rows."""
    batches = iter(loader)
    while True:
        began_s = perf_counter()
        batch = next(batches, None)
        spent.rows_s += perf_counter() - began_s
        if batch is None:
            return
        yield batch


def _optimizer() -> Any:
    """The usual choice for DLRM's tables: one sum per row, which next to no memory and traffic go with."""
    return kvemb.optim.rowwise_adagrad(lr=_LR)


def _example(name: str) -> Any:
    """Return a module of examples/dlrm, which is no package of ours but a program's folder."""
    folder = str(Path(__file__).resolve().parents[1] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module(f"dlrm.{name}")
