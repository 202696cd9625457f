"""Models of the tests: the same weights each time they are made, and batches that ask for rows twice."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

N_USERS, N_WORDS, DIM = 60, 40, 8
SEED = 7
BATCH = 20
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def functional() -> Any:
    keras.utils.set_random_seed(SEED)
    user, words = keras.Input((1,), dtype="int32", name="user"), keras.Input((3,), dtype="int32", name="words")
    a = keras.layers.Flatten()(keras.layers.Embedding(N_USERS, DIM, name="users")(user))
    b = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(N_WORDS, DIM, name="vocabulary")(words))
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()([a, b]))
    return keras.Model([user, words], keras.layers.Dense(1)(hidden))


def sequential() -> Any:
    keras.utils.set_random_seed(SEED)
    layers = [keras.layers.Embedding(N_WORDS, DIM, name="vocabulary"), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


class Towers(keras.Model):
    """Subclassed, with one layer that is called twice and ids that are sliced out of one input."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(SEED)
        super().__init__()
        self.users = keras.layers.Embedding(N_USERS, DIM, name="users")
        self.vocabulary = keras.layers.Embedding(N_WORDS, DIM, name="vocabulary")
        self.top = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        user, first, rest = x["ids"][:, 0], x["ids"][:, 1], x["ids"][:, 2:]
        words = self.vocabulary(first) + keras.ops.mean(self.vocabulary(rest), axis=1)
        return self.top(keras.ops.concatenate([self.users(user), words], axis=-1))


def pairs(n: int, seed: int = 0) -> tuple[list[Any], Any]:
    """x of `functional` and y."""
    rng = np.random.default_rng(seed)
    x = [rng.integers(0, N_USERS, (n, 1)).astype("int32"), rng.integers(0, N_WORDS, (n, 3)).astype("int32")]
    return x, rng.normal(size=(n, 1)).astype("float32")


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


def both(make: Callable[[], Any] = functional, rule: Callable[[], Any] = sgd, **options: Any) -> tuple[Any, Any]:
    """Two models that are alike, compiled."""
    plain, ours = make(), make()
    for model in (plain, ours):
        model.compile(rule(), "mse", **options)
    return plain, ours


def names_of(test: str) -> Callable[[str], str]:
    """`names=` of distribute: a test's own tables."""
    return lambda layer: f"{test}.{layer}"


def two_words() -> Any:
    keras.utils.set_random_seed(SEED)
    layers = [keras.layers.Embedding(N_WORDS, DIM, name="vocabulary"), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((2,), dtype="int32"), *layers])


def all_words(n_steps: int) -> tuple[Any, Any]:
    """Batches of `two_words` that have every id, once.

    Keras also moves rows that are in no batch, where a rule has a memory; and on TensorFlow it clips and squares the gradients of an id
    that comes twice before it adds them up.
    """
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.permutation(N_WORDS).reshape(BATCH, 2) for _ in range(n_steps)]).astype("int32")
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype("float32")
