"""The values of a feature, from any kind of input: bags of values, one after another; and the buckets of values.

Dense arrays and lists have missing values (-1, or "" for text, as in TensorFlow), jagged input has none. No loop over values; lists of
Python objects are walked once, at the edge.

A value's bucket is XXH64 (seed 0) of its bytes, modulo the buckets, on every machine: UTF-8 for text, 8 little-endian bytes for an integer,
as any XXH64 library computes it. Integers are hashed by vector operations, text in a Python loop over the unique strings of a call, for
NumPy has no hash of strings (adr/0018 has the times). Stateless, hence thread- and fork-safe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

MISSING_INTEGER = -1
MISSING_TEXT = ("", b"")


@dataclass(frozen=True, eq=False)
class Bags:
    """Values [m] (integers, floats, or str and bytes) of one feature in one batch; lengths int64 [b] of its bags; weights float32 [m]."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None

    def keep(self, mask: NDArray[np.bool_]) -> "Bags":
        """Return the bags with only those values for which `mask` bool [m] is true; bags may become empty."""
        if mask.all():
            return self
        kept = np.concatenate([[0], np.cumsum(mask)])
        ends = np.cumsum(self.lengths)
        weights = None if self.weights is None else self.weights[mask]
        return Bags(self.values[mask], kept[ends] - kept[ends - self.lengths], weights)

    def present(self) -> "Bags":
        """Return the bags without the values that stand for a missing one."""
        if self.values.dtype.kind in "iu":
            return self.keep(self.values != MISSING_INTEGER)
        if self.values.dtype.kind == "O":
            return self.keep(np.fromiter((value not in MISSING_TEXT for value in self.values.tolist()), np.bool_, len(self.values)))
        return self


def dense_bags(array: NDArray[Any]) -> Bags:
    """Read an array [b] or [b, l] of numbers or text, missing values included."""
    if array.ndim not in (1, 2):
        raise InvalidInputError(f"a dense feature must have the shape [b] or [b, l], got {array.shape}")
    if array.dtype.kind not in "iufUSTO":
        raise InvalidInputError(f"a feature must hold integers, floats or text, got dtype {array.dtype}")
    length = 1 if array.ndim == 1 else array.shape[1]
    flat = array.reshape(-1)
    return Bags(flat.astype(object) if flat.dtype.kind in "UST" else flat, np.full(len(array), length, np.int64))


def jagged_bags(values: NDArray[Any], lengths: NDArray[Any], weights: NDArray[Any] | None = None) -> Bags:
    """Read values [m] and the lengths [b] of the bags that they make up."""
    if lengths.dtype.kind not in "iu" or lengths.ndim != 1 or values.ndim != 1:
        raise InvalidInputError(
            f"jagged: values {values.dtype} {values.shape}, lengths {lengths.dtype} {lengths.shape}; give [m] and integers [b]"
        )
    if (lengths < 0).any() or int(lengths.sum()) != len(values):
        raise InvalidInputError(f"jagged: lengths add up to {int(lengths.sum())} and must be at least 0; there are {len(values)} values")
    if weights is not None and weights.shape != values.shape:
        raise InvalidInputError(f"jagged: weights have the shape {weights.shape}, values {values.shape}")
    return Bags(values, lengths.astype(np.int64, copy=False), None if weights is None else weights.astype(np.float32, copy=False))


def list_bags(rows: Sequence[Any]) -> Bags:
    """Read a list of b values (numbers, str or bytes), or of b lists of them that may differ in length; missing values included."""
    nested = [isinstance(row, list | tuple) for row in rows]
    if any(nested) and not all(nested):
        raise InvalidInputError("a list feature must hold values, or lists of values, not both")
    lengths = np.fromiter(map(len, rows), np.int64, len(rows)) if any(nested) else np.ones(len(rows), np.int64)
    flat = list(chain.from_iterable(rows)) if any(nested) else list(rows)
    if any(isinstance(value, str | bytes) for value in flat):
        values = np.empty(len(flat), object)
        values[:] = flat
        return Bags(values, lengths)
    try:
        values = np.asarray(flat if flat else np.empty(0, np.int64))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"a list feature cannot be read: {error}") from error
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise InvalidInputError(
            f"a list feature must hold integers, floats, str or bytes, got dtype {values.dtype} of shape {values.shape}"
        )
    return Bags(values, lengths)


