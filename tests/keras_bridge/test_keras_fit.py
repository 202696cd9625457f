"""A Keras model whose embeddings are tables learns what it learned before: same losses, on every backend, and used in every way."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import CLOSE, SEED, Towers, both, functional, names_of, pairs, sequential, sgd

import kvemb
from kvemb.errors import ShardUnavailableError
from kvemb.keras import distribute


def test_fit_evaluate_and_predict_are_those_of_the_plain_model(in_step: kvemb.Cluster, name: str) -> None:
    plain, ours = both()
    done = distribute(ours, in_step, min_rows=1, names=names_of(name), quiet=True)
    assert [table.name for table in done.tables] == [f"{name}.users", f"{name}.vocabulary"]
    x, y = pairs(250)  # the last batch is a smaller one
    options = {"batch_size": 32, "epochs": 2, "shuffle": False, "validation_data": pairs(40, seed=1), "verbose": 0}
    expected, got = plain.fit(x, y, **options).history, ours.fit(x, y, **options).history
    assert got.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(got[key], values, **CLOSE)
    np.testing.assert_allclose(ours.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), **CLOSE)
    np.testing.assert_allclose(ours.predict(x, verbose=0), plain.predict(x, verbose=0), **CLOSE)


def test_steps_by_hand_are_those_of_the_plain_model(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours = both()
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    for seed in range(4):
        x, y = pairs(20 + 30 * seed, seed)  # of another shape each time, and more rows
        np.testing.assert_allclose(ours.train_on_batch(x, y), plain.train_on_batch(x, y), **CLOSE)
        np.testing.assert_allclose(ours.test_on_batch(x, y), plain.test_on_batch(x, y), **CLOSE)
        np.testing.assert_allclose(ours.predict_on_batch(x), plain.predict_on_batch(x), **CLOSE)


def test_a_sequential_model_goes_on_as_before(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours = both(sequential)
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    (_, x), y = pairs(100)
    losses = [model.fit(x, y, batch_size=20, epochs=3, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)


def test_a_subclassed_model_is_followed_into_its_code(cluster: kvemb.Cluster, name: str) -> None:
    rng = np.random.default_rng(3)
    x = {"ids": rng.integers(0, 40, (64, 5)).astype("int32")}
    y = rng.normal(size=(64, 1)).astype("float32")
    plain, ours = both(Towers)
    for model in (plain, ours):
        keras.utils.set_random_seed(SEED)
        model(x)  # built, with weights
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    losses = [model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)


def test_evaluation_and_prediction_push_nothing(cluster: kvemb.Cluster, name: str) -> None:
    ours = functional()
    ours.compile("sgd", "mse")
    done = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    x, y = pairs(64)
    ours.evaluate(x, y, verbose=0)
    ours.predict(x, verbose=0)
    assert done.steps.last_ack is None
    ours.train_on_batch(x, y)
    assert done.steps.last_ack is not None


@pytest.mark.parametrize("at_a_time", [1, 3])
def test_a_push_that_fails_in_mid_fit_is_told_by_name_and_training_goes_on(
    cluster: kvemb.Cluster, name: str, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_a_time > 1 and keras.backend.backend() == "torch":
        pytest.skip("Keras on torch has steps_per_execution=1 only")
    plain, ours = both(sequential)
    ours.compile(sgd(), "mse", steps_per_execution=at_a_time)
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    (_, x), y = pairs(80)
    push, pushed = type(cluster).push, list[Any]()

    def failing(of: kvemb.Cluster, *args: Any, **kwargs: Any) -> Any:
        pushed.append(None)
        if len(pushed) == 5:
            raise ShardUnavailableError("shard 0 went away")
        return push(of, *args, **kwargs)

    monkeypatch.setattr(type(cluster), "push", failing)
    with pytest.raises(ShardUnavailableError, match="went away"):
        ours.fit(x, y, batch_size=10, shuffle=False, verbose=0)
    plain.fit(x[:50], y[:50], batch_size=10, shuffle=False, verbose=0)
    np.testing.assert_allclose(ours.get_weights()[0], plain.layers[-1].get_weights()[0], **CLOSE)
    assert np.isfinite(ours.fit(x, y, batch_size=10, verbose=0).history["loss"]).all()
