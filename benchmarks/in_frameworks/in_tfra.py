"""DeepFM in TFRA: its dynamic embeddings on Redis, used as its documentation does (see benchmarks/tfra/worker.py). Nothing of ours."""

from typing import Any

import tensorflow as tf
import tensorflow_recommenders_addons as tfra

from benchmarks.in_frameworks.problem import EPSILON, Contender, Loop, Problem
from benchmarks.in_frameworks.tensorflow_model import batches, dense_weights, loss_of

VERSIONS = {"tensorflow of TFRA": tf.__version__, "tfra": tfra.__version__}

de = tfra.dynamic_embedding


def contenders(problem: Problem, where: str) -> dict[str, Contender]:
    """TFRA on Redis; `where` is its redis_config.json."""
    creator = de.RedisTableCreator(de.RedisTableConfig(redis_config_abs_dir=where))
    tables = {}
    for name, rows in problem.rows.items():
        first = tf.keras.initializers.Zeros()
        options = {"key_dtype": tf.int64, "value_dtype": tf.float32, "initializer": first, "kv_creator": creator}
        tables[name] = de.get_variable(name, dim=rows.shape[1], **options)
        tables[name].upsert(tf.constant(problem.known_ids), tf.constant(rows))
    shadows = [de.shadow_ops.ShadowVariable(table, name=f"{name}_shadow") for name, table in tables.items()]
    dense = dense_weights(problem)
    variables = [*dense, *shadows]
    adam = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.legacy.Adam(float(problem.lr), epsilon=EPSILON))

    @tf.function
    def step(batch: Any) -> Any:
        distinct, at = tf.unique(tf.reshape(batch["ids"], [-1]))
        shape = tf.shape(batch["ids"])
        with tf.GradientTape() as tape:
            rows = []
            for shadow, table in zip(shadows, tables.values()):  # noqa: B905 (TensorFlow 2.15 runs on Python 3.9, too)
                found = tf.gather(de.shadow_ops.embedding_lookup(shadow, distinct), at)
                rows.append(tf.reshape(found, tf.concat([shape, [table.dim]], 0)))
            loss = loss_of(dense, *rows, batch["values"], batch["labels"])
        adam.apply_gradients(zip(tape.gradient(loss, variables), variables))  # noqa: B905
        return loss

    given = batches(problem, problem.ids)
    return {"lookup + Adam": Loop(lambda indices: [given[i] for i in indices], step, lambda: None)}
