"""Click logs as DLRM wants them: 13 numbers and 26 categories per line, from a Criteo file or drawn from a planted model."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from deepfm.readers import format_of, read_clicks
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from dlrm.planted_clicks import KEYS, N_NUMBERS, planted_clicks
from kvemb.errors import InvalidInputError
from kvemb.torch import KeyedJaggedTensor

NUMBER_STD = 3.0  # of log(1 + x) in Criteo's log, about: brings it near 1


class Batch(NamedTuple):
    """Numbers float32 [b, 13], a bag of one id for each key and line, labels float32 [b]."""

    numbers: Tensor
    categories: KeyedJaggedTensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Lines(Dataset[Batch]):
    """n lines: numbers float32 [n, 13], ids int64 [n, 26] from 0 to n_ids - 1, labels float32 [n]."""

    numbers: NDArray[np.float32]
    ids: NDArray[np.int64]
    labels: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, lines: list[int]) -> Batch:
        """Return some lines as a batch."""
        ids = torch.from_numpy(np.ascontiguousarray(self.ids[lines].T).reshape(-1))  # key after key
        categories = KeyedJaggedTensor(KEYS, ids, lengths=torch.ones(len(ids), dtype=torch.int64))
        return Batch(torch.from_numpy(self.numbers[lines]), categories, torch.from_numpy(self.labels[lines]))

    def split(self, n_valid: int) -> tuple["Lines", "Lines"]:
        """Part with the last lines."""
        cut = len(self) - n_valid
        first, last = (Lines(self.numbers[part], self.ids[part], self.labels[part]) for part in (slice(cut), slice(cut, None)))
        return first, last

    def loader(self, batch_size: int, seed: int) -> DataLoader[Batch]:
        """Go through all whole batches in an order of the seed's own, another one in each epoch."""
        order = RandomSampler(self, generator=torch.Generator().manual_seed(seed))
        return DataLoader(self, sampler=BatchSampler(order, batch_size, drop_last=True), batch_size=None)


def criteo(path: str, n_ids: int) -> Lines:
    """Read a Criteo file; each column's categories are hashed to n_ids ids.

    Raises:
        InvalidInputError: no such file, another format, or a bad line.
    """
    if (found := format_of(path)) != "Criteo":
        raise InvalidInputError(f"{path}: {found}; expected Criteo's format, 40 columns separated by tabs")
    clicks = read_clicks(path)
    values, ids = (array.reshape(len(clicks), -1) for array in (clicks.values, clicks.ids))
    return Lines(values[:, :N_NUMBERS] / NUMBER_STD, (ids[:, N_NUMBERS:].view(np.uint64) % n_ids).astype(np.int64), clicks.labels)


def synthetic(n_lines: int, n_ids: int, seed: int) -> Lines:
    """Draw lines whose labels depend on a weight per category, and on the products of some numbers."""
    return Lines(*planted_clicks(n_lines, n_ids, seed))
