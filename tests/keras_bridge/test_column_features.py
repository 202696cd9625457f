"""DenseFeatures in Keras: blocks, order and missing values are TensorFlow's; it is trained, saved and loaded like any layer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import CLOSE, SEED, names_of

import kvemb
from kvemb.columns import (
    bucketized_column,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_list,
    embedding_column,
    numeric_column,
    shared_embedding_columns,
    weighted_categorical_column,
)
from kvemb.errors import InvalidInputError
from kvemb.keras import DenseFeatures, distribute
from trainer.columns.feature_values import list_bags

RATE = 0.5
VIEWED = [[4, 9], [], [9], [1]]


def columns(name: str) -> list[Any]:
    viewed, bought = (categorical_column_with_identity(f"{name}.{key}", 20) for key in ("viewed", "bought"))
    word = weighted_categorical_column(categorical_column_with_hash_bucket(f"{name}.word", 50), f"{name}.weight")
    device = categorical_column_with_vocabulary_list(f"{name}.device", ["phone", "tablet"], num_oov_buckets=1)
    return [
        *shared_embedding_columns([viewed, bought], 4, combiner="sqrtn"),
        embedding_column(word, 3, combiner="mean"),
        embedding_column(device, 2, combiner="sum"),
        embedding_column(bucketized_column(numeric_column(f"{name}.age"), [18.0, 40.0]), 2),
        numeric_column(f"{name}.price", normalizer_fn=keras.ops.tanh),
    ]


def features(name: str) -> dict[str, Any]:
    of = {
        "viewed": VIEWED,
        "bought": np.array([[3, -1], [9, 9], [-1, -1], [0, 1]]),
        "word": [["red", "shoes"], ["red"], [], ["hat", ""]],
        "weight": [[1.0, 2.0], [0.5], [], [3.0, 0.0]],
        "device": np.array(["phone", "fridge", "tablet", "phone"]),
        "age": [17.0, 18.0, 40.0, 39.0],
        "price": np.array([0.0, 1.0, -1.0, 2.0], np.float32),
        "not-read": [1, 2, 3, 4],
    }
    return {f"{name}.{key}": value for key, value in of.items()}


def functional(layer: Any) -> Any:
    keras.utils.set_random_seed(SEED)
    inputs = layer.symbolic_inputs()
    return keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))


class Subclassed(keras.Model):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        keras.utils.set_random_seed(SEED)
        self.blocks, self.top = layer, keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.top(self.blocks(x))


def blocks_by_hand(name: str, made: dict[str, Any]) -> np.ndarray:
    """The same from rows that are pulled, column by column."""
    given, listed = features(name), {column.name: column for column in columns(name)}
    blocks = []
    for column in sorted(listed.values(), key=lambda column: column.name):
        if not hasattr(column, "table_name"):
            blocks.append(np.tanh(given[column.key])[:, None])
            continue
        table = made[column.table_name]
        key = column.source.key.removeprefix(f"{name}.")
        block = np.zeros((4, column.dimension), np.float32)
        for at in range(4):
            value = given[f"{name}.{key}"][at]
            values = list(value) if isinstance(value, list | np.ndarray) else [value]
            weights = given[f"{name}.weight"][at] if key == "word" else [1.0] * len(values)
            kept = [(one, weight) for one, weight in zip(values, weights, strict=True) if one not in (-1, "") and weight > 0]
            if kept:
                dtype = np.float32 if key == "age" else object if isinstance(kept[0][0], str) else np.int64
                rows = table.pull(column.source.buckets(np.array([one for one, _ in kept], dtype)))
                by = np.array([weight for _, weight in kept], np.float32)
                divisor = {"sum": 1.0, "mean": by.sum(), "sqrtn": np.sqrt((by**2).sum())}[column.combiner]
                block[at] = (rows * by[:, None]).sum(axis=0) / divisor
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


@pytest.mark.parametrize("make", [functional, Subclassed])
def test_blocks_order_and_missing_values_are_those_of_the_columns(cluster: kvemb.Cluster, name: str, make: Any) -> None:
    layer = DenseFeatures(columns(name), optimizer=keras.optimizers.SGD(RATE))
    model = make(layer)
    model.compile("sgd", "mse")
    made = {table.name: table for table in distribute(model, cluster, quiet=True).tables}
    assert len(made) == 4, "two columns share a table"
    ready = layer.preprocess(features(name))
    kernel, bias = model.layers[-1].get_weights() if make is functional else (None, None)
    got = model.predict(ready, verbose=0)
    if kernel is None:
        kernel, bias = model.top.get_weights()
    np.testing.assert_allclose(got, blocks_by_hand(name, made) @ kernel + bias, **CLOSE)


def test_fit_gives_the_losses_of_plain_layers(in_step: kvemb.Cluster, name: str) -> None:
    rng = np.random.default_rng(1)
    ids, price = rng.integers(0, 30, (200, 2)), rng.normal(size=(200, 1)).astype(np.float32)
    y = (np.sin(ids).sum(axis=1, keepdims=True) + price).astype(np.float32)
    column = embedding_column(categorical_column_with_identity(f"{name}.item", 30), 4)
    # Not Adagrad: on TensorFlow Keras squares the gradients of an id that comes twice one by one.
    layer = DenseFeatures([column, numeric_column(f"{name}.price")], optimizer=keras.optimizers.SGD(0.1))
    model = functional(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    (table,) = distribute(model, in_step, quiet=True).tables
    x = layer.preprocess({f"{name}.item": ids, f"{name}.price": price})

    item, number = keras.Input((2,), dtype="int64"), keras.Input((1,))
    own = keras.layers.Embedding(30, 4)
    mean = keras.ops.mean(own(item), axis=1)
    plain = keras.Model([item, number], keras.layers.Dense(1)(keras.layers.Concatenate()([mean, number])))
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    own.set_weights([table.pull(np.arange(30))])
    plain.layers[-1].set_weights(model.layers[-1].get_weights())

    losses = model.fit(x, y, batch_size=40, epochs=4, shuffle=False, verbose=0).history["loss"]
    expected = plain.fit([ids, price], y, batch_size=40, epochs=4, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(table.pull(np.arange(30)), own.get_weights()[0], rtol=2e-3, atol=2e-5)


def test_padding_trains_no_row(cluster: kvemb.Cluster, name: str) -> None:
    layer = DenseFeatures([embedding_column(categorical_column_with_identity(f"{name}.viewed", 20), 4)], optimizer="adam")
    model = functional(layer)
    model.compile("sgd", "mse")
    (table,) = distribute(model, cluster, quiet=True).tables
    model.train_on_batch(layer.preprocess({f"{name}.viewed": VIEWED}), np.ones((4, 1), np.float32))
    assert np.flatnonzero(table.pull(np.arange(20), return_versions=True)[1]).tolist() == [1, 4, 9]


def test_a_saved_model_goes_on_with_its_tables(cluster: kvemb.Cluster, name: str, tmp_path: Any) -> None:
    layer = DenseFeatures(columns(name), optimizer=keras.optimizers.SGD(RATE))
    model = functional(layer)
    model.compile("sgd", "mse")
    distribute(model, cluster, quiet=True)
    x, y = layer.preprocess(features(name)), np.ones((4, 1), np.float32)
    first = model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    (again,) = (one for one in loaded.layers if isinstance(one, DenseFeatures))
    distribute(loaded, cluster, quiet=True)
    ready = again.preprocess(features(name))
    for key, values in x.items():
        np.testing.assert_array_equal(ready[key], values)
    np.testing.assert_allclose(loaded.predict(ready, verbose=0), model.predict(x, verbose=0), **CLOSE)
    assert loaded.train_on_batch(ready, y) < first


def crossed_columns(name: str, of: Any = kvemb.columns) -> list[Any]:
    """Of kvemb.columns, or of tf.feature_column."""
    page = of.categorical_column_with_identity(f"{name}.page", 9)
    crossed = of.crossed_column([page, f"{name}.word"], 30)
    weighted = of.weighted_categorical_column(page, f"{name}.seconds")
    return [of.embedding_column(crossed, 2, combiner="sum"), of.indicator_column(crossed), of.indicator_column(weighted)]


def test_a_cross_is_embedded_counted_and_saved(cluster: kvemb.Cluster, name: str) -> None:
    layer = DenseFeatures(crossed_columns(name), optimizer=keras.optimizers.SGD(RATE))
    inputs = layer.symbolic_inputs()
    model = keras.Model(inputs, layer(inputs))
    (table,) = distribute(model, cluster, quiet=True).tables
    given = {"page": [[1, 2], []], "word": [["a", "b"], ["a"]], "seconds": [[0.5, 2.0], []]}
    ready = layer.preprocess({f"{name}.{key}": values for key, values in given.items()})
    got = model.predict(ready, verbose=0)
    ids = crossed_columns(name)[1].source.cross([list_bags(given["page"]), list_bags(given["word"])]).values
    assert len(ids) == 4
    np.testing.assert_allclose(got[0, :2], table.pull(ids).sum(axis=0), **CLOSE)
    assert got[0, 2:32].tolist() == np.bincount(ids, minlength=30).tolist()
    assert got[0, 32:].tolist() == [0.0, 0.5, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert not got[1].any()
    again = DenseFeatures.from_config(json.loads(json.dumps(layer.get_config())))
    assert again.get_config() == layer.get_config()


def test_tensorflows_own_columns_are_taken(name: str) -> None:
    theirs = crossed_columns(name, pytest.importorskip("tensorflow").feature_column)
    ours = DenseFeatures(crossed_columns(name), name="same").get_config()
    assert DenseFeatures(theirs, name="same").get_config() == ours


def feature_space() -> tuple[Any, dict[str, Any]]:
    """One that has every kind of feature that gives ids, and what it was adapted to."""
    of = keras.utils.FeatureSpace
    space = of(
        {
            "colour": of.string_categorical(output_mode="int"),
            "page": of.integer_categorical(output_mode="int"),
            "word": of.string_hashed(50, output_mode="int"),
            "user": of.integer_hashed(50, output_mode="int"),
            "age": of.float_discretized(3, output_mode="int"),
            "price": of.float_normalized(),
        },
        crosses=[of.cross(("colour", "page"), 40, output_mode="int")],
        output_mode="dict",
    )
    given = {
        "colour": np.array(["red", "green", "blue", "red"]),
        "page": np.array([3, 7, 7, 1]),
        "word": np.array(["a", "b", "c", "d"]),
        "user": np.array([5, 2**30, 5, 1]),
        "age": np.array([17.0, 30.0, 50.0, 70.0], np.float32),
        "price": np.array([1.0, 2.0, 3.0, 5.0], np.float32),
    }
    space.adapt(given)
    return space, given


def numbers(space: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {key: keras.ops.convert_to_numpy(of) for key, of in space(given).items()}


def behind(encoded: dict[str, Any]) -> Any:
    """An embedding behind each of the ids, a dense layer behind all."""
    keras.utils.set_random_seed(SEED)
    flat, rows = keras.layers.Flatten, keras.layers.Embedding
    blocks = [of if key == "price" else flat()(rows(64, 3, name=f"{key}_rows")(of)) for key, of in encoded.items()]
    return keras.layers.Dense(1)(keras.layers.Concatenate()(blocks))


def test_ids_of_a_feature_space_go_into_embeddings_that_are_tables_and_both_are_saved(
    cluster: kvemb.Cluster, name: str, tmp_path: Path
) -> None:
    pytest.importorskip("tensorflow")  # FeatureSpace reads by tf.data
    space, given = feature_space()
    encoded, y = space.get_encoded_features(), np.array([[1.0], [0.0], [0.5], [1.0]], np.float32)
    outputs = [behind(encoded) for _ in range(2)]
    plain, ours = (keras.Model(encoded, one) for one in outputs)
    for model in (plain, ours):
        model.compile(keras.optimizers.SGD(0.01), "mse")
    tables = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True).tables
    assert len(tables) == 6, "five features and a cross"
    first = {table.name: table.pull(np.arange(64)) for table in tables}

    ids = numbers(space, given)
    losses = [model.fit(ids, y, batch_size=2, epochs=2, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)
    trained = {of.name: np.flatnonzero((of.pull(np.arange(64)) != first[of.name]).any(axis=1)).tolist() for of in tables}
    assert trained == {f"{name}.{key}_rows": np.unique(of).tolist() for key, of in ids.items() if key != "price"}

    if keras.backend.backend() == "tensorflow":  # elsewhere Keras takes no text into a model
        raw = {key: keras.ops.convert_to_tensor(of[:, None]) for key, of in given.items()}
        whole = [keras.Model(space.get_inputs(), one) for one in outputs]
        distribute(whole[1], cluster, min_rows=1, names=names_of(name), quiet=True)
        np.testing.assert_allclose(*(model.predict(raw, verbose=0) for model in whole), **CLOSE)

    ours.save(tmp_path / "model.keras")
    space.save(str(tmp_path / "space.keras"))
    again, same_space = (keras.saving.load_model(tmp_path / f"{what}.keras") for what in ("model", "space"))
    distribute(again, cluster, min_rows=1, names=names_of(name), quiet=True)
    ids = numbers(same_space, given)
    losses = [model.fit(ids, y, batch_size=2, epochs=2, shuffle=False, verbose=0).history["loss"] for model in (plain, again)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda name: DenseFeatures([numeric_column(name)]), "no embedding column"),
        (lambda name: DenseFeatures([categorical_column_with_identity(name, 3)]), "wrap it with embedding_column"),
        (lambda name: DenseFeatures(columns(name)).preprocess({}), "no feature"),
        (lambda name: DenseFeatures(columns(name)).preprocess({**features(name), f"{name}.viewed": [1.5] * 4}), "holds"),
        (lambda name: DenseFeatures(columns(name)).preprocess({**features(name), f"{name}.weight": [1.0] * 4}), "a number for each value"),
        (lambda name: DenseFeatures(columns(name))({f"{name}.viewed": np.array([1])}), r"its preprocess\(\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, make: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        make(name)
