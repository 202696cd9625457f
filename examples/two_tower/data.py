"""Pairs of a user and an item that were drawn from hidden interests, and batches of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

N_INTERESTS, PER_USER, FAITHFUL = 20, 20, 0.9
Pairs = NDArray[np.int64]
"""[n, 2]: a user and an item."""


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of pairs, in another order every time."""

    pairs: Pairs
    batch_size: int
    rng: np.random.Generator

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        log_q = np.log(np.bincount(self.pairs[:, 1]).clip(1) / len(self.pairs)).astype(np.float32)
        order = self.rng.permutation(len(self.pairs))
        for at in range(0, len(order) - self.batch_size + 1, self.batch_size):
            user, item = torch.from_numpy(self.pairs[order[at : at + self.batch_size]]).unbind(1)
            yield {"user": user, "item": item, "log_q": torch.from_numpy(log_q[item.numpy()])}


def draw(n_users: int, n_items: int, rng: np.random.Generator) -> tuple[Pairs, Pairs]:
    """Draw PER_USER pairs per user to train on, and one more to be found: every user has two interests and mostly takes items of these."""
    interest = rng.permutation(n_items) % N_INTERESTS
    by_interest = [np.flatnonzero(interest == one) for one in range(N_INTERESTS)]
    users = np.repeat(np.arange(n_users), PER_USER + 1)
    own = rng.integers(0, N_INTERESTS, (n_users, 2))[users, rng.integers(0, 2, len(users))]
    own = np.where(rng.random(len(users)) < FAITHFUL, own, rng.integers(0, N_INTERESTS, len(users)))
    rank = rng.random(len(users)) ** 2  # some items are more popular than others
    items = np.array([by_interest[one][int(at * len(by_interest[one]))] for one, at in zip(own.tolist(), rank.tolist(), strict=True)])
    pairs = np.stack([users, items], axis=1).reshape(n_users, PER_USER + 1, 2)
    return pairs[:, 1:].reshape(-1, 2), pairs[:, 0]
