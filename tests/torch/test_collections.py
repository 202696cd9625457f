"""Collections: results and gradients are those of torch.nn.EmbeddingBag for each feature, and all tables are one pull."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from collection_features import FIRST, N_IDS, configs, random_features
from creating_cluster import CreatingCluster, pushed_grad, rows_of
from making_cluster import MakingCluster
from torch import nn
from torch.nn import functional as F

from kvemb import init, optim
from kvemb.errors import InvalidInputError, TableMismatchError
from trainer.bridge.shared_lookups import EarlyLookup, found_of, unique_of
from trainer.torch import Embedding, SparseOptimizer, materialize
from trainer.torch.collections.embedding_collections import EmbeddingBagCollection, EmbeddingCollection
from trainer.torch.collections.jagged_tensors import JaggedTensor, KeyedJaggedTensor
from trainer.torch.collections.keyed_recipes import EmbeddingBagConfig, EmbeddingConfig

DIMS = {"page": 4, "ad": 3, "word": 2}


def expected_blocks(features: KeyedJaggedTensor, weights: dict[str, torch.Tensor], tables: list[EmbeddingBagConfig]) -> torch.Tensor:
    """What torch computes, one feature after another."""
    blocks = []
    for config in tables:
        for name in config.feature_names:
            of = features[name]
            options = {"mode": config.pooling, "include_last_offset": True, "per_sample_weights": of.weights_or_none()}
            blocks.append(F.embedding_bag(of.values(), weights[config.name], of.offsets(), **options))
    return torch.cat(blocks, dim=1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_pooled_features_and_gradients_equal_torchs_bags(seed: int, weighted: bool) -> None:
    cluster = CreatingCluster()
    tables = configs("sum" if weighted else "mean")
    collection = EmbeddingBagCollection(tables, cluster, is_weighted=weighted)
    weights = {name: rows_of(cluster.tables[name], N_IDS) for name in DIMS}
    optimizer = SparseOptimizer(collection)
    features, theirs = random_features(seed, weighted=weighted), random_features(seed, weighted=weighted)
    got, expected = collection(features), expected_blocks(theirs, weights, tables)
    assert got.keys() == ["seen@page", "liked", "ad", "seen@word", "query"]
    assert got.length_per_key() == [4, 4, 3, 2, 2]
    torch.testing.assert_close(got.values(), expected, rtol=1e-6, atol=1e-6)
    got.values().square().sum().backward()
    expected.square().sum().backward()
    optimizer.step()
    for name, dense in weights.items():
        torch.testing.assert_close(pushed_grad(cluster, name, dense), dense.grad, rtol=1e-5, atol=1e-5)
    if weighted:
        torch.testing.assert_close(features.weights().grad, theirs.weights().grad, rtol=1e-5, atol=1e-5)


def test_all_tables_of_a_forward_pass_are_one_pull_of_distinct_ids() -> None:
    cluster = CreatingCluster()
    collection = EmbeddingBagCollection(configs(), cluster)
    features = random_features(0)
    collection(features)
    assert cluster.n_round_trips == 1
    page = torch.cat([features["seen"].values(), features["liked"].values()])
    assert cluster.asked[0]["page"].tolist() == page.unique().tolist()
    SparseOptimizer(
        torch.nn.ModuleDict(
            {"a": collection, "b": EmbeddingCollection([EmbeddingConfig(name="x", embedding_dim=1, num_embeddings=9)], cluster)}
        )
    )
    collection(features)
    assert cluster.n_round_trips == 2


def test_rows_installed_for_what_was_asked_are_used_without_a_pull() -> None:
    cluster = CreatingCluster()
    collection = EmbeddingBagCollection(configs(), cluster)
    features = random_features(1)
    expected = collection(features).values()
    asked = collection.asked(features)
    assert [table.name for table, _ in asked] == ["page", "ad", "word"]
    ahead = {}
    for table, ids in asked:
        wanted = unique_of(ids)
        ahead[table.name] = [EarlyLookup(ids, found_of(wanted, table.pull(wanted.ids.astype(np.int64), return_versions=True)))]
    SparseOptimizer(collection).shared.install(ahead)
    before = cluster.n_round_trips
    assert torch.equal(collection(features).values(), expected)
    assert cluster.n_round_trips == before


def test_sequences_have_a_row_per_value_in_their_own_bags() -> None:
    cluster = CreatingCluster()
    collection = EmbeddingCollection(
        [
            EmbeddingConfig(name="page", embedding_dim=4, num_embeddings=N_IDS, feature_names=["seen", "liked"], optimizer=optim.sgd(0.5)),
            EmbeddingConfig(name="word", embedding_dim=2, num_embeddings=None, feature_names=["query"], optimizer=optim.sgd(0.5)),
        ],
        cluster,
    )
    weights = {name: rows_of(cluster.tables[name], N_IDS) for name in ("page", "word")}
    optimizer = SparseOptimizer(collection)
    features = random_features(3, weighted=True)
    got = collection(features)
    assert list(got) == ["seen", "liked", "query"]
    assert cluster.n_round_trips == 1
    for name, table in (("seen", "page"), ("liked", "page"), ("query", "word")):
        assert torch.equal(got[name].values(), F.embedding(features[name].values(), weights[table]))
        assert got[name].lengths().tolist() == features[name].lengths().tolist()
        assert torch.equal(got[name].weights(), features[name].weights())
    sum(one.values().square().sum() for one in got.values()).backward()
    both = torch.cat([features["seen"].values(), features["liked"].values()])
    F.embedding(both, weights["page"]).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(pushed_grad(cluster, "page", weights["page"]), weights["page"].grad)


def test_a_feature_of_several_tables_is_told_apart_by_table() -> None:
    common = {"embedding_dim": 2, "num_embeddings": None}
    collection = EmbeddingCollection([EmbeddingConfig(name=name, feature_names=["f"], **common) for name in "ab"], CreatingCluster())
    assert list(collection(KeyedJaggedTensor.from_lists({"f": [[1]]}))) == ["f@a", "f@b"]


def test_no_values_and_no_bags_are_fine() -> None:
    cluster = CreatingCluster()
    names = ["seen", "liked", "ad", "query"]
    for collection in (EmbeddingBagCollection(configs(), cluster), EmbeddingCollection(configs(), cluster)):
        for n_bags in (0, 3):
            got = collection(
                KeyedJaggedTensor(names, torch.empty(0, dtype=torch.int64), lengths=torch.zeros(4 * n_bags, dtype=torch.int64))
            )
            if isinstance(collection, EmbeddingBagCollection):
                assert torch.equal(got.values(), torch.zeros(n_bags, 15))
            else:
                assert tuple(got["ad"].values().shape) == (0, 3)


def test_evaluation_records_nothing() -> None:
    collection = EmbeddingBagCollection(configs(), CreatingCluster())
    assert not collection.eval()(random_features(0)).values().requires_grad
    with torch.no_grad():
        assert not collection.train()(random_features(0)).values().requires_grad
    assert collection(random_features(0)).values().requires_grad


def test_a_frozen_collection_or_table_of_it_records_nothing() -> None:
    collection = EmbeddingBagCollection(configs(), CreatingCluster())
    assert not collection.requires_grad_(False)(random_features(0)).values().requires_grad
    collection.requires_grad_(True).tables[0].requires_grad_(False)
    collection(random_features(0)).values().sum().backward()
    assert [len(module.pending.leaves) for module in collection.tables] == [0, 1, 1]


def test_a_state_names_the_tables_and_is_for_no_others() -> None:
    state = EmbeddingBagCollection(configs(), CreatingCluster()).state_dict()
    assert sorted(state) == [f"tables.{at}._extra_state" for at in range(3)]
    EmbeddingBagCollection(configs(), CreatingCluster()).load_state_dict(state)
    with pytest.raises(InvalidInputError, match=r"the state is of table 'page'.*this module is over table 'word'"):
        EmbeddingBagCollection(configs()[::-1], CreatingCluster()).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_a_compiled_model_looks_up_as_it_is(kind: str) -> None:
    if kind == "bags":
        collection = EmbeddingBagCollection(configs(), CreatingCluster())
    else:
        collection = EmbeddingCollection(configs(), CreatingCluster())

    def score(features: KeyedJaggedTensor) -> torch.Tensor:
        found = collection(features)
        return torch.relu(found["ad"] if kind == "bags" else found["ad"].values()).sum()

    expected = score(random_features(0))
    torch.testing.assert_close(torch.compile(score, backend="eager")(random_features(0)), expected)


def test_lookups_that_nobody_collects_are_refused_at_a_bound() -> None:
    cluster = CreatingCluster()
    collection = EmbeddingCollection([EmbeddingConfig(name="t", embedding_dim=1, num_embeddings=None)], cluster)
    features = KeyedJaggedTensor.from_lists({"t": [[1]]})
    for _ in range(1000):
        collection(features)["t"].values().sum().backward()
    before = cluster.n_round_trips
    with pytest.raises(InvalidInputError, match="SparseOptimizer"):
        collection(features)
    assert cluster.n_round_trips == before


def test_tables_are_created_as_the_config_says() -> None:
    cluster = CreatingCluster()
    common = {"embedding_dim": 2, "dtype": "bfloat16", "seed": 3, "reduce": "mean"}
    EmbeddingBagCollection([EmbeddingBagConfig(name="t", num_embeddings=100, **common)], cluster)
    EmbeddingCollection(
        [EmbeddingConfig(name="u", embedding_dim=2, num_embeddings=None, optimizer=optim.adam(), initializer=FIRST)], cluster
    )
    mine, other = cluster.tables["t"].definition, cluster.tables["u"].definition
    assert (mine.dtype, mine.seed, mine.reduce, mine.num_ids, mine.optimizer.kind) == ("bfloat16", 3, "mean", 100, "rowwise_adagrad")
    assert mine.initializer == init.uniform(-0.1, 0.1)
    assert (other.num_ids, other.optimizer.kind, other.initializer) == (None, "adam", FIRST)
    with pytest.raises(TableMismatchError):
        EmbeddingCollection([EmbeddingConfig(name="u", embedding_dim=3, num_embeddings=None)], cluster)


def keyed(**features: list[list[int]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lists(features)


@pytest.mark.parametrize(
    ("features", "match"),
    [
        (keyed(seen=[[1]], liked=[[1]], ad=[[1]]), "query"),
        (KeyedJaggedTensor(["ad", "seen", "liked", "query"], torch.tensor([1, 2]), lengths=torch.tensor([1, 0, 0, 0])), "add up to 1"),
        (KeyedJaggedTensor(["ad", "seen", "liked", "query"], torch.tensor([1, 2]), lengths=torch.tensor([3, -1, 0, 0])), "at least 0"),
        (keyed(seen=[[1]], liked=[[1]], ad=[[N_IDS]], query=[[1]]), "table 'ad': id 40"),
        (KeyedJaggedTensor(["ad", "seen", "liked", "query"], torch.ones(4), lengths=torch.ones(4, dtype=torch.int32)), "integer ids"),
    ],
)
def test_features_that_do_not_fit_are_refused_before_any_pull(features: KeyedJaggedTensor, match: str) -> None:
    cluster = CreatingCluster()
    with pytest.raises(InvalidInputError, match=match):
        EmbeddingBagCollection(configs(), cluster)(features)
    assert cluster.n_round_trips == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (torch.fx.symbolic_trace, "torch.fx cannot .* leaf of your Tracer"),
        (torch.jit.script, "torch.jit.script cannot .*torch.export|materi"),
    ],
)
def test_what_torch_cannot_compile_is_refused_by_name(change: Any, match: str, plain: bool) -> None:
    collection = EmbeddingBagCollection(configs(), MakingCluster())
    with pytest.raises(InvalidInputError, match=match):
        change(torch.nn.Sequential(materialize(collection) if plain else collection))


class VariableStride(KeyedJaggedTensor):
    """TorchRec's features may have fewer bags of some keys; then the number of lengths says nothing."""

    def variable_stride_per_key(self) -> bool:
        return True


