"""DenseFeatures: TensorFlow's numbers, features in every form, one pull for all tables, and what each option does."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from creating_cluster import CreatingCluster, pushed_grad, rows_of
from tensorflow_features import FIRST, identity, tensorflow_columns, tensorflow_features
from torch import nn
from torch.nn import functional as F

from kvemb import optim
from kvemb.errors import InvalidInputError
from trainer.bridge.shared_lookups import EarlyLookup, found_of, unique_of
from trainer.columns import (
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_list,
    crossed_column,
    embedding_column,
    indicator_column,
    numeric_column,
    shared_embedding_columns,
    weighted_categorical_column,
)
from trainer.columns.feature_values import list_bags
from trainer.torch import SparseOptimizer, prepare
from trainer.torch.collections.jagged_tensors import JaggedTensor
from trainer.torch.modules.dense_features import DenseFeatures


def embedded(key: str, dim: int = 3, combiner: str = "mean") -> Any:
    return embedding_column(identity(key), dim, combiner, FIRST)


# --- TensorFlow's numbers -----------------------------------------------------------------------------------------------------------


# What tf.compat.v1.feature_column.input_layer of TensorFlow 2.21 gives for these columns, features and rows.
TENSORFLOW = [
    [0.0625, 0.8125, 0.395285, -3.75, -0.75, 0, 0.5, 1.25, 0.353553, -0.53033, 1, -1, 0.7, -1.5, 0.375, -0.25],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 2, 0.25, 1],
    [-0.5, 0.25, 0.5, 1.5, 0.5, -0.125, 0, 0.75, -1.154701, 0.144338, -0.5, 5, 99, 1, -1, -0.25],
]
TABLES = ("page_embedding", "colour_embedding", "size_bucketized_embedding", "ad_weighted_by_clicks_embedding")
TABLES += ("bid_weighted_by_paid_embedding", "cat_weighted_by_worth_embedding", "liked_watched_shared_embedding")


def test_blocks_and_their_order_are_tensorflows() -> None:
    cluster = CreatingCluster()
    layer = DenseFeatures(tensorflow_columns(), cluster)
    for k, name in enumerate(TABLES, 1):
        for row_id in range(10):
            row = ((row_id * 7 + np.arange(cluster.tables[name].dim) * 3 + k) % 11 - 5) / 4
            cluster.tables[name].rows[row_id] = (row.astype(np.float32), np.zeros(1, np.float32), 1)
    got = layer(tensorflow_features())
    assert got.dtype == torch.float32
    assert layer.width == 16
    torch.testing.assert_close(got, torch.tensor(TENSORFLOW, dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_a_cross_is_embedded_and_counted() -> None:
    cluster, crossed = CreatingCluster(), crossed_column([identity("page"), "word"], 50)
    weighted = weighted_categorical_column(identity("page", 4), "seconds")
    layer = DenseFeatures([embedding_column(crossed, 2, "sum", FIRST), indicator_column(crossed), indicator_column(weighted)], cluster)
    features = {"page": torch.tensor([[1, 2], [-1, 3]]), "word": [["a", "b"], []], "seconds": torch.tensor([[0.5, 2.0], [9.0, 4.0]])}
    got = layer(features)
    made = crossed.cross([list_bags([[1, 2], [3]]), list_bags([["a", "b"], []])])
    counted = torch.from_numpy(np.bincount(made.values, minlength=50).astype(np.float32))
    assert layer.width == 2 + 50 + 4
    torch.testing.assert_close(got[0, :2], rows_of(cluster.tables["page_X_word_embedding"], 50)[made.values].sum(dim=0))
    torch.testing.assert_close(got[0, 2:52], counted)
    assert got[1, :52].tolist() == [0.0] * 52
    assert got[:, 52:].tolist() == [[0.0, 0.5, 2.0, 0.0], [0.0, 0.0, 0.0, 4.0]]


# --- features in every form ---------------------------------------------------------------------------------------------------------


BAGS = [[1, 2], [], [2]]
FORMS = {
    "tensor": torch.tensor([[1, 2], [-1, -1], [2, -1]]),
    "int32 tensor": torch.tensor([[1, 2], [-1, -1], [2, -1]], dtype=torch.int32),
    "array": np.array([[1, 2], [-1, -1], [2, -1]]),
    "lists": BAGS,
    "tuples": tuple(tuple(bag) for bag in BAGS),
    "jagged": JaggedTensor.from_lists(BAGS),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_every_form_of_integers_gives_torchs_bags(form: str, combiner: str) -> None:
    cluster = CreatingCluster()
    layer = DenseFeatures([embedded("c", combiner=combiner)], cluster)
    weights = rows_of(cluster.tables["c_embedding"], 20)
    expected = F.embedding_bag(torch.tensor([1, 2, 2]), weights, torch.tensor([0, 2, 2]), mode=combiner)
    assert torch.equal(layer({"c": FORMS[form]}), expected)


@pytest.mark.parametrize(
    "words",
    [
        [["a", "b"], [], ["b"]],
        [[b"a", b"b"], [b""], [b"b"]],
        np.array([["a", "b"], ["", ""], ["", "b"]]),
        np.array([[b"a", b"b"], [b"", b""], [b"", b"b"]]),
        np.array([["a", "b"], ["", ""], ["", "b"]], object),
    ],
)
def test_every_form_of_text_is_the_same(words: Any) -> None:
    cluster = CreatingCluster()
    hashed = categorical_column_with_hash_bucket("w", 50)
    listed = categorical_column_with_vocabulary_list("w", ["b", "a"])
    columns = [embedding_column(hashed, 2, "sum", FIRST, table_name="hashed"), embedding_column(listed, 2, "sum", FIRST)]
    with pytest.raises(InvalidInputError, match="distinct names"):
        DenseFeatures(columns, cluster)
    for column, places in zip(columns, (hashed.buckets(np.array(["a", "b"], object)), [1, 0]), strict=True):
        layer = DenseFeatures([column], cluster)
        rows = rows_of(cluster.tables[column.table_name], 50)
        expected = torch.stack([rows[places[0]] + rows[places[1]], torch.zeros(2), rows[places[1]]])
        torch.testing.assert_close(layer({"w": words}), expected)


def test_numbers_pass_through_and_keep_their_gradient() -> None:
    layer = DenseFeatures([numeric_column("b", normalizer_fn=lambda x: x * 2), numeric_column("a", shape=(2, 2))], CreatingCluster())
    prices = torch.tensor([1.0, 2.0], requires_grad=True)
    got = layer({"a": np.arange(8).reshape(2, 2, 2), "b": prices})
    assert got.tolist() == [[0, 1, 2, 3, 2], [4, 5, 6, 7, 4]]
    got.sum().backward()
    assert prices.grad is not None
    assert prices.grad.tolist() == [2, 2]
    assert layer.asked({"b": prices}) == []


def test_arrays_that_may_not_be_written_are_fine() -> None:
    ids, prices = np.array([1, 2]), np.array([1.5, 2.5])
    ids.flags.writeable = prices.flags.writeable = False
    assert DenseFeatures([embedded("c"), numeric_column("x")], CreatingCluster())({"c": ids, "x": prices})[:, -1].tolist() == [1.5, 2.5]


def test_no_examples_are_fine() -> None:
    layer = DenseFeatures([embedded("c"), numeric_column("x")], CreatingCluster())
    assert layer({"c": torch.empty(0, 2, dtype=torch.int64), "x": torch.empty(0)}).shape == (0, 4)


@pytest.mark.parametrize(
    ("features", "match"),
    [
        ({"x": [1.0]}, "no feature 'c'; there are x"),
        ({"c": [[1]]}, "no feature 'x'"),
        ({"c": [[1], [2]], "x": [1.0]}, "same number of examples"),
        ({"c": [["a"]], "x": [1.0]}, "'c' holds text"),
        ({"c": torch.ones(1), "x": [1.0]}, "'c' holds float32"),
        ({"c": torch.ones(1, 1, 1, dtype=torch.int64), "x": [1.0]}, "feature 'c': .*shape"),
        ({"c": 3, "x": [1.0]}, "'c': it must be a tensor"),
        ({"c": [[20]], "x": [1.0]}, "'c': 20 is outside"),
        ({"c": [[1]], "x": [[1.0, 2.0]]}, "'x' has the shape"),
        ({"c": [[1]], "x": ["dear"]}, "'x' holds no numbers"),
        ({"c": [[1]], "x": [1j]}, "'x' is .*complex"),
    ],
)
def test_features_that_do_not_fit_are_refused_by_name_before_any_pull(features: dict[str, Any], match: str) -> None:
    cluster = CreatingCluster()
    with pytest.raises(InvalidInputError, match=match):
        DenseFeatures([embedded("c"), numeric_column("x")], cluster)(features)
    assert cluster.n_round_trips == 0


@pytest.mark.parametrize("weights", [[[1.0], [1.0]], [[1.0, 2.0, 3.0], []], [["a", "b"], []]])
def test_weights_that_are_not_those_of_the_values_are_refused(weights: list[Any]) -> None:
    column = embedding_column(weighted_categorical_column(identity("c"), "w"), 2)
    with pytest.raises(InvalidInputError, match="'w' must hold a number"):
        DenseFeatures([column], CreatingCluster())({"c": [[1, 2], []], "w": weights})


# --- lookups ------------------------------------------------------------------------------------------------------------------------


def test_weights_that_want_a_gradient_are_refused_unless_none_is_recorded() -> None:
    layer = DenseFeatures([embedding_column(weighted_categorical_column(identity("c"), "w"), 2)], CreatingCluster())
    features = {"c": [[1, 2]], "w": torch.ones(1, 2, requires_grad=True)}
    with pytest.raises(InvalidInputError, match=r"'w': .*gradient.*EmbeddingBagCollection"):
        layer(features)
    with torch.no_grad():
        assert layer(features).shape == (1, 2)


def test_text_that_is_none_is_refused_by_name() -> None:
    column = embedding_column(categorical_column_with_hash_bucket("c", 9), 2)
    with pytest.raises(InvalidInputError, match=r"feature 'c': .*None.*missing"):
        DenseFeatures([column], CreatingCluster())({"c": ["x", None]})


@pytest.mark.parametrize("normalizer_fn", [torch.sum, lambda x: x[:1], lambda x: torch.cat([x, x], dim=1)])
def test_numbers_that_change_their_shape_when_normalized_are_refused_by_name(normalizer_fn: Any) -> None:
    with pytest.raises(InvalidInputError, match="'x': normalizer_fn"):
        DenseFeatures([numeric_column("x", normalizer_fn=normalizer_fn)], CreatingCluster())({"x": [1.0, 2.0]})


def test_gradients_equal_torchs_also_where_columns_share_a_table() -> None:
    cluster = CreatingCluster()
    shared = shared_embedding_columns([identity("a"), weighted_categorical_column(identity("b"), "w")], 3, "sum", FIRST)
    layer = DenseFeatures([*shared, embedded("c")], cluster, optimizer=optim.sgd(0.5))
    optimizer = SparseOptimizer(layer)
    features = {"a": [[1, 2], [2]], "b": [[2], [5, 5]], "w": [[0.5], [2.0, -3.0]], "c": torch.tensor([4, 4])}
    ab, c = (rows_of(cluster.tables[name], 20) for name in ("a_b_weighted_by_w_shared_embedding", "c_embedding"))
    expected = [
        F.embedding_bag(torch.tensor([1, 2, 2]), ab, torch.tensor([0, 2]), mode="sum"),
        F.embedding_bag(torch.tensor([2, 5, 5]), ab, torch.tensor([0, 1]), mode="sum", per_sample_weights=torch.tensor([0.5, 2, -3])),
        F.embedding(torch.tensor([4, 4]), c),
    ]
    got = layer(features)
    torch.testing.assert_close(got, torch.cat(expected, dim=1))
    got.square().sum().backward()
    sum(block.square().sum() for block in expected).backward()
    optimizer.step()
    torch.testing.assert_close(pushed_grad(cluster, "a_b_weighted_by_w_shared_embedding", ab), ab.grad)
    torch.testing.assert_close(pushed_grad(cluster, "c_embedding", c), c.grad)


def install_all(layer: DenseFeatures, features: dict[str, Any]) -> None:
    ahead = {}
    for table, ids in layer.asked(features):
        wanted = unique_of(ids)
        ahead[table.name] = [EarlyLookup(ids, found_of(wanted, table.pull(wanted.ids.astype(np.int64), return_versions=True)))]
    SparseOptimizer(layer).shared.install(ahead)


@pytest.mark.parametrize("unique", [False, True])
def test_rows_installed_for_what_was_asked_are_used_without_a_pull(unique: bool) -> None:
    cluster = CreatingCluster()
    layer = DenseFeatures([embedded("a"), embedded("b"), numeric_column("x")], cluster, emb_unique=unique)
    features = {"a": [[3, 1], [2]], "b": torch.tensor([7, 4]), "x": torch.ones(2)}
    expected = layer(features)
    install_all(layer, features)
    before = cluster.n_round_trips
    assert torch.equal(layer(features), expected)
    assert cluster.n_round_trips == before


def test_a_column_embedded_twice_is_read_once() -> None:
    reads = []
    source = categorical_column_with_identity("c", 20)
    columns = [embedding_column(source, 2, initializer=FIRST), shared_embedding_columns([source], 3, initializer=FIRST)[0]]
    layer = DenseFeatures(columns, CreatingCluster())

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            reads.append(1)
            return super().__iter__()

    layer({"c": Counted([1, 2])})
    once = len(reads)
    reads.clear()
    DenseFeatures(columns[:1], CreatingCluster())({"c": Counted([1, 2])})
    assert len(reads) == once


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_results_do_not_depend_on_torchs_default_dtype(combiner: str) -> None:
    layer = DenseFeatures([embedded("c", combiner=combiner), numeric_column("x")], CreatingCluster())
    features = {"c": [[1, 2, 2], [], [3]], "x": [1.5, 2.0, 0.1]}
    expected = layer(features)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(layer(features), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# --- options ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_groups", "n_pulls"), [(1, 1), (2, 2), (3, 3), (5, 5), (9, 5)])
def test_tables_are_pulled_in_at_most_so_many_groups(n_groups: int, n_pulls: int) -> None:
    cluster = CreatingCluster()
    columns = [embedded(key) for key in "abcde"]
    features = {key: torch.tensor([at, 7]) for at, key in enumerate("abcde")}
    layer = DenseFeatures(columns, cluster, emb_num_groups=n_groups)
    got = layer(features)
    assert cluster.n_round_trips == n_pulls
    assert torch.equal(got, DenseFeatures(columns, cluster)(features))


@pytest.mark.parametrize("consistency", ["stale", "bounded", "exact"])
def test_a_prepared_loader_keeps_to_the_groups(consistency: str) -> None:
    cluster = CreatingCluster("sync")
    layer = DenseFeatures([embedded(key) for key in "abc"], cluster, emb_num_groups=2)
    model = nn.ModuleList([layer, DenseFeatures([embedded("d")], cluster), DenseFeatures([embedded("e")], cluster)])
    optimizer = SparseOptimizer(model)
    batches = [{key: torch.tensor([at, n]) for at, key in enumerate("abcde")} for n in range(6)]
    k = 0 if consistency == "bounded" else None
    with prepare(model, batches, consistency=consistency, k=k, threads_num=1, capacity=1) as prepared:
        for features in prepared:
            sum(module(features).sum() for module in model).backward()
            optimizer.step()
    groups = [set(names.removesuffix("_embedding") for names in asked) for asked in cluster.asked]
    assert {"a", "b", "c"} not in groups, "as without prepare"
    assert all(groups.count(group) >= 5 for group in ({"a", "c"}, {"b"}, {"d", "e"}))
    assert layer.tables[0].shared.n_ahead == 5 * 5


def test_unique_inputs_are_not_searched_for_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.from_numpy(np.random.default_rng(0).permutation(1 << 20)[:5000])
    column = embedding_column(categorical_column_with_identity("c", 1 << 20), 2, "sum", FIRST)
    cluster = CreatingCluster()
    expected = DenseFeatures([column], cluster)({"c": ids.reshape(-1, 2)})
    promised = DenseFeatures([column], cluster, emb_unique=True)
    monkeypatch.setattr("kvemb.arrays.ids._owners", lambda *_: pytest.fail("searched for duplicates"))
    assert torch.equal(promised({"c": ids.reshape(-1, 2)}), expected)
    with pytest.raises(pytest.fail.Exception):
        DenseFeatures([column], cluster)({"c": ids.reshape(-1, 2)})


def test_gradients_of_unique_inputs_go_to_their_rows() -> None:
    cluster = CreatingCluster()
    layer = DenseFeatures([embedded("c", combiner="sum")], cluster, optimizer=optim.sgd(0.5), emb_unique={"c_embedding": True})
    optimizer = SparseOptimizer(layer)
    rows = rows_of(cluster.tables["c_embedding"], 20)
    ids, scale = torch.tensor([9, 2, 14, 5]), torch.arange(12.0).reshape(4, 3)
    (layer({"c": ids}) * scale).sum().backward()
    (F.embedding(ids, rows) * scale).sum().backward()
    optimizer.step()
    assert torch.equal(pushed_grad(cluster, "c_embedding", rows), rows.grad)


def test_a_broken_promise_of_unique_inputs_is_refused_before_any_pull() -> None:
    cluster = CreatingCluster()
    with pytest.raises(InvalidInputError, match=r"'c_embedding': emb_unique .*but 3 does"):
        DenseFeatures([embedded("c")], cluster, emb_unique=True)({"c": [[3, 1], [3]]})
    assert cluster.n_round_trips == 0


def test_options_may_be_given_by_column() -> None:
    cluster = CreatingCluster()
    DenseFeatures(
        [embedded("a"), embedded("b")],
        cluster,
        optimizer={"b_embedding": optim.adam(lr=0.5)},
        emb_dtype={"a_embedding": "float16"},
        reduce="mean",
    )
    a, b = (cluster.tables[name].definition for name in ("a_embedding", "b_embedding"))
    assert (a.dtype, a.optimizer.kind, a.reduce) == ("float16", "rowwise_adagrad", "mean")
    assert (b.dtype, b.optimizer, b.reduce) == ("float32", optim.adam(lr=0.5), "mean")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_looks_up_as_it_is() -> None:
    layer = DenseFeatures([embedded("a"), numeric_column("x")], CreatingCluster())

    def score(features: dict[str, Any]) -> torch.Tensor:
        return torch.relu(layer(features)).sum()

    features = {"a": torch.tensor([[1, 2], [3, 3]]), "x": torch.tensor([1.0, 2.0])}
    torch.testing.assert_close(torch.compile(score, backend="eager")(features), score(features))


def test_small_tables_are_dense_and_huge_ones_are_not() -> None:
    cluster = CreatingCluster()
    huge = embedding_column(categorical_column_with_identity("huge", 2**63 - 1), 2)
    layer = DenseFeatures([embedded("small"), huge], cluster)
    assert cluster.tables["small_embedding"].definition.num_ids == 20
    assert cluster.tables["huge_embedding"].definition.num_ids is None
    assert layer({"small": [1], "huge": torch.tensor([2**63 - 2])}).shape == (1, 5)


SHARED = shared_embedding_columns([identity("a"), identity("b")], 2)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ([], {}),
        ([identity("a")], {}),
        ([embedded("a"), embedded("a")], {}),
        ([embedding_column(identity(key), 2, table_name="t") for key in "ab"], {}),
        ([SHARED[0], *shared_embedding_columns([identity("b")], 3, shared_embedding_collection_name=SHARED[0].table_name)], {}),
        ([embedded("a")], {"emb_num_groups": 0}),
        ([embedded("a")], {"emb_num_groups": True}),
        ([embedded("a")], {"emb_dtype": "int8"}),
        ([embedded("a")], {"emb_dtype": {"a": "float16"}}),
        ([embedded("a")], {"emb_dtype": torch.float16}),
        ([embedded("a")], {"emb_unique": "yes"}),
        ([embedded("a")], {"optimizer": "adam"}),
        (SHARED, {"emb_unique": True}),
        (SHARED, {"emb_dtype": {"a_shared_embedding": "float16"}}),
    ],
)
def test_what_makes_no_layer_is_refused(columns: list[Any], options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        DenseFeatures(columns, CreatingCluster(), **options)


@pytest.mark.parametrize("option", ["batch_size", "max_norm", "trainable"])
def test_options_without_effect_do_not_exist(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        DenseFeatures([embedded("a")], CreatingCluster(), **{option: 1})


def test_a_layer_names_its_columns() -> None:
    assert "DenseFeatures(\n  a_embedding, x" in repr(DenseFeatures([numeric_column("x"), embedded("a")], CreatingCluster()))
