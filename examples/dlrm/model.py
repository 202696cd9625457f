"""DLRM: numbers through a perceptron, categories through embeddings, their pairwise products through another. Data: elsewhere.

The lookups are handed in, so that rows may live in kvemb tables or in torch's own modules; nothing else differs.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.planted_clicks import N_NUMBERS


class DLRM(nn.Module):
    """Predict the logit of a click.

    Args:
        lookups: from a KeyedJaggedTensor with b bags per key to a KeyedTensor with float32 [b, dim] per key.
        n_features, dim: number of keys, and the width of their vectors.
        bottom: widths of the hidden layers for numbers; one of width `dim` follows.
        top: widths of the hidden layers for products.

    Source: Naumov et al., "Deep learning recommendation model for personalization and recommendation systems", 2019.
    """

    def __init__(
        self, lookups: nn.Module, *, n_features: int, dim: int, bottom: Sequence[int] = (512, 256), top: Sequence[int] = (512, 256)
    ) -> None:
        super().__init__()
        self.lookups, self.n_features = lookups, n_features
        self.bottom = nn.Sequential(*_layers([N_NUMBERS, *bottom, dim]))
        self.top = nn.Sequential(*_layers([dim + n_features * (n_features + 1) // 2, *top]), nn.Linear(top[-1], 1))
        row, column = torch.tril_indices(n_features + 1, n_features + 1, -1)
        self.register_buffer("pairs", row * (n_features + 1) + column, persistent=False)

    def forward(self, numbers: Tensor, categories: Any) -> Tensor:
        """Return logits float32 [b].

        Args:
            numbers: float32 [b, 13].
            categories: what the lookups take.
        """
        dense = self.bottom(numbers)
        looked_up = self.lookups(categories).values().reshape(dense.shape[0], self.n_features, -1)
        vectors = torch.cat([dense[:, None], looked_up], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([dense, products], dim=1)).squeeze(1)
        return logits

    def dense_parameters(self) -> list[nn.Parameter]:
        """The weights that are no rows."""
        return [*self.bottom.parameters(), *self.top.parameters()]


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    return [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
