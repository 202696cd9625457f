"""DeepFM in TensorFlow without a Keras model: with variables for rows, and with kvemb tables. A GradientTape loop, with Keras's Adam."""

from typing import Any

import keras
import tensorflow as tf

import kvemb
from benchmarks.in_frameworks.problem import EPSILON, Contender, Loop, Problem
from benchmarks.in_frameworks.stored_tables import AHEAD, MAX_UNAPPLIED, stored_tables
from benchmarks.in_frameworks.tensorflow_model import batches, dense_weights, loss_of
from kvemb.tensorflow import RowsOptimizer, embedding_lookup, function, prepare

VERSIONS = {"tensorflow": tf.__version__, "keras": keras.__version__}


def contenders(problem: Problem, where: str) -> dict[str, Contender]:
    """TensorFlow's own, ours, and ours with rows pulled ahead; `where` is the cluster's URL."""
    cluster = kvemb.connect(where)
    return {"own": _own(problem), "ours": _ours(problem, cluster, ""), "ours, ahead": _ours(problem, cluster, ".ahead")}


def _own(problem: Problem) -> Loop:
    dense = dense_weights(problem)
    tables = {name: tf.Variable(rows) for name, rows in problem.rows.items()}
    variables = [*dense, *tables.values()]
    adam = keras.optimizers.Adam(float(problem.lr), epsilon=EPSILON)
    adam.build(variables)

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = [tf.nn.embedding_lookup(table, batch["ids"]) for table in tables.values()]
            loss = loss_of(dense, *rows, batch["values"], batch["labels"])
        # Dense gradients are faster at this size, and Adam sees one for each row: of tf.IndexedSlices it would square each for itself.
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
        adam.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    given = batches(problem, problem.positions)
    return Loop(lambda indices: [given[i] for i in indices], step, lambda: None)


def _ours(problem: Problem, cluster: Any, suffix: str) -> Loop:
    tables = stored_tables(cluster, problem, f"tensorflow{suffix}", kvemb.optim.adam(float(problem.lr), eps=EPSILON))
    dense = dense_weights(problem)
    adam = keras.optimizers.Adam(float(problem.lr), epsilon=EPSILON)
    adam.build(dense)
    rows = RowsOptimizer(list(tables.values()), max_unapplied=MAX_UNAPPLIED)

    @function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            found = [embedding_lookup(table, batch["ids"]) for table in tables.values()]
            loss = loss_of(dense, *found, batch["values"], batch["labels"])
        adam.apply_gradients(zip(tape.gradient(loss, dense), dense, strict=True))
        rows.step()
        return loss

    given = batches(problem, problem.ids)
    turn: list[Any] = given[:1]
    loader = prepare(step, turn, **AHEAD) if suffix else turn

    def load(indices: Any) -> Any:
        turn[:] = [given[i] for i in indices]
        return loader

    return Loop(load, step, cluster.flush)
