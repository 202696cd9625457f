"""What people do with a Keras model goes on: saving, mixed precision, callbacks, several steps at a time, copies; the rest is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import CLOSE, DIM, N_WORDS, SEED, both, functional, names_of, pairs, sequential, sgd

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.keras import Embedding, distribute, materialize, prepare


def trained(cluster: kvemb.Cluster, name: str, make: Any = functional) -> tuple[Any, Any, Any]:
    """A model over tables after a few steps; x and y."""
    ours = both(make)[1]
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    x, y = pairs(60)
    ours.fit(x if make is functional else x[1], y, batch_size=20, verbose=0)
    return ours, x if make is functional else x[1], y


def test_a_saved_model_has_no_rows_and_goes_on_with_its_tables(cluster: kvemb.Cluster, name: str, tmp_path: Path) -> None:
    ours, x, y = trained(cluster, name)
    ours.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    with pytest.raises(InvalidInputError, match=r"does not know: call kvemb.keras.distribute"):
        loaded(x)
    distribute(loaded, cluster, quiet=True)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), ours.predict(x, verbose=0), **CLOSE)
    losses = [model.train_on_batch(x, y) for model in (loaded, ours)]  # the second sees rows after the first one's step
    assert losses[1] < losses[0]


def test_a_copy_of_plain_layers_predicts_the_same_without_a_cluster(cluster: kvemb.Cluster, name: str, tmp_path: Path) -> None:
    ours, x, _ = trained(cluster, name)
    plain = materialize(ours)
    assert [type(layer) for layer in plain.layers if layer.name == "users"] == [keras.layers.Embedding]
    np.testing.assert_allclose(plain.predict(x, verbose=0), ours.predict(x, verbose=0), **CLOSE)
    plain.save(tmp_path / "plain.keras")
    np.testing.assert_allclose(keras.saving.load_model(tmp_path / "plain.keras").predict(x, verbose=0), ours.predict(x, verbose=0), **CLOSE)


def test_a_copy_beyond_max_bytes_is_refused(cluster: kvemb.Cluster, name: str) -> None:
    ours = trained(cluster, name)[0]
    with pytest.raises(InvalidInputError, match=r"above max_bytes=100; raise it"):
        materialize(ours, max_bytes=100)


def test_mixed_precision_is_computed_as_in_the_plain_model(cluster: kvemb.Cluster, name: str) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        plain, ours = both(sequential)
    finally:
        keras.config.set_dtype_policy("float32")
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    (_, x), y = pairs(60)
    losses = [model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)
    assert str(ours.layers[0].compute_dtype) == "bfloat16"


def test_scaled_losses_are_taken_off_and_an_overflow_changes_no_row(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours = both(sequential, lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**10))
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    (_, x), y = pairs(20)
    for _ in range(3):
        np.testing.assert_allclose(ours.train_on_batch(x, y), plain.train_on_batch(x, y), **CLOSE)
    before = table.pull(np.arange(N_WORDS))
    ours.train_on_batch(x, np.full_like(y, np.inf))
    np.testing.assert_array_equal(table.pull(np.arange(N_WORDS)), before)
    np.testing.assert_allclose(before, plain.layers[0].get_weights()[0], **CLOSE)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras on torch has steps_per_execution=1 only")
def test_several_steps_in_one_call_pull_and_push_each(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours = both(sequential)
    ours.compile(sgd(), "mse", steps_per_execution=3)
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    (_, x), y = pairs(100)
    losses = [model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)
    np.testing.assert_allclose(ours.predict(x, verbose=0), plain.predict(x, verbose=0), **CLOSE)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_a_layer_over_a_table_combines_bags(cluster: kvemb.Cluster, name: str, combiner: str) -> None:
    table = cluster.create_table(name, dim=DIM, optimizer=kvemb.optim.sgd(0.5), initializer=kvemb.init.uniform(-1, 1), num_ids=N_WORDS)
    words = keras.Input((4,), dtype="int32")
    model = keras.Model(words, keras.layers.Dense(1)(Embedding(table, combiner=combiner, mask_zero=True)(words)))
    model.compile(sgd(), "mse")
    distribute(model, cluster, quiet=True)
    x = np.array([[1, 2, 0, 0], [3, 3, 5, 0], [0, 0, 0, 0]], np.int32)
    rows, kernel, bias = table.pull(x), *model.layers[-1].get_weights()
    n = (x != 0).sum(axis=1, keepdims=True)
    divisor = {"sum": np.ones_like(n), "mean": n, "sqrtn": np.sqrt(n)}[combiner]
    bags = (rows * (x != 0)[..., None]).sum(axis=1) / np.maximum(divisor, 1)
    np.testing.assert_allclose(model.predict(x, verbose=0), bags @ kernel + bias, rtol=1e-4, atol=1e-5)
    model.train_on_batch(x, np.zeros((3, 1), np.float32))
    assert np.abs(table.pull([1, 3]) - rows[[0, 1], [0, 0]]).max() > 0
    np.testing.assert_array_equal(table.pull([0]), rows[0, 2:3])


def test_a_call_outside_of_a_step_looks_up_and_refuses_to_train(cluster: kvemb.Cluster, name: str) -> None:
    ours, x, _ = trained(cluster, name, sequential)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(ours(x)), ours.predict(x, verbose=0), **CLOSE)
    with pytest.raises(InvalidInputError, match="its gradients would not be pushed"):
        ours(x, training=True)


class InNumbers(keras.Model):
    """Its call cannot take symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary, self.top = keras.layers.Embedding(N_WORDS, DIM, name="vocabulary"), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        if isinstance(x, keras.KerasTensor):
            raise TypeError("numbers only")
        return self.top(keras.ops.mean(self.vocabulary(x), axis=1))


