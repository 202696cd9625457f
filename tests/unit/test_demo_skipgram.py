"""The demo's model: exact gradients, reproducible and fairly dealt batches, and learning on a planted corpus."""

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from kvemb.demo.corpus import HELD_OUT_EVERY, HELD_OUT_STRETCH, Corpus, build
from kvemb.demo.job import neighbours
from kvemb.demo.skipgram import PassText, Settings, TrainingBatch, TrainingProgress, held_out_loss, loss_and_grads, train_pass, windows
from kvemb.demo.word_rows import WORD_IN, WORD_OUT, LocalRows

SMALL = Settings(window=2, subsample=1.0, block=8, block_negatives=6, batch_blocks=3, least_batches=1)
N_GROUPS = 8


@pytest.fixture(scope="module")
def planted() -> Corpus:
    """Text of stretches of 32 words, each from one of 8 groups of 5 words: a group's words stand together."""
    rng = np.random.default_rng(5)
    groups = np.repeat(rng.integers(0, N_GROUPS, HELD_OUT_STRETCH * HELD_OUT_EVERY // 32), 32)
    members = rng.integers(0, 5, groups.size)
    words = [f"g{group}_{member}" for group, member in zip(groups.tolist(), members.tolist(), strict=True)]
    return build([words])


class Recorder:
    """Rows whose pulls and pushes are kept."""

    def __init__(self, rows: LocalRows) -> None:
        self._rows = rows
        self.pulled: list[Mapping[str, NDArray[np.int64]]] = []
        self.pushed: list[Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]] = []

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        self.pulled.append(batch)
        return self._rows.pull(batch)

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        self.pushed.append(grads)
        self._rows.push(grads)


def reference_loss(arrays: list[NDArray[np.float64]], positives: NDArray[np.bool_]) -> float:
    """The paper's sum, in float64, one pair at a time."""
    c, x, y = arrays
    total = 0.0
    for b, i, j in zip(*(where.tolist() for where in np.nonzero(positives)), strict=True):
        total += np.logaddexp(0, -c[b, i] @ x[b, j])
        total += 5 / y.shape[1] * np.logaddexp(0, y[b] @ c[b, i]).sum()
    return float(total)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["centers", "contexts", "negatives"])
def test_gradients_equal_finite_differences_of_the_papers_loss(which: int) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in [(2, 4, 3), (2, 4, 3), (2, 6, 3)]]
    positives = windows(np.array([[1, 1, 1, 1], [1, 1, 2, -1]], np.int32), np.array([[1, 2, 1, 3], [2, 1, 2, 2]]))
    c32, x32, y32 = (array.astype(np.float32) for array in arrays)
    loss, grads = loss_and_grads(c32, x32, y32, positives, n_negatives=5)
    assert loss == pytest.approx(reference_loss(arrays, positives), rel=1e-5)
    numeric = np.zeros_like(arrays[which])
    for at in np.ndindex(numeric.shape):
        ends = []
        for step in (1e-5, -1e-5):
            moved = [array.copy() for array in arrays]
            moved[which][at] += step
            ends.append(reference_loss(moved, positives))
        numeric[at] = (ends[0] - ends[1]) / 2e-5
    assert np.abs(numeric).max() > 0.1
    np.testing.assert_allclose(grads[which], numeric, rtol=1e-4, atol=1e-5)


def test_a_pass_covers_the_trained_text_once_and_nothing_held_out(planted: Corpus) -> None:
    text = PassText(planted, seed=3, settings=SMALL)
    real = text.runs >= 0
    got, times = np.unique(text.tokens[real], return_counts=True)
    assert got.tolist() == planted.ids.tolist()
    assert times.tolist() == planted.counts.tolist()
    held_out_runs = set(planted.runs[planted.held_out].tolist())
    assert held_out_runs
    assert not held_out_runs & set(text.runs[real].tolist())


