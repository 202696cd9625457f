"""KeyedTensor: what a pooled collection returns, one row per example, a block of columns per key.

Names and methods are TorchRec's. What must not live here: pooling (`embedding_collections`).

Source: torchrec.sparse.jagged_tensor.KeyedTensor (interface only).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kvemb.errors import InvalidInputError


class KeyedTensor:
    """One row per example, with a block of columns per key.

    Args:
        keys: in the order of the blocks.
        length_per_key: columns of each.
        values: [b, sum of these].

    Example:
        >>> pooled = KeyedTensor(["page", "ad"], [2, 1], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> pooled["ad"].tolist(), pooled.offset_per_key()
        ([[3.0]], [0, 2, 3])
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys, self._lengths, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        """The keys, in the order of their blocks."""
        return self._keys

    def values(self) -> Tensor:
        """All blocks side by side: [b, sum of the lengths]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each block."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """Where each block begins, and the end."""
        return [0, *accumulate(self._lengths)]

    def to_dict(self) -> dict[str, Tensor]:
        """The blocks by key: [b, columns] each."""
        return dict(zip(self._keys, torch.split(self._values, self._lengths, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise InvalidInputError(f"no key {key!r}; there are {', '.join(self._keys)}")
        return self.to_dict()[key]

    def __repr__(self) -> str:
        return f"KeyedTensor({', '.join(self._keys)}: {tuple(self._values.shape)})"


def _parts(pooled: KeyedTensor) -> tuple[list[Tensor], tuple[list[str], list[int]]]:
    return [pooled.values()], (pooled.keys(), pooled.length_per_key())


def _rebuilt(parts: Iterable[Any], context: tuple[list[str], list[int]]) -> KeyedTensor:
    (values,) = parts
    return KeyedTensor(*context, values)


pytree.register_pytree_node(KeyedTensor, _parts, _rebuilt, serialized_type_name="kvemb.KeyedTensor")
