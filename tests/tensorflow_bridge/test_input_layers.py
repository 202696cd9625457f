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


def made_by(of: Any) -> list[Any]:
    """Columns of every kind, made by kvemb.columns or TensorFlow."""
    page, size = of.categorical_column_with_identity("page", 10), of.bucketized_column(of.numeric_column("size", shape=(2,)), [0.0, 10.0])
    colour = of.categorical_column_with_vocabulary_list("colour", ["red", "green", "blue"], num_oov_buckets=0)
    ad = of.weighted_categorical_column(of.categorical_column_with_identity("ad", 6), "clicks")
    made = [
        of.indicator_column(page),
        of.indicator_column(colour),
        of.indicator_column(ad),
        of.indicator_column(size),
        of.indicator_column(of.crossed_column([page, "colour", of.crossed_column([colour, size], 3)], 10**6)),
        of.embedding_column(of.crossed_column([page, "colour"], 1), 2, combiner="mean"),
        of.embedding_column(of.categorical_column_with_hash_bucket("word", 1), 2),
    ]
    keys = [of.categorical_column_with_identity(key, 10) for key in ("page", "liked")]
    return [*made, *of.shared_embedding_columns(keys, 2, combiner="sqrtn")]


def random_features(rng: np.random.Generator, n: int = 6) -> dict[str, Any]:
    words = np.array(["red", "green", "pink", ""])
    given = rng.random((n, 3)) < 0.6
    at = np.argwhere(given)
    return {
        "page": rng.integers(-1, 10, (n, 2)),
        "liked": rng.integers(-1, 10, (n, 3)),
        "size": rng.normal(scale=9, size=(n, 2)).astype(np.float32),
        "colour": words[rng.integers(0, 4, (n, 3))],
        "word": words[rng.integers(0, 4, n)],
        "ad": (at, rng.integers(0, 6, len(at)), (n, 3)),
        "clicks": (at, rng.normal(size=len(at)).astype(np.float32), (n, 3)),
    }


@pytest.mark.parametrize("way", ["eager", "graph", "rows as arguments"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorflows_own_columns_give_tensorflows_results_but_for_the_hash(way: str) -> None:
    given = random_features(np.random.default_rng(4))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        theirs = made_by(fc)  # in a graph: TensorFlow has no shared columns elsewhere
        made = fc.input_layer({name: as_tensor(of) for name, of in given.items()}, theirs)
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.tables_initializer()])
        tables = kt.column_tables(theirs, ColumnCluster())
        for variable in tf.compat.v1.global_variables():
            variable.load(tables[variable.name.split("/")[1]].pull(range(int(variable.shape[0]))), session)
        expected = session.run(made)
        keys = [tf.feature_column.categorical_column_with_identity(key, 10) for key in ("page", "liked")]
        assert kc.from_tensorflow(tf.feature_column.shared_embeddings(keys, 2, combiner="sqrtn")) == made_by(kc)[-2:]
        with pytest.raises(InvalidInputError, match="trainable=False"):
            kc.from_tensorflow(tf.feature_column.shared_embeddings(keys, 2, trainable=False))
    assert kc.from_tensorflow(theirs) == made_by(kc)

    assert sorted(tables) == ["colour_X_page_embedding", "liked_page_shared_embedding", "word_embedding"]
    batch = {name: as_tensor(of) for name, of in given.items()}

    def step(batch: Any) -> Any:
        return kt.input_layer(batch, theirs, tables)

    got = {"eager": step, "graph": tf.function(step), "rows as arguments": kt.function(step)}[way](batch).numpy()
    assert got.shape == expected.shape
    ours = sorted(kc.from_tensorflow(theirs), key=lambda column: column.name)
    ends = np.cumsum([column.width for column in ours])
    for column, mine, other in zip(ours, np.split(got, ends[:-1], axis=1), np.split(expected, ends[:-1], axis=1), strict=True):
        if column.name.endswith("page_X_size_bucketized_indicator"):
            assert np.array_equal(np.sort(mine, axis=1), np.sort(other, axis=1)), "another hash, the same combinations"
            assert mine.sum() > 50
        else:
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6, err_msg=column.name)


