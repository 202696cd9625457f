"""Batches of pairs, as torch's tensors."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from two_tower.interests import Pairs, log_shares


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of pairs, in another order every time."""

    pairs: Pairs
    batch_size: int
    rng: np.random.Generator

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        log_q = log_shares(self.pairs)
        order = self.rng.permutation(len(self.pairs))
        for at in range(0, len(order) - self.batch_size + 1, self.batch_size):
            user, item = torch.from_numpy(self.pairs[order[at : at + self.batch_size]]).unbind(1)
            yield {"user": user, "item": item, "log_q": torch.from_numpy(log_q[item.numpy()])}