class InverseIndices(KeyedJaggedTensor):
    """Or bags that stand for several examples."""

    def inverse_indices_or_none(self) -> object:
        return ["seen"], torch.tensor([[0, 0]])


@pytest.mark.parametrize("kind", [VariableStride, InverseIndices])
def test_bags_that_are_not_one_per_example_and_key_are_refused(kind: type[KeyedJaggedTensor]) -> None:
    features = random_features(0)
    with pytest.raises(InvalidInputError, match="same number of bags"):
        EmbeddingBagCollection(configs(), CreatingCluster())(kind(features.keys(), features.values(), lengths=features.lengths()))


@pytest.mark.parametrize("features", [{"seen": [[1]]}, torch.tensor([1]), JaggedTensor.from_lists([[1]])])
def test_what_is_no_keyed_jagged_tensor_is_refused(features: object) -> None:
    with pytest.raises(InvalidInputError, match="KeyedJaggedTensor"):
        EmbeddingBagCollection(configs(), CreatingCluster())(features)  # type: ignore[arg-type]


def test_weights_that_are_missing_are_asked_for() -> None:
    with pytest.raises(InvalidInputError, match="no weights"):
        EmbeddingBagCollection(configs("sum"), CreatingCluster(), is_weighted=True)(random_features(0))