def test_an_indicator_counts_each_step_of_a_sequence() -> None:
    batch = {"page": sparse([[1, 2, 2], [], [7]], tf.int64)}
    columns = [tf.feature_column.indicator_column(tf.feature_column.categorical_column_with_identity("page", 8))]
    made, lengths = kt.sequence_input_layer(batch, columns, {})
    assert lengths.numpy().tolist() == [3, 0, 1]
    np.testing.assert_array_equal(made, tf.one_hot([[1, 2, 2], [-1, -1, -1], [7, -1, -1]], 8))
    with pytest.raises(InvalidInputError, match="a cross has no steps"):
        kt.sequence_input_layer(batch, [kc.indicator_column(kc.crossed_column(["page", "page"], 8))], {})


TF = tf.feature_column
PAGE = TF.categorical_column_with_identity("page", 10)


@pytest.mark.parametrize(
    ("column", "first"),
    [
        (TF.embedding_column(PAGE, 4), {"kind": "truncated_normal", "mean": 0.0, "std": 0.5}),
        (TF.embedding_column(PAGE, 4, initializer=tf.initializers.RandomUniform(-1.0, 2.0)), {"kind": "uniform", "low": -1.0, "high": 2.0}),
        (TF.embedding_column(PAGE, 4, initializer=tf.initializers.Ones()), {"kind": "constant", "value": 1.0}),
        (TF.embedding_column(PAGE, 4, initializer=tf.initializers.Constant(0.5)), {"kind": "constant", "value": 0.5}),
        (TF.embedding_column(PAGE, 4, initializer=tf.initializers.Zeros()), {"kind": "zeros"}),
        (TF.embedding_column(PAGE, 4, initializer=tf.initializers.RandomNormal(0.5, 2.0)), {"kind": "normal", "mean": 0.5, "std": 2.0}),
    ],
)
def test_first_rows_of_tensorflows_columns_have_their_distribution(column: Any, first: dict[str, Any]) -> None:
    assert kc.from_tensorflow([column])[0].initializer.to_dict() == first


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (TF.embedding_column(PAGE, 4, max_norm=1.0), "max_norm=1.0 has no counterpart"),
        (TF.embedding_column(PAGE, 4, trainable=False), "trainable=False"),
        (TF.embedding_column(PAGE, 4, ckpt_to_load_from="model", tensor_name_in_ckpt="page"), "ckpt_to_load_from='model'"),
        (TF.embedding_column(PAGE, 4, use_safe_embedding_lookup=False), "use_safe_embedding_lookup=False"),
        (TF.embedding_column(PAGE, 4, initializer=tf.initializers.GlorotUniform()), "initializer GlorotUniform"),
        (TF.embedding_column(PAGE, 4, initializer=tf.zeros), "initializer function"),
        (TF.indicator_column(TF.crossed_column(["a", "b"], 9, hash_key=3)), "hash_key=3"),
        (TF.indicator_column(TF.categorical_column_with_vocabulary_file("a", "words.txt", 3)), "give the file's lines"),
        (TF.embedding_column(TF.sequence_categorical_column_with_identity("a", 3), 4), "to sequence_input_layer"),
        (TF.sequence_numeric_column("a"), "to sequence_input_layer"),
        (PAGE, "wrap it with embedding_column or indicator_column"),
    ],
)
def test_what_only_tensorflows_columns_have_is_refused_by_name(column: Any, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        kt.input_layer({}, [column], {})


def test_tensorflows_sequence_columns_are_those_of_a_step() -> None:
    batch = {"page": sparse([[1, 2, 2], [], [7]], tf.int64), "seconds": sparse([[0.5, 1.5, 2.5], [], [9.0]], tf.float32)}
    of_steps = TF.sequence_categorical_column_with_identity("page", 10)
    theirs = [TF.embedding_column(of_steps, 3), TF.indicator_column(of_steps), TF.sequence_numeric_column("seconds")]
    page = kc.categorical_column_with_identity("page", 10)
    ours = [kc.embedding_column(page, 3), kc.indicator_column(page), kc.numeric_column("seconds")]
    tables = kt.column_tables(theirs, ColumnCluster())
    for mine, other in zip(*(kt.sequence_input_layer(batch, columns, tables) for columns in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(mine, other)
    for option in ({"default_value": 1.0}, {"normalizer_fn": tf.sparse.softmax}):
        with pytest.raises(InvalidInputError, match="have no counterpart: steps are filled up with 0"):
            kt.sequence_input_layer(batch, [TF.sequence_numeric_column("seconds", **option)], {})


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
