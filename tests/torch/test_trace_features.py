"""Collections and feature columns are looked up ahead, too: jagged batches, strings, floats that become ids."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from creating_cluster import CreatingCluster
from torch import Tensor, nn

from kvemb import init, optim
from trainer.columns import (
    bucketized_column,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    embedding_column,
    numeric_column,
)
from trainer.torch import SparseOptimizer, prepare
from trainer.torch.collections.embedding_collections import EmbeddingBagCollection
from trainer.torch.collections.jagged_tensors import KeyedJaggedTensor
from trainer.torch.collections.keyed_recipes import EmbeddingBagConfig
from trainer.torch.modules.dense_features import DenseFeatures

N_BATCHES, N_BAGS = 5, 6
OPTIONS: dict[str, Any] = {"num_embeddings": 40, "initializer": init.normal(std=1.0), "optimizer": optim.sgd(0.5)}


def train(model: nn.Module, batches: Any, use: Callable[[Any], Tensor]) -> list[float]:
    optimizer = SparseOptimizer(model)
    losses = []
    for batch in batches:
        loss = use(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def jagged(seed: int, *, weighted: bool = False) -> KeyedJaggedTensor:
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, 4, 3 * N_BAGS))
    n = int(lengths.sum())
    weights = torch.from_numpy(rng.normal(size=n).astype(np.float32)) if weighted else None
    return KeyedJaggedTensor(["seen", "ad", "query"], torch.from_numpy(rng.integers(0, 40, n)), weights, lengths=lengths)


SHAPES: dict[str, tuple[Callable[[KeyedJaggedTensor], Any], Callable[[Any], KeyedJaggedTensor]]] = {
    "alone": (lambda features: features, lambda batch: batch),
    "in a tuple": (lambda features: (features, torch.zeros(N_BAGS)), lambda batch: batch[0]),
    "moved": (lambda features: {"sparse": features}, lambda batch: batch["sparse"].to("cpu")),
    "made in the loop": (
        lambda features: {"values": features.values(), "lengths": features.lengths()},
        lambda batch: KeyedJaggedTensor(["seen", "ad", "query"], batch["values"], lengths=batch["lengths"]),
    ),
}


@pytest.mark.parametrize(
    ("shape", "weighted"), [*((shape, False) for shape in SHAPES), ("alone", True), ("in a tuple", True), ("moved", True)]
)
def test_a_collection_over_jagged_features(shape: str, weighted: bool) -> None:
    wrap, features_of = SHAPES[shape]

    def made() -> EmbeddingBagCollection:
        tables = [
            EmbeddingBagConfig(name="page", embedding_dim=4, feature_names=["seen", "query"], **OPTIONS),
            EmbeddingBagConfig(name="ad", embedding_dim=4, **OPTIONS),
        ]
        return EmbeddingBagCollection(tables, CreatingCluster(), is_weighted=weighted)

    batches = [wrap(jagged(i, weighted=weighted)) for i in range(N_BATCHES)]
    plain, model = made(), made()
    expected = train(plain, batches, lambda batch: plain(features_of(batch)).values())
    loader = prepare(model, batches, capacity=1)
    got = train(model, loader, lambda batch: model(features_of(batch)).values())
    assert got[0] == expected[0]
    shared = shared_of(model)
    assert (shared.n_ahead, shared.n_pulled) == (2 * (N_BATCHES - 1), 2), loader.report


def shared_of(model: nn.Module) -> Any:
    return next(module.shared for module in model.modules() if hasattr(module, "pending"))


@pytest.mark.parametrize("inside", [False, True])
def test_feature_columns_over_strings_ids_and_floats(inside: bool) -> None:
    words = ["red", "green", "blue", ""]
    rng = np.random.default_rng(0)

    def batch() -> dict[str, Any]:
        features = {
            "word": [[words[i] for i in rng.integers(0, 4, n)] for n in rng.integers(0, 4, N_BAGS)],
            "page": torch.from_numpy(rng.integers(-1, 20, (N_BAGS, 3))),
            "price": torch.from_numpy(rng.normal(size=(N_BAGS, 1)).astype(np.float32)),
        }
        return {"features": features, "label": torch.zeros(N_BAGS)} if inside else features

    def made() -> DenseFeatures:
        price = numeric_column("price")
        columns = [
            price,
            embedding_column(categorical_column_with_hash_bucket("word", 30), 2),
            embedding_column(categorical_column_with_identity("page", 20), 3),
            embedding_column(bucketized_column(price, [-1.0, 0.0, 1.0]), 1),
        ]
        return DenseFeatures(columns, CreatingCluster(), optimizer=optim.sgd(0.5))

    model, batches = made(), [batch() for _ in range(N_BATCHES)]
    loader = prepare(model, batches, capacity=2)
    train(model, loader, lambda batch: model(batch["features"] if inside else batch))
    shared = shared_of(model)
    assert shared.n_ahead == 3 * (N_BATCHES - 1), loader.report
    assert shared.n_pulled == 3
