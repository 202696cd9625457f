"""The contract's model in TensorFlow without Keras: on tables, and on variables."""

from typing import Any

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


def loss_of(lookup: Any, rows: dict[str, Any], batch: Any) -> Any:
    logits = tf.reduce_sum(lookup(rows["user"], batch["user"]) * lookup(rows["item"], batch["item"]), 1)
    return tf.reduce_mean((logits - batch["label"]) ** 2)


def on_tables(tables: dict[str, Any], data: list[dict[str, Any]], ahead: str | None = None) -> list[float]:
    optimizer = kt.RowsOptimizer(list({table.name: table for table in tables.values()}.values()))

    @kt.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(kt.embedding_lookup, tables, batch)
        tape.gradient(loss, [])
        optimizer.step()
        return loss

    batches: Any = data if ahead is None else kt.prepare(step, data, consistency=ahead, threads_num=1, capacity=2)
    return [float(step(batch)) for batch in batches]


def on_its_own(rows: dict[str, Any], data: list[dict[str, Any]], kind: str) -> list[float]:
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


def evaluated(tables: dict[str, Any], batch: dict[str, Any]) -> float:
    return float(loss_of(kt.embedding_lookup, tables, batch))
