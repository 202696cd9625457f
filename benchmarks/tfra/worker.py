"""TFRA at work, in its own process and virtual environment: JSON lines in, JSON lines out, arrays in .npy files.

Every request names what to do ("do") and its arguments; every reply is one object, {"error": ...} after a failure. This file imports
nothing of ours: it must run where only TensorFlow, TFRA and NumPy are installed. It uses TFRA as its documentation does: a Variable
with the Redis backend, shadow_ops inside a tf.function, DynamicEmbeddingOptimizer around Keras' Adam (of the two ways to look up for
training and the two Adams of Keras 2.15 the fastest pair). Only the call into TensorFlow is timed.
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
_REPLIES = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # TensorFlow and TFRA print; only replies may go where replies are read

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_recommenders_addons as tfra  # noqa: E402

de = tfra.dynamic_embedding
GRADIENT = 0.5
_FILL_ROWS = 100_000


class Worker:
    """One TFRA table on one Redis server, and batches of ids."""

    def open(self, config, dim, lr, std):
        """Connect; `config` is the path of TFRA's redis_config.json. Rows begin as zeros, as missing rows read, or as normal draws."""
        creator = de.RedisTableCreator(de.RedisTableConfig(redis_config_abs_dir=config))
        first = tf.keras.initializers.RandomNormal(0.0, std) if std else tf.keras.initializers.Zeros()
        self.table = de.get_variable("bench", key_dtype=tf.int64, value_dtype=tf.float32, dim=dim, initializer=first, kv_creator=creator)
        adam = tf.keras.optimizers.legacy.Adam(lr, epsilon=1e-8)
        self.optimizer = de.DynamicEmbeddingOptimizer(adam)
        self.shadow = de.shadow_ops.ShadowVariable(self.table, name="bench_shadow")
        self.calls = {
            "lookup": tf.function(self._lookup),
            "lookup_unique": tf.function(self._lookup_unique),
            "train": tf.function(self._train),
        }
        self.at = 0
        return {"tensorflow": tf.__version__, "tfra": tfra.__version__}

    def fill(self, ids, rows):
        """Write rows."""
        ids, rows = np.load(ids), np.load(rows)
        for start in range(0, len(ids), _FILL_ROWS):
            piece = slice(start, start + _FILL_ROWS)
            self.table.upsert(tf.constant(ids[piece]), tf.constant(rows[piece]))
        return {}

    def batches(self, ids, first):
        """Take the batches, int64 [n, m]; `first`: which `run` begins with."""
        self.at = first
        self.ids = [tf.constant(batch) for batch in np.load(ids)]
        return {}

    def look(self, ids, rows, call):
        """Write the rows of these ids, for another process to compare."""
        np.save(rows, self.calls[call](tf.constant(np.load(ids))).numpy())
        return {}

    def step(self, index):
        """Train on one batch, untimed."""
        self.calls["train"](self.ids[index])
        return {}

    def run(self, call, seconds, steps):
        """Call with batch after batch, going on where the last run stopped, until the calls took so long and are so many."""
        wall_s = cpu_s = 0.0
        n_rows = n_steps = 0
        while wall_s < seconds or n_steps < steps:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            result = self.calls[call](self.ids[self.at])
            n = int(result.numpy()) if call == "train" else len(result.numpy())
            wall_s += time.perf_counter() - start_s
            cpu_s += time.process_time() - start_cpu_s
            n_rows, n_steps, self.at = n_rows + n, n_steps + 1, (self.at + 1) % len(self.ids)
        return {"n_rows": n_rows, "n_steps": n_steps, "wall_s": wall_s, "cpu_s": cpu_s}

    def _lookup(self, ids):
        return self.table.lookup(ids)

    def _lookup_unique(self, ids):
        distinct, at = tf.unique(ids)
        return tf.gather(self.table.lookup(distinct), at)

    def _train(self, ids):
        """Look distinct rows up, take the gradient of their sum times a constant, apply Adam; return how many they were."""
        distinct, _ = tf.unique(ids)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.shadow_ops.embedding_lookup(self.shadow, distinct)) * GRADIENT
        gradients = tape.gradient(loss, [self.shadow])
        self.optimizer.apply_gradients(zip(gradients, [self.shadow]))  # noqa: B905 (TensorFlow runs on Python 3.9, too)
        return tf.size(distinct)


def main():
    """Answer requests until standard input ends."""
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # reported to the parent, which decides
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=_REPLIES, flush=True)


if __name__ == "__main__":
    main()
