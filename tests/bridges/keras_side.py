"""The contract's models in Keras, on the backend of this process: on tables, and on keras.layers.Embedding."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kvemb import optim
from kvemb.keras import Embedding, distribute, materialize, prepare

RULES = {
    "sgd": optim.sgd(0.5),
    "adagrad": optim.adagrad(0.1, eps=1e-30, initial_accumulator_value=0.1),
    "adam": optim.adam(0.01),
}
PLAIN = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-8),
}
REPEATS = keras.backend.backend() != "tensorflow"
"""Keras on TensorFlow squares the gradients of an id that comes twice one by one (docs/frameworks.md)."""


def model_of(layers: Mapping[str, Any], optimizer: Any) -> Any:
    """A user's row by an item's; layers of tables, or Keras's own."""
    user, item = (keras.Input((), dtype="int64", name=name) for name in ("user", "item"))
    model = keras.Model([user, item], keras.ops.sum(layers["user"](user) * layers["item"](item), axis=1))
    model.compile(optimizer, "mse")
    return model


def step_of(model: Any, x: list[Any], y: Any, call: str = "train_on_batch") -> float:
    model.reset_metrics()  # Keras would give the mean of all steps so far
    return float(getattr(model, call)(x, y))


class Trained:
    """Two tables, and a step over them."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        by_table = {table.name: Embedding(table) for table in tables.values()}
        self._model = model_of({name: by_table[table.name] for name, table in tables.items()}, keras.optimizers.SGD(0.5))
        distribute(self._model, tables["user"].cluster, quiet=True)

    def step(self, batch: Any) -> float:
        return step_of(self._model, [batch["user"], batch["item"]], batch["label"])

    def forget(self) -> None:
        """Nothing is kept."""

    def trained_ahead(self, data: list[Any], **options: Any) -> list[float]:
        """Here `fit` takes the steps, so it has the loop, too."""
        losses: list[float] = []
        noted = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
        ahead = prepare(self._model, threads_num=1, capacity=2, **options)
        self._model.fit((((batch["user"], batch["item"]), batch["label"]) for batch in data), verbose=0, callbacks=[noted])
        assert ahead.waited.n_batches == len(data) == len(losses)
        n = np.arange(1, len(losses) + 1)  # Keras gives the mean of all steps so far
        return list(np.diff(np.array(losses) * n, prepend=0.0))

    def evaluated(self, batch: Any) -> float:
        return step_of(self._model, [batch["user"], batch["item"]], batch["label"], "test_on_batch")

    def exported(self, tables: Mapping[str, Any], batch: Any) -> float:
        plain = materialize(self._model)
        plain.compile("sgd", "mse")
        return step_of(plain, [batch["user"], batch["item"]], batch["label"], "test_on_batch")


class TrainedBags:
    """A table of bags: ids [b, n] that 0 fills up, and a weight for each."""

    def __init__(self, table: Any) -> None:
        word, weight = keras.Input((None,), dtype="int64", name="word"), keras.Input((None,), name="weight")
        bags = Embedding(table, combiner="sum", mask_zero=True)(word, weight)
        self._model = keras.Model([word, weight], keras.ops.sum(bags, axis=1))
        self._model.compile(keras.optimizers.SGD(0.5), "mse")
        distribute(self._model, table.cluster, quiet=True)

    def step(self, batch: Any) -> float:
        return step_of(self._model, [batch["word"], batch["weight"]], batch["label"])


def on_its_own(rows: Mapping[str, Any], data: list[dict[str, Any]], kind: str) -> list[float]:
    made = {id(of): keras.layers.Embedding(*np.shape(of)) for of in rows.values()}
    model = model_of({name: made[id(of)] for name, of in rows.items()}, PLAIN[kind]())
    for of in rows.values():
        made[id(of)].set_weights([of])
    return [step_of(model, [batch["user"], batch["item"]], batch["label"]) for batch in data]


def turned(towers: Mapping[str, Any], optimizer: Any, data: list[Any], connect: Any = lambda model: None) -> None:
    inputs = [keras.Input((), dtype="int64", name=name) for name in towers]
    model = keras.Model(inputs, [keras.ops.sum(of(ids), axis=1) for of, ids in zip(towers.values(), inputs, strict=True)])
    model.compile(optimizer, ["mse", "mse"])
    connect(model)
    for tower, batch in data:
        weights = [np.full(len(batch["label"]), float(name == tower)) for name in towers]
        model.train_on_batch([batch[name] for name in towers], [batch["label"]] * 2, sample_weight=weights)


def turns(tables: Mapping[str, Any], data: list[Any]) -> None:
    layers = {name: Embedding(table) for name, table in tables.items()}
    turned(layers, PLAIN["adam"](), data, lambda model: distribute(model, tables["user"].cluster, quiet=True))


def turns_alone(rows: Mapping[str, Any], data: list[Any]) -> dict[str, Any]:
    layers = {name: keras.layers.Embedding(*np.shape(of), weights=[of]) for name, of in rows.items()}
    turned(layers, PLAIN["adam"](), data)
    return {name: layer.get_weights()[0] for name, layer in layers.items()}
