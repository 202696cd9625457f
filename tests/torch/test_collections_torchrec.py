"""Our collections beside TorchRec's own, where that is installed (it needs fbgemm_gpu; nothing here does)."""

import warnings

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchrec = pytest.importorskip("torchrec", reason="TorchRec is not installed; its features are told by their methods")

import torch
from creating_cluster import CreatingCluster, pushed_grad, rows_of

from kvemb import init, optim
from trainer.torch import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    SparseOptimizer,
)

N_IDS = 40


def random_features(kind: type, seed: int, *, weighted: bool) -> KeyedJaggedTensor:
    """Of ours or of TorchRec's: both take the same arguments."""
    rng = np.random.default_rng(seed)
    keys = ["query", "liked", "unused", "ad", "seen"]
    lengths = rng.integers(0, 6, len(keys) * 7)
    weights = torch.from_numpy(rng.normal(size=lengths.sum()).astype(np.float32)) if weighted else None
    return kind(keys, torch.from_numpy(rng.integers(0, N_IDS, lengths.sum())), weights, lengths=torch.from_numpy(lengths))


def test_arguments_stand_where_torchrecs_do() -> None:
    values, weights, lengths, offsets = torch.arange(3), torch.rand(3), torch.tensor([2, 1]), torch.tensor([0, 2, 3])
    for ours, theirs, args in (
        (JaggedTensor, torchrec.JaggedTensor, (values, weights, lengths)),
        (KeyedJaggedTensor, torchrec.KeyedJaggedTensor, (["a", "b"], values, weights, lengths)),
        (KeyedJaggedTensor.from_lengths_sync, torchrec.KeyedJaggedTensor.from_lengths_sync, (["a", "b"], values, lengths, weights)),
        (KeyedJaggedTensor.from_offsets_sync, torchrec.KeyedJaggedTensor.from_offsets_sync, (["a", "b"], values, offsets, weights)),
    ):
        got, expected = ours(*args), theirs(*args)
        for method in ("values", "weights", "lengths", "offsets"):
            assert torch.equal(getattr(got, method)(), getattr(expected, method)())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_pooled_features_are_torchrecs(seed: int, weighted: bool) -> None:
    pooling = torchrec.modules.embedding_configs.PoolingType.SUM if weighted else torchrec.modules.embedding_configs.PoolingType.MEAN
    shapes = [("page", 4, ["seen", "liked"]), ("ad", 3, ["ad"]), ("word", 2, ["seen", "query"])]
    common = [{"name": n, "embedding_dim": d, "num_embeddings": N_IDS, "feature_names": f, "pooling": pooling} for n, d, f in shapes]
    cluster = CreatingCluster()
    own = [EmbeddingBagConfig(optimizer=optim.sgd(0.1), initializer=init.normal(std=1.0), **one) for one in common]
    ours = EmbeddingBagCollection(own, cluster, is_weighted=weighted)
    theirs = torchrec.EmbeddingBagCollection([torchrec.EmbeddingBagConfig(**one) for one in common], is_weighted=weighted)
    for name, *_ in shapes:
        theirs.embedding_bags[name].weight.data = rows_of(cluster.tables[name], N_IDS).detach()
    optimizer = SparseOptimizer(ours)
    features = random_features(torchrec.KeyedJaggedTensor, seed, weighted=weighted)
    got, expected = ours(features), theirs(features)
    assert (got.keys(), got.length_per_key(), got.offset_per_key()) == (
        expected.keys(),
        expected.length_per_key(),
        expected.offset_per_key(),
    )
    torch.testing.assert_close(got.values(), expected.values(), rtol=1e-6, atol=1e-6)
    assert torch.equal(ours(random_features(KeyedJaggedTensor, seed, weighted=weighted)).values(), got.values())
    got.values().square().sum().backward()
    expected.values().square().sum().backward()
    optimizer.step()
    for name, *_ in shapes:
        grad = theirs.embedding_bags[name].weight.grad
        torch.testing.assert_close(pushed_grad(cluster, name, grad), grad, rtol=1e-5, atol=1e-5)


def test_sequences_are_torchrecs() -> None:
    common = [{"name": name, "embedding_dim": 4, "num_embeddings": N_IDS, "feature_names": ["seen", "liked"]} for name in "pq"]
    cluster = CreatingCluster()
    ours = EmbeddingCollection([EmbeddingConfig(**one) for one in common], cluster)
    theirs = torchrec.EmbeddingCollection([torchrec.EmbeddingConfig(**one) for one in common])
    for name in "pq":
        theirs.embeddings[name].weight.data = rows_of(cluster.tables[name], N_IDS).detach()
    features = random_features(torchrec.KeyedJaggedTensor, 3, weighted=False)
    got, expected = ours(features), theirs(features)
    assert list(got) == list(expected)
    for name, feature in expected.items():
        assert torch.equal(got[name].values(), feature.values())
        assert torch.equal(got[name].lengths(), feature.lengths())
