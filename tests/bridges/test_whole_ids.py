"""Ids of 64 bits through every entry point of every bridge: the rows are those of all bits, or the call is refused; never another row."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from test_contract import COLUMNS, side

import kvemb
from kvemb.columns import categorical_column_with_identity, embedding_column
from kvemb.errors import InvalidInputError

IDS = np.array([7, 2**32 + 7, 2**40, 2**53 + 1, 2**32, *kvemb.hash_ids(["AF_INET6", "socket", "user"])])
IN_COLUMN = np.array([*IDS[:5], *abs(IDS[5:])])
N, N_BUCKETS = len(IDS), 2**63 - 1
EVERY = np.unique(np.concatenate([IDS, IN_COLUMN, IDS.astype(np.int32), IDS.astype(np.float32).astype(np.int64)]))
"""Also what is left of the ids where bits are lost."""
ROWS = np.arange(1.0, len(EVERY) + 1, dtype=np.float32)[:, None].repeat(2, axis=1)
DIM = 2
Way = Callable[[Any, Any], Any]
"""From a table and ids [n] to their rows [n, dim], or of one that trains None."""


def torch_ways() -> dict[str, Way]:
    import torch

    import kvemb.torch as kt

    def trained(table: Any, ids: Any) -> None:
        module = kt.Embedding(table)
        optimizer = kt.SparseOptimizer(module)
        for batch in kt.prepare(module, [torch.from_numpy(ids)], threads_num=1, capacity=1):
            module(batch).sum().backward()
            optimizer.step()

    def collection(table: Any, ids: Any) -> Any:
        made = kt.EmbeddingCollection(
            [kt.EmbeddingConfig(name=f"{table.name}.c", embedding_dim=DIM, num_embeddings=None, feature_names=["f"])], table.cluster
        )
        fill(table.cluster.table(f"{table.name}.c"))
        features = kt.KeyedJaggedTensor(keys=["f"], values=torch.from_numpy(ids), lengths=torch.ones(N, dtype=torch.int64))
        return made(features)["f"].values()

    def columns(table: Any, ids: Any, given: Any) -> Any:
        made = kt.DenseFeatures(columns_of(table), table.cluster, optimizer=kvemb.optim.sgd(1.0))
        fill(table.cluster.table(columns_of(table)[0].table_name))
        return made({table.name: given(ids)})

    return {
        "Embedding": lambda table, ids: kt.Embedding(table)(torch.from_numpy(ids)),
        "EmbeddingBag": lambda table, ids: kt.EmbeddingBag(table, mode="sum")(torch.from_numpy(ids)[:, None]),
        "EmbeddingBag, offsets": lambda table, ids: kt.EmbeddingBag(table)(torch.from_numpy(ids), torch.arange(N)),
        "EmbeddingCollection": collection,
        "prepare, a step": trained,
        "columns, tensor": partial(columns, given=torch.from_numpy),
        "columns, list": partial(columns, given=list),
        "columns, float64": partial(columns, given=lambda ids: torch.from_numpy(ids.astype(np.float64))),
        "float32": lambda table, ids: kt.Embedding(table)(torch.from_numpy(ids).float()),
    }


def tensorflow_ways() -> dict[str, Way]:
    import tensorflow as tf

    import kvemb.tensorflow as kt

    def ragged(ids: Any) -> Any:
        return tf.RaggedTensor.from_row_lengths(ids, np.ones(len(ids), np.int64))

    def trained(table: Any, ids: Any, wrap: Any, ahead: bool = False) -> None:
        optimizer = kt.RowsOptimizer([table])

        def step(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(kt.embedding_lookup(table, batch))
            tape.gradient(loss, [])
            optimizer.step()
            return loss

        taken, data = wrap(step), tf.data.Dataset.from_tensors(ids)
        for batch in kt.prepare(taken, data) if ahead else data:
            taken(batch)

    def unsigned(table: Any, ids: Any) -> Any:
        made = table.cluster.create_table(f"{table.name}.u", dim=DIM, id_dtype="uint64", optimizer=kvemb.optim.sgd(1.0))
        fill(made)
        return kt.safe_embedding_lookup_sparse(made, ragged(ids.view(np.uint64)), combiner="sum")

    def columns(table: Any, ids: Any, given: Any) -> Any:
        made = kt.column_tables(columns_of(table), table.cluster)
        fill(next(iter(made.values())))
        return kt.input_layer({table.name: given(ids)}, columns_of(table), made)

    return {
        "embedding_lookup, array": kt.embedding_lookup,
        "embedding_lookup, list": lambda table, ids: kt.embedding_lookup(table, ids.tolist()),
        "embedding_lookup, ragged": lambda table, ids: kt.embedding_lookup(table, ragged(ids)).flat_values,
        "embedding_lookup, float": lambda table, ids: kt.embedding_lookup(table, ids.astype(np.float64)),
        "embedding_lookup_sparse": lambda table, ids: kt.embedding_lookup_sparse(table, ragged(ids).to_sparse(), None, combiner="sum"),
        "fused": lambda table, ids: kt.fused_embedding_lookup_sparse([table], [ragged(ids)], combiners="sum")[0],
        "safe_embedding_lookup_sparse": lambda table, ids: kt.safe_embedding_lookup_sparse(table, ragged(ids), combiner="sum"),
        "safe, uint64": unsigned,
        "eager step": partial(trained, wrap=lambda step: step),
        "tf.function": partial(trained, wrap=tf.function),
        "function": partial(trained, wrap=kt.function),
        "prepare": partial(trained, wrap=kt.function, ahead=True),
        "columns, tensor": partial(columns, given=tf.constant),
        "columns, ragged": partial(columns, given=ragged),
        "columns, list": partial(columns, given=list),
    }


def jax_ways() -> dict[str, Way]:
    import jax.numpy as jnp
    from flax import nnx

    import kvemb.jax as kj

    def step_over(table: Any) -> Any:
        return kj.embed(lambda params, rows, batch: jnp.sum(rows["f"]), {"f": table})

    def trained(table: Any, ids: Any) -> None:
        step = step_over(table)
        for batch in kj.prepare(step, [{"f": ids}]):
            step({}, batch)

    def converted(table: Any, ids: Any) -> Any:
        model = nnx.Embed(1000, DIM, rngs=nnx.Rngs(0))
        done = kj.distribute(model, table.cluster, optimizer=kj.sgd(1.0), min_rows=1, names=lambda path: f"{table.name}.nnx", quiet=True)
        return done.step(lambda model, batch: jnp.sum(model(batch["f"] % 1000))).evaluate(done.params, {"f": ids})

    return {
        "rows": lambda table, ids: step_over(table).rows({"f": ids})["f"],
        "rows, list": lambda table, ids: step_over(table).rows({"f": ids.tolist()})["f"],
        "rows, an array of JAX": lambda table, ids: step_over(table).rows({"f": jnp.asarray(ids)})["f"],
        "rows, float": lambda table, ids: step_over(table).rows({"f": ids.astype(np.float64)})["f"],
        "prepare, a step": trained,
        "a model's own lookups": converted,
    }


def keras_ways() -> dict[str, Way]:
    import keras

    import kvemb.keras as kk

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def call(self, x: Any) -> Any:
            return self.layer(x[:, 0])

    def compiled(model: Any, table: Any, x: Any) -> Any:
        model.compile(keras.optimizers.SGD(1.0), lambda y, rows: keras.ops.sum(rows, -1))
        if isinstance(model, keras.Sequential):
            model.build(x.shape)
        kk.distribute(model, table.cluster, quiet=True)
        return model

    def graph(table: Any, dtype: str | None, path: Callable[[Any], Any] = lambda x: x, **options: Any) -> Any:
        x = keras.Input((1,), dtype=dtype)
        rows = kk.Embedding(table, **options)(path(x))
        return keras.Model(x, keras.ops.reshape(rows, (-1, DIM)))

    def called(table: Any, ids: Any, make: Callable[[Any], Any], call: Callable[[Any, Any], Any]) -> Any:
        return call(compiled(make(table), table, ids[:, None]), ids[:, None])

    def masked(table: Any) -> Any:
        x = keras.Input((1,), dtype="int64")
        return keras.Model(x, keras.layers.GlobalAveragePooling1D()(kk.Embedding(table, mask_zero=True)(x)))

    def from_columns(table: Any, ids: Any, given: Callable[[Any], Any] = lambda ids: ids) -> Any:
        layer = kk.DenseFeatures(columns_of(table))
        inputs = layer.symbolic_inputs()
        model = keras.Model(inputs, layer(inputs))
        kk.distribute(model, table.cluster, quiet=True)
        fill(table.cluster.table(columns_of(table)[0].table_name))
        return model.predict(layer.preprocess({table.name: given(ids)}), verbose=0)

    def of_features(table: Any, ids: Any) -> Any:
        config = kk.TableConfig(f"{table.name}.d", N_BUCKETS, DIM, initializer="zeros", combiner="sum")
        layer = kk.DistributedEmbedding({"f": kk.FeatureConfig("f", config, (None,), (None, DIM))})
        inputs = {"f": keras.Input((), dtype="int64", name="f")}
        model = keras.Model(inputs, layer(inputs)["f"])
        kk.distribute(model, table.cluster, quiet=True)
        fill(table.cluster.table(config.name))
        return model.predict({"f": ids}, verbose=0)

    def on_accelerator(model: Any, x: Any) -> None:
        """Where there is one, Keras on JAX puts the batches of `fit` on it one ahead."""
        with mock.patch("jax.default_backend", return_value="gpu") if keras.backend.backend() == "jax" else nullcontext():
            model.fit(x, Y, batch_size=N, verbose=0)

    def ahead(model: Any, x: Any) -> None:
        kk.prepare(model, threads_num=1, capacity=1)
        model.fit(x, Y, batch_size=N, verbose=0)

    calls: dict[str, Callable[[Any, Any], Any]] = {
        "model(x)": lambda model, x: model(x, training=False),
        "predict": lambda model, x: model.predict(x, verbose=0),
        "predict_on_batch": lambda model, x: model.predict_on_batch(x),
        "fit": lambda model, x: nothing(model.fit(x, Y, batch_size=N, verbose=0)),
        "fit, prepared": ahead,
        "train_on_batch": lambda model, x: nothing(model.train_on_batch(x, Y)),
    }
    evaluates = {
        "evaluate": lambda model, x: model.evaluate(x, Y, verbose=0),
        "test_on_batch": lambda model, x: model.test_on_batch(x, Y),
    }
    every: dict[str, Callable[[Any], Any]] = {
        "no Input": lambda table: keras.Sequential([kk.Embedding(table), keras.layers.Reshape((DIM,))]),
        "int64": lambda table: graph(table, "int64"),
        "int32": lambda table: graph(table, "int32"),
        "subclassed": lambda table: Own(kk.Embedding(table)),
    }
    some: dict[str, Callable[[Any], Any]] = {
        "reshaped": lambda table: graph(table, "int64", lambda x: keras.ops.reshape(x, (-1,))),
        "flat": lambda table: graph(table, "int64", lambda x: keras.layers.Flatten()(x)),
        "cast": lambda table: graph(table, "int64", lambda x: keras.ops.cast(x, "int32")),
        "joined": lambda table: graph(table, "int64", lambda x: keras.layers.Concatenate()([x[:, :0], x])),
        "bags": lambda table: graph(table, "int64", mask_zero=True, combiner="sum"),
        "masked": masked,
    }
    ways: dict[str, Way] = {f"{call}, {of}": partial(called, make=every[of], call=calls[call]) for call in calls for of in every}
    ways |= {f"{c}, {of}": lambda t, ids, c=c, of=of: loss(called(t, ids, every[of], evaluates[c])) for c in evaluates for of in every}
    ways |= {f"{c}, {of}": partial(called, make=some[of], call=calls[c]) for c in ("model(x)", "predict", "train_on_batch") for of in some}
    return ways | {
        "layer(x)": lambda table, ids: kk.Embedding(table)(ids),
        "layer(x), list": lambda table, ids: kk.Embedding(table)(ids.tolist()),
        "layer(x), a tensor": lambda table, ids: kk.Embedding(table)(keras.ops.convert_to_tensor(ids)),
        "layer(x), float32": lambda table, ids: kk.Embedding(table)(ids.astype(np.float32)),
        "predict, float64": partial(called, make=every["int64"], call=lambda model, x: model.predict(x.astype(np.float64), verbose=0)),
        "train_on_batch, tensors": partial(
            called, make=every["int64"], call=lambda model, x: nothing(model.train_on_batch(keras.ops.convert_to_tensor(x), Y))
        ),
        "fit, put on a device": partial(called, make=every["int64"], call=on_accelerator),
        "DistributedEmbedding": of_features,
        "columns": from_columns,
        "columns, a tensor": partial(from_columns, given=keras.ops.convert_to_tensor),
    }


Y = np.zeros((N, 1), np.float32)
WAYS = {"torch": torch_ways, "tensorflow": tensorflow_ways, "jax": jax_ways, "keras": keras_ways}
OF_COLUMNS = ("columns", "DistributedEmbedding")
REFUSED = {
    "torch": {"columns, float64", "float32"},
    "tensorflow": {"embedding_lookup, float"},
    "jax": {"rows, an array of JAX", "rows, float", "a model's own lookups"},
}
IN_KERAS = {"layer(x), float32", "predict, float64", "model(x), no Input", "model(x), int32", "model(x), cast"}
IN_KERAS_ON_JAX = {"layer(x), a tensor", "train_on_batch, tensors", "columns, a tensor"}


def columns_of(table: Any) -> list[Any]:
    return [embedding_column(categorical_column_with_identity(table.name, N_BUCKETS), DIM, combiner="sum")]


def fill(table: Any) -> None:
    there = (0 if table.definition.num_ids is not None else -(2**63)) <= EVERY
    table.assign(EVERY[there].view(table.definition.id_dtype), ROWS[there])


def loss(value: Any) -> Any:
    """The rows that a mean of their sums tells of."""
    expected = ROWS[np.searchsorted(EVERY, IDS)]
    return expected if np.isclose(np.asarray(value), expected.sum(1).mean()) else np.asarray(value)


def nothing(result: Any) -> None:
    """Of a step the table's rows are looked at."""


