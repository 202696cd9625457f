"""DeepFM in TensorFlow operations, with rows from any source. Python 3.9 and TensorFlow 2.15 must take it: TFRA's run there."""

from typing import Any

import tensorflow as tf

from benchmarks.in_frameworks.problem import Problem


def dense_weights(problem: Problem) -> list[Any]:
    """Return the perceptron's variables: kernel, bias, kernel, …"""
    return [tf.Variable(array) for kernel in problem.kernels for array in (kernel, tf.zeros(kernel.shape[1]))]


def loss_of(dense: list[Any], weights: Any, vectors: Any, values: Any, labels: Any) -> Any:
    """Return the mean log loss.

    Args:
        dense: of `dense_weights`.
        weights, vectors: rows [b, f, 1] and [b, f, dim].
        values, labels: [b, f] and [b].
    """
    first_order = tf.reduce_sum(weights[..., 0] * values, axis=1)
    vectors = vectors * values[..., None]
    squares = tf.reduce_sum(tf.square(vectors), axis=1)
    second_order = 0.5 * tf.reduce_sum(tf.square(tf.reduce_sum(vectors, axis=1)) - squares, axis=1)
    hidden = tf.reshape(vectors, [-1, dense[0].shape[0]])
    for at in (0, 2):
        hidden = tf.nn.relu(hidden @ dense[at] + dense[at + 1])
    logits = first_order + second_order + (hidden @ dense[4] + dense[5])[:, 0]
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def batches(problem: Problem, ids: Any) -> list[dict[str, Any]]:
    """Return the batches as tensors, as a tf.data.Dataset would hand them out."""
    arrays = {"ids": ids, "values": problem.values, "labels": problem.labels}
    return [{name: tf.constant(array[i]) for name, array in arrays.items()} for i in range(len(problem.labels))]
