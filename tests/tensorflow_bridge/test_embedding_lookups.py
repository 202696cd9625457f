"""Each lookup is TensorFlow's own on a plain variable: value and gradient, eagerly, in a tf.function, and with rows as its arguments."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from memory_cluster import MemoryCluster

tf = pytest.importorskip("tensorflow")

import kvemb.tensorflow as kt  # noqa: E402
from kvemb.errors import InvalidInputError  # noqa: E402

N, DIM = 9, 3
WAYS = {
    "eager": lambda step: step,
    "graph": lambda step: tf.function(step),
    "rows as arguments": lambda step: kt.function(step),
}


def check(ours: Callable[[Any], Any], theirs: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> None:
    """Compare values, and gradients by the rows, of a loss over the result of `ours` (of a table) and `theirs` (of a variable)."""
    table = MemoryCluster("sync").table("word", DIM)
    variable = tf.Variable(table.pull(range(N)))
    optimizer = kt.RowsOptimizer([table])

    def step(scale: Any) -> Any:
        with tf.GradientTape() as tape:
            result = ours(table)
            loss = loss_of(result) * scale
        tape.gradient(loss, [])
        optimizer.step()
        return result

    result = wrap(step)(tf.constant(1.0))
    with tf.GradientTape() as tape:
        expected = theirs(variable)
        loss = loss_of(expected)
    np.testing.assert_allclose(flat(result), flat(expected), rtol=1e-6, atol=1e-7)
    assert result.shape.as_list() == expected.shape.as_list()
    gradient = np.zeros((N, DIM), np.float32)
    ids, grads = table.cluster.pushes[-1]["word"]
    gradient[ids] = grads
    np.testing.assert_allclose(gradient, tf.convert_to_tensor(tape.gradient(loss, variable)), rtol=1e-5, atol=1e-6)
    assert np.abs(gradient).sum() > 0


def loss_of(result: Any) -> Any:
    """A loss whose gradient differs from value to value."""
    values = tf.reshape(result.flat_values if isinstance(result, tf.RaggedTensor) else result, [-1])
    return tf.reduce_sum(tf.square(values) * tf.cast(tf.range(1, tf.size(values) + 1), tf.float32))


def flat(result: Any) -> Any:
    return (result.flat_values if isinstance(result, tf.RaggedTensor) else result).numpy()


def sparse(rows: list[list[Any]], dtype: Any = tf.int64) -> Any:
    return tf.ragged.constant(rows, dtype, row_splits_dtype=tf.int64).to_sparse()


def ragged(rows: list[list[Any]], dtype: Any = tf.int64) -> Any:
    return tf.ragged.constant(rows, dtype, row_splits_dtype=tf.int64)


IDS = [[1, 5, 1], [2], [8, 8]]
WEIGHTS = [[0.5, 2.0, 1.0], [3.0], [1.0, 0.25]]
HOLES = [[1, -1, 5], [], [2, 2], [-1], [8]]
SOME_WEIGHTS = [[0.5, 1.0, -2.0], [], [0.0, 2.0], [1.0], [3.0]]


KINDS = [
    *(("eager", kind, combiner) for kind in (sparse, ragged) for combiner in ("sum", "mean", "sqrtn")),
    ("graph", sparse, "mean"),
    ("rows as arguments", ragged, "sqrtn"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("ids", "max_norm"),
    [([3, 1, 3], 0.5), ([[1, 2], [2, 7]], None), (4, None), (ragged([[1, 2, 2], [], [7]]), None)],
    ids=["[b], max_norm", "[b, l]", "[]", "ragged"],
)
def test_embedding_lookup(way: str, ids: Any, max_norm: float | None) -> None:
    check(
        lambda table: kt.embedding_lookup(table, ids, max_norm),
        lambda variable: tf.nn.embedding_lookup(variable, ids, max_norm),
        WAYS[way],
    )


@pytest.mark.parametrize(("way", "kind", "combiner"), [*KINDS, ("eager", sparse, None)])
def test_embedding_lookup_sparse(way: str, kind: Any, combiner: str | None) -> None:
    for weights in (None, kind(WEIGHTS, tf.float32)):
        check(
            lambda table, weights=weights: kt.embedding_lookup_sparse(table, kind(IDS), weights, combiner=combiner),
            lambda variable, weights=weights: tf.nn.embedding_lookup_sparse(variable, kind(IDS), weights, combiner=combiner),
            WAYS[way],
        )


@pytest.mark.parametrize(("way", "kind", "combiner"), KINDS)
@pytest.mark.parametrize("default_id", [None, 7])
def test_safe_embedding_lookup_sparse(way: str, kind: Any, combiner: str, default_id: int | None) -> None:
    for weights in (None, kind(SOME_WEIGHTS, tf.float32)):
        given = {"combiner": combiner, "default_id": default_id, "max_norm": 1.5}
        check(
            lambda table, weights=weights, given=given: kt.safe_embedding_lookup_sparse(table, kind(HOLES), weights, **given),
            lambda variable, weights=weights, given=given: tf.nn.safe_embedding_lookup_sparse(variable, kind(HOLES), weights, **given),
            WAYS[way],
        )


@pytest.mark.parametrize("way", WAYS)
def test_safe_embedding_lookup_sparse_of_higher_rank(way: str) -> None:
    ids = tf.sparse.from_dense(tf.constant([[[1, 2], [0, 0]], [[3, 0], [5, 5]]], tf.int64))
    check(
        lambda table: kt.safe_embedding_lookup_sparse(table, ids),
        lambda variable: tf.nn.safe_embedding_lookup_sparse(variable, ids),
        WAYS[way],
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["fused_embedding_lookup_sparse", "fused_safe_embedding_lookup_sparse"])
def test_fused_lookups_are_one_pull_of_all_tables(way: str, name: str) -> None:
    cluster = MemoryCluster("sync")
    tables = [cluster.table("word", DIM), cluster.table("user", 2), cluster.table("word", DIM)]
    variables = [tf.Variable(table.pull(range(N))) for table in tables[:2]]
    optimizer, n_pulls = kt.RowsOptimizer(tables[:2]), cluster.n_pulls
    safe = name.startswith("fused_safe")
    ids = [sparse(HOLES if safe else IDS), ragged(IDS), sparse(IDS)]
    weights = [sparse(SOME_WEIGHTS if safe else WEIGHTS, tf.float32), None, None]
    combiners = ["mean", "sum", "sqrtn"]

    def step(scale: Any) -> Any:
        with tf.GradientTape() as tape:
            results = getattr(kt, name)(tables, ids, weights, combiners)
            loss = tf.add_n([loss_of(result) * scale for result in results])
        tape.gradient(loss, [])
        optimizer.step()
        return results

    results = WAYS[way](step)(tf.constant(1.0))
    assert cluster.n_pulls == n_pulls + 1
    with tf.GradientTape() as tape:
        plain = getattr(tf.nn, name.removeprefix("fused_"))
        of = [variables[0], variables[1], variables[0]]
        expected = [plain(v, i, w, combiner=c) for v, i, w, c in zip(of, ids, weights, combiners, strict=True)]
        loss = tf.add_n([loss_of(result) for result in expected])
    for result, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-6, atol=1e-7)
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        pushed = np.zeros(variable.shape, np.float32)
        name_of = "word" if variable is variables[0] else "user"
        at, grads = cluster.pushes[-1][name_of]
        pushed[at] = grads
        np.testing.assert_allclose(pushed, tf.convert_to_tensor(gradient), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_examples_without_any_id_are_zeros_and_ask_for_nothing(way: str) -> None:
    table = MemoryCluster().table("word", DIM)
    step = WAYS[way](lambda scale: kt.safe_embedding_lookup_sparse(table, sparse([[], [-1]])) * scale)
    assert step(tf.constant(1.0)).numpy().tolist() == [[0.0] * DIM] * 2


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda table: kt.embedding_lookup(table, [1.5]), "ids must be integers, got float32"),
        (lambda table: kt.embedding_lookup("word", [1]), "a kvemb table"),
        (lambda table: kt.embedding_lookup(table, [-1]), "Most likely it is padding"),
        (lambda table: kt.embedding_lookup_sparse(table, [[1]], None), "SparseTensor or tf.RaggedTensor, got list"),
        (lambda table: kt.fused_embedding_lookup_sparse(table, []), "give a list of tables"),
        (lambda table: kt.fused_safe_embedding_lookup_sparse([table], []), "1 tables were given, and 0"),
    ],
)
def test_what_a_lookup_does_not_take_is_refused(call: Callable[[Any], Any], why: str) -> None:
    cluster = MemoryCluster()
    table = cluster.table("word", DIM)
    table.minus_one_allowed = False
    with pytest.raises(InvalidInputError, match=why):
        call(table)


def test_a_graph_of_tensorflow_1_is_refused_and_leaves_nothing_behind() -> None:
    table = MemoryCluster("sync").table("word", DIM)
    with tf.Graph().as_default(), pytest.raises(InvalidInputError, match=r"graph of TensorFlow 1.*make the step a tf.function"):
        kt.embedding_lookup(table, tf.constant([1, 2]))
    np.testing.assert_array_equal(kt.embedding_lookup(table, tf.constant([1])), table.pull([1]))
