"""Input layers over feature columns are TensorFlow's own over plain variables: value and gradient."""

from typing import Any

import numpy as np
import pytest
from memory_cluster import MemoryCluster, MemoryTable

tf = pytest.importorskip("tensorflow")

import kvemb.columns as kc  # noqa: E402
import kvemb.tensorflow as kt  # noqa: E402
from kvemb import optim  # noqa: E402
from kvemb.errors import InvalidInputError  # noqa: E402
from kvemb.schema.table_def import TableDef  # noqa: E402

fc = tf.compat.v1.feature_column


class ColumnCluster(MemoryCluster):
    def create_table(self, name: str, *, dim: int, optimizer: Any, initializer: Any, exist_ok: bool, **identity: Any) -> Any:
        assert exist_ok
        return self.tables.setdefault(name, MemoryTable(self, TableDef(name, dim, optimizer, initializer, **identity)))


def sparse(rows: list[list[Any]], dtype: Any) -> Any:
    return tf.ragged.constant(rows, dtype, row_splits_dtype=tf.int64).to_sparse()


def features() -> dict[str, Any]:
    return {
        "price": tf.constant([[3.0], [1.0], [0.0]]),
        "size": tf.constant([[-1.0, 0.7], [0.0, 10.0], [5.0, 99.0]]),
        "page": tf.constant([[1, 2, -1], [-1, -1, -1], [9, 3, 3]], tf.int64),
        "colour": tf.constant([["red", "pink"], ["", ""], ["blue", "green"]]),
        "ad": sparse([[1, 2], [], [3]], tf.int64),
        "clicks": sparse([[1.0, 3.0], [], [-2.0]], tf.float32),
    }


def columns(of: Any) -> list[Any]:
    """The same columns, made by `of`: kvemb.columns or TensorFlow's."""
    page, colour = (
        of.categorical_column_with_identity("page", 10),
        of.categorical_column_with_vocabulary_list("colour", ["red", "green", "blue"]),
    )
    ad = of.weighted_categorical_column(of.categorical_column_with_identity("ad", 6), "clicks")
    size = of.bucketized_column(of.numeric_column("size", shape=(2,)), [0.0, 0.7, 10.0])
    return [
        of.numeric_column("price", normalizer_fn=lambda x: (x - 1) / 2),
        of.embedding_column(page, 3, combiner="sqrtn"),
        of.embedding_column(colour, 2),
        of.embedding_column(ad, 2, combiner="mean"),
        of.embedding_column(size, 1, combiner="sum"),
    ]


def tensorflows(tables: dict[str, Any], scale: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """TensorFlow's own layer in a graph of TF1: its value, and the gradient of each variable for a loss of sum(scale * value)."""
    values = {name: as_numpy(of) for name, of in EAGER.items()}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        made = fc.input_layer({name: as_tensor(of) for name, of in values.items()}, columns(fc))
        variables = tf.compat.v1.global_variables()
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.tables_initializer()])
        names = {variable: variable.name.split("/")[1] for variable in variables}
        for variable, name in names.items():
            variable.load(tables[name].pull(range(int(variable.shape[0]))), session)
        gradients = tf.gradients(tf.reduce_sum(made * scale), variables)
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        value, grads = session.run([made, dense])
    return value, dict(zip(names.values(), grads, strict=True))


def as_numpy(of: Any) -> Any:
    return tuple(part.numpy() for part in (of.indices, of.values, of.dense_shape)) if isinstance(of, tf.SparseTensor) else of.numpy()


def as_tensor(of: Any) -> Any:
    return tf.SparseTensor(*of) if isinstance(of, tuple) else tf.constant(of)


EAGER = features()


