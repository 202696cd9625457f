"""Skip-gram with negative sampling: the text of a step, the loss, its gradients, and the training loop.

Strategy: drop part of the frequent words and cut the rest into blocks of equal length. Shuffle the blocks, and deal batches of blocks
to the trainers in turn. Inside a block every window is a band of one [l, l] matrix and the negatives are shared, so the model is three
batched matrix products. A step pulls each unique row once, sums the gradients of equal ids and pushes each unique row once. The text of a
step is a pure function of (corpus, settings, seed, pass, batch number); where rows are kept must not live here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.segment_sum import group_by_id
from kvemb.demo.corpus import Corpus
from kvemb.demo.word_rows import WORD_IN, WORD_OUT, Rows

_PADDING = -1  # the run number of a place in a block that holds no text


@dataclass(frozen=True)
class Settings:
    """How the text is sampled. The defaults suit 3 M words on two busy cores."""

    window: int = 5  # a word's contexts reach 1..window words to each side, drawn for each word (Mikolov et al. 2013).
    subsample: float = 1e-4  # of a word with a larger share of the text than this, only sqrt(subsample / share) is kept
    n_negatives: int = 5  # weight of the negative samples: so many per positive pair
    block: int = 64  # words per block
    block_negatives: int = 64  # negatives drawn for a block; their loss is scaled to n_negatives per pair
    batch_blocks: int = 256  # blocks per batch, at most
    # of a pass; batches are smaller where the text is short. Trainers that learn from rows a few batches old need many.
    least_batches: int = 90


DEFAULTS = Settings()


class TrainingBatch(NamedTuple):
    """One step's work: `b` blocks of `l` words with `k` negatives each."""

    tokens: NDArray[np.int64]  # int64 [b, l], ids in reading order; each is a centre and, for its neighbours, a context
    negatives: NDArray[np.int64]  # int64 [b, k], ids drawn as negative contexts for all centres of the block
    positives: NDArray[np.bool_]  # bool [b, l, l], whether word j is in the window of centre i


