"""DeepFM: a factorization machine and a multilayer perceptron that share their embeddings. Data and training: elsewhere.

The two lookups are handed in, so that rows may live in a kvemb table or in torch's own modules; nothing else differs.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepfm.clicks import Clicks


class Batch(NamedTuple):
    """ids int64 [m], values float32 [m], offsets int64 [b], line int64 [m] (which line each id is in), labels float32 [b]."""

    ids: Tensor
    values: Tensor
    offsets: Tensor
    line: Tensor
    labels: Tensor


def to_batch(clicks: Clicks) -> Batch:
    """Turn lines of a click log into tensors."""
    offsets = torch.from_numpy(clicks.offsets)
    line = torch.repeat_interleave(torch.arange(len(clicks)), offsets.diff())
    ids, values, labels = (torch.from_numpy(array) for array in (clicks.ids, clicks.values, clicks.labels))
    return Batch(ids, values, offsets[:-1], line, labels)


class DeepFM(nn.Module):
    """Predict the logit of a click.

        y = bias + sum_i w_i x_i + sum_{i<j} <v_i, v_j> x_i x_j + MLP(features)

    The perceptron sees the vectors v_i x_i of all fields side by side; where the number of features varies from line to
    line there are no fields, and it sees their sum.

    Args:
        linear: EmbeddingBag, mode "sum", dim 1: the w_i.
        factors: Embedding, dim d: the v_i.
        dim: d.
        n_fields: features of every line, or None if that varies.
        hidden: widths of the perceptron's hidden layers.

    Source: Guo, Tang, Ye, Li, He, "DeepFM: a factorization-machine based neural network for CTR prediction", IJCAI 2017;
        the pairs in linear time: Rendle, "Factorization machines", ICDM 2010, lemma 3.1.
    """

    def __init__(self, linear: nn.Module, factors: nn.Module, *, dim: int, n_fields: int | None, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.factors = linear, factors
        self.n_fields = n_fields
        self.bias = nn.Parameter(torch.zeros(()))
        widths = [dim * (n_fields or 1), *hidden]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.perceptron = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, batch: Batch) -> Tensor:
        """Return logits float32 [b]."""
        n_lines = len(batch.labels)
        first_order = self.linear(batch.ids, batch.offsets, per_sample_weights=batch.values).squeeze(1)
        vectors = self.factors(batch.ids) * batch.values[:, None]
        if self.n_fields is None:
            empty = vectors.new_zeros(n_lines, vectors.shape[1])
            total, squares = (empty.index_add(0, batch.line, x) for x in (vectors, vectors.square()))
            features = total
        else:
            by_field = vectors.reshape(n_lines, self.n_fields, -1)
            total, squares = by_field.sum(dim=1), by_field.square().sum(dim=1)
            features = by_field.flatten(1)
        second_order = 0.5 * (total.square() - squares).sum(dim=1)
        logits: Tensor = self.bias + first_order + second_order + self.perceptron(features).squeeze(1)
        return logits

    def dense_parameters(self) -> list[nn.Parameter]:
        """The weights that are no rows of a table: bias and perceptron."""
        return [self.bias, *self.perceptron.parameters()]
