"""One of two workers of tf.distribute.MultiWorkerMirroredStrategy, each a trainer: its half of each batch, rows in a cluster.

Prints its losses, its dense weights and the rows. Arguments: the cluster's URL, the rank, both workers' ports; a step before which it ends.
"""

import json
import os
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import kvemb
import kvemb.tensorflow as kt

N_WORDS, DIM, BATCH, N_STEPS = 30, 4, 12, 6


class Model(tf.Module):
    """Logistic regression over rows; the large variable is given."""

    def __init__(self, word: Any) -> None:
        super().__init__()
        self.word = word
        self.kernel = tf.Variable(tf.linspace(-1.0, 1.0, DIM)[:, tf.newaxis])
        self.bias = tf.Variable([0.0])

    def loss(self, ids: Any, label: Any) -> Any:
        """The loss of a part of a batch, as a part of the whole batch's mean."""
        logits = tf.matmul(tf.nn.embedding_lookup(self.word, ids), self.kernel)[:, 0] + self.bias
        return tf.nn.compute_average_loss(tf.nn.sigmoid_cross_entropy_with_logits(label, logits), global_batch_size=BATCH)


def first_rows() -> Any:
    return np.random.default_rng(1).normal(size=(N_WORDS, DIM)).astype("f")


def optimizer() -> Any:
    return tf.keras.optimizers.Adagrad(0.1)


def batches() -> list[tuple[Any, Any]]:
    """No id twice in a batch: Keras squares those one by one."""
    rng = np.random.default_rng(2)
    return [(rng.permutation(N_WORDS)[:BATCH], rng.integers(0, 2, BATCH).astype("f")) for _ in range(N_STEPS)]


def step_of(model: Any, trained_by: Any) -> Any:
    def step(ids: Any, label: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(ids, label)
        trained_by.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        return loss

    return step


def main(url: str, rank: str, ports: str, ends_at: str = "-1") -> None:
    workers = [f"127.0.0.1:{port}" for port in ports.split(",")]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": int(rank)}})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    word = tf.Variable(first_rows())
    with strategy.scope():
        model, trained_by = Model(word), optimizer()
    with kvemb.connect(url, trainer=f"worker-{rank}", timeout_s=120) as cluster:
        kt.distribute(model, cluster, optimizer=trained_by, min_rows=10, quiet=True)
        step, losses = step_of(model, trained_by), []
        run = tf.function(lambda ids, label: strategy.run(step, args=(ids, label)))
        for at, (ids, label) in enumerate(batches()):
            if at == int(ends_at):
                os._exit(9)
            half = slice(int(rank), None, 2)
            loss = run(tf.constant(ids[half]), tf.constant(label[half]))
            losses.append(float(strategy.experimental_local_results(loss)[0]))
        rows = cluster.table("word").pull(range(N_WORDS))
    print(json.dumps({"losses": losses, "kernel": model.kernel.numpy().tolist(), "rows": rows.tolist()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
