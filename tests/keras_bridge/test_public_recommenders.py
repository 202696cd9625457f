"""Recommenders as Keras's and keras-rs's public examples have them learn over tables what they learned before, by `distribute` alone.

Their structure, in words of our own, on random data of the same shape: "Collaborative filtering for movie recommendations", "Structured
data learning with wide, deep, and cross networks" and "A transformer-based recommendation system" of keras.io, "basic ranking" and "basic
retrieval" of keras-rs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras import layers
from keras_models import CLOSE, SEED, names_of

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.keras import distribute

N_USERS, N_MOVIES, DIM, SEQUENCE = 50, 70, 8, 3
Data = tuple[Any, Any]


class RecommenderNet(keras.Model):
    """Collaborative filtering: the dot product of two vectors, and two biases."""

    def __init__(self, regularizer: Any = None) -> None:
        super().__init__()
        options = {"embeddings_initializer": "he_normal", "embeddings_regularizer": regularizer}
        self.user_embedding = layers.Embedding(N_USERS, DIM, name="user", **options)
        self.user_bias = layers.Embedding(N_USERS, 1, name="user_bias")
        self.movie_embedding = layers.Embedding(N_MOVIES, DIM, name="movie", **options)
        self.movie_bias = layers.Embedding(N_MOVIES, 1, name="movie_bias")
        self.dot = layers.Dot(axes=1)

    def call(self, inputs: Any) -> Any:
        user, movie = inputs[:, 0], inputs[:, 1]
        score = self.dot([self.user_embedding(user), self.movie_embedding(movie)])
        return keras.ops.sigmoid(score + self.user_bias(user) + self.movie_bias(movie))


class RankingModel(keras.Model):
    """Basic ranking: two vectors side by side under dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.user_embedding = layers.Embedding(N_USERS, DIM, name="user")
        self.candidate_embedding = layers.Embedding(N_MOVIES, DIM, name="movie")
        self.ratings = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8, activation="relu"), layers.Dense(1)])

    def call(self, inputs: Any) -> Any:
        parts = [self.user_embedding(inputs["user_id"]), self.candidate_embedding(inputs["movie_id"])]
        return self.ratings(keras.ops.concatenate(parts, axis=1))


class Tower(keras.Model):
    """A vector, and a dense layer over it."""

    def __init__(self, n_rows: int, name: str) -> None:
        super().__init__(name=f"{name}_tower")
        self.embedding = layers.Embedding(n_rows, DIM, name=name)
        self.top = layers.Dense(DIM)

    def call(self, ids: Any) -> Any:
        return self.top(self.embedding(ids))


class RetrievalModel(keras.Model):
    """Basic retrieval: towers, of which one is asked in the loss alone, for ids that stand in y."""

    def __init__(self) -> None:
        super().__init__()
        self.user_tower, self.candidate_tower = Tower(N_USERS, "user"), Tower(N_MOVIES, "movie")
        self.loss_fn = keras.losses.MeanSquaredError()

    def call(self, inputs: Any, training: bool = False) -> Any:
        return {"user_embeddings": self.user_tower(inputs)}

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        candidates = self.candidate_tower(y["movie_id"])
        scores = keras.ops.sum(y_pred["user_embeddings"] * candidates, axis=1, keepdims=True)
        return self.loss_fn(keras.ops.expand_dims(y["rating"], -1), scores, sample_weight)


def cross_network() -> Any:
    """Wide, deep and cross: a functional model whose inputs are a dict, some of them numbers."""
    inputs = {name: keras.Input((), name=name, dtype="int32") for name in ("user", "movie", "month")}
    inputs["age"] = keras.Input((1,), name="age")
    rows = {"user": N_USERS, "movie": N_MOVIES, "month": 12}
    encoded = [layers.Embedding(n, DIM, name=f"{name}_rows")(inputs[name]) for name, n in rows.items()]
    first = layers.BatchNormalization()(layers.concatenate([*encoded, inputs["age"]]))
    crossed = first
    for _ in range(2):
        crossed = first * layers.Dense(3 * DIM + 1)(crossed) + crossed
    deep = layers.Dense(16, activation="relu")(first)
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(layers.concatenate([crossed, deep])))


def behavior_sequence_transformer() -> Any:
    """One layer for the target movie and for those watched before, frozen vectors of genres beside it, attention over all."""
    inputs = {
        "user_id": keras.Input((1,), name="user_id", dtype="int32"),
        "sequence_movie_ids": keras.Input((SEQUENCE,), name="sequence_movie_ids", dtype="int32"),
        "target_movie_id": keras.Input((1,), name="target_movie_id", dtype="int32"),
        "sequence_ratings": keras.Input((SEQUENCE,), name="sequence_ratings"),
    }
    movie = layers.Embedding(N_MOVIES, DIM, name="movie")
    genres = np.random.default_rng(2).integers(0, 2, (N_MOVIES, 4)).astype("float32")
    genre = layers.Embedding(N_MOVIES, 4, embeddings_initializer=keras.initializers.Constant(genres), trainable=False, name="genres")
    mixed = layers.Dense(DIM, activation="relu")

    def encoded(ids: Any) -> Any:
        return mixed(layers.concatenate([movie(ids), genre(ids)]))

    watched = encoded(inputs["sequence_movie_ids"]) * keras.ops.expand_dims(inputs["sequence_ratings"], -1)
    sequence = layers.concatenate([watched, encoded(inputs["target_movie_id"])], axis=1)
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=DIM)(sequence, sequence)
    attended = layers.LayerNormalization()(layers.Add()([sequence, attended]))
    user = layers.Flatten()(layers.Embedding(N_USERS, DIM, name="user")(inputs["user_id"]))
    features = layers.concatenate([layers.Flatten()(attended), user])
    return keras.Model(inputs, layers.Dense(1)(layers.LeakyReLU()(layers.Dense(16)(features))))


