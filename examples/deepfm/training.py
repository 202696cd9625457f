"""Train and evaluate a DeepFM, one line of figures per epoch. Where rows live and what the data is must not be known here."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from deepfm import metrics
from deepfm.clicks import Clicks, batches
from deepfm.model import DeepFM, to_batch

EVALUATION_BATCH = 8192
COLUMNS = ("epoch", "train logloss", "valid logloss", "AUC", "RMSE", "seconds")


class Optimizer(Protocol):
    """What a step needs of torch's optimizers and of SparseOptimizer."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


@dataclass(frozen=True)
class Figures:
    """How good a model's probabilities are on a log."""

    log_loss: float
    auc: float
    rmse: float


def measure(model: DeepFM, clicks: Clicks) -> Figures:
    """Evaluate without recording anything."""
    model.eval()
    with torch.no_grad():
        parts = [torch.sigmoid(model(to_batch(batch))).numpy() for batch in batches(clicks, EVALUATION_BATCH)]
    model.train()
    probabilities = np.concatenate(parts)
    return Figures(
        metrics.log_loss(clicks.labels, probabilities),
        metrics.auc(clicks.labels, probabilities),
        metrics.rmse(clicks.labels, probabilities),
    )


def train_step(model: DeepFM, clicks: Clicks, optimizers: Sequence[Optimizer]) -> float:
    """Train on one batch; return its mean log loss before the step."""
    batch = to_batch(clicks)
    loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.detach())


def train(
    model: DeepFM,
    log: tuple[Clicks, Clicks],
    optimizers: Sequence[Optimizer],
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    settle: Callable[[], None],
) -> Figures:
    """Train, printing one line per epoch.

    Args:
        model: trained in place.
        log: lines to train on, lines to validate on.
        optimizers: of rows and of dense weights.
        epochs, batch_size: how often, and lines per step.
        seed: of the order of lines, which is another one in each epoch.
        settle: called after each epoch, before validation: makes every push visible.

    Returns:
        The figures after the last epoch.
    """
    clicks, valid = log
    print("  ".join(f"{name:>13}" for name in COLUMNS), flush=True)
    for epoch in range(1, epochs + 1):
        started = time.monotonic()
        order = np.random.default_rng((seed, epoch)).permutation(len(clicks))
        total = 0.0
        for batch in batches(clicks, batch_size, order):
            total += train_step(model, batch, optimizers) * len(batch)
        settle()
        seconds = time.monotonic() - started
        figures = measure(model, valid)
        cells = (f"{x:.4f}" for x in (total / len(clicks), figures.log_loss, figures.auc, figures.rmse))
        print("  ".join(f"{cell:>13}" for cell in (f"{epoch}", *cells, f"{seconds:.1f}")), flush=True)
    return figures