class PassText:
    """The text of one pass in shuffled blocks, and its batches: the same for every trainer, another for every pass. Immutable.

    Every kept word is in one block; places left over are padding. Subsampling, its threshold and the power 3/4: Mikolov et al. 2013,
    "Distributed Representations of Words and Phrases and their Compositionality", sections 2.2 and 2.3.
    """

    def __init__(self, corpus: Corpus, *, seed: int, pass_index: int = 0, held_out: bool = False, settings: Settings = DEFAULTS) -> None:
        self.settings = settings
        self._seed = [seed, pass_index, int(held_out)]
        rng = np.random.default_rng(self._seed)
        keep = np.sqrt(settings.subsample * max(corpus.counts.sum(), 1) / np.maximum(corpus.counts, 1))  # [v]
        survives = rng.random(corpus.tokens.size) < keep[np.searchsorted(corpus.ids, corpus.tokens)]
        kept = np.flatnonzero(survives & (corpus.held_out == held_out))
        lead = int(rng.integers(settings.block))  # block edges cut windows; a new phase each pass cuts others
        n_blocks = -(-(lead + kept.size) // settings.block) if kept.size else 0
        filler = corpus.tokens[kept[0]] if kept.size else 0  # an id that is there anyway: padding must not ask for new rows
        tokens = np.full(n_blocks * settings.block, filler, np.int64)
        runs = np.full(tokens.size, _PADDING, np.int32)
        tokens[lead : lead + kept.size] = corpus.tokens[kept]
        runs[lead : lead + kept.size] = corpus.runs[kept]
        order = rng.permutation(n_blocks)
        self.tokens: NDArray[np.int64] = tokens.reshape(n_blocks, settings.block)[order]
        self.runs: NDArray[np.int32] = runs.reshape(n_blocks, settings.block)[order]
        weights = corpus.counts.astype(np.float64) ** 0.75
        self._batch_blocks = max(1, min(settings.batch_blocks, n_blocks // settings.least_batches))
        self._negative_ids, self._negative_share = corpus.ids, weights / max(weights.sum(), 1.0)

    @property
    def n_batches(self) -> int:
        """Of all trainers together."""
        return -(-len(self.tokens) // self._batch_blocks)

    def batch(self, number: int) -> TrainingBatch:
        """Draw the windows and negatives of one batch; 0 <= number < n_batches."""
        some = slice(number * self._batch_blocks, (number + 1) * self._batch_blocks)
        rng = np.random.default_rng([*self._seed, number])
        tokens = self.tokens[some]
        reach = rng.integers(1, self.settings.window + 1, tokens.shape)
        negatives = rng.choice(self._negative_ids, (len(tokens), self.settings.block_negatives), p=self._negative_share)
        return TrainingBatch(tokens, negatives, windows(self.runs[some], reach))


def windows(runs: NDArray[np.int32], reach: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which words are contexts of which, bool [b, l, l]: of one run, int32 [b, l], -1 for padding, within `reach` words."""
    place = np.arange(runs.shape[1])
    distance = np.abs(place[:, None] - place[None, :])
    near: NDArray[np.bool_] = (distance[None] <= reach[:, :, None]) & (distance > 0)[None]
    near &= (runs[:, :, None] == runs[:, None, :]) & (runs != _PADDING)[:, :, None]
    return near


class Gradients(NamedTuple):
    """Gradients of the summed loss, each shaped like the rows it belongs to, float32."""

    centers: NDArray[np.float32]
    contexts: NDArray[np.float32]
    negatives: NDArray[np.float32]


def loss_and_grads(
    centers: NDArray[np.float32],  # float32 [b, l, d], rows of "word_in"
    contexts: NDArray[np.float32],  # float32 [b, l, d], rows of "word_out"
    negatives: NDArray[np.float32],  # float32 [b, k, d], rows of "word_out", shared by the centres of a block
    positives: NDArray[np.bool_],  # bool [b, l, l], whether context j belongs to centre i
    *,
    n_negatives: int,
) -> tuple[float, Gradients]:
    """Return the skip-gram loss of some blocks, summed over positive pairs, and its three gradients (Mikolov et al. 2013, equation 4).

    With s_ij = c_i . x_j and t_im = c_i . y_m, and p_i the number of positive pairs of centre i:
    loss = sum_ij positive log(1 + exp(-s_ij)) + sum_im (n_negatives p_i / k) log(1 + exp(t_im)).
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


class TrainingProgress(NamedTuple):
    """A trainer's steps of its pass that are done; the rows pulled (and pushed) and the mean loss per positive pair of the last."""

    step: int
    n_steps: int
    n_rows: int
    loss: float


def train_pass(rows: Rows, text: PassText, *, trainer: int = 0, n_trainers: int = 1) -> Iterator[TrainingProgress]:
    """Train this trainer's share of one pass, every n_trainers-th batch, and yield after each step."""
    numbers = range(trainer, text.n_batches, n_trainers)
    for step, number in enumerate(numbers, start=1):
        batch = text.batch(number)
        loss, grads = pull_and_grade(rows, batch, text.settings.n_negatives)
        rows.push(grads)
        n_rows = sum(ids.size for ids, _ in grads.values())
        yield TrainingProgress(step, len(numbers), n_rows, loss / max(int(batch.positives.sum()), 1))


def held_out_loss(rows: Rows, text: PassText) -> float:
    """Return the mean loss per positive pair, nan without any; rows that know nothing score (1 + n_negatives) log 2: 4.159 with 5."""
    total, n_pairs = 0.0, 0
    for number in range(text.n_batches):
        batch = text.batch(number)
        total += pull_and_grade(rows, batch, text.settings.n_negatives)[0]
        n_pairs += int(batch.positives.sum())
    return total / n_pairs if n_pairs else float("nan")


def pull_and_grade(
    rows: Rows, batch: TrainingBatch, n_negatives: int
) -> tuple[float, Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]]:
    """Pull a batch's rows; return the summed loss, and the push: per table unique ids, int64 [n], and gradients, float32 [n, d]."""
    n_words = batch.tokens.size
    into = group_by_id(batch.tokens.ravel().view(np.uint64))
    out = group_by_id(np.concatenate([batch.tokens.ravel(), batch.negatives.ravel()]).view(np.uint64))
    in_ids, out_ids = into.ids.view(np.int64), out.ids.view(np.int64)
    pulled = rows.pull({WORD_IN: in_ids, WORD_OUT: out_ids})
    centers = pulled[WORD_IN][into.inverse].reshape(*batch.tokens.shape, -1)
    contexts = pulled[WORD_OUT][out.inverse[:n_words]].reshape(*batch.tokens.shape, -1)
    negatives = pulled[WORD_OUT][out.inverse[n_words:]].reshape(*batch.negatives.shape, -1)
    loss, grads = loss_and_grads(centers, contexts, negatives, batch.positives, n_negatives=n_negatives)
    dim = centers.shape[-1]
    out_grads = np.concatenate([grads.contexts.reshape(-1, dim), grads.negatives.reshape(-1, dim)])
    return loss, {WORD_IN: (in_ids, into.sum(grads.centers.reshape(-1, dim))), WORD_OUT: (out_ids, out.sum(out_grads))}


def _sigmoid(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Squash to (0, 1); scores are kept within +-30 so that log of the result stays finite in float32."""
    squashed: NDArray[np.float32] = np.reciprocal(1 + np.exp(-np.clip(scores, -30, 30)))
    return squashed