def ids(rng: np.random.Generator, n_rows: int, *shape: int) -> Any:
    return rng.integers(0, n_rows, shape).astype("int32")


def ratings(rng: np.random.Generator, *shape: int) -> Any:
    return rng.random(shape).astype("float32")


def pairs_of(n: int, rng: np.random.Generator) -> Data:
    return np.stack([ids(rng, N_USERS, n), ids(rng, N_MOVIES, n)], axis=1), ratings(rng, n)


def ranked(n: int, rng: np.random.Generator) -> Data:
    return {"user_id": ids(rng, N_USERS, n), "movie_id": ids(rng, N_MOVIES, n)}, ratings(rng, n)


def retrieved(n: int, rng: np.random.Generator) -> Data:
    return ids(rng, N_USERS, n), {"movie_id": ids(rng, N_MOVIES, n), "rating": ratings(rng, n)}


def records(n: int, rng: np.random.Generator) -> Data:
    x = {"user": ids(rng, N_USERS, n), "movie": ids(rng, N_MOVIES, n), "month": ids(rng, 12, n), "age": ratings(rng, n, 1)}
    return x, rng.integers(0, 2, n).astype("float32")


def sequences(n: int, rng: np.random.Generator) -> Data:
    x = {
        "user_id": ids(rng, N_USERS, n, 1),
        "sequence_movie_ids": ids(rng, N_MOVIES, n, SEQUENCE),
        "target_movie_id": ids(rng, N_MOVIES, n, 1),
        "sequence_ratings": ratings(rng, n, SEQUENCE),
    }
    return x, ratings(rng, n)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """As tf.data gives them to those examples: [batch] stays [batch]."""

    def __init__(self, data: Data, size: int) -> None:
        super().__init__()
        self._data, self._size = data, size

    def __len__(self) -> int:
        return -(-len(keras.tree.flatten(self._data)[0]) // self._size)

    def __getitem__(self, at: int) -> Data:
        kept = slice(at * self._size, (at + 1) * self._size)
        batch: Data = keras.tree.map_structure(lambda one: one[kept], self._data)
        return batch


EXAMPLES: dict[str, tuple[Callable[[], Any], Callable[[int, np.random.Generator], Data], Any, list[str]]] = {
    "collaborative filtering": (RecommenderNet, pairs_of, "binary_crossentropy", ["movie", "movie_bias", "user", "user_bias"]),
    "basic ranking": (RankingModel, ranked, "mse", ["movie", "user"]),
    "basic retrieval": (RetrievalModel, retrieved, None, ["movie", "user"]),
    "cross network": (cross_network, records, "binary_crossentropy", ["month_rows", "movie_rows", "user_rows"]),
    "behavior sequence transformer": (behavior_sequence_transformer, sequences, "mse", ["movie", "user"]),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_public_recommender_learns_over_tables_as_before(cluster: kvemb.Cluster, name: str, example: str) -> None:
    make, data_of, loss, expected_tables = EXAMPLES[example]
    data = Batches(data_of(40, np.random.default_rng(1)), 16)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(SEED)
        model = make()
        model(data[0][0])  # built, with weights
        if example == "basic retrieval":
            model.candidate_tower(data[0][1]["movie_id"])
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss=loss)
        models.append(model)
    plain, ours = models
    done = distribute(ours, cluster, min_rows=1, names=names_of(name), quiet=True)
    assert sorted(table.name for table in done.tables) == [f"{name}.{table}" for table in expected_tables]
    losses = [model.fit(data, epochs=2, shuffle=False, verbose=0).history["loss"] for model in (plain, ours)]
    np.testing.assert_allclose(losses[1], losses[0], **CLOSE)
    assert losses[0][0] != losses[0][1], "it learns, so that equal losses mean something"
    evaluated = [model.evaluate(data, verbose=0) for model in (plain, ours)]
    np.testing.assert_allclose(evaluated[1], evaluated[0], **CLOSE)
    x = Batches((data[0][0],), 16)
    predicted = [keras.tree.flatten(model.predict(x, verbose=0)) for model in (plain, ours)]
    np.testing.assert_allclose(predicted[1][0], predicted[0][0], **CLOSE)


def test_regularized_embeddings_of_collaborative_filtering_are_refused_by_name(cluster: kvemb.Cluster, name: str) -> None:
    model = RecommenderNet(keras.regularizers.l2(1e-6))
    model.compile(optimizer="adam", loss="binary_crossentropy")
    with pytest.raises(InvalidInputError, match=r"'user': embeddings_regularizer: it needs all rows in every step.*leave="):
        distribute(model, cluster, min_rows=1, names=names_of(name), quiet=True)


def test_a_layer_that_takes_all_candidates_at_once_is_told_where_they_are(cluster: kvemb.Cluster, name: str) -> None:
    model = RankingModel()
    model.compile(optimizer="adagrad", loss="mse")
    distribute(model, cluster, min_rows=1, names=names_of(name), quiet=True)
    with pytest.raises(InvalidInputError, match=r"'movie' has no weight: its rows are in table .*materialize"):
        _ = model.candidate_embedding.embeddings