@pytest.mark.parametrize("way", ["eager", "graph", "rows as arguments"])
@pytest.mark.parametrize("name", ["input_layer", "input_from_feature_columns"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_input_layer_is_tensorflows_own(way: str, name: str) -> None:
    cluster = ColumnCluster("sync")
    mine = columns(kc)
    tables = kt.column_tables(mine, cluster, optimizer=optim.sgd(0.1))
    optimizer = kt.RowsOptimizer(list(tables.values()))
    scale = np.random.default_rng(0).normal(size=(3, 9)).astype(np.float32)

    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            made = getattr(kt, name)(batch, mine, tables)
            loss = tf.reduce_sum(made * scale)
        tape.gradient(loss, [])
        optimizer.step()
        return made

    before = {name: MemoryCopy(table) for name, table in tables.items()}
    n_pulls = cluster.n_pulls
    made = {"eager": step, "graph": tf.function(step), "rows as arguments": kt.function(step)}[way](EAGER)
    assert cluster.n_pulls == n_pulls + 1, "all columns are one pull"
    value, gradients = tensorflows({of.removesuffix("_embedding") + "_embedding": copy for of, copy in before.items()}, scale)
    np.testing.assert_allclose(made, value, rtol=1e-5, atol=1e-6)
    assert made.shape == (3, 9)
    for table, expected in gradients.items():
        pushed = np.zeros_like(expected)
        ids, grads = cluster.pushes[-1].get(table, (np.empty(0, np.int64), np.empty((0, 1), np.float32)))
        pushed[ids] = grads
        np.testing.assert_allclose(pushed, expected, rtol=1e-5, atol=1e-6)


class MemoryCopy:
    """A table's rows as they are now."""

    def __init__(self, table: Any) -> None:
        self._rows = table.pull(range(table.definition.num_ids))

    def pull(self, ids: range) -> Any:
        return self._rows[list(ids)]


@pytest.mark.parametrize("way", ["eager", "graph", "rows as arguments"])
def test_sequence_input_layer_is_a_lookup_for_each_step_of_a_sequence(way: str) -> None:
    cluster = ColumnCluster("sync")
    mine = [kc.embedding_column(kc.categorical_column_with_identity("page", 10), 3), kc.numeric_column("seconds")]
    tables = kt.column_tables(mine, cluster, optimizer=optim.sgd(0.1))
    optimizer = kt.RowsOptimizer(list(tables.values()))
    variable = tf.Variable(tables["page_embedding"].pull(range(10)))
    batch = {"page": sparse([[1, 2, 2], [], [7]], tf.int64), "seconds": sparse([[0.5, 1.5, 2.5], [], [9.0]], tf.float32)}
    scale = np.random.default_rng(0).normal(size=(3, 3, 4)).astype(np.float32)

    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            made, lengths = kt.sequence_input_layer(batch, mine, tables)
            loss = tf.reduce_sum(made * scale)
        tape.gradient(loss, [])
        optimizer.step()
        return made, lengths, kt.sequence_input_from_feature_columns(batch, mine, tables)[..., 3:]

    made, lengths, seconds = {"eager": step, "graph": tf.function(step), "rows as arguments": kt.function(step)}[way](batch)
    with tf.GradientTape() as tape:
        ids = tf.sparse.expand_dims(batch["page"], -1)
        expected = tf.nn.safe_embedding_lookup_sparse(variable, ids)
        loss = tf.reduce_sum(expected * scale[..., :3])
    assert lengths.numpy().tolist() == [3, 0, 1]
    np.testing.assert_allclose(made[..., :3], expected, rtol=1e-6)
    assert made[..., 3].numpy().tolist() == [[0.5, 1.5, 2.5], [0, 0, 0], [9.0, 0, 0]] == seconds[..., 0].numpy().tolist()
    pushed = np.zeros((10, 3), np.float32)
    ids, grads = cluster.pushes[-1]["page_embedding"]
    pushed[ids] = grads
    np.testing.assert_allclose(pushed, tf.convert_to_tensor(tape.gradient(loss, variable)), rtol=1e-5)


def test_what_an_input_layer_does_not_take_is_refused() -> None:
    page = kc.categorical_column_with_identity("page", 10)
    column = kc.embedding_column(page, 3)
    tables = kt.column_tables([column], ColumnCluster())
    for features, columns, of, why in (
        ({}, [column], tables, "no feature 'page'"),
        (EAGER, [page], tables, "wrap it with embedding_column"),
        (EAGER, [column, column], tables, "distinct names"),
        (EAGER, [column], {}, "see column_tables"),
        ({"page": tf.constant([99])}, [column], tables, "outside 0 to 10"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            kt.input_layer(features, columns, of)
    lengths = {"page": sparse([[1], [2, 3]], tf.int64), "seconds": sparse([[1.0, 2.0], [3.0]], tf.float32)}
    with pytest.raises(tf.errors.InvalidArgumentError, match="sequences of other lengths"):
        kt.sequence_input_layer(lengths, [column, kc.numeric_column("seconds")], tables)
