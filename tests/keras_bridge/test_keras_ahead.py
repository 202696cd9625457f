"""Rows are pulled before `fit` comes to their batch, on every backend: the same losses where they are exact, whatever `fit` is given."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import CLOSE, both, functional, names_of, pairs, sequential, sgd

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.keras import distribute, prepare
from trainer.lookahead.pull_threads import NAME

SIZES = {"threads_num": 1, "capacity": 3}


def connected(cluster: kvemb.Cluster, name: str, make: Any = functional, **options: Any) -> tuple[Any, Any, Any]:
    """Plain, the same over tables, and what pulls ahead for it."""
    plain, ours = both(make)
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    return plain, ours, prepare(ours, **{"consistency": "exact", **SIZES, **options})


def looking_up() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]


class Pulls:
    """In which threads rows are pulled."""

    def __init__(self, cluster: kvemb.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by = list[str]()
        pull = type(cluster).pull_versions

        def noted(of: Any, *args: Any, **kwargs: Any) -> Any:
            self.by.append(threading.current_thread().name)
            return pull(of, *args, **kwargs)

        monkeypatch.setattr(type(cluster), "pull_versions", noted)


def test_losses_are_those_of_the_plain_model_and_every_batch_was_pulled_ahead(in_step: kvemb.Cluster, name: str) -> None:
    plain, ours, ahead = connected(in_step, name)
    x, y = pairs(250)
    options = {"batch_size": 32, "epochs": 3, "shuffle": False, "validation_data": pairs(40, seed=1), "verbose": 0}
    expected, got = plain.fit(x, y, **options).history, ours.fit(x, y, **options).history
    for key, values in expected.items():
        np.testing.assert_allclose(got[key], values, **CLOSE)
    np.testing.assert_allclose(ours.predict(x, verbose=0), plain.predict(x, verbose=0), **CLOSE)
    assert ahead.waited.n_batches == 3 * 8
    assert looking_up() == [], "threads end with fit"


def test_no_row_of_a_step_is_pulled_in_the_thread_that_trains(cluster: kvemb.Cluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours, ahead = connected(cluster, name, consistency="stale")
    pulls = Pulls(cluster, monkeypatch)
    x, y = pairs(160)
    ours.fit(x, y, batch_size=32, epochs=2, verbose=0)
    assert len(pulls.by) == ahead.waited.n_batches == 10
    assert all(thread.startswith(NAME) for thread in pulls.by)
    assert "not foreseen" not in ahead.report


def test_data_of_every_kind_is_read_in_its_order(cluster: kvemb.Cluster, name: str) -> None:
    """Endless generators, and steps that are counted: one run goes on over epochs."""

    def batches() -> Iterator[Any]:
        for seed in range(1000):
            (_, words), y = pairs(16, seed)
            yield words, y

    plain, ours, _ = connected(cluster, name, sequential)
    losses = [model.fit(batches(), steps_per_epoch=7, epochs=3, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)
    pairs_of = [(words, y) for (_, words), y in (pairs(16, seed) for seed in range(5))]
    losses = [model.fit(_Dataset(pairs_of), epochs=2, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)


class _Dataset(keras.utils.PyDataset):
    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, at: int) -> Any:
        return self._batches[at]


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="Keras itself trains on arrays there while its generator fills them again")
def test_a_generator_may_fill_the_same_arrays_again(cluster: kvemb.Cluster, name: str) -> None:
    def batches() -> Iterator[Any]:
        (_, words), y = pairs(16)
        for seed in range(1, 12):
            yield words, y
            (_, words[...]), y[...] = pairs(16, seed)

    plain, ours, _ = connected(cluster, name, sequential)
    losses = [model.fit(batches(), verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)


def test_steps_and_evaluations_within_fit_leave_its_batches_alone(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours, ahead = connected(cluster, name)
    x, y = pairs(200)
    more = pairs(30, seed=5)

    def fitted(model: Any) -> list[float]:
        losses: list[float] = []

        def between(batch: int, logs: Any) -> None:
            if batch % 3 == 1:
                getattr(model, "jax_state_sync", lambda: None)()  # as Keras's callbacks do on JAX
                losses.append(model.evaluate(*more, verbose=0))
                model.predict(more[0], verbose=0)

        evaluating = keras.callbacks.LambdaCallback(on_train_batch_end=between)
        model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=[evaluating])
        return [*losses, model.train_on_batch(*more), *model.fit(x, y, shuffle=False, verbose=0).history["loss"]]

    expected, got = fitted(plain), fitted(ours)
    np.testing.assert_allclose(got, expected, **CLOSE)
    assert ahead.waited.n_batches == 20 + 7


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras on torch has steps_per_execution=1 only")
def test_several_steps_in_one_call_are_each_pulled_ahead(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours = both(sequential)
    ours.compile(sgd(), "mse", steps_per_execution=3)
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    ahead = prepare(ours, consistency="exact", **SIZES)
    (_, x), y = pairs(100)
    losses = [model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)
    assert ahead.waited.n_batches == 10


def test_an_error_of_the_data_comes_up_and_the_next_fit_goes_on(cluster: kvemb.Cluster, name: str) -> None:
    def batches(n: int) -> Iterator[Any]:
        for seed in range(n):
            (_, words), y = pairs(16, seed)
            yield words, y
        raise RuntimeError("no more disk")

    _, ours, ahead = connected(cluster, name, sequential)
    with pytest.raises(Exception, match="no more disk"):  # TensorFlow wraps what a generator raises
        ours.fit(batches(6), verbose=0)
    assert looking_up() == []
    assert ahead.waited.n_batches == 6, "those before it were trained"
    (_, words), y = pairs(64)
    assert np.isfinite(ours.fit(words, y, verbose=0).history["loss"]).all()
    with pytest.raises(InvalidInputError, match="outside"):
        ours.fit(words + 10**6, y, verbose=0)
    assert looking_up() == []


def test_it_is_stopped_in_mid_epoch(cluster: kvemb.Cluster, name: str) -> None:
    _, ours, _ = connected(cluster, name, sequential)
    (_, words), y = pairs(200)

    def stop(batch: int, logs: Any) -> None:
        if batch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ours.fit(words, y, batch_size=10, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)])
    assert looking_up() == []
    assert np.isfinite(ours.train_on_batch(words, y))


def test_what_cannot_be_prepared_is_said(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours, ahead = connected(cluster, name, sequential)
    with pytest.raises(InvalidInputError, match=r"no model over tables yet: call kvemb.keras.distribute"):
        prepare(plain)
    with pytest.raises(InvalidInputError, match="k goes with 'bounded'"):
        prepare(ours, k=2)
    with pytest.raises(InvalidInputError, match="not under way"):
        next(iter(ahead))
