"""A trained two-tower model as servers use it: rows as they are now, and scores by the dense part that the trainer exported.

The trainer writes a folder with `export`: scores.pt2, the dense part, and items.npy, the items to choose from. A server needs no model code
and no trainer for it.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

import kvemb.serve
from kvemb.torch import export_dense

USERS, ITEMS = "two_tower.user", "two_tower.item"


class Scores(nn.Module):
    """How well users and items go together, by the vectors of a two-tower model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """int64 [b] and [n] -> float32 [b, n]."""
        return self.model.user_vectors(user) @ self.model.item_vectors(item).T


def export(model: nn.Module, folder: Path, n_items: int) -> None:
    """Write what a server needs beside the rows."""
    export_dense(Scores(model), {"user": torch.arange(2), "item": torch.arange(3)}, folder / "scores.pt2")
    np.save(folder / "items.npy", np.arange(n_items))


class Recommender:
    """Recommends items to users. Thread-safe.

    Args:
        url: of the cluster, its kvemb.yaml; no trainer and no parameter server has to be there.
        folder: that `export` wrote.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.items: NDArray[np.int64] = np.load(folder / "items.npy")
        self._client = kvemb.serve.connect(url, timeout_ms=1000)
        self._model = kvemb.serve.Model(self._client, folder / "scores.pt2")

    def __enter__(self) -> "Recommender":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def recommend(self, users: ArrayLike, k: int, timeout_ms: float | None = None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the k best items of each of b users, and their scores: [b, k] both."""
        scores = self._model({"user": users, "item": self.items}, timeout_ms=timeout_ms)
        best = np.argsort(-scores, axis=1)[:, :k]
        return self.items[best], np.take_along_axis(scores, best, axis=1)