def test_weights_of_a_collection_that_is_not_weighted_count_for_nothing() -> None:
    collection = EmbeddingBagCollection(configs(), CreatingCluster())
    assert torch.equal(collection(random_features(0, weighted=True)).values(), collection(random_features(0)).values())


class PoolingType:
    """What TorchRec's enum looks like."""

    value = "MEAN"


def test_pooling_may_be_torchrecs_enum() -> None:
    assert EmbeddingBagConfig(name="t", embedding_dim=1, num_embeddings=1, pooling=PoolingType()).pooling == "mean"


@pytest.mark.parametrize(
    "make",
    [
        lambda: EmbeddingBagConfig(name="t", embedding_dim=1, num_embeddings=1, pooling="max"),
        lambda: EmbeddingConfig(name="t", embedding_dim=1, num_embeddings=1, feature_names="seen"),
        lambda: EmbeddingBagCollection([], CreatingCluster()),
        lambda: EmbeddingBagCollection(configs() * 2, CreatingCluster()),
        lambda: EmbeddingBagCollection(configs(), CreatingCluster(), is_weighted=True),
        lambda: EmbeddingCollection(
            [EmbeddingConfig(name="t", embedding_dim=1, num_embeddings=1, feature_names=["f", "f"])], CreatingCluster()
        ),
    ],
)
def test_what_makes_no_collection_is_refused(make: object) -> None:
    with pytest.raises(InvalidInputError):
        make()


