"""torch's own embeddings in a collection's place: the rows of --local."""

from collections.abc import Sequence

import torch
from torch import nn

from kvemb.torch import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor


class LocalBags(nn.Module):
    """EmbeddingBagCollection with torch's own nn.EmbeddingBag inside, one per table.

    Args:
        tables: rows begin uniform in ± 1/sqrt(num_embeddings), as those of a collection do.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.keys = [table.name for table in tables]
        self.bags = nn.ModuleList(nn.EmbeddingBag(t.num_embeddings, t.embedding_dim, mode="sum", sparse=True) for t in tables)
        for bag in self.bags:
            nn.init.uniform_(bag.weight, -(bag.num_embeddings**-0.5), bag.num_embeddings**-0.5)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool; float32 [b, dim] per key."""
        pooled = []
        for key, bag in zip(self.keys, self.bags, strict=True):
            feature = features[key]
            pooled.append(bag(feature.values(), feature.offsets()[:-1]))
        return KeyedTensor(self.keys, [one.shape[1] for one in pooled], torch.cat(pooled, dim=1))
