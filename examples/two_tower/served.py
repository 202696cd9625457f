"""A trained two-tower model as servers use it: rows from storage as they are now, and scores of an exported torch program.

The trainer writes a folder with `export`: scores.pt2, from rows of users [b, dim] and of items [n, dim] to scores [b, n], and items.npy,
the items to choose from. A server needs no model code and no trainer for it.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import kvemb.serve
from kvemb.serve import ServedFrom

USERS, ITEMS = "two_tower.user", "two_tower.item"


class Scores(nn.Module):
    """The products of users' and items' vectors."""

    def __init__(self, user_tower: nn.Module, item_tower: nn.Module) -> None:
        super().__init__()
        self.user_tower, self.item_tower = user_tower, item_tower

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """float32 [b, dim] and [n, dim] -> [b, n]."""
        return F.normalize(self.user_tower(users), dim=1) @ F.normalize(self.item_tower(items), dim=1).T


def export(folder: Path, user_tower: nn.Module, item_tower: nn.Module, dim: int, n_items: int) -> None:
    """Write what a server needs beside the rows."""
    any_number = ({0: torch.export.Dim("users")}, {0: torch.export.Dim("items")})
    program = torch.export.export(
        Scores(user_tower, item_tower).eval(), (torch.zeros(2, dim), torch.zeros(3, dim)), dynamic_shapes=any_number
    )
    torch.export.save(program, folder / "scores.pt2")
    np.save(folder / "items.npy", np.arange(n_items))


class Recommender:
    """Recommends items to users. Thread-safe.

    Args:
        url: of the cluster, its kvemb.yaml; no trainer and no parameter server has to be there.
        folder: that `export` wrote.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.items: NDArray[np.int64] = np.load(folder / "items.npy")
        self._scores = torch.export.load(folder / "scores.pt2").module()
        self.client = kvemb.serve.connect(url, timeout_ms=1000)

    def __enter__(self) -> "Recommender":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.client.close()

    def recommend(self, users: ArrayLike, k: int, timeout_ms: float | None = None) -> tuple[NDArray[np.int64], NDArray[np.float32], bool]:
        """Return the k best items of each of b users and their scores, [b, k] both, and whether rows are older than they should be."""
        found = self.client.lookup_tables({USERS: users, ITEMS: self.items}, return_sources=True, timeout_ms=timeout_ms)
        with torch.inference_mode():
            rows = (torch.from_numpy(found[name][0]) for name in (USERS, ITEMS))
            best = self._scores(*rows).topk(min(k, len(self.items)))
        return self.items[best.indices.numpy()], best.values.numpy(), any(bool((found[name][1] >= ServedFrom.OLD).any()) for name in found)
