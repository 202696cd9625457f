"""The demo's yardstick: the same training in one process, on a NumPy array per table.

Here lives the local `Rows`: initial rows from the same initializer, updates by the same optimizer as the distributed
run. It knows every id in advance, which storage never does, so a row is found by binary search in the sorted ids. No
sockets, no processes.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.demo.batches import DEFAULTS, Settings
from kvemb.demo.corpus import Corpus
from kvemb.demo.evaluate import held_out_loss, held_out_sample
from kvemb.demo.skipgram import DIM, INITIALIZER, N_PASSES, OPTIMIZER, WORD_IN, WORD_OUT, TrainingProgress, train_pass


class LocalRows:
    """Rows of this process, updated by row-wise Adagrad. Not safe to share between threads that push.

    Args:
        ids: int64 [v], every id that will ever be used, ascending and distinct.
        seed: of the initial rows; the seed of the tables it is compared with.

    Example:
        >>> rows = LocalRows(np.array([3, 5, 9]), seed=0)
        >>> rows.pull({"word_in": np.array([9, 3])})["word_in"].shape
        (2, 32)
    """

    def __init__(self, ids: NDArray[np.int64], *, seed: int) -> None:
        self._ids = ids
        unsigned = np.ascontiguousarray(ids).view(np.uint64)
        self._weights = {name: INITIALIZER.rows(unsigned, DIM, table=name, seed=seed) for name in (WORD_IN, WORD_OUT)}
        self._mean_square_sums = {name: np.zeros((ids.size, 1), np.float32) for name in self._weights}
        hyper = OPTIMIZER.defaults()
        self._lr, self._eps = np.float32(hyper["lr"]), np.float32(hyper["eps"])

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """Copy rows out: per table, known ids int64 [n] to float32 [n, d]."""
        return {name: self._weights[name][np.searchsorted(self._ids, ids)] for name, ids in batch.items()}

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """Apply gradients: per table, distinct known ids int64 [n] and float32 [n, d].

        G += mean(g ** 2) over the row's columns; w -= lr g / (sqrt(G) + eps).

        Source: Duchi, Hazan, Singer 2011 (Adagrad); one accumulator per row as in Naumov et al. 2019, "Deep Learning
        Recommendation Model for Personalization and Recommendation Systems", and its code.
        """
        for name, (ids, gradients) in grads.items():
            at = np.searchsorted(self._ids, ids)
            sums = self._mean_square_sums[name][at] + np.square(gradients).mean(axis=1, keepdims=True)
            self._mean_square_sums[name][at] = sums
            self._weights[name][at] -= self._lr * gradients / (np.sqrt(sums) + self._eps)


@dataclass(eq=False)
class LocalResult:
    """What the baseline learnt.

    Attributes:
        rows: the trained rows, for neighbours.
        train_losses: mean training loss per pair, one per pass.
        held_out_losses: held-out loss before training and after each pass, n_passes + 1 numbers.
        seconds: time in training, measuring left out, on a monotonic clock.
    """

    rows: LocalRows
    train_losses: list[float] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def run_local(
    corpus: Corpus,
    *,
    seed: int,
    report: Callable[[TrainingProgress], None],
    n_passes: int = N_PASSES,
    settings: Settings = DEFAULTS,
) -> LocalResult:
    """Train all passes in this process: some 4 s each on one core for the standard library.

    Args:
        corpus: the text.
        seed: of the sampling and of the initial rows; that of the run it is compared with.
        report: called after each step.
        n_passes: passes over the text.
        settings: how to sample.

    Example:
        >>> from kvemb.demo.corpus import build
        >>> result = run_local(build([["a", "b", "c"] * 50]), seed=0, report=lambda progress: None, n_passes=2)
        >>> len(result.train_losses), result.train_losses[1] < result.train_losses[0]
        (2, True)
    """
    sample = held_out_sample(corpus, seed=seed, settings=settings)
    result = LocalResult(LocalRows(corpus.ids, seed=seed))
    result.held_out_losses.append(held_out_loss(result.rows, sample))
    for pass_index in range(n_passes):
        start = time.monotonic()
        loss = train_pass(
            result.rows,
            corpus,
            pass_index=pass_index,
            trainer=0,
            n_trainers=1,
            seed=seed,
            report=report,
            settings=settings,
        )
        result.seconds += time.monotonic() - start
        result.train_losses.append(loss)
        result.held_out_losses.append(held_out_loss(result.rows, sample))
    return result