def test_a_model_that_cannot_be_followed_is_told_what_feeds_its_layers(cluster: kvemb.Cluster, name: str) -> None:
    (_, x), y = pairs(40)
    for features in (None, {"vocabulary": lambda x: x}):
        model = InNumbers()
        model(x)
        model.compile(sgd(), "mse")
        distribute(model, cluster, min_rows=1, names=names_of(name), features=features, quiet=True)
        if features is None:
            with pytest.raises(InvalidInputError, match=r"called with symbols it fails \(TypeError: numbers only\).*features="):
                model.train_on_batch(x, y)
        else:
            assert model.train_on_batch(x, y) > model.train_on_batch(x, y)


def test_an_embedding_that_is_not_built_is_drawn_by_its_initializer(cluster: kvemb.Cluster, name: str) -> None:
    model = keras.Sequential([keras.layers.Embedding(10**9, 4, name="huge"), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(sgd(), "mse")
    (table,) = distribute(model, cluster, names=names_of(name), quiet=True).tables
    assert table.definition.initializer == kvemb.init.uniform(-0.05, 0.05)
    x = np.array([[10**9 - 1], [5]], np.int64)
    assert model.train_on_batch(x, np.ones((2, 1), np.float32)) > model.train_on_batch(x, np.ones((2, 1), np.float32))


def test_embeddings_that_cannot_be_tables_are_named_with_why(cluster: kvemb.Cluster, name: str) -> None:
    layers = [keras.layers.Embedding(N_WORDS, DIM, embeddings_regularizer="l2", name="held"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile(sgd(), "mse")
    with pytest.raises(InvalidInputError, match=r"'held': embeddings_regularizer.*leave="):
        distribute(model, cluster, min_rows=1, names=names_of(name), quiet=True)
    with pytest.raises(InvalidInputError, match=r"there is no keras.layers.Embedding to replace: 'held' stays"):
        distribute(model, cluster, min_rows=1, leave=["held"], quiet=True)


def choosing(of_rows: bool) -> Any:
    """A model whose ids come from logits: of a dense layer, or of rows."""
    keras.utils.set_random_seed(SEED)
    words = keras.Input((3,), dtype="int32")
    seen = keras.layers.Embedding(N_WORDS, DIM, name="seen")(words) if of_rows else keras.ops.cast(words, "float32")
    chosen = keras.ops.argmax(keras.layers.Dense(N_WORDS)(keras.layers.Flatten()(seen)), axis=-1)
    return keras.Model(words, keras.layers.Dense(1)(keras.layers.Embedding(N_WORDS, DIM, name="vocabulary")(chosen)))


def test_ids_from_logits_are_computed_with_the_weights_of_now(cluster: kvemb.Cluster, name: str) -> None:
    plain, ours = both(lambda: choosing(False))
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    (_, x), y = pairs(60)
    for model in (plain, ours):
        model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(table.pull(np.arange(N_WORDS)), plain.get_layer("vocabulary").get_weights()[0], **CLOSE)
    prepare(ours)
    with pytest.raises(InvalidInputError, match=r"computed by layers with weights.*Train it without prepare"):
        ours.fit(x, y, verbose=0)
    of_rows = both(lambda: choosing(True))[1]
    distribute(of_rows, cluster, min_rows=1, names=names_of(f"{name}.r"), quiet=True)
    with pytest.raises(InvalidInputError, match="ids are computed from rows of layer 'seen'"):
        of_rows.fit(x, y, verbose=0)


def test_a_layer_that_is_distributed_in_time_is_refused_with_what_to_do(cluster: kvemb.Cluster, name: str) -> None:
    words = keras.Input((4, 3), dtype="int32")
    rows = keras.layers.TimeDistributed(keras.layers.Embedding(N_WORDS, DIM, name="vocabulary"))(words)
    model = keras.Model(words, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(sgd(), "mse")
    with pytest.raises(InvalidInputError, match=r"'vocabulary': TimeDistributed .* takes ids of any shape"):
        distribute(model, cluster, min_rows=1, names=names_of(name), quiet=True)


def test_a_model_of_keras_2_is_told_its_way(cluster: kvemb.Cluster) -> None:
    old = type("Model", (), {"__module__": "tf_keras.src.engine.training"})
    with pytest.raises(InvalidInputError, match=r"got Model, of Keras 2 .*kvemb.tensorflow"):
        distribute(old(), cluster)


def test_a_module_of_tensorflows_own_is_told_its_way(cluster: kvemb.Cluster) -> None:
    tensorflow = pytest.importorskip("tensorflow")

    class Words(tensorflow.Module):  # type: ignore[misc,name-defined]
        """Any."""

    with pytest.raises(InvalidInputError, match=r"got Words, a program without Keras's models: kvemb.tensorflow.distribute"):
        distribute(Words(), cluster)


def test_a_table_that_was_trained_before_is_told(cluster: kvemb.Cluster, name: str) -> None:
    trained(cluster, name)
    again = distribute(both(functional)[1], cluster, min_rows=1, names=names_of(name), quiet=True)
    assert f"'{name}.vocabulary' (3 steps of training) are those of the model that made" in str(again)
    own = distribute(both(functional)[1], cluster, min_rows=1, names=names_of(name), prefix="own/", quiet=True)
    assert [table.name for table in own.tables] == [f"own/{table.name}" for table in again.tables]
    assert "steps of training" not in str(distribute(both(functional)[1], cluster, min_rows=1, names=names_of(f"{name}.new"), quiet=True))


@pytest.mark.parametrize("after", [keras.layers.GlobalAveragePooling1D, keras.layers.Flatten])
def test_id_0_that_is_masked_is_a_row_as_in_keras(cluster: kvemb.Cluster, name: str, after: Any) -> None:
    """Trained where what comes after does not look at the mask, as Flatten; left alone elsewhere."""

    def masked() -> Any:
        keras.utils.set_random_seed(SEED)
        embedding = keras.layers.Embedding(N_WORDS, DIM, mask_zero=True, name="vocabulary")
        return keras.Sequential([keras.Input((3,), dtype="int32"), embedding, after(), keras.layers.Dense(1)])

    plain, ours = both(masked)
    first = plain.layers[0].get_weights()[0][0]
    (table,) = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    (_, words), y = pairs(64)
    words[:, 0] = np.maximum(words[:, 0], 1)  # the mean of nothing is no number
    words[:, 1:] *= np.random.default_rng(1).integers(0, 2, (64, 2)).astype("int32")
    for model in (plain, ours):
        model.fit(words, y, batch_size=16, shuffle=False, verbose=0)
    rows = plain.layers[0].get_weights()[0]
    np.testing.assert_allclose(table.pull(np.arange(N_WORDS)), rows, **CLOSE)
    assert np.array_equal(rows[0], first) is (after is not keras.layers.Flatten)


def test_quantizing_is_refused_with_what_to_do(cluster: kvemb.Cluster, name: str) -> None:
    ours = trained(cluster, name)[0]
    with pytest.raises(InvalidInputError, match=r"materialize the model first, then quantize the copy"):
        ours.quantize("int8")
    plain = materialize(ours)
    plain.quantize("int8")


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="ragged tensors are TensorFlow's")
def test_ragged_ids_of_a_direct_call_are_refused(cluster: kvemb.Cluster, name: str) -> None:
    import tensorflow as tf

    layers = [keras.layers.Embedding(N_WORDS, DIM, name="vocabulary"), keras.layers.Dense(1)]
    ours = keras.Sequential([keras.Input((None,), dtype="int32"), *layers])
    ours.compile(sgd(), "mse")
    distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    with pytest.raises(InvalidInputError, match="ids of a batch are ragged or sparse"):
        ours(tf.ragged.constant([[1, 2], [3]]))


class Block(keras.layers.Layer):  # type: ignore[misc]
    """A layer that looks up twice, and can be made again in backward as a whole."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocabulary = keras.layers.Embedding(N_WORDS, DIM, name="vocabulary")
        self.dense = keras.layers.Dense(4, activation="tanh")

    def call(self, x: Any) -> Any:
        return self.dense(keras.ops.mean(self.vocabulary(x), axis=1) * keras.ops.mean(self.vocabulary(x[:, :2]), axis=1))


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="there Keras's own layers fail under a RematScope")
def test_layers_that_are_computed_again_in_backward_train_the_same(cluster: kvemb.Cluster, name: str) -> None:
    def model(mode: str | None) -> Any:
        keras.utils.set_random_seed(SEED)
        x = keras.Input((3,), dtype="int32")
        with keras.RematScope(mode=mode):
            block = Block()
        made = keras.Model(x, keras.layers.Dense(1)(block(x)))
        made.compile(sgd(), "mse")
        return made

    plain, ours = model(None), model("full")
    (table,) = distribute(ours, cluster, min_rows=1, names=lambda path: name, quiet=True).tables
    (_, x), y = pairs(40)
    losses = [one.fit(x, y, batch_size=20, shuffle=False, epochs=2, verbose=0).history["loss"] for one in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)
    np.testing.assert_allclose(table.pull(np.arange(N_WORDS)), plain.layers[1].vocabulary.get_weights()[0], **CLOSE)
