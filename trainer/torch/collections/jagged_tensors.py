"""Jagged features: bags of different lengths as flat tensors.

JaggedTensor is one feature, KeyedJaggedTensor several with the same number of bags. Names, and the order of arguments, are TorchRec's; its
own objects go into our collections, too, so these do only what a trainer without TorchRec needs (adr/0123). Both are pytree nodes: a walk
over a batch finds their tensors. They can be pickled, so a DataLoader's workers may make them. KeyedTensor is the result of a pooled
collection: one row per example, a block of columns per key. Immutable by convention.

Source: torchrec.sparse.jagged_tensor, KeyedTensor included (interface only).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kvemb.errors import InvalidInputError

from ..modules.pooling import exporting


class _JaggedValues:
    """The common part of both: values of bags, one bag after another, how many each bag has, and perhaps a weight for each value."""

    def __init__(self, values: Tensor, weights: Tensor | None = None, lengths: Tensor | None = None, offsets: Tensor | None = None) -> None:
        self._values, self._weights = values, weights
        self._lengths = _lengths_of(lengths, offsets)
        if weights is not None and weights.shape != values.shape[:1]:
            raise InvalidInputError(f"there are {_shape(weights)} weights for {_shape(values)} values")

    def values(self) -> Tensor:
        """All values, bag after bag."""
        return self._values

    def lengths(self) -> Tensor:
        """How many values each bag has: [b]; of several features [len(keys) * b]."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each bag begins, and the end: one more than `lengths`."""
        return torch.cat([self._lengths.new_zeros(1), self._lengths.cumsum(0, dtype=self._lengths.dtype)])

    def weights_or_none(self) -> Tensor | None:
        """A weight per value, or None."""
        return self._weights

    def weights(self) -> Tensor:
        """A weight per value; refused where there is none."""
        if self._weights is None:
            raise InvalidInputError("these features have no weights")
        return self._weights

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return it with its tensors on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return it in pinned memory; a DataLoader with pin_memory=True calls this."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return cast(Self, pytree.tree_map_only(Tensor, change, self))


class JaggedTensor(_JaggedValues):
    """One feature: values of b bags, one bag after another.

    Args:
        values: [m], or [m, dim].
        weights: [m], a weight for each value, or None.
        lengths: integers [b]: how many values each bag has. Give these or `offsets`.
        offsets: integers [b + 1]: where each bag begins, and the end.

    Raises:
        InvalidInputError: shapes or dtypes do not fit, or not exactly one of `lengths` and `offsets` is given. Lengths that do not add
            up to m are refused where bags are told apart.

    Example:
        >>> feature = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))
        >>> feature.offsets().tolist(), [bag.tolist() for bag in feature.to_dense()]
        ([0, 2, 2, 3], [[1, 2], [], [3]])
    """

    @classmethod
    def from_lists(cls, bags: Iterable[Sequence[Any]], dtype: torch.dtype = torch.int64) -> "JaggedTensor":
        """Make a feature from b lists of numbers; tensors [l] are fine, too.

        Raises:
            InvalidInputError: a list holds floats, and `dtype` is one of integers.

        Example:
            >>> JaggedTensor.from_lists([[1, 2], [], [3]]).lengths().tolist()
            [2, 0, 1]
        """
        parts = [_tensor(bag, dtype) for bag in bags]
        values = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
        return cls(values, lengths=torch.tensor([len(part) for part in parts], dtype=torch.int64))

    def to_dense(self) -> list[Tensor]:
        """The bags, a tensor each."""
        return list(torch.split(self._values, _sizes(self._lengths[:, None], self._values)))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """The bags side by side: [b, l] or [b, l, dim]; longer ones are cut, shorter ones filled up.

        Args:
            desired_length: l; the longest bag's unless given.
            padding_value: fills up shorter bags.

        Example:
            >>> JaggedTensor.from_lists([[1, 2], [], [3]]).to_padded_dense(2).tolist()
            [[1, 2], [0, 0], [3, 0]]
        """
        lengths = self._lengths.to(torch.int64)
        if not exporting():
            _sizes(lengths[:, None], self._values)
        longest = int(lengths.max()) if desired_length is None and len(lengths) else desired_length or 0
        bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        place = torch.arange(len(bag), device=lengths.device) - self.offsets()[:-1].to(torch.int64)[bag]
        kept = place < longest
        dense = self._values.new_full((len(lengths), longest, *self._values.shape[1:]), padding_value)
        return dense.index_put((bag[kept], place[kept]), self._values[kept])

    def __repr__(self) -> str:
        return f"JaggedTensor({_shape(self._values)} values in {_shape(self._lengths)} bags)"