def test_trainers_shares_are_disjoint_and_cover_the_pass(planted: Corpus) -> None:
    text = PassText(planted, seed=3, pass_index=1, settings=SMALL)
    assert np.array_equal(np.concatenate([text.batch(number).tokens for number in range(text.n_batches)]), text.tokens)

    def pulled(trainer: int, n_trainers: int) -> list[list[int]]:
        rows = Recorder(LocalRows(planted.ids, seed=0))
        steps = list(train_pass(rows, text, trainer=trainer, n_trainers=n_trainers))
        assert [step.step for step in steps] == list(range(1, steps[0].n_steps + 1))
        assert len(steps) == steps[0].n_steps
        return [sorted(batch[WORD_OUT].tolist()) for batch in rows.pulled]

    alone, shares = pulled(0, 1), [pulled(trainer, 3) for trainer in range(3)]
    assert len(alone) == text.n_batches == sum(len(part) for part in shares)
    assert [shares[number % 3][number // 3] for number in range(len(alone))] == alone


def test_batches_repeat_for_one_seed_and_differ_between_passes_and_seeds(planted: Corpus) -> None:
    def first(seed: int, pass_index: int) -> TrainingBatch:
        return PassText(planted, seed=seed, pass_index=pass_index, settings=SMALL).batch(0)

    base, again = first(1, 0), first(1, 0)
    for one, other in zip(base, again, strict=True):
        assert np.array_equal(one, other)
    assert not np.array_equal(base.tokens, first(1, 1).tokens)
    assert not np.array_equal(base.negatives, first(2, 0).negatives)


def test_a_step_pulls_and_pushes_each_row_once_with_its_summed_gradient(planted: Corpus) -> None:
    start = LocalRows(planted.ids, seed=0)
    rows = Recorder(LocalRows(planted.ids, seed=0))
    text = PassText(planted, seed=0, settings=SMALL)
    batch = text.batch(0)
    progress = next(train_pass(rows, text))
    (pulled,), (pushed,) = rows.pulled, rows.pushed
    assert progress.n_rows == sum(ids.size for ids in pulled.values())

    def look_up(table: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return start.pull({table: ids.ravel()})[table].reshape(*ids.shape, 32)

    centers, contexts, negatives = look_up(WORD_IN, batch.tokens), look_up(WORD_OUT, batch.tokens), look_up(WORD_OUT, batch.negatives)
    loss, grads = loss_and_grads(centers, contexts, negatives, batch.positives, n_negatives=5)
    assert progress.loss == pytest.approx(loss / batch.positives.sum())
    used = {WORD_IN: [(batch.tokens, grads.centers)], WORD_OUT: [(batch.tokens, grads.contexts), (batch.negatives, grads.negatives)]}
    for table, parts in used.items():
        ids = np.concatenate([part.ravel() for part, _ in parts])
        assert np.array_equal(np.sort(pulled[table]), np.unique(ids))
        assert np.array_equal(pushed[table][0], pulled[table])
        assert pushed[table][1].dtype == np.float32
        expected = np.zeros((pulled[table].size, 32))
        order = np.argsort(pulled[table])
        at = order[np.searchsorted(pulled[table], ids, sorter=order)]
        np.add.at(expected, at, np.concatenate([grad.reshape(-1, 32) for _, grad in parts]).astype(np.float64))
        np.testing.assert_allclose(pushed[table][1], expected, rtol=1e-4, atol=1e-6)


def test_two_trainers_on_shared_rows_learn_the_planted_groups(planted: Corpus) -> None:
    settings = Settings(window=2, subsample=1.0, block=16, block_negatives=16, batch_blocks=16, least_batches=1)
    rows = LocalRows(planted.ids, seed=0)
    text, held_out = (PassText(planted, seed=0, held_out=which, settings=settings) for which in (False, True))
    losses = [held_out_loss(rows, held_out)]
    for trainer in range(2):
        assert list(train_pass(rows, text, trainer=trainer, n_trainers=2))
        losses.append(held_out_loss(rows, held_out))
    assert losses[0] == pytest.approx(6 * np.log(2), abs=1e-3)
    assert losses[0] - 1 > losses[1] > losses[2]
    probes = [f"g{group}_0" for group in range(N_GROUPS)]
    near = neighbours(rows, planted, [*probes, "unknown"], n_nearest=4)
    assert {probe: {word for word, _ in found} for probe, found in near.items()} == {
        probe: {f"{probe[:2]}_{member}" for member in range(1, 5)} for probe in probes
    }


def test_training_on_local_rows_repeats_bit_for_bit(planted: Corpus) -> None:
    def steps() -> list[TrainingProgress]:
        return list(train_pass(LocalRows(planted.ids, seed=4), PassText(planted, seed=4, settings=SMALL)))

    first = steps()
    assert first == steps()
    assert first[-1].loss < first[0].loss
