"""What the demo's result is judged by: the loss on held-out text, and the nearest neighbours of a few words.

Here lives measuring only, through the same `Rows` as training; nothing here pushes. The held-out sample is a pure
function of the corpus and the seed, so two runs on the same corpus are measured on the same pairs against the same
negatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.demo.batches import DEFAULTS, NegativeSampler, Settings, kept_words, windows
from kvemb.demo.corpus import Corpus
from kvemb.demo.skipgram import WORD_IN, WORD_OUT, Rows

_STREAM = 0x48454C44  # keeps the sample's random numbers apart from those of the passes
PROBES = ("socket", "Lock", "TypeError", "mkdir", "encode", "decimal", "thread", "if")


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Pairs of text that was never trained on: centers, contexts int64 [n] and negatives int64 [n, k], all ids."""

    centers: NDArray[np.int64]
    contexts: NDArray[np.int64]
    negatives: NDArray[np.int64]


def held_out_sample(corpus: Corpus, *, seed: int, n_pairs: int = 20_000, settings: Settings = DEFAULTS) -> HeldOut:
    """Draw pairs of words that stand in each other's window in the held-out text, with negatives for each.

    Args:
        corpus: the text.
        seed: the run's seed.
        n_pairs: pairs wanted; all there are if the held-out text has fewer.
        settings: window, subsampling and number of negatives, as in training.

    Returns:
        The sample; empty for a text too short to have held-out stretches.

    Example:
        >>> from kvemb.demo.corpus import build
        >>> sample = held_out_sample(build([["a", "b"] * 20_000]), seed=0, n_pairs=10, settings=Settings(subsample=1.0))
        >>> sample.centers.shape, sample.negatives.shape
        ((10,), (10, 5))
    """
    rng = np.random.default_rng([seed, _STREAM])
    kept = np.flatnonzero(kept_words(corpus, rng, settings.subsample) & corpus.held_out)
    kept = kept[: kept.size - kept.size % settings.block]
    tokens = corpus.tokens[kept].reshape(-1, settings.block)
    reach = rng.integers(1, settings.window + 1, tokens.shape)
    block, center, context = np.nonzero(windows(corpus.runs[kept].reshape(tokens.shape), reach))
    chosen = rng.permutation(block.size)[:n_pairs]
    negatives = NegativeSampler(corpus).draw(rng, (chosen.size, settings.n_negatives))
    return HeldOut(tokens[block[chosen], center[chosen]], tokens[block[chosen], context[chosen]], negatives)


def held_out_loss(rows: Rows, sample: HeldOut) -> float:
    """Measure the mean loss per held-out pair: -log sigmoid(c . x) - sum over the negatives log sigmoid(-c . y).

    Rows that know nothing score (1 + k) log 2: 4.159 with 5 negatives. Pulls each distinct row once and pushes nothing.

    Returns:
        The mean in float64; nan for an empty sample.

    Example:
        >>> from kvemb.demo.local_run import LocalRows
        >>> one = np.array([7])
        >>> round(held_out_loss(LocalRows(one, seed=0), HeldOut(one, one, np.array([[7, 7, 7, 7, 7]]))), 1)
        4.2
    """
    if not sample.centers.size:
        return float("nan")
    out_ids = np.concatenate([sample.contexts[:, None], sample.negatives], axis=1)
    in_unique, in_at = np.unique(sample.centers, return_inverse=True)
    out_unique, out_at = np.unique(out_ids, return_inverse=True)
    pulled = rows.pull({WORD_IN: in_unique, WORD_OUT: out_unique})
    centers = pulled[WORD_IN][in_at]
    scores = np.einsum("nd,nkd->nk", centers, pulled[WORD_OUT][out_at.reshape(out_ids.shape)]).astype(np.float64)
    scores[:, 1:] *= -1
    return float(np.logaddexp(0, -scores).sum(axis=1).mean())


def neighbours(
    rows: Rows, corpus: Corpus, probes: Sequence[str] = PROBES, *, n_nearest: int = 5, min_count: int = 50
) -> dict[str, list[tuple[str, float]]]:
    """Find the words whose rows point the same way as a probe's: cosine of "word_in" rows.

    Args:
        rows: where the rows are.
        corpus: the words and how often they were seen.
        probes: words to look up; one that is not among the candidates is left out of the answer.
        n_nearest: neighbours per probe, nearest first, the probe itself left out.
        min_count: words seen less often in training are no candidates: a few updates say nothing.

    Returns:
        Per probe, (word, cosine) pairs. Pulls all candidates' rows at once (some 6,000) and pushes nothing.

    Example:
        >>> from kvemb.demo.corpus import build
        >>> from kvemb.demo.local_run import LocalRows
        >>> corpus = build([["a", "b"] * 50])
        >>> near = neighbours(LocalRows(corpus.ids, seed=0), corpus, ["a", "unknown"])
        >>> [(probe, [word for word, _ in found]) for probe, found in near.items()]
        [('a', ['b'])]
    """
    candidates = np.flatnonzero(corpus.counts >= min_count)
    place = {corpus.words[at]: i for i, at in enumerate(candidates.tolist())}
    known = [probe for probe in probes if probe in place]
    if not known:
        return {}
    table = rows.pull({WORD_IN: corpus.ids[candidates]})[WORD_IN]
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), np.float32(1e-12))
    at = np.array([place[probe] for probe in known])
    cosines = unit[at] @ unit.T
    cosines[np.arange(at.size), at] = -np.inf
    best = np.argsort(-cosines, axis=1, kind="stable")[:, : min(n_nearest, candidates.size - 1)]
    return {probe: [(corpus.words[candidates[j]], float(cosines[i, j])) for j in best[i].tolist()] for i, probe in enumerate(known)}
