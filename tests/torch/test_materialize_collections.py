"""materialize of collections and DenseFeatures: the same bits without a cluster, one parameter per table, saved, loaded and trained."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from collection_features import configs, random_features
from creating_cluster import pushed_grad
from making_cluster import MakingCluster
from tensorflow_features import tensorflow_columns, tensorflow_features
from torch import nn

from kvemb import init, optim
from kvemb.errors import InvalidInputError
from trainer.columns import categorical_column_with_hash_bucket, categorical_column_with_identity, embedding_column, numeric_column
from trainer.torch import (
    DenseFeatures,
    Embedding,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    SparseOptimizer,
    distribute,
    materialize,
    prepare,
)
from trainer.torch.export.plain_tables import KnownRows, PlainDenseFeatures, PlainEmbeddingBagCollection, PlainEmbeddingCollection
from trainer.torch.lookup.table_module import LookupModule

ROWS = {"embedding_dim": 3, "optimizer": optim.sgd(0.5), "initializer": init.normal(std=1.0)}


def flat(result: Any) -> torch.Tensor:
    """What a model computed as one tensor."""
    if isinstance(result, dict):
        return torch.cat([one.values().reshape(-1) for one in result.values()])
    return result if isinstance(result, torch.Tensor) else result.values()


def grown(cluster: MakingCluster, name: str = "grown", **options: Any) -> EmbeddingCollection:
    """A sequence of any 64-bit ids, in a table without num_ids."""
    return EmbeddingCollection([EmbeddingConfig(name=name, num_embeddings=None, **{**ROWS, **options})], cluster)


def hashed(cluster: MakingCluster) -> DenseFeatures:
    word = categorical_column_with_hash_bucket("word", 100)
    once = categorical_column_with_identity("once", 20)
    columns = [embedding_column(word, 3, "sqrtn"), embedding_column(once, 2), numeric_column("x")]
    return DenseFeatures(columns, cluster, emb_unique={"once_embedding": True})


MAKE: dict[str, tuple[Callable[[MakingCluster], nn.Module], Any]] = {
    "bags": (lambda cluster: EmbeddingBagCollection(configs(), cluster), random_features(0)),
    "weighted bags": (
        lambda cluster: EmbeddingBagCollection(configs("sum"), cluster, is_weighted=True),
        random_features(1, weighted=True),
    ),
    "sequences": (lambda cluster: EmbeddingCollection(configs(), cluster), random_features(2)),
    "columns": (lambda cluster: DenseFeatures(tensorflow_columns(), cluster), tensorflow_features()),
    "hashed": (hashed, {"word": [["a", "b"], [], ["b"]], "once": torch.tensor([7, -1, 2]), "x": [1.0, 2.0, 3.0]}),
}


@pytest.mark.parametrize("ids", ["all", "chosen"])
@pytest.mark.parametrize("kind", MAKE)
def test_a_copy_gives_the_same_bits(kind: str, ids: str) -> None:
    make, features = MAKE[kind]
    cluster = MakingCluster()
    model = make(cluster)
    optimizer = SparseOptimizer(model)
    flat(model(features)).square().sum().backward()
    optimizer.step()
    chosen = {t.name: np.arange(t.definition.num_ids) for t in cluster.tables.values()} if ids == "chosen" else None
    plain = materialize(model.eval(), chosen)
    assert not plain.training
    assert {type(table) for table in plain.tables} == {nn.Embedding if ids == "all" else KnownRows}
    before = cluster.n_pulls
    assert torch.equal(flat(plain(features)), flat(model(features)))
    assert cluster.n_pulls == before + 1, "only the model's own"


def test_many_ids_at_once_are_the_same_bits_in_training_mode_too() -> None:
    collection = EmbeddingBagCollection(configs(), MakingCluster())
    rng = np.random.default_rng(0)
    keys, lengths = ["seen", "liked", "ad", "query"], rng.integers(0, 40, 4 * 900)
    features = KeyedJaggedTensor(keys, torch.from_numpy(rng.integers(0, 40, lengths.sum())), lengths=torch.from_numpy(lengths))
    assert torch.equal(materialize(collection)(features).values(), collection(features).values())


def test_names_keys_and_lengths_are_those_of_the_original() -> None:
    cluster = MakingCluster()
    bags, rows = EmbeddingBagCollection(configs(), cluster), EmbeddingCollection(configs(), cluster)
    plain_bags, plain_rows = materialize(bags), materialize(rows)
    features = random_features(0, weighted=True)
    ours, theirs = plain_bags(features), bags(features)
    assert (ours.keys(), ours.length_per_key()) == (theirs.keys(), theirs.length_per_key())
    got, expected = plain_rows(features), rows(features)
    assert list(got) == list(expected)
    for name, one in got.items():
        assert torch.equal(one.lengths(), expected[name].lengths())
        assert torch.equal(one.weights(), expected[name].weights())
    assert (plain_bags.embedding_bag_configs(), plain_bags.is_weighted()) == (configs(), False)
    assert plain_rows.embedding_configs() == configs()
    layer = DenseFeatures(tensorflow_columns(), cluster)
    assert materialize(layer).width == layer.width == 16
    assert [type(materialize(one)) for one in (bags, rows, layer)] == [
        PlainEmbeddingBagCollection,
        PlainEmbeddingCollection,
        PlainDenseFeatures,
    ]


def test_ids_that_are_not_known_have_rows_of_zeros() -> None:
    cluster = MakingCluster()
    bag = EmbeddingBagConfig(name="mean", num_embeddings=None, pooling="mean", feature_names=["f"], **ROWS)
    model = nn.ModuleList([grown(cluster), EmbeddingBagCollection([bag], cluster)])
    known = [-(2**63), 7, 2**62]
    rows, bags = materialize(model.eval(), {"grown": known, "mean": known})
    assert list(rows.state_dict()) == ["tables.0.weight", "tables.0.ids"]
    features = KeyedJaggedTensor(["grown", "f"], torch.tensor([7, 8, -(2**63)] * 2), lengths=torch.tensor([3, 0] * 2))
    expected = model[0](features)["grown"].values()
    expected[1] = 0
    assert torch.equal(rows(features)["grown"].values(), expected)
    mean = cluster.tables["mean"].pull([7, -(2**63)]).sum(0) / 3  # the row of zeros counts
    torch.testing.assert_close(bags(features).values()[0], torch.from_numpy(mean))
    assert not bags(features).values()[1].any()


class Ranker(nn.Module):
    """A collection and a plain embedding over one table, and columns."""

    def __init__(self, cluster: MakingCluster) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(configs(), cluster)
        self.page = Embedding(cluster.tables["page"], padding_idx=3)
        self.alias = self.bags
        self.columns = hashed(cluster)
        self.top = nn.Linear(15 + 4 + self.columns.width, 1)

    def forward(self, features: KeyedJaggedTensor, named: dict[str, Any]) -> torch.Tensor:
        pooled = self.alias(features).values()[:3]
        return self.top(torch.cat([pooled, self.page(torch.tensor([1, 3, 5])), self.columns(named)], dim=1))


BATCH = random_features(4), MAKE["hashed"][1]


def test_a_table_is_one_parameter_however_many_use_it() -> None:
    model = Ranker(MakingCluster()).eval()
    plain = materialize(model)
    assert plain.alias is plain.bags
    assert plain.page.weight is plain.bags.tables[0].weight
    assert [tuple(p.shape) for p in plain.parameters()] == [(40, 4), (40, 3), (40, 2), (20, 2), (100, 3), (1, 25), (1,)]
    assert torch.equal(plain(*BATCH), model(*BATCH))
    chosen = materialize(model, {"page": range(3, 9)})
    assert chosen.page.weight is chosen.bags.tables[0].weight
    assert chosen.bags.tables[0].ids.tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("ids", [None, {"page": range(40), "word": [4, 5]}], ids=["all", "some"])
def test_a_copy_is_copied_saved_and_loaded(ids: dict | None) -> None:
    model = Ranker(MakingCluster()).eval()
    plain = materialize(model, ids)
    expected = plain(*BATCH)
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    for again in (copy.deepcopy(plain), torch.load(file, weights_only=False)):
        assert torch.equal(again(*BATCH), expected)
        assert again.page.weight is again.bags.tables[0].weight
    state = io.BytesIO()
    torch.save(plain.state_dict(), state)
    state.seek(0)
    other = materialize(Ranker(MakingCluster()).eval(), ids)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.equal(other(*BATCH), expected)
    other.load_state_dict(torch.load(state, weights_only=True))
    assert torch.equal(other(*BATCH), expected)


@pytest.mark.parametrize("kind", MAKE)
def test_gradients_of_a_copy_are_those_that_the_model_pushes(kind: str) -> None:
    make, features = MAKE[kind]
    cluster = MakingCluster()
    model = make(cluster)
    optimizer, plain = SparseOptimizer(model), materialize(model)
    theirs = torch.optim.SGD(plain.parameters(), lr=1.0)
    flat(plain(features)).square().sum().backward()
    flat(model(features)).square().sum().backward()
    optimizer.step()
    for table, module in zip(plain.tables, model.table_modules(), strict=True):
        torch.testing.assert_close(table.weight.grad, pushed_grad(cluster, module.table.name, table.weight))
    before = flat(plain(features)).detach().clone()
    theirs.step()
    assert not torch.equal(flat(plain(features)), before)


def test_a_copy_does_not_follow_and_a_new_one_has_what_was_pushed() -> None:
    cluster = MakingCluster()
    model = Ranker(cluster)
    optimizer, plain = SparseOptimizer(model), materialize(model)
    before = plain(*BATCH)
    model(*BATCH).sum().backward()
    optimizer.step()
    assert torch.equal(plain(*BATCH), before)
    assert not torch.equal(materialize(model)(*BATCH), before)
    assert isinstance(model.bags, EmbeddingBagCollection)


def test_ids_are_given_by_the_path_of_a_table_in_its_collection_too() -> None:
    model = nn.ModuleDict({"a": grown(MakingCluster())})
    with pytest.raises(InvalidInputError, match=r"module 'a.tables.0': table 'grown' has no num_ids; give ids=\{'grown'"):
        materialize(model)
    assert materialize(model, {"a.tables.0": [5, 4]})["a"].tables[0].ids.tolist() == [4, 5]
    with pytest.raises(InvalidInputError, match=r"'a' is no table and no path.*the tables \['grown'\] and the paths \['a.tables.0'\]"):
        materialize(model, {"a": [1]})
    with pytest.raises(InvalidInputError, match=r"the rows are 36 bytes, more than max_bytes=35; the largest table is 'grown'"):
        materialize(model, {"grown": [4, 5]}, max_bytes=35)


def test_a_copy_takes_no_features_that_do_not_fit() -> None:
    plain = materialize(EmbeddingBagCollection(configs(), MakingCluster()))
    keys = ["ad", "seen", "liked", "query"]
    for features, match in (
        (KeyedJaggedTensor(keys[:3], torch.tensor([1, 1, 1]), lengths=torch.ones(3, dtype=torch.int64)), "no feature query"),
        (KeyedJaggedTensor(keys, torch.ones(4), lengths=torch.ones(4, dtype=torch.int64)), "table 'page': input must be .* integer ids"),
    ):
        with pytest.raises(InvalidInputError, match=match):
            plain(features)
    for outside in (-1, 40):
        with pytest.raises(IndexError):
            plain(KeyedJaggedTensor(keys, torch.tensor([1, outside, 1, 1]), lengths=torch.ones(4, dtype=torch.int64)))


def test_nothing_in_a_copy_is_looked_up_or_pushed() -> None:
    plain = materialize(Ranker(MakingCluster()))
    assert not any(isinstance(module, LookupModule) for module in plain.modules())
    for make in (SparseOptimizer, lambda model: prepare(model, [BATCH])):
        with pytest.raises(InvalidInputError, match="the model has no"):
            make(plain)


def test_a_copy_can_be_distributed_and_made_plain_again() -> None:
    model = EmbeddingBagCollection(configs(), MakingCluster())
    features = random_features(0)
    expected = model(features).values()
    plain, cluster = materialize(model), MakingCluster()
    distribute(plain, cluster, min_rows=40, optimizer=torch.optim.SGD(plain.parameters(), lr=0.5), carry_weights=True, quiet=True)
    assert len(cluster.tables) == 3
    torch.testing.assert_close(plain(features).values(), expected)
    torch.testing.assert_close(materialize(plain)(features).values(), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_copy_runs_compiled() -> None:
    plain = materialize(Ranker(MakingCluster()))
    torch.testing.assert_close(torch.compile(plain, backend="eager")(*BATCH), plain(*BATCH))


class Scorer(nn.Module):
    """As in DLRM: vectors of numbers and categories together, and sequences."""

    def __init__(self, cluster: MakingCluster, kind: str) -> None:
        super().__init__()
        weighted = kind == "weighted bags"
        self.bags = EmbeddingBagCollection(configs("sum" if weighted else "mean"), cluster, is_weighted=weighted)
        self.rows = EmbeddingCollection(configs(), cluster)
        self.top = nn.Linear(2 + 15, 1)

    def forward(self, numbers: torch.Tensor, features: KeyedJaggedTensor) -> tuple[torch.Tensor, Any]:
        return self.top(torch.cat([numbers, self.bags(features).values()], dim=1)), self.rows(features)


def batch_of(n_bags: int, kind: str) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    rng = np.random.default_rng(n_bags)
    keys = ["query", "liked", "unused", "ad", "seen"]
    lengths = rng.integers(0, 5, len(keys) * n_bags)
    values, weights = torch.from_numpy(rng.integers(0, 40, lengths.sum())), torch.rand(lengths.sum()) if kind == "weighted bags" else None
    return torch.rand(n_bags, 2), KeyedJaggedTensor(keys, values, weights, lengths=torch.from_numpy(lengths))


@pytest.mark.parametrize(("kind", "ids"), [("bags", {"page": range(40), "word": range(40)}), ("weighted bags", None)])
def test_a_copy_with_collections_is_exported_for_batches_of_any_size_from_two_on(kind: str, ids: dict | None) -> None:
    model = Scorer(MakingCluster(), kind).eval()
    n_bags, n_values = torch.export.Dim("n_bags", min=2), torch.export.Dim("n_values")
    of_features = [{0: n_values}, {0: 5 * n_bags}, {0: n_values} if kind == "weighted bags" else None]
    exported = torch.export.export(materialize(model, ids), batch_of(4, kind), dynamic_shapes=({0: n_bags}, of_features))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    with torch.serialization.safe_globals([KeyedJaggedTensor]):
        program = torch.export.load(file).module()
    for size in (2, 4, 9):
        batch = batch_of(size, kind)
        (score, rows), (expected, expected_rows) = program(*batch), model(*batch)
        torch.testing.assert_close(score, expected)
        assert list(rows) == list(expected_rows)
        assert torch.equal(flat(rows), flat(expected_rows))
    numbers, features = batch_of(2, kind)
    short = KeyedJaggedTensor(features.keys(), features.values(), features.weights_or_none(), lengths=features.lengths() * 0)
    with pytest.raises(RuntimeError, match="assertion failed"):
        program(numbers, short)


class OfTensors(nn.Module):
    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.collection(KeyedJaggedTensor(["ad", "seen", "liked", "query"], values, lengths=lengths)).values()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Using len to get tensor shape:torch.jit.TracerWarning")
def test_what_cannot_be_recorded_says_so() -> None:
    plain = materialize(EmbeddingBagCollection(configs(), MakingCluster()))
    with pytest.raises(InvalidInputError, match=r"use torch\.export"):
        torch.jit.trace(OfTensors(plain), (torch.arange(4), torch.ones(4, dtype=torch.int64)))
    columns = materialize(hashed(MakingCluster()))
    with pytest.raises(InvalidInputError, match=r"keep the copy with torch\.save"):
        torch.export.export(columns, ({"word": torch.tensor([1]), "once": torch.tensor([1]), "x": torch.tensor([1.0])},))


class Doubled(EmbeddingBagCollection):
    def forward(self, features: Any) -> Any:
        return super().forward(features).values() * 2


class Other(LookupModule):
    pass


def test_a_module_whose_forward_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="module '0' is a Doubled, a EmbeddingBagCollection with a forward of its own"):
        materialize(nn.Sequential(Doubled(configs(), MakingCluster())))
    with pytest.raises(InvalidInputError, match=r"module .0. is a Other; .* can be made plain are .*Embedding, .*, DenseFeatures"):
        materialize(nn.Sequential(Other()))


def test_columns_without_tables_are_copied_too() -> None:
    plain = materialize(DenseFeatures([numeric_column("x")], MakingCluster()))
    assert copy.deepcopy(plain)({"x": [1.0, 2.0]}).tolist() == [[1.0], [2.0]]
