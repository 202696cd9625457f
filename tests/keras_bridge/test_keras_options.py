"""The options of `distribute` reach the tables that it makes, and it says what it did."""

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import DIM, N_USERS, N_WORDS, functional, names_of, sequential

import kvemb
from kvemb.keras import distribute


def test_options_reach_the_tables(cluster: kvemb.Cluster, name: str) -> None:
    ours = sequential()
    ours.compile("sgd", "mse")
    options = {"initializer": kvemb.init.constant(0.5), "dtype": "float16", "seed": 7, "reduce": "mean", "max_unapplied": 3}
    done = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True, **options)
    (table,) = done.tables
    made = table.definition
    assert (made.initializer, made.dtype, made.seed, made.reduce) == (kvemb.init.constant(0.5), "float16", 7, "mean")
    assert done.steps.max_unapplied == 3
    np.testing.assert_array_equal(table.pull([0, N_WORDS - 1]), np.full((2, DIM), 0.5, np.float32))


def test_small_embeddings_stay_and_it_says_so(cluster: kvemb.Cluster, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        ours = functional()
        ours.compile("sgd", "mse")
        done = distribute(ours, cluster, min_rows=N_USERS, names=names_of(f"{name}{quiet}"), quiet=quiet)
        assert [table.name for table in done.tables] == [f"{name}{quiet}.users"]
        assert type(ours.get_layer("vocabulary")) is keras.layers.Embedding
        said = capsys.readouterr().err
        assert (f"'vocabulary' stays: {N_WORDS} rows, fewer than min_rows={N_USERS}" in said) is not quiet
        assert ('kvemb.keras.prepare(model, consistency="exact")' in said) is not quiet
