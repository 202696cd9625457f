"""Train and evaluate a DeepFM, one line of figures per epoch. Where rows live and what the data is must not be known here."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from deepfm import metrics
from deepfm.clicks import Clicks, batches
from deepfm.model import Batch, DeepFM, to_batch
from kvemb.errors import InvalidInputError

EVALUATION_BATCH = 8192
COLUMNS = ("epoch", "train logloss", "valid logloss", "AUC", "RMSE", "seconds")


class Optimizer(Protocol):
    """What a step needs of torch's optimizers and of SparseOptimizer."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


@dataclass
class Progress:
    """How far training has come: what it needs to go on from here.

    Args:
        step: batches trained on in all.
        epoch: the one under way, from 1.
        batch: batches of it trained on.
        total_loss: summed over the lines of these batches.
    """

    step: int = 0
    epoch: int = 1
    batch: int = 0
    total_loss: float = 0.0


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


def train_step(model: DeepFM, batch: Batch, optimizers: Sequence[Optimizer]) -> float:
    """Train on one batch; return its mean log loss before the step."""
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
    progress: Progress,
    ahead: Callable[[Iterable[Batch]], Iterable[Batch]] = lambda batches: batches,
    after_step: Callable[[], None] = lambda: None,
) -> Figures:
    """Train, printing one line per epoch.

    Args:
        model: trained in place.
        log: lines to train on, lines to validate on.
        optimizers: of rows and of dense weights.
        epochs, batch_size: how often, and lines per step.
        seed: of the order of lines, which is another one in each epoch.
        settle: called after each epoch, before validation: makes every push visible.
        progress: where to begin, kept up to date. An epoch that is all trained is only measured.
        ahead: hands on the batches of an epoch, and may look at them before they are used.
        after_step: called after each step.

    Returns:
        The figures after the last epoch.

    Raises:
        InvalidInputError: an epoch behind the last one has begun already.
    """
    clicks, valid = log
    at = progress
    if at.epoch > epochs:
        raise InvalidInputError(f"epoch {at.epoch} has begun already: --epochs {epochs} is less than what is trained")
    print("  ".join(f"{name:>13}" for name in COLUMNS), flush=True)
    for epoch in range(at.epoch, epochs + 1):
        started = time.monotonic()
        if epoch > at.epoch:
            at.epoch, at.batch, at.total_loss = epoch, 0, 0.0
        order = np.random.default_rng((seed, epoch)).permutation(len(clicks))
        for batch in ahead(to_batch(part) for part in batches(clicks, batch_size, order[at.batch * batch_size :])):
            at.total_loss += train_step(model, batch, optimizers) * len(batch.labels)
            at.batch, at.step = at.batch + 1, at.step + 1
            after_step()
        settle()
        seconds = time.monotonic() - started
        figures = measure(model, valid)
        cells = (f"{x:.4f}" for x in (at.total_loss / len(clicks), figures.log_loss, figures.auc, figures.rmse))
        print("  ".join(f"{cell:>13}" for cell in (f"{epoch}", *cells, f"{seconds:.1f}")), flush=True)
    return figures
