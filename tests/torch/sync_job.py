"""The job of test_sync_equality: a small DeepFM, trained by one process on local rows, or by several on a cluster's.

As a program it is one trainer of a sync job: dense gradients are averaged by torch.distributed (gloo), the rows' by the
parameter servers; each trainer takes the mean loss of its share of every batch.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from deepfm.clicks import Clicks
from deepfm.model import DeepFM, to_batch
from torch import distributed, nn
from torch.nn import functional as F

import kvemb
from benchmarks.deepfm_rows import DENSE, Rows, Settings, indexed, local_rows, stored_rows
from kvemb.arrays.hashing import mix64

N_STEPS, BATCH, N_FIELDS, DIM, N_CATEGORIES = 200, 64, 6, 4, 50
LEARNING_RATES = {"sgd": 0.5, "adagrad": 0.05, "adam": 0.005}


def draw_log() -> Clicks:
    """Every line of the job, in order: skewed categories, values that are not all 1, labels that depend on the ids."""
    rng = np.random.default_rng(7)
    n_lines = N_STEPS * BATCH
    category = (N_CATEGORIES * rng.random((n_lines, N_FIELDS)) ** 3).astype(np.uint64)
    field = np.arange(1, N_FIELDS + 1, dtype=np.uint64) << np.uint64(32)
    values = rng.uniform(0.5, 1.5, (n_lines, N_FIELDS)).astype(np.float32)
    logits = (rng.normal(size=(N_FIELDS, N_CATEGORIES))[np.arange(N_FIELDS), category.astype(int)] * values).sum(axis=1)
    labels = (rng.random(n_lines) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    offsets = np.arange(n_lines + 1) * N_FIELDS
    return Clicks(labels, offsets, mix64(field + category).view(np.int64).reshape(-1), values.reshape(-1))


def train(log: Clicks, rows: Rows, kind: str, *, rank: int, world: int, average: Callable[[nn.Module], None]) -> list[float]:
    """Train on this trainer's share of every batch; return the mean loss of each."""
    torch.manual_seed(0)  # the same dense weights everywhere
    model = DeepFM(rows.linear, rows.factors, dim=DIM, n_fields=N_FIELDS, hidden=(16,))
    dense = DENSE[kind](model.dense_parameters(), lr=LEARNING_RATES[kind])
    losses = []
    for step in range(N_STEPS):
        share = np.arange(step * BATCH + rank * BATCH // world, step * BATCH + (rank + 1) * BATCH // world)
        batch = to_batch(log.take(share))
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels)
        rows.optimizer.zero_grad()
        dense.zero_grad()
        loss.backward()
        average(model)
        rows.optimizer.step()
        dense.step()
        losses.append(loss.item())
    return losses


def local_losses(kind: str) -> list[float]:
    """Train in this process, on whole batches and torch's own embeddings."""
    log = draw_log()
    known_ids = np.unique(log.ids)
    rows = local_rows(known_ids, settings(kind), suffix=f".{kind}")
    return train(indexed(log, known_ids), rows, kind, rank=0, world=1, average=lambda model: None)


def settings(kind: str) -> Settings:
    return Settings(DIM, kind, LEARNING_RATES[kind], seed=3, reduce="mean")


def average_over(world: int) -> Callable[[nn.Module], None]:
    """Average dense gradients over the trainers, as DistributedDataParallel does."""

    def average(model: nn.Module) -> None:
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= world

    return average


def main(url: str, rank: int, world: int, folder: Path) -> None:
    """Run one trainer; its losses by optimizer go to losses-<rank>.json."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=(folder / "gloo").as_uri(), rank=rank, world_size=world)
    log = draw_log()
    with kvemb.connect(url, trainer=f"trainer-{rank}") as cluster:
        losses = {}
        for kind in LEARNING_RATES:
            rows = stored_rows(cluster, settings(kind), suffix=f".{kind}")
            losses[kind] = train(log, rows, kind, rank=rank, world=world, average=average_over(world))
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