class KeyedJaggedTensor(_JaggedValues):
    """Several features with b bags each: all bags of the first key, then all of the second, ….

    Args:
        keys: the features' names, unique.
        values: [m].
        weights: [m], a weight for each value, or None.
        lengths: integers [len(keys) * b]. Give these or `offsets`.
        offsets: integers [len(keys) * b + 1].

    Raises:
        InvalidInputError: shapes or dtypes do not fit, keys stand twice, or not exactly one of `lengths` and `offsets` is given.

    Example: two examples, "page" holds [1, 2] and [], "ad" holds [5] and [6].
        >>> features = KeyedJaggedTensor.from_lists({"page": [[1, 2], []], "ad": [[5], [6]]})
        >>> features.keys(), features.values().tolist(), features.lengths().tolist()
        (['page', 'ad'], [1, 2, 5, 6], [2, 0, 1, 1])
        >>> features["ad"].values().tolist()
        [5, 6]
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._keys = list(keys)
        super().__init__(values, weights, lengths, offsets)
        if not self._keys or len(set(self._keys)) < len(self._keys):
            raise InvalidInputError(f"keys must be distinct, and one at least; got {self._keys}")
        if len(self._lengths) % len(self._keys):
            raise InvalidInputError(f"{len(self._lengths)} lengths cannot be the same number of bags for each of {len(self._keys)} keys")

    @classmethod
    def from_lengths_sync(cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "KeyedJaggedTensor":
        """Make features from lengths [len(keys) * b], as TorchRec does."""
        return cls(keys, values, weights, lengths)

    @classmethod
    def from_offsets_sync(cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None) -> "KeyedJaggedTensor":
        """Make features from offsets [len(keys) * b + 1], as TorchRec does."""
        return cls(keys, values, weights, offsets=offsets)

    @classmethod
    def from_lists(cls, features: Mapping[str, Iterable[Sequence[Any]]]) -> "KeyedJaggedTensor":
        """Make features from b lists of ids for each key."""
        parts = {key: JaggedTensor.from_lists(bags) for key, bags in features.items()}
        n_bags = {key: len(part.lengths()) for key, part in parts.items()}
        if len(set(n_bags.values())) != 1:
            raise InvalidInputError(f"features must have the same number of bags, and there must be one at least; got {n_bags}")
        values, lengths = (torch.cat(of) for of in zip(*((part.values(), part.lengths()) for part in parts.values()), strict=True))
        return cls(list(parts), values, lengths=lengths)

    def keys(self) -> list[str]:
        """The features' names."""
        return self._keys

    def stride(self) -> int:
        """The number of bags of each key, b."""
        return len(self._lengths) // len(self._keys)

    def to_dict(self) -> dict[str, JaggedTensor]:
        """The features by name."""
        return split_features(self._keys, self._values, self._lengths, self._weights)

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise InvalidInputError(f"no feature {key!r}; there are {', '.join(self._keys)}")
        return self.to_dict()[key]

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor({', '.join(self._keys)}: {_shape(self._values)} values in {_shape(self._lengths)} bags)"


