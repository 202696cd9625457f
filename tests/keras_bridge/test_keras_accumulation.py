"""`gradient_accumulation_steps`: rows change where the dense weights do, as those of keras.layers.Embedding, on each backend."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import BATCH, N_USERS, N_WORDS, all_words, both, functional, names_of, pairs, two_words

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.keras import TableConfig, distribute, prepare

N = 3  # batches of a step
RULES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=N),
    "momentum, a schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=5, decay_rate=0.5), momentum=0.9, gradient_accumulation_steps=N
    ),
    "Adam": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=N),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05, gradient_accumulation_steps=N),
    "Adagrad, clipnorm": lambda: keras.optimizers.Adagrad(0.05, clipnorm=0.02, gradient_accumulation_steps=N),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=N)),
}
if keras.backend.backend() != "tensorflow":  # where Keras divides no sparse gradient of a plain embedding
    RULES["scaled"] = lambda: keras.optimizers.SGD(0.1, loss_scale_factor=64.0, gradient_accumulation_steps=N)
CLOSE_ROWS = {"rtol": 2e-5, "atol": 2e-6}


@pytest.mark.parametrize("rule", RULES)
def test_rows_change_with_the_last_batch_of_a_step_as_those_of_keras(cluster: kvemb.Cluster, name: str, rule: str) -> None:
    plain, ours = both(two_words, RULES[rule])
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    x, y = all_words(4 * N + 1)
    n_changes, before = 0, table.pull(np.arange(N_WORDS))
    for at in range(0, len(x), BATCH):
        losses = [model.train_on_batch(x[at : at + BATCH], y[at : at + BATCH]) for model in (plain, ours)]
        np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
        rows = table.pull(np.arange(N_WORDS))
        np.testing.assert_allclose(rows, plain.layers[0].get_weights()[0], **CLOSE_ROWS)
        n_changes, before = n_changes + bool((rows != before).any()), rows
    assert n_changes == 4


@pytest.mark.parametrize("way", ["fit", "fit, rows ahead"])
def test_batches_of_a_step_that_ask_for_other_rows(cluster: kvemb.Cluster, name: str, way: str) -> None:
    plain, ours = both(functional, RULES["SGD"])
    tables = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    ahead = prepare(ours, consistency="exact", threads_num=2, capacity=4) if "ahead" in way else None
    x, y = pairs(8 * (2 * N - 1))  # an epoch ends in the middle of a step
    losses = [model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    for layer, n in (("users", N_USERS), ("vocabulary", N_WORDS)):
        (table,) = (one for one in tables if one.name.endswith(layer))
        np.testing.assert_allclose(table.pull(np.arange(n)), plain.get_layer(layer).get_weights()[0], **CLOSE_ROWS)
    assert ahead is None or "15 batches, waited" in ahead.report


def test_a_rule_of_their_own_and_a_second_compile_gather_too(cluster: kvemb.Cluster, name: str) -> None:
    ours = both(two_words)[1]
    (table,) = distribute(ours, cluster, min_rows=1, optimizer=kvemb.optim.sgd(0.5), names=names_of(name), quiet=True).tables
    ours.compile(keras.optimizers.SGD(0.0, gradient_accumulation_steps=2), "mse")
    plain = both(two_words)[0]
    plain.compile(keras.optimizers.SGD(0.5), "mse")
    plain.layers[-1].trainable = False
    plain.compile(keras.optimizers.SGD(0.5), "mse")
    x, y = all_words(2)
    for at in (0, BATCH):
        ours.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])
    plain.train_on_batch(x, y)  # the mean over both batches
    np.testing.assert_allclose(table.pull(np.arange(N_WORDS)), plain.layers[0].get_weights()[0], **CLOSE_ROWS)


def test_a_model_that_is_saved_in_the_middle_of_a_step_is_told_when_it_goes_on(cluster: kvemb.Cluster, name: str, tmp_path: Path) -> None:
    ours = both(two_words, RULES["SGD"])[1]
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    x, y = all_words(N)
    first, second, third = ((x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH))
    ours.train_on_batch(*first)
    ours.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    distribute(loaded, cluster, min_rows=1, names=names_of(name), quiet=True)
    before = table.pull(np.arange(N_WORDS))
    with pytest.warns(UserWarning, match="gathered gradients of 1 batches, and those of rows here are of 0"):
        loaded.train_on_batch(*second)
    loaded.train_on_batch(*third)
    assert (table.pull(np.arange(N_WORDS)) != before).any()


def test_a_tables_own_optimizer_does_not_count_batches(cluster: kvemb.Cluster, name: str) -> None:
    config = TableConfig(name, 10, 4, optimizer=RULES["SGD"]())
    feature = kvemb.keras.FeatureConfig("word", config, (None, 2), (None, 4))
    model = keras.Sequential([kvemb.keras.DistributedEmbedding(feature), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(InvalidInputError, match="counted by the optimizer that the model is compiled with"):
        distribute(model, cluster, quiet=True)
