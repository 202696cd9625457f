"""DistributedEmbedding has keras-rs's words and results: nested features, shared tables, combiners, weights, ragged ids, own optimizers."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import CLOSE, DIM, N_USERS, N_WORDS, SEED, sgd

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.keras import DistributedEmbedding, FeatureConfig, TableConfig, distribute

RATE = 0.5


def table(name: str, rows: int = N_WORDS, **options: Any) -> TableConfig:
    return TableConfig(name, rows, DIM, **{"optimizer": keras.optimizers.SGD(RATE), **options})


def feature(name: str, of: TableConfig, n: int | None = None) -> FeatureConfig:
    return FeatureConfig(name, of, (None,) if n is None else (None, n), (None, of.embedding_dim))


class Bags(keras.Model):
    """One layer over features in a dict of a list, whose results are added up by a fixed vector."""

    def __init__(self, features: Any) -> None:
        super().__init__()
        self.looked_up = DistributedEmbedding(features)
        keras.utils.set_random_seed(SEED)
        self.top = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.top(keras.ops.concatenate(keras.tree.flatten(self.looked_up(x)), axis=-1))


class PlainBags(keras.Model):
    """The same of keras.layers.Embedding: two features share `words`."""

    def __init__(self) -> None:
        super().__init__()
        self.users = keras.layers.Embedding(N_USERS, DIM)
        self.words = keras.layers.Embedding(N_WORDS, DIM)
        keras.utils.set_random_seed(SEED)
        self.top = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        title, clicked = (keras.ops.mean(self.words(ids), axis=1) for ids in x["texts"])
        return self.top(keras.ops.concatenate([title, clicked, self.users(x["user"])], axis=-1))


def batch(n: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, N_WORDS, (n, width)).astype("int32") for width in (3, 2)]
    return {"user": rng.integers(0, N_USERS, n).astype("int32"), "texts": texts}, rng.normal(size=(n, 1)).astype("float32")


def features(name: str) -> Any:
    words, users = table(f"{name}.words"), table(f"{name}.users", N_USERS)
    return {"user": feature("user", users), "texts": [feature("title", words, 3), feature("clicked", words, 2)]}


def test_nested_features_with_a_shared_table_learn_as_plain_embeddings(in_step: kvemb.Cluster, name: str) -> None:
    ours, plain = Bags(features(name)), PlainBags()
    for model in (ours, plain):
        model.compile(keras.optimizers.SGD(RATE), "mse")
    done = distribute(ours, in_step, quiet=True)
    assert sorted(one.name for one in done.tables) == [f"{name}.users", f"{name}.words"]
    x, y = batch(50)
    assert ours.predict(x, verbose=0).shape == plain.predict(x, verbose=0).shape
    rows = {one.name.rpartition(".")[2]: one.pull(range(N_USERS if "users" in one.name else N_WORDS)) for one in done.tables}
    plain.users.set_weights([rows["users"]])
    plain.words.set_weights([rows["words"]])
    plain.top.set_weights(ours.top.get_weights())
    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": batch(20, 1)}
    expected, got = plain.fit(x, y, **options).history, ours.fit(x, y, **options).history
    for key, values in expected.items():
        np.testing.assert_allclose(got[key], values, **CLOSE)
    np.testing.assert_allclose(ours.train_on_batch(x, y), plain.train_on_batch(x, y), **CLOSE)
    np.testing.assert_allclose(ours.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), **CLOSE)
    np.testing.assert_allclose(ours.predict(x, verbose=0), plain.predict(x, verbose=0), **CLOSE)


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_bags_are_combined_with_weights_and_ragged_ones_are_padded(cluster: kvemb.Cluster, name: str, combiner: str) -> None:
    words = table(name, combiner=combiner, initializer="uniform")
    layer = DistributedEmbedding({"words": feature("words", words, 3), "first": feature("first", words)})
    model = keras.Sequential([layer, Joined()])
    model.compile(sgd(), "mse")
    (rows,) = (one.pull(range(N_WORDS)) for one in distribute(model, cluster, quiet=True).tables)
    bags = [[1, 2, 2], [5], [], [7, 9, 3, 11]]  # the last one is cut
    weights = [[0.5, 2.0, 1.0], [3.0], [], [1.0, 1.0, 0.25, 9.0]]
    first = np.array([4, 4, 0, 2], np.int32)
    x = layer.preprocess(
        {"words": np.array([np.array(bag, np.int32) for bag in bags], object), "first": first},
        {"words": np.array([np.array(of, np.float32) for of in weights], object), "first": np.full(4, 2.0, np.float32)},
    )
    expected = np.zeros((4, DIM), np.float32)
    for at, (bag, of) in enumerate(zip(bags, weights, strict=True)):
        if bag:
            by = np.array(of[:3], np.float32)
            divisor = {"mean": by.sum(), "sum": 1.0, "sqrtn": np.sqrt((by**2).sum())}[combiner]
            expected[at] = (rows[bag[:3]] * by[:, None]).sum(axis=0) / divisor
    alone = rows[first] * (2.0 if combiner == "sum" else 1.0)
    got = model.predict(x, verbose=0)
    np.testing.assert_allclose(got, np.concatenate([alone, expected], axis=-1), **CLOSE)


class Joined(keras.layers.Layer):
    """Of a dict of vectors, side by side by key."""

    def call(self, x: Any) -> Any:
        return keras.ops.concatenate([x[key] for key in sorted(x)], axis=-1)


def test_each_table_has_its_own_optimizer_and_follows_its_schedule(cluster: kvemb.Cluster, name: str) -> None:
    falling = keras.optimizers.schedules.ExponentialDecay(RATE, decay_steps=1, decay_rate=0.5)
    still, moving = table(f"{name}.still", optimizer=keras.optimizers.SGD(0.0)), table(f"{name}.m", optimizer=keras.optimizers.SGD(falling))
    model = Bags([feature("a", still), feature("b", moving)])
    model.compile(keras.optimizers.Adam(0.0), "mse")
    made = {one.name: one for one in distribute(model, cluster, quiet=True).tables}
    one, other = made[still.name], made[moving.name]
    x = [np.array([3], np.int32), np.array([4], np.int32)]
    y = model.predict(x, verbose=0) + 100.0  # far away: the gradient stays about the same
    at = [other.pull([4])]
    before = one.pull([3])
    for _ in range(3):
        model.train_on_batch(x, y)
        at.append(other.pull([4]))
        y = model.predict(x, verbose=0) + 100.0
    np.testing.assert_array_equal(one.pull([3]), before)
    steps = np.abs(np.diff(np.concatenate(at), axis=0)).sum(axis=1)
    np.testing.assert_allclose(steps[1:] / steps[:-1], 0.5, rtol=1e-3)


def test_a_functional_model_is_saved_and_goes_on(cluster: kvemb.Cluster, name: str, tmp_path: Any) -> None:
    of = features(name)
    inputs = {
        "user": keras.Input((), dtype="int32", name="user"),
        "texts": [keras.Input((3,), dtype="int32", name="title"), keras.Input((2,), dtype="int32", name="clicked")],
    }
    parts = DistributedEmbedding(of)(inputs)
    joined = keras.layers.Concatenate()([parts["user"], *parts["texts"]])
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile(sgd(), "mse")
    distribute(model, cluster, quiet=True)
    x, y = batch(30)
    first = model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    distribute(loaded, cluster, quiet=True)
    (layer,) = (one for one in loaded.layers if isinstance(one, DistributedEmbedding))
    assert len(layer.tables) == 2, "two features share one of them"
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), **CLOSE)
    assert loaded.train_on_batch(x, y) < first


def test_a_dataset_of_ragged_tensors_is_preprocessed_in_its_map(cluster: kvemb.Cluster, name: str) -> None:
    tf = pytest.importorskip("tensorflow")
    words = table(name, combiner="sum")
    model = Bags(feature("words", words, 3))
    model.compile(sgd(), "mse")
    (rows,) = distribute(model, cluster, quiet=True).tables
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(6, dtype=np.int32), [3, 1, 0, 2])
    data = tf.data.Dataset.from_tensor_slices((ragged, np.ones((4, 1), np.float32))).batch(2)
    ready = data.map(lambda x, y: (model.looked_up.preprocess(x), y))
    seen = rows.pull(range(6))
    bags = np.stack([seen[:3].sum(axis=0), seen[3], np.zeros(DIM, np.float32), seen[4:6].sum(axis=0)])
    got = model.predict(ready, verbose=0)
    kernel, bias = model.top.get_weights()
    np.testing.assert_allclose(got, bags @ kernel + bias, **CLOSE)
    model.fit(ready, verbose=0)
    assert (np.abs(rows.pull(range(6)) - seen).max(axis=1) > 0).all()
    with pytest.raises(InvalidInputError, match=r"put preprocess\(\)"):
        model.predict_on_batch(ragged)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda name: table(name, placement="sparsecore"), "placement is 'sparsecore'.*'auto'"),
        (lambda name: table(name, placement="default_device"), "placement is 'default_device'.*keras.layers.Embedding"),
        (lambda name: table(name, combiner="max"), "combiner is 'max'; give one of sum, mean, sqrtn"),
        (lambda name: table(name, max_ids_per_partition=256), "max_ids_per_partition.*SparseCore.*Leave it out"),
        (lambda name: table(name, max_unique_ids_per_partition=256), "max_unique_ids_per_partition.*Leave it out"),
        (lambda name: table(name, rows=0), "vocabulary_size is 0"),
        (lambda name: FeatureConfig("f", table(name), (None, 3), (None, 3, DIM)), r"output_shape is \(None, 3, 8\)"),
        (lambda name: DistributedEmbedding(feature("f", table(name)), table_stacking=["a", "b"]), "table_stacking.*leave it out"),
        (lambda name: DistributedEmbedding(feature("f", table(name)), update_stats=True), "update_stats=True.*leave it out"),
        (lambda name: DistributedEmbedding([feature("f", table(name)), feature("g", table(name))]), "several tables are named"),
        (lambda name: DistributedEmbedding([table(name)]), "must be FeatureConfig objects"),
        (lambda name: DistributedEmbedding({"a": feature("f", table(name))}).preprocess({"b": np.array([1])}), "in the structure"),
        (lambda name: DistributedEmbedding(feature("f", table(name), 3)).preprocess(np.zeros((2, 4), int)), r"input_shape is \(None, 3\)"),
    ],
)
def test_what_means_nothing_here_is_refused_by_name(name: str, make: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        make(name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "nadam"}, "optimizer of table '.*': the parameter servers have no update rule for Nadam"),
        ({"optimizer": keras.optimizers.SGD(0.1, global_clipnorm=1.0)}, "optimizer of table '.*': global_clipnorm"),
        ({"optimizer": keras.optimizers.SGD(0.1, loss_scale_factor=2.0)}, "losses are scaled by the optimizer that the model is compiled"),
        ({"initializer": "orthogonal"}, "Orthogonal.* has no counterpart"),
        ({"optimizer": "no such"}, "table '.*'.*no such"),
    ],
)
def test_a_table_that_the_cluster_cannot_have_is_refused_before_anything_is_made(
    cluster: kvemb.Cluster, name: str, options: dict[str, Any], says: str
) -> None:
    model = Bags(feature("f", table(name, **options)))
    model.compile(sgd(), "mse")
    with pytest.raises(InvalidInputError, match=says):
        distribute(model, cluster, quiet=True)
    assert name not in cluster.tables()
