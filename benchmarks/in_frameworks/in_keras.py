"""DeepFM as a functional Keras model, trained by `fit`: as it is, and after `distribute`. On the backend that KERAS_BACKEND names."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import kvemb
from benchmarks.in_frameworks.problem import EPSILON, Contender, Problem
from benchmarks.in_frameworks.stored_tables import AHEAD, MAX_UNAPPLIED
from kvemb.keras import distribute, prepare

BACKEND = keras.backend.backend()
VERSIONS = {"keras": keras.__version__}
if BACKEND == "torch":
    import torch

    torch.set_num_threads(1)


def contenders(problem: Problem, where: str) -> dict[str, Contender]:
    """Keras's own, ours, and ours with rows pulled ahead; `where` is the cluster's URL."""
    cluster = kvemb.connect(where)
    ours, ahead = (_stored(problem, cluster, suffix) for suffix in ("", ".ahead"))
    prepare(ahead, **AHEAD)
    made = {"ours": Fitted(ours, problem, cluster.flush), "ours, ahead": Fitted(ahead, problem, cluster.flush)}
    return {"own": Fitted(_model(problem), problem, lambda: None), **made}


def _stored(problem: Problem, cluster: Any, suffix: str) -> Any:
    model = _model(problem)
    distribute(model, cluster, min_rows=1, names=lambda of: f"keras.{BACKEND}{suffix}.{of}", max_unapplied=MAX_UNAPPLIED, quiet=True)
    return model


class Fitted:
    """A model that `fit` trains.

    Args:
        model: compiled.
        problem: batches.
        settle: wait until everything is applied.
    """

    def __init__(self, model: Any, problem: Problem, settle: Callable[[], None]) -> None:
        self._model, self._problem, self.settle = model, problem, settle

    def train(self, indices: Sequence[int], after_step: Callable[[], None]) -> Any:
        """Train; the loss is the mean that `fit` says."""
        of, n_lines = self._problem, self._problem.labels.shape[1]
        ids, values, labels = (np.concatenate([array[i] for i in indices]) for array in (of.positions, of.values, of.labels))
        after_each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: after_step())
        done = self._model.fit([ids, values], labels, batch_size=n_lines, shuffle=False, verbose=0, callbacks=[after_each])
        return done.history["loss"]


def _model(problem: Problem) -> Any:
    layers, ops = keras.layers, keras.ops
    n_fields = problem.ids.shape[2]
    ids, values = keras.Input((n_fields,), dtype="int32"), keras.Input((n_fields,))
    tables = {name: layers.Embedding(*rows.shape, name=name) for name, rows in problem.rows.items()}
    first_order = ops.sum(tables["linear"](ids)[..., 0] * values, axis=1)
    vectors = tables["factors"](ids) * ops.expand_dims(values, -1)
    second_order = 0.5 * ops.sum(ops.square(ops.sum(vectors, axis=1)) - ops.sum(ops.square(vectors), axis=1), axis=1)
    hidden = ops.reshape(vectors, (-1, n_fields * problem.dim))
    perceptron = [layers.Dense(kernel.shape[1], activation="relu") for kernel in problem.kernels[:2]]
    for dense in [*perceptron, last := layers.Dense(1)]:
        hidden = dense(hidden)
    model = keras.Model([ids, values], first_order + second_order + hidden[:, 0])
    for name, layer in tables.items():
        layer.set_weights([problem.rows[name]])
    for dense, kernel in zip([*perceptron, last], problem.kernels, strict=True):
        dense.set_weights([kernel, np.zeros(kernel.shape[1], np.float32)])
    adam = keras.optimizers.Adam(float(problem.lr), epsilon=EPSILON)
    model.compile(adam, keras.losses.BinaryCrossentropy(from_logits=True))
    return model
