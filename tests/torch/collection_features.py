"""Tables of a collection, and features drawn for them."""

import numpy as np
import torch

from kvemb import init, optim
from trainer.torch.collections.jagged_tensors import KeyedJaggedTensor
from trainer.torch.collections.keyed_recipes import EmbeddingBagConfig

N_IDS, N_BAGS = 40, 7
FIRST = init.normal(std=1.0)


def configs(word_pooling: str = "mean") -> list[EmbeddingBagConfig]:
    """`page` serves two features, `seen` goes into two tables."""
    common = {"num_embeddings": N_IDS, "initializer": FIRST, "optimizer": optim.sgd(0.5)}
    return [
        EmbeddingBagConfig(name="page", embedding_dim=4, feature_names=["seen", "liked"], **common),
        EmbeddingBagConfig(name="ad", embedding_dim=3, **common),
        EmbeddingBagConfig(name="word", embedding_dim=2, feature_names=["seen", "query"], pooling=word_pooling, **common),
    ]


def random_features(seed: int, *, weighted: bool = False) -> KeyedJaggedTensor:
    """Every feature with bags of 0 to 5 ids, duplicates among them, and a feature that no table has."""
    rng = np.random.default_rng(seed)
    keys = ["query", "liked", "unused", "ad", "seen"]
    lengths = rng.integers(0, 6, len(keys) * N_BAGS)
    values = torch.from_numpy(rng.integers(0, N_IDS, lengths.sum()))
    weights = torch.from_numpy(rng.normal(size=lengths.sum()).astype(np.float32)).requires_grad_() if weighted else None
    return KeyedJaggedTensor(keys, values, weights, lengths=torch.from_numpy(lengths))
