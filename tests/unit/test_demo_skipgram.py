"""The demo's model: exact gradients, reproducible and fairly dealt batches, and learning on a planted corpus."""

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from kvemb.arrays.hashing import hash_ids
from kvemb.demo import evaluate
from kvemb.demo.batches import NegativeSampler, PassText, Settings, TrainingBatch, batches, n_batches, pass_text, windows
from kvemb.demo.corpus import HELD_OUT_EVERY, HELD_OUT_STRETCH, Corpus, build
from kvemb.demo.local_run import LocalRows, run_local
from kvemb.demo.skipgram import (
    OPTIMIZER,
    WORD_IN,
    WORD_OUT,
    TrainingProgress,
    loss_and_grads,
    sum_by_row,
    train_pass,
    train_step,
)

SMALL = Settings(window=2, subsample=1.0, block=8, block_negatives=6, batch_blocks=3)
N_GROUPS = 8


@pytest.fixture(scope="module")
def planted() -> Corpus:
    """Text of stretches of 32 words, each from one of 8 groups of 5 words: a group's words stand together."""
    rng = np.random.default_rng(5)
    groups = np.repeat(rng.integers(0, N_GROUPS, HELD_OUT_STRETCH * HELD_OUT_EVERY // 32), 32)
    members = rng.integers(0, 5, groups.size)
    words = [f"g{group}_{member}" for group, member in zip(groups.tolist(), members.tolist(), strict=True)]
    return build([words])


def share(corpus: Corpus, text: PassText, trainer: int, n_trainers: int) -> list[TrainingBatch]:
    return list(batches(corpus, text, SMALL, pass_index=1, trainer=trainer, n_trainers=n_trainers, seed=3))


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


def test_loss_and_gradients_stay_finite_for_huge_scores() -> None:
    far = np.full((1, 2, 4), 100.0, np.float32)
    loss, grads = loss_and_grads(far, -far, far, ~np.eye(2, dtype=np.bool_)[None], n_negatives=5)
    assert np.isfinite(loss)
    assert loss > 100
    assert all(np.isfinite(grad).all() for grad in grads)


def test_windows_respect_reach_runs_and_padding() -> None:
    runs = np.array([[4, 4, 4, 5, 5, -1, -1]], np.int32)
    got = windows(runs, np.array([[1, 1, 2, 9, 1, 9, 9]]))[0]
    pairs = [tuple(pair) for pair in np.argwhere(got).tolist()]
    assert pairs == [(0, 1), (1, 0), (1, 2), (2, 0), (2, 1), (3, 4), (4, 3)]


def test_a_pass_covers_the_trained_text_once_and_nothing_held_out(planted: Corpus) -> None:
    text = pass_text(planted, SMALL, pass_index=0, seed=3)
    real = text.runs >= 0
    got, times = np.unique(text.tokens[real], return_counts=True)
    assert got.tolist() == planted.ids.tolist()
    assert times.tolist() == planted.counts.tolist()
    held_out_runs = set(planted.runs[planted.held_out].tolist())
    assert held_out_runs
    assert not held_out_runs & set(text.runs[real].tolist())


def test_subsampling_drops_frequent_words_and_keeps_rare_ones() -> None:
    corpus = build([["often"] * 900 + [f"rare{i}" for i in range(100)]])
    text = pass_text(corpus, Settings(subsample=1e-3, block=8), pass_index=0, seed=0)
    kept = text.tokens[text.runs >= 0]
    assert int((kept == hash_ids(["often"])[0]).sum()) < 100  # 900 * sqrt(1e-3 / 0.9) = 30 expected
    assert np.unique(kept).size == 101


def test_trainers_shares_are_disjoint_and_cover_the_pass(planted: Corpus) -> None:
    text = pass_text(planted, SMALL, pass_index=1, seed=3)
    alone = share(planted, text, 0, 1)
    shares = [share(planted, text, trainer, 3) for trainer in range(3)]
    assert [len(part) for part in shares] == [n_batches(text, SMALL, trainer=trainer, n_trainers=3) for trainer in range(3)]
    dealt = [shares[number % 3][number // 3] for number in range(len(alone))]
    assert sum(len(part) for part in shares) == len(alone)
    assert np.array_equal(np.concatenate([batch.tokens for batch in alone]), text.tokens)
    for mine, whole in zip(dealt, alone, strict=True):
        assert np.array_equal(mine.tokens, whole.tokens)
        assert np.array_equal(mine.negatives, whole.negatives)
        assert np.array_equal(mine.positives, whole.positives)


def test_batches_repeat_for_one_seed_and_differ_between_passes_and_seeds(planted: Corpus) -> None:
    def first(seed: int, pass_index: int) -> TrainingBatch:
        text = pass_text(planted, SMALL, pass_index=pass_index, seed=seed)
        return next(batches(planted, text, SMALL, pass_index=pass_index, trainer=0, n_trainers=1, seed=seed))

    base, again = first(1, 0), first(1, 0)
    assert np.array_equal(base.tokens, again.tokens)
    assert np.array_equal(base.negatives, again.negatives)
    assert not np.array_equal(base.tokens, first(1, 1).tokens)
    assert not np.array_equal(base.negatives, first(2, 0).negatives)


def test_negatives_follow_the_three_quarter_power_of_trained_counts() -> None:
    corpus = build([["a"] * 160 + ["b"] * 10])
    drawn = NegativeSampler(corpus).draw(np.random.default_rng(0), (300, 100))
    assert drawn.shape == (300, 100)
    share_of_b = float((drawn == hash_ids(["b"])[0]).mean())
    assert share_of_b == pytest.approx(1 / 9, abs=0.01)  # 16 ** 0.75 = 8 to 1


def test_gradients_of_equal_rows_are_summed() -> None:
    at = np.array([2, 0, 2, 1, 0])
    grads = np.arange(10, dtype=np.float32).reshape(5, 2)
    expected = np.zeros((3, 2), np.float32)
    np.add.at(expected, at, grads)
    assert np.array_equal(sum_by_row(grads, at), expected)


def test_a_step_pulls_and_pushes_each_row_once(planted: Corpus) -> None:
    rows = Recorder(LocalRows(planted.ids, seed=0))
    text = pass_text(planted, SMALL, pass_index=0, seed=0)
    batch = next(batches(planted, text, SMALL, pass_index=0, trainer=0, n_trainers=1, seed=0))
    _, n_rows = train_step(rows, batch, SMALL)
    (pulled,), (pushed,) = rows.pulled, rows.pushed
    assert n_rows == sum(ids.size for ids in pulled.values())
    for table, needed in ((WORD_IN, [batch.tokens]), (WORD_OUT, [batch.tokens, batch.negatives])):
        assert np.array_equal(pulled[table], np.unique(np.concatenate([ids.ravel() for ids in needed])))
        assert np.array_equal(pushed[table][0], pulled[table])
        assert pushed[table][1].shape == (pulled[table].size, 32)
        assert pushed[table][1].dtype == np.float32


def test_local_rows_apply_rowwise_adagrad() -> None:
    rows = LocalRows(np.array([-7, 2, 30]), seed=1)
    before = rows.pull({WORD_IN: np.array([30, -7])})[WORD_IN]
    grad = np.linspace(-1, 1, 32, dtype=np.float32)[None]
    for _ in range(2):
        rows.push({WORD_IN: (np.array([30]), grad)})
    after = rows.pull({WORD_IN: np.array([30, -7])})[WORD_IN]
    scale = np.sqrt(np.square(grad.astype(np.float64)).mean())
    moved = OPTIMIZER.defaults()["lr"] * grad[0] * (1 / scale + 1 / (scale * np.sqrt(2)))
    np.testing.assert_allclose(before[0] - after[0], moved, rtol=1e-4, atol=1e-6)
    assert np.array_equal(before[1], after[1])


def test_two_trainers_on_shared_rows_learn_the_planted_groups(planted: Corpus) -> None:
    settings = Settings(window=2, subsample=1.0, block=16, block_negatives=16, batch_blocks=16)
    rows = LocalRows(planted.ids, seed=0)
    sample = evaluate.held_out_sample(planted, seed=0, settings=settings)
    reports: list[TrainingProgress] = []
    losses = [evaluate.held_out_loss(rows, sample)]
    for trainer in range(2):
        train_pass(rows, planted, pass_index=0, trainer=trainer, n_trainers=2, seed=0, report=reports.append, settings=settings)
        losses.append(evaluate.held_out_loss(rows, sample))
    assert losses[0] == pytest.approx(6 * np.log(2), abs=1e-3)
    assert losses[0] - 1 > losses[1] > losses[2]
    assert [r.step for r in reports if r.trainer == 1] == list(range(1, reports[-1].n_steps + 1))
    probes = [f"g{group}_0" for group in range(N_GROUPS)]
    near = evaluate.neighbours(rows, planted, [*probes, "unknown"], n_nearest=4)
    assert {probe: {word for word, _ in found} for probe, found in near.items()} == {
        probe: {f"{probe[:2]}_{member}" for member in range(1, 5)} for probe in probes
    }


def test_the_baseline_repeats_bit_for_bit_and_its_loss_falls(planted: Corpus) -> None:
    first, second = (run_local(planted, seed=4, report=lambda _: None, n_passes=2, settings=SMALL) for _ in range(2))
    assert first.held_out_losses == second.held_out_losses
    assert first.train_losses == second.train_losses
    assert len(first.held_out_losses) == 3
    assert first.held_out_losses[0] > first.held_out_losses[1] > first.held_out_losses[2]


def test_measuring_pushes_nothing_and_is_the_same_for_every_caller(planted: Corpus) -> None:
    one, two = (evaluate.held_out_sample(planted, seed=9, n_pairs=50, settings=SMALL) for _ in range(2))
    rows = Recorder(LocalRows(planted.ids, seed=0))
    assert one.centers.shape == (50,)
    assert one.negatives.shape == (50, SMALL.n_negatives)
    assert evaluate.held_out_loss(rows, one) == evaluate.held_out_loss(rows, two)
    evaluate.neighbours(rows, planted, ["g0_0"])
    assert not rows.pushed
    assert np.isin(one.centers, planted.tokens[planted.held_out]).all()