def split_features(keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None) -> dict[str, JaggedTensor]:
    """Take features apart: values [m] in bags of lengths [len(keys) * b], with weights [m] or None."""
    if lengths.shape[0] % len(keys):
        raise InvalidInputError(f"{lengths.shape[0]} lengths for {len(keys)} features: each must have the same number of bags")
    if not exporting():
        _JaggedValues(values, weights, lengths)  # refuses what does not fit; these may be TorchRec's
    per_key = lengths.reshape(len(keys), -1)
    sizes = _sizes(per_key, values)
    weights_of = [None] * len(keys) if weights is None else torch.split(weights, sizes)
    parts = zip(torch.split(values, sizes), weights_of, per_key, strict=True)
    return {key: JaggedTensor(*of) for key, of in zip(keys, parts, strict=True)}


def _sizes(lengths: Tensor, values: Tensor) -> list[int]:
    """Return the sum of each row of lengths [n, b]; refuses lengths that do not fit the values [m]."""
    sizes: list[int] = lengths.sum(1).tolist()
    if exporting():  # the sizes of batches to come; the exported program checks them
        for size in sizes:
            torch._check(size >= 0)  # type: ignore[no-untyped-call]
        torch._check(sum(sizes) == values.shape[0])  # type: ignore[no-untyped-call]
    elif sum(sizes) != values.shape[0] or bool((lengths < 0).any()):
        raise InvalidInputError(f"lengths add up to {sum(sizes)} and must be at least 0; there are {values.shape[0]} values")
    return sizes


def _tensor(bag: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Read a list; floats are never cut off to integers, for weights are floats."""
    if dtype.is_floating_point:
        return torch.as_tensor(bag, dtype=dtype)
    given = torch.as_tensor(bag)
    if given.is_floating_point() and given.numel():
        raise InvalidInputError(f"from_lists: {given[:8].tolist()} are floats, and {dtype} would cut them off; give dtype=torch.float32")
    return given.to(dtype)


def _lengths_of(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    given = offsets if lengths is None else lengths
    if given is None or (lengths is not None and offsets is not None):
        raise InvalidInputError("give lengths or offsets, one of them; by position, weights stand before lengths")
    if given.dim() != 1 or given.is_floating_point() or given.is_complex():
        raise InvalidInputError(f"lengths or offsets must be 1-D integers, got {given.dtype} of shape {tuple(given.shape)}")
    if lengths is not None:
        return lengths
    if not len(given) or int(given[0]) != 0:
        raise InvalidInputError(f"offsets must begin with 0, got {given[:8].tolist()} …")
    return given.diff()


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


# Nodes for pytrees: a walk may put anything in the place of the tensors, so nothing is checked on the way back.


def _parts(features: JaggedTensor | KeyedJaggedTensor) -> tuple[list[Tensor | None], list[str] | None]:
    keys = features._keys if isinstance(features, KeyedJaggedTensor) else None
    return [features._values, features._lengths, features._weights], keys


def _parts_with_keys(features: JaggedTensor | KeyedJaggedTensor) -> tuple[list[tuple[Any, Tensor | None]], list[str] | None]:
    parts, keys = _parts(features)
    names = [pytree.GetAttrKey(name) for name in ("values", "lengths", "weights")]
    return list(zip(names, parts, strict=True)), keys


def _rebuilt(parts: Iterable[Any], keys: list[str] | None) -> Any:
    features: Any = object.__new__(JaggedTensor if keys is None else KeyedJaggedTensor)
    features._values, features._lengths, features._weights = parts
    if keys is not None:
        features._keys = keys
    return features


for _kind in (JaggedTensor, KeyedJaggedTensor):
    pytree.register_pytree_node(
        _kind, _parts, _rebuilt, serialized_type_name=f"kvemb.{_kind.__name__}", flatten_with_keys_fn=_parts_with_keys
    )


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


def _pooled_parts(pooled: KeyedTensor) -> tuple[list[Tensor], tuple[list[str], list[int]]]:
    return [pooled.values()], (pooled.keys(), pooled.length_per_key())


def _pooled_rebuilt(parts: Iterable[Any], context: tuple[list[str], list[int]]) -> KeyedTensor:
    (values,) = parts
    return KeyedTensor(*context, values)


pytree.register_pytree_node(KeyedTensor, _pooled_parts, _pooled_rebuilt, serialized_type_name="kvemb.KeyedTensor")
