"""The contract's models in TensorFlow without Keras: on tables, and on variables."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import kvemb.tensorflow as kt
from kvemb import optim

RULES = {
    "sgd": optim.sgd(0.5),
    "adagrad": optim.adagrad(0.1, eps=1e-30, initial_accumulator_value=0.1),
    "adam": optim.adam(0.01),
}
PLAIN = {
    "sgd": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.5),
    "adagrad": lambda: tf.compat.v1.train.AdagradOptimizer(0.1),
    "adam": lambda: tf.compat.v1.train.AdamOptimizer(0.01),
}
REPEATS = True


def loss_of(lookup: Any, rows: Mapping[str, Any], batch: Any) -> Any:
    logits = tf.reduce_sum(lookup(rows["user"], batch["user"]) * lookup(rows["item"], batch["item"]), 1)
    return tf.reduce_mean((logits - batch["label"]) ** 2)


def stepped(loss_of: Any, optimizer: Any) -> Any:
    @kt.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(batch)
        tape.gradient(loss, [])
        optimizer.step()
        return loss

    return step


class Trained:
    """Two tables, and a step over them."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self._tables = tables
        self._optimizer = kt.RowsOptimizer(list({table.name: table for table in tables.values()}.values()))
        self._step = stepped(lambda batch: loss_of(kt.embedding_lookup, tables, batch), self._optimizer)

    def step(self, batch: Any) -> float:
        return float(self._step(batch))

    def forget(self) -> None:
        self._optimizer.drop()

    def evaluated(self, batch: Any) -> float:
        return float(loss_of(kt.embedding_lookup, self._tables, batch))

    def ahead(self, data: Iterable[Any], **options: Any) -> Iterable[Any]:
        return kt.prepare(self._step, data, threads_num=1, capacity=2, **options)

    def exported(self, tables: Mapping[str, Any], batch: Any) -> float:
        rows = {name: tf.Variable(table.pull(np.arange(table.definition.num_ids))) for name, table in tables.items()}
        return float(loss_of(tf.nn.embedding_lookup, rows, batch))


class TrainedBags:
    """A table of bags: ids [b, n] that 0 fills up, and a weight for each."""

    def __init__(self, table: Any) -> None:
        def loss_of(batch: Any) -> Any:
            there = tf.where(batch["word"] > 0)
            shape = tf.shape(batch["word"], out_type=tf.int64)
            ids, weights = (tf.SparseTensor(there, tf.gather_nd(batch[name], there), shape) for name in ("word", "weight"))
            bags = kt.safe_embedding_lookup_sparse(table, ids, weights, combiner="sum")
            return tf.reduce_mean((tf.reduce_sum(bags, 1) - batch["label"]) ** 2)

        self._step = stepped(loss_of, kt.RowsOptimizer([table]))

    def step(self, batch: Any) -> float:
        return float(self._step(batch))


def on_its_own(rows: Mapping[str, Any], data: list[dict[str, Any]], kind: str) -> list[float]:
    made = {id(of): tf.Variable(of) for of in rows.values()}
    variables = {name: made[id(of)] for name, of in rows.items()}
    optimizer, losses = PLAIN[kind](), []
    for batch in data:
        with tf.GradientTape() as tape:
            loss = loss_of(tf.nn.embedding_lookup, variables, batch)
        every = list(made.values())
        optimizer.apply_gradients(zip(tape.gradient(loss, every), every, strict=True))
        losses.append(float(loss))
    return losses


def turn_loss(lookup: Any, of: Any, ids: Any, batch: Any) -> Any:
    return tf.reduce_mean((tf.reduce_sum(lookup(of, ids), 1) - batch["label"]) ** 2)


def turns(tables: Mapping[str, Any], data: list[Any]) -> None:
    optimizer = kt.RowsOptimizer(list(tables.values()))
    steps = {
        name: stepped(lambda batch, name=name, of=of: turn_loss(kt.embedding_lookup, of, batch[name], batch), optimizer)
        for name, of in tables.items()
    }
    for tower, batch in data:
        steps[tower](batch)


def turns_alone(rows: Mapping[str, Any], data: list[Any]) -> dict[str, Any]:
    variables, optimizer = {name: tf.Variable(of) for name, of in rows.items()}, PLAIN["adam"]()
    for tower, batch in data:
        with tf.GradientTape() as tape:
            loss = turn_loss(tf.nn.embedding_lookup, variables[tower], batch[tower], batch)
        every = list(variables.values())
        optimizer.apply_gradients(zip(tape.gradient(loss, every), every, strict=True))
    return {name: of.numpy() for name, of in variables.items()}
