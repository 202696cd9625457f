"""What one step trains on: blocks of text, the windows inside them, and shared negative samples, as arrays of ids.

Here lives sampling, a pure function of (corpus, settings, seed, pass, batch number); rows and gradients must not.
Strategy: drop part of the frequent words, cut what is left into blocks of equal length, shuffle the blocks, and deal
batches of blocks to the trainers in turn. Inside a block every window is a band of one [l, l] matrix and the
negatives are shared by the block, so the model is three batched matrix products. The batches do not depend on the
number of trainers; only who trains which does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.demo.corpus import Corpus

_PADDING = -1  # the run number of a place in a block that holds no text


@dataclass(frozen=True)
class Settings:
    """How the text is sampled. The defaults suit 3 M words on two busy cores.

    Attributes:
        window: a word's contexts reach 1..window words to each side, drawn anew for each word (Mikolov et al. 2013).
        subsample: of a word with a larger share of the text than this, only sqrt(subsample / share) is kept.
        n_negatives: weight of the negative samples: so many per positive pair.
        block: words per block.
        block_negatives: negatives drawn for a block; their loss is scaled to n_negatives per pair.
        batch_blocks: blocks per batch.
    """

    window: int = 5
    subsample: float = 1e-4
    n_negatives: int = 5
    block: int = 64
    block_negatives: int = 64
    batch_blocks: int = 256


DEFAULTS = Settings()


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """One step's work: `b` blocks of `l` words with `k` negatives each.

    Attributes:
        tokens: int64 [b, l], ids in reading order; each is a centre and, for its neighbours, a context.
        negatives: int64 [b, k], ids drawn as negative contexts for all centres of the block.
        positives: bool [b, l, l], whether word j is in the window of centre i.
    """

    tokens: NDArray[np.int64]
    negatives: NDArray[np.int64]
    positives: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PassText:
    """The text of one pass in shuffled blocks: tokens int64 [n_blocks, l], and the run each is in, int32 alike."""

    tokens: NDArray[np.int64]
    runs: NDArray[np.int32]


class NegativeSampler:
    """Draw ids in proportion to count ** 0.75 over the words of the training text (Mikolov et al. 2013).

    Immutable, so safe to share between threads.

    Example:
        >>> from kvemb.demo.corpus import build
        >>> NegativeSampler(build([["a", "b", "a"]])).draw(np.random.default_rng(0), (2, 3)).shape
        (2, 3)
    """

    def __init__(self, corpus: Corpus) -> None:
        seen = corpus.counts > 0
        self._ids = corpus.ids[seen]
        self._cumulative = np.cumsum(corpus.counts[seen].astype(np.float64) ** 0.75)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Draw ids: int64 of that shape."""
        points = rng.random(shape) * self._cumulative[-1]
        found = np.searchsorted(self._cumulative, points, side="right")
        drawn: NDArray[np.int64] = self._ids[np.minimum(found, self._ids.size - 1)]  # rounding may reach past the end
        return drawn