def test_a_collection_says_what_it_is() -> None:
    collection = EmbeddingBagCollection(configs(), CreatingCluster())
    assert "page(seen, liked), ad(ad), word(seen, query)" in repr(collection)
    assert [config.name for config in collection.embedding_bag_configs()] == ["page", "ad", "word"]
    assert not collection.is_weighted()
    assert EmbeddingCollection(configs(), CreatingCluster()).embedding_configs() == configs()
    assert isinstance(collection(random_features(0)).to_dict()["ad"], torch.Tensor)
    assert isinstance(random_features(0)["ad"], JaggedTensor)


def in_backward(module: nn.Module) -> None:
    """As TorchRec's function of this name."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch's own
        from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})


MODULES = {
    "collection": lambda cluster: EmbeddingBagCollection(configs(), cluster),
    "part of a model": lambda cluster: nn.Sequential(nn.Sequential(EmbeddingBagCollection(configs(), cluster)), nn.ReLU()),
    "one table": lambda cluster: Embedding(cluster.table("user", 2)),
}


@pytest.mark.parametrize("made", MODULES.values(), ids=MODULES)
def test_an_optimizer_in_backward_of_modules_that_have_no_parameters_is_refused(made: Callable[[CreatingCluster], nn.Module]) -> None:
    module = made(CreatingCluster())
    with pytest.raises(
        InvalidInputError, match=r"apply_optimizer_in_backward.*table '(page|user)'.*would train nothing.*SparseOptimizer\(model\)"
    ):
        in_backward(module)
    assert list(module.parameters()) == []


def test_an_optimizer_in_backward_of_the_dense_part_of_a_model_is_not_refused() -> None:
    model = nn.ModuleList([EmbeddingBagCollection(configs(), CreatingCluster()), nn.Linear(2, 1)])
    in_backward(model)
    assert [len(param._in_backward_optimizers) for param in model.parameters()] == [1, 1]