@pytest.fixture(scope="module")
def cluster(require_server: Callable[[str], str]) -> Iterator[kvemb.Cluster]:
    require_server("redis-server")
    job = kvemb.local(store="redis", mode="sync", trainers=1, durability="os")
    with job as url, kvemb.connect(url, trainer="whole", timeout_s=120) as cluster:
        yield cluster


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("column", COLUMNS)
def test_rows_are_those_of_all_bits_of_an_id_or_refused(cluster: kvemb.Cluster, column: str) -> None:
    side(column)
    framework, _, backend = column.partition("-")
    refused = REFUSED.get(framework) or IN_KERAS | (IN_KERAS_ON_JAX if backend == "jax" else set())
    wrong, ways = {}, WAYS[framework]()
    for at, (way, look_up) in enumerate(ways.items()):
        if told := _told(cluster, f"{framework}.{at}", way, look_up, way in refused or (backend == "jax" and "model(x)" in way)):
            wrong[way] = told
    assert not wrong, "\n".join(f"{way}: {told}" for way, told in wrong.items())


def _told(cluster: Any, name: str, way: str, look_up: Way, refused: bool) -> str:
    """What is wrong with the rows that a way gives."""
    table = cluster.create_table(name, dim=DIM, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros())
    fill(table)
    ids = IN_COLUMN if way.startswith(OF_COLUMNS) else IDS
    try:
        got = look_up(table, ids)
    except InvalidInputError as error:
        return "" if refused else f"refused: {error}"
    if refused:
        return "taken, and should be refused"
    if got is not None:
        got = np.asarray(getattr(got, "detach", lambda: got)()).reshape(-1, DIM)
        expected = ROWS[np.searchsorted(EVERY, ids)]
        return "" if np.array_equal(got, expected) else f"{got[:, 0]}, not {expected[:, 0]}"
    cluster.flush()
    moved = (table.pull(EVERY) != ROWS).any(axis=1)
    return "" if np.array_equal(moved, np.isin(EVERY, ids)) else f"trained {EVERY[moved]}, not {np.sort(ids)}"
