"""Rows under a tf.distribute strategy, in a process of its own: the number of devices is settled when TensorFlow begins.

Prints what comes of each way of making a step under each strategy.
"""

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from memory_cluster import MemoryCluster

import kvemb.tensorflow as kt

STRATEGIES: dict[str, Callable[[], Any]] = {
    "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
}
WAYS: dict[str, Callable[[Any], Any]] = {"eager": lambda step: step, "graph": tf.function, "rows as arguments": kt.function}


def outcome(strategy: str, way: str) -> str:
    cluster = MemoryCluster("sync")
    word = cluster.table("word", 2)
    optimizer = kt.RowsOptimizer([word])
    with (used := STRATEGIES[strategy]()).scope():
        weight = tf.Variable(2.0)

    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kt.embedding_lookup(word, ids)) * weight
        tape.gradient(loss, [weight])
        optimizer.step()
        return loss

    try:
        used.run(WAYS[way](step), args=(tf.constant([3, 4]),))
    except Exception as error:  # a tf.function makes another one of ours
        known = "Train one process for each device" in str(error)
        return "refused" if known and not cluster.pushes else f"{type(error)}: {error}"
    ids, grads = cluster.pushes[-1]["word"]
    return "trained" if (ids.tolist(), grads.tolist()) == ([3, 4], [[2.0, 2.0]] * 2) else f"{cluster.pushes}"


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    print(json.dumps({strategy: {way: outcome(strategy, way) for way in WAYS} for strategy in STRATEGIES}))


if __name__ == "__main__":
    main()