def pass_text(corpus: Corpus, settings: Settings, *, pass_index: int, seed: int) -> PassText:
    """Choose and shuffle the text of one pass: the same for every trainer, another for every pass.

    Args:
        corpus: the whole text; its held-out stretches are left out.
        settings: how to sample.
        pass_index: 0, 1, ...
        seed: the run's seed.

    Returns:
        Blocks in training order. Every kept word stands in exactly one block; places left over are padding of no
        effect.

    Source: subsampling and its threshold are those of Mikolov et al. 2013, "Distributed Representations of Words and
    Phrases and their Compositionality", section 2.3.

    Example:
        >>> from kvemb.demo.corpus import build
        >>> corpus = build([["a", "b"] * 10])
        >>> text = pass_text(corpus, Settings(block=8, subsample=1.0), pass_index=0, seed=0)
        >>> text.tokens.shape[1], int((text.runs >= 0).sum())
        (8, 20)
    """
    rng = np.random.default_rng([seed, pass_index])
    kept = np.flatnonzero(kept_words(corpus, rng, settings.subsample) & ~corpus.held_out)
    lead = int(rng.integers(settings.block))  # block edges cut windows; a new phase each pass cuts others
    n_blocks = -(-(lead + kept.size) // settings.block)
    filler = corpus.tokens[kept[0]] if kept.size else 0  # an id that is there anyway: padding must not ask for new rows
    tokens = np.full(n_blocks * settings.block, filler, np.int64)
    runs = np.full(tokens.size, _PADDING, np.int32)
    tokens[lead : lead + kept.size] = corpus.tokens[kept]
    runs[lead : lead + kept.size] = corpus.runs[kept]
    order = rng.permutation(n_blocks)
    return PassText(tokens.reshape(n_blocks, -1)[order], runs.reshape(n_blocks, -1)[order])


def kept_words(corpus: Corpus, rng: np.random.Generator, subsample: float) -> NDArray[np.bool_]:
    """Draw which words of the text survive the subsampling of frequent ones: bool [n].

    Example:
        >>> from kvemb.demo.corpus import build
        >>> kept_words(build([["a", "b"]]), np.random.default_rng(0), 1.0).tolist()
        [True, True]
    """
    share = np.maximum(corpus.counts, 1) / max(int(corpus.counts.sum()), 1)
    keep = np.sqrt(subsample / share)
    return rng.random(corpus.tokens.size) < keep[corpus.positions(corpus.tokens)]


def n_batches(text: PassText, settings: Settings, *, trainer: int, n_trainers: int) -> int:
    """Count the batches that `batches` yields to this trainer.

    Example:
        >>> text = PassText(np.zeros((10, 8), np.int64), np.zeros((10, 8), np.int32))
        >>> [n_batches(text, Settings(batch_blocks=4), trainer=trainer, n_trainers=2) for trainer in (0, 1)]
        [2, 1]
    """
    total = -(-len(text.tokens) // settings.batch_blocks)
    return len(range(trainer, total, n_trainers))


def batches(
    corpus: Corpus, text: PassText, settings: Settings, *, pass_index: int, trainer: int, n_trainers: int, seed: int
) -> Iterator[TrainingBatch]:
    """Yield this trainer's batches of a pass: every n_trainers-th, so that the shares are disjoint and cover the pass.

    Args:
        corpus: source of the negatives' distribution.
        text: what `pass_text` made for the same settings, pass and seed.
        settings: how to sample.
        pass_index: 0, 1, ...
        trainer: 0 <= trainer < n_trainers.
        n_trainers: how many share the pass.
        seed: the run's seed.

    Example:
        >>> from kvemb.demo.corpus import build
        >>> corpus, settings = build([["a", "b"] * 10]), Settings(block=4, batch_blocks=2, subsample=1.0)
        >>> text = pass_text(corpus, settings, pass_index=0, seed=0)
        >>> batch = next(batches(corpus, text, settings, pass_index=0, trainer=0, n_trainers=2, seed=0))
        >>> batch.tokens.shape, batch.negatives.shape, batch.positives.shape
        ((2, 4), (2, 64), (2, 4, 4))
    """
    sampler = NegativeSampler(corpus)
    total = -(-len(text.tokens) // settings.batch_blocks)
    for number in range(trainer, total, n_trainers):
        blocks = slice(number * settings.batch_blocks, (number + 1) * settings.batch_blocks)
        rng = np.random.default_rng([seed, pass_index, number])
        yield _batch(text.tokens[blocks], text.runs[blocks], settings, sampler, rng)


def windows(runs: NDArray[np.int32], reach: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which words of a block are contexts of which: bool [b, l, l], centre first.

    Args:
        runs: int32 [b, l], the run of text each word stands in; words of different runs are no contexts of one
            another; -1 is padding.
        reach: int64 [b, l], how many words to each side a centre's window reaches.

    Example:
        >>> windows(np.array([[7, 7, 7, 8, -1]], np.int32), np.array([[1, 1, 2, 4, 4]]))[0].astype(int).tolist()
        [[0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    """
    place = np.arange(runs.shape[1])
    distance = np.abs(place[:, None] - place[None, :])
    near: NDArray[np.bool_] = (distance[None] <= reach[:, :, None]) & (distance > 0)[None]
    near &= (runs[:, :, None] == runs[:, None, :]) & (runs != _PADDING)[:, :, None]
    return near


def _batch(
    tokens: NDArray[np.int64],
    runs: NDArray[np.int32],
    settings: Settings,
    sampler: NegativeSampler,
    rng: np.random.Generator,
) -> TrainingBatch:
    """Draw the windows and negatives of some blocks."""
    reach = rng.integers(1, settings.window + 1, tokens.shape)
    negatives = sampler.draw(rng, (tokens.shape[0], settings.block_negatives))
    return TrainingBatch(tokens, negatives, windows(runs, reach))
