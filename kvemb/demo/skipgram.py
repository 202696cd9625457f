"""Skip-gram with negative sampling: the loss, its gradients, and the training loop over rows that live elsewhere.

Here lives the model; where rows are kept (`Rows`) and what text a step sees (`batches`) must not. Two tables:
"word_in" holds a word as a centre, "word_out" as a context. A step pulls each distinct row once, computes on [b, l,
d] arrays with batched matrix products, sums the gradients of equal ids and pushes each distinct row once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb import init, optim
from kvemb.demo.batches import DEFAULTS, Settings, TrainingBatch, batches, n_batches, pass_text
from kvemb.demo.corpus import Corpus

WORD_IN = "word_in"
WORD_OUT = "word_out"
DIM = 32
N_PASSES = 3
INITIALIZER = init.uniform(low=-0.5 / DIM, high=0.5 / DIM)  # word2vec's own start for its input vectors
OPTIMIZER = optim.rowwise_adagrad(lr=0.2)  # as good as full Adagrad here, with one float of state per row instead of 32


class Rows(Protocol):
    """Where the rows are: in storage nodes, or in an array of this process."""

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """Fetch rows: per table, ids int64 [n] to rows float32 [n, d] in the same order."""
        ...

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """Hand over gradients: per table, distinct ids int64 [n] and gradients float32 [n, d]."""
        ...


@dataclass(frozen=True)
class TrainingProgress:
    """What a trainer has done when a step is over.

    Attributes:
        pass_index: 0, 1, ...
        trainer: whose progress this is.
        step: steps done in this pass by this trainer, counted from 1.
        n_steps: steps of this pass for this trainer.
        n_rows: rows pulled in this step, both tables (as many were pushed).
        n_words: words (centres) of this step.
        loss: mean loss per positive pair of this step.
    """

    pass_index: int
    trainer: int
    step: int
    n_steps: int
    n_rows: int
    n_words: int
    loss: float


class Gradients(NamedTuple):
    """Gradients of the summed loss, each shaped like the rows it belongs to, float32."""

    centers: NDArray[np.float32]
    contexts: NDArray[np.float32]
    negatives: NDArray[np.float32]


def loss_and_grads(
    centers: NDArray[np.float32],
    contexts: NDArray[np.float32],
    negatives: NDArray[np.float32],
    positives: NDArray[np.bool_],
    *,
    n_negatives: int,
) -> tuple[float, Gradients]:
    """Compute the skip-gram loss of some blocks, summed over positive pairs, and its gradients.

    With s_ij = c_i . x_j and t_im = c_i . y_m, and p_i the number of positive pairs of centre i:
    loss = sum_ij positive log(1 + exp(-s_ij)) + sum_im (n_negatives p_i / k) log(1 + exp(t_im)).
    The sum, not the mean, so that a short last batch weighs each pair like any other.

    Args:
        centers: float32 [b, l, d], rows of "word_in".
        contexts: float32 [b, l, d], rows of "word_out".
        negatives: float32 [b, k, d], rows of "word_out", shared by the centres of a block.
        positives: bool [b, l, l], whether context j belongs to centre i.
        n_negatives: how many negatives a positive pair stands against; the k shared ones are scaled to it.

    Returns:
        The summed loss (divide by positives.sum() for the mean per pair) and the three gradients.

    Source: Mikolov et al. 2013, "Distributed Representations of Words and Phrases and their Compositionality",
    equation 4.

    Example:
        >>> row = np.zeros((1, 2, 4), np.float32)
        >>> loss, _ = loss_and_grads(row, row, row, ~np.eye(2, dtype=bool)[None], n_negatives=5)
        >>> round(loss / 2, 3)  # (1 + 5) log 2 for rows that know nothing
        4.159
    """
    n_pairs = positives.sum(axis=2, dtype=np.float32)[:, :, None]
    scores = centers @ contexts.transpose(0, 2, 1)
    where = np.flatnonzero(positives)
    right = _sigmoid(scores.ravel()[where])
    pull_together = np.zeros_like(scores)
    pull_together.ravel()[where] = right - 1
    wrong = _sigmoid(-(centers @ negatives.transpose(0, 2, 1)))  # probability that each negative is told apart
    weight = n_pairs * np.float32(n_negatives / negatives.shape[1])
    push_apart = (1 - wrong) * weight
    loss = -float(np.log(right).sum(dtype=np.float64)) - float((np.log(wrong) * weight).sum(dtype=np.float64))
    return loss, Gradients(
        pull_together @ contexts + push_apart @ negatives,
        pull_together.transpose(0, 2, 1) @ centers,
        push_apart.transpose(0, 2, 1) @ centers,
    )


def train_step(rows: Rows, batch: TrainingBatch, settings: Settings = DEFAULTS) -> tuple[float, int]:
    """Train on one batch: pull, compute, push.

    Returns:
        The summed loss before the step, and the number of rows pulled.
    """
    n_words = batch.tokens.size
    in_ids, in_at = np.unique(batch.tokens, return_inverse=True)
    out_ids, out_at = np.unique(np.concatenate([batch.tokens.ravel(), batch.negatives.ravel()]), return_inverse=True)
    pulled = rows.pull({WORD_IN: in_ids, WORD_OUT: out_ids})
    centers = pulled[WORD_IN][in_at].reshape(*batch.tokens.shape, -1)
    contexts = pulled[WORD_OUT][out_at[:n_words]].reshape(*batch.tokens.shape, -1)
    negatives = pulled[WORD_OUT][out_at[n_words:]].reshape(*batch.negatives.shape, -1)
    loss, grads = loss_and_grads(centers, contexts, negatives, batch.positives, n_negatives=settings.n_negatives)
    dim = centers.shape[-1]
    out_grads = np.concatenate([grads.contexts.reshape(-1, dim), grads.negatives.reshape(-1, dim)])
    rows.push(
        {
            WORD_IN: (in_ids, sum_by_row(grads.centers.reshape(-1, dim), in_at.ravel())),
            WORD_OUT: (out_ids, sum_by_row(out_grads, out_at)),
        }
    )
    return loss, in_ids.size + out_ids.size


def train_pass(
    rows: Rows,
    corpus: Corpus,
    *,
    pass_index: int,
    trainer: int,
    n_trainers: int,
    seed: int,
    report: Callable[[TrainingProgress], None],
    settings: Settings = DEFAULTS,
) -> float:
    """Train this trainer's share of one pass over the corpus.

    Args:
        rows: where the rows are.
        corpus: the text.
        pass_index: 0, 1, ...; each pass subsamples and shuffles anew.
        trainer: 0 <= trainer < n_trainers.
        n_trainers: how many share the pass; 1 trains all of it.
        seed: the run's seed; the same for all trainers.
        report: called after each step.
        settings: how to sample.

    Returns:
        Mean loss per positive pair over the steps of this trainer; nan if its share is empty. Errors of `rows` pass
        through; steps before them have been pushed.
    """
    text = pass_text(corpus, settings, pass_index=pass_index, seed=seed)
    n_steps = n_batches(text, settings, trainer=trainer, n_trainers=n_trainers)
    work = batches(corpus, text, settings, pass_index=pass_index, trainer=trainer, n_trainers=n_trainers, seed=seed)
    total_loss, total_pairs = 0.0, 0
    for step, batch in enumerate(work, start=1):
        loss, n_rows = train_step(rows, batch, settings)
        n_pairs = int(batch.positives.sum())
        report(TrainingProgress(pass_index, trainer, step, n_steps, n_rows, batch.tokens.size, loss / max(n_pairs, 1)))
        total_loss, total_pairs = total_loss + loss, total_pairs + n_pairs
    return total_loss / total_pairs if total_pairs else float("nan")


def sum_by_row(grads: NDArray[np.float32], at: NDArray[np.intp]) -> NDArray[np.float32]:
    """Sum the gradients of equal rows.

    Args:
        grads: float32 [m, d].
        at: int [m], the row each belongs to; every number in 0..max occurs.

    Returns:
        float32 [max + 1, d].

    Example:
        >>> sum_by_row(np.array([[1.0], [2.0], [4.0]], np.float32), np.array([1, 0, 1])).tolist()
        [[2.0], [5.0]]
    """
    order = np.argsort(at, kind="stable")
    starts = np.flatnonzero(np.diff(at[order], prepend=-1))
    return np.add.reduceat(grads[order], starts, axis=0)


def _sigmoid(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Squash to (0, 1); scores are kept within +-30 so that log of the result stays finite in float32."""
    squashed: NDArray[np.float32] = np.reciprocal(1 + np.exp(-np.clip(scores, -30, 30)))
    return squashed