_PRIMES: Final = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_P1, _P2, _P3, _P4, _P5 = (np.uint64(prime) for prime in _PRIMES)


def hash_buckets(values: NDArray[Any], n_buckets: int) -> NDArray[np.int64]:
    """Give each value [m] its bucket: int64 [m], 0 to n_buckets - 1. Source: github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md"""
    return (hash_values(values) % np.uint64(n_buckets)).view(np.int64)


def cross_bags(parts: Sequence[Bags], n_buckets: int) -> Bags:
    """Give each combination of a value from each part its bucket, int64; within a bag the last part's values vary fastest.

    The hash begins as that of the first value. Each further value makes it the XXH64 (seed 0) of 16 bytes: the hash so far and the hash of
    the value, both little-endian. So the order of the parts counts.
    """
    if len({len(part.lengths) for part in parts}) > 1:
        raise InvalidInputError(f"what is crossed must have the same number of examples, got {[len(part.lengths) for part in parts]}")
    words, lengths = hash_values(parts[0].values), parts[0].lengths
    for part in parts[1:]:
        product = lengths * part.lengths
        bag = np.repeat(np.arange(len(product)), product)  # [m], of each combination
        place = np.arange(len(bag)) - np.repeat(np.cumsum(product) - product, product)  # [m], its place in its bag
        before, further = np.divmod(place, part.lengths[bag])
        before += (np.cumsum(lengths) - lengths)[bag]
        further += (np.cumsum(part.lengths) - part.lengths)[bag]
        words, lengths = _hash_words(words[before], hash_values(part.values)[further]), product
    return Bags((words % np.uint64(n_buckets)).view(np.int64), lengths)


def hash_values(values: NDArray[Any]) -> NDArray[np.uint64]:
    """XXH64 of integers or text: [m] -> uint64 [m]."""
    return hash_integers(values) if values.dtype.kind in "iu" else hash_texts(values.tolist())


def hash_integers(values: NDArray[Any]) -> NDArray[np.uint64]:
    """XXH64 of the 8 little-endian bytes of each integer: [m] -> uint64 [m]."""
    return _hash_words(values.astype(np.uint64 if values.dtype.kind == "u" else np.int64, copy=False).view(np.uint64))


def _hash_words(*lanes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """XXH64 of the little-endian bytes of one to three words, one after another: each [m] -> [m]."""
    words: Any = np.uint64((_PRIMES[4] + 8 * len(lanes)) & 0xFFFFFFFFFFFFFFFF)
    for word in lanes:
        lane = _rotate(word * _P2, 31)
        lane *= _P1
        lane ^= words
        words = _rotate(lane, 27)
        words *= _P1
        words += _P4
    words ^= words >> np.uint64(33)
    words *= _P2
    words ^= words >> np.uint64(29)
    words *= _P3
    words ^= words >> np.uint64(32)
    return cast("NDArray[np.uint64]", words)


def hash_texts(values: Sequence[object]) -> NDArray[np.uint64]:
    """XXH64 of the UTF-8 bytes of each string, or of bytes as they are; each unique value is hashed once."""
    try:
        known = {value: xxhash.xxh64_intdigest(text_bytes(value)) for value in set(values)}
    except TypeError as error:  # an unhashable element
        raise InvalidInputError(f"text must be str or bytes: {error}") from error
    return np.fromiter(map(known.__getitem__, values), np.uint64, len(values))


def text_bytes(value: object) -> bytes:
    """Return the UTF-8 bytes of str, bytes as they are, and refuse anything else."""
    if isinstance(value, bytes):
        return bytes(value)
    if not isinstance(value, str):
        raise InvalidInputError(f'text must be str or bytes, got {value!r} ({type(value).__name__}); for a value that is missing give ""')
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{value!r} has no UTF-8 form: {error.reason}") from None


def _rotate(words: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    high = words << np.uint64(bits)
    high |= words >> np.uint64(64 - bits)
    return high
