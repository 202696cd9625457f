"""Train DLRM in TensorFlow without Keras, on rows that live in Redis, Valkey or memcached.

    python examples/dlrm_tensorflow.py
    python examples/dlrm_tensorflow.py --config kvemb.yaml --lines 1000000

The same model, data and figures as examples/dlrm_torch.py: 13 numbers, 26 categories of a log that is drawn from a planted model. Rows are
pulled ahead of the step that uses them; what the steps waited for is told at the end.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow greets with pages otherwise

import numpy as np
import tensorflow as tf
from deepfm.metrics import auc, log_loss
from dlrm.place import add_arguments, opened
from dlrm.planted_clicks import KEYS, N_NUMBERS, Clicks, planted_clicks

import kvemb
from kvemb.cli import exit_in_order
from kvemb.errors import KvembError
from kvemb.tensorflow import RowsOptimizer, embedding_lookup, function, prepare

VALID_FRACTION = 0.1
BOTTOM, TOP = (512, 256), (512, 256)


class DLRM(tf.Module):
    """Predict the logit of a click: numbers through a perceptron, products of all pairs of vectors through another.

    Args:
        tables: by key.
        dim: of their rows.

    Source: Naumov et al., "Deep learning recommendation model for personalization and recommendation systems", 2019.
    """

    def __init__(self, tables: Mapping[str, Any], dim: int) -> None:
        super().__init__()
        self.tables, n_vectors = dict(tables), len(tables) + 1
        self.bottom = _perceptron([N_NUMBERS, *BOTTOM, dim])
        self.top = _perceptron([dim + n_vectors * (n_vectors - 1) // 2, *TOP, 1])
        row, column = np.tril_indices(n_vectors, -1)
        self._pairs = row * n_vectors + column

    def __call__(self, numbers: Any, ids: Any) -> Any:
        """Return logits float32 [b] for numbers float32 [b, 13] and ids int64 [b, 26]."""
        dense = tf.nn.relu(_through(self.bottom, numbers))
        rows = [embedding_lookup(table, ids[:, column]) for column, table in enumerate(self.tables.values())]
        vectors = tf.stack([dense, *rows], axis=1)
        products = tf.matmul(vectors, vectors, transpose_b=True)
        pairs = tf.gather(tf.reshape(products, [tf.shape(products)[0], -1]), self._pairs, axis=1)
        return _through(self.top, tf.concat([dense, pairs], axis=1))[:, 0]


def _perceptron(widths: Sequence[int]) -> list[Any]:
    """Weights and biases, uniform in ± 1/sqrt(inputs) as torch's."""
    made = []
    for n_in, n_out in pairwise(widths):
        bound = n_in**-0.5
        made.append(tf.Variable(tf.random.uniform([n_in, n_out], -bound, bound)))
        made.append(tf.Variable(tf.random.uniform([n_out], -bound, bound)))
    return made


def _through(layers: Sequence[Any], x: Any) -> Any:
    last = len(layers) - 2
    for at in range(0, len(layers), 2):
        x = tf.matmul(x, layers[at]) + layers[at + 1]
        x = x if at == last else tf.nn.relu(x)
    return x


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; 0, or 1 after an error that was told in one line on standard error."""
    args = _arguments(argv)
    tf.random.set_seed(args.seed)
    try:
        with opened(args) as cluster:
            _run(args, planted_clicks(args.lines, args.ids, args.seed), cluster)
    except KvembError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace, clicks: Clicks, cluster: Any) -> None:
    cut = args.lines - int(args.lines * VALID_FRACTION)
    first, rule = kvemb.init.uniform(-(args.ids**-0.5), args.ids**-0.5), kvemb.optim.adagrad(lr=args.lr)
    tables = {
        key: cluster.create_table(key, dim=args.dim, optimizer=rule, initializer=first, num_ids=args.ids, exist_ok=True) for key in KEYS
    }
    model = DLRM(tables, args.dim)
    step = stepped(model, RowsOptimizer(list(tables.values())), args.lr)
    predict = function(lambda numbers, ids: tf.sigmoid(model(numbers, ids)))
    log = tf.data.Dataset.from_tensor_slices(tuple(of[:cut] for of in clicks))
    log = log.shuffle(cut, seed=args.seed).batch(args.batch_size, drop_remainder=True)
    batches = prepare(step, log, consistency=args.consistency)
    for epoch in range(1, args.epochs + 1):
        losses = [float(step(*batch)) for batch in batches]
        cluster.flush()
        print(f"epoch {epoch}: train logloss {np.mean(losses):.4f}, valid {evaluated(predict, clicks, cut, args.batch_size)}", flush=True)
    print(batches.report)


def stepped(model: DLRM, rows: RowsOptimizer, lr: float) -> Callable[..., Any]:
    """Make the training step: Adagrad as torch's for the dense weights, the tables' own rule for rows."""
    weights = model.trainable_variables
    squares = [tf.Variable(tf.zeros_like(weight)) for weight in weights]

    @function
    def step(numbers: Any, ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, model(numbers, ids)))
        for weight, square, gradient in zip(weights, squares, tape.gradient(loss, weights), strict=True):
            square.assign_add(gradient * gradient)
            weight.assign_sub(lr * gradient / (tf.sqrt(square) + 1e-10))
        rows.step()
        return loss

    return step


def evaluated(predict: Callable[..., Any], clicks: Clicks, cut: int, batch_size: int) -> str:
    """Measure log loss and AUC on lines that were not trained on."""
    numbers, ids, labels = (of[cut:] for of in clicks)
    parts = [slice(at, at + batch_size) for at in range(0, len(labels), batch_size)]
    p = np.concatenate([predict(numbers[part], ids[part]).numpy() for part in parts])
    return f"logloss {log_loss(labels, p):.4f}, AUC {auc(labels, p):.4f}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train DLRM in TensorFlow on rows that live in key-value storage.")
    add_arguments(parser, local=False)
    add: Callable[..., Any] = parser.add_argument
    add("--lines", type=int, default=100_000, help="of data (default 100000)")
    add("--ids", type=int, default=100_000, help="ids per table that categories are hashed to (default 100000)")
    add("--dim", type=int, default=16, help="weights per row (default 16)")
    add("--lr", type=float, default=0.01, help="of Adagrad, for rows and dense weights (default 0.01)")
    add("--epochs", type=int, default=1, help="default 1")
    add("--batch-size", type=int, default=2048, help="default 2048")
    add("--consistency", choices=("stale", "exact"), default="stale", help="of rows pulled ahead; exact needs a sync cluster")
    add("--seed", type=int, default=0, help="of data, initial weights and order of lines (default 0)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_in_order()
    sys.exit(main())
