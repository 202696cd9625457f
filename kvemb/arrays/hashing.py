"""64-bit mixing, digests, the order of rows, and the counter generator that initial rows and stochastic rounding draw from.

Pure integer arithmetic: the same bits on every CPU, platform and NumPy version.

Strategy: `mix64` is the splitmix64 finalizer, a bijection on 64-bit words. The counter generator gives row r and counter c the word
mix64(state(r) + (c + 1) * GOLDEN). So every word is a pure function of its row's state and its counter: no draw depends on another. Every
function is stateless, hence thread- and fork-safe.
"""

import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.errors import ConfigError, InvalidInputError

if int(np.__version__.partition(".")[0]) < 2:  # seen with momentum, in tests/unit/test_reconstruct.py
    raise ConfigError(
        f"NumPy {np.__version__} is installed, kvemb needs 2.0 or newer: with NumPy 1, rows that are rebuilt from a journal differ in "
        "their last bits from those in storage. Install numpy>=2, if need be in an environment of its own, for trainers and shards alike."
    )

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: splitmix64's increment.
# Arrays without axes: of a small batch, an operation with a NumPy scalar takes three times as long.
_MUL_1: Final = np.array(0xBF58476D1CE4E5B9, np.uint64)
_MUL_2: Final = np.array(0x94D049BB133111EB, np.uint64)
_UNMUL_1, _UNMUL_2 = np.uint64(0x96DE1B173F119089), np.uint64(0x319642B2D24D8EC3)  # times the above: 1
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.array(30, np.uint64), np.array(27, np.uint64), np.array(31, np.uint64)
_BLOCK_WORDS: Final = 1 << 14  # 128 KiB per 8-byte buffer: a handful of them stay in a core's second-level cache.


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble uint64 words of any shape with the splitmix64 finalizer (a bijection; 0 maps to 0): a new array.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (variant 13 of David Stafford's mixers).
    """
    if not isinstance(x, np.ndarray) or x.dtype != np.uint64:
        got = getattr(x, "dtype", type(x).__name__)
        raise InvalidInputError(f"expected a uint64 array, got {got}; view int64 ids as uint64")
    z = np.array(x, order="C")  # A copy, and still an array where x has no axes.
    mix64_inplace(z, np.empty_like(z))
    return z


def mix64_inplace(z: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """Overwrite `z` with mix64(z), by way of `scratch` of the same shape, uint64. For inner loops; trusts its arguments."""
    # An array for every result: no allocation, and array ufuncs wrap around silently where NumPy scalars would warn.
    np.right_shift(z, _SHIFT_30, scratch)
    np.bitwise_xor(z, scratch, z)
    np.multiply(z, _MUL_1, z)
    np.right_shift(z, _SHIFT_27, scratch)
    np.bitwise_xor(z, scratch, z)
    np.multiply(z, _MUL_2, z)
    np.right_shift(z, _SHIFT_31, scratch)
    np.bitwise_xor(z, scratch, z)


def unmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the words that `mix64` scrambles to these: uint64, a new array of the same shape."""
    z: NDArray[np.uint64] = x ^ x >> np.uint64(31) ^ x >> np.uint64(62)
    z *= _UNMUL_2
    z ^= z >> np.uint64(27) ^ z >> np.uint64(54)
    z *= _UNMUL_1
    z ^= z >> np.uint64(30) ^ z >> np.uint64(60)
    return z


def digest64(*parts: str | bytes | int) -> int:
    """Digest parts to 64 bits, for generator keys, tags and checks: the first 8 bytes, little-endian, of BLAKE2b-512 (RFC 7693).

    Every part is preceded by its type and length, so ("ab", "c"), ("a", "bc"), ("1",) and (1,) all differ.
    """
    state = hashlib.blake2b()
    for part in parts:
        tag, payload = _payload(part)
        state.update(tag + len(payload).to_bytes(8, "little") + payload)
    return int.from_bytes(state.digest()[:8], "little")


def hash_ids(strings: Sequence[str] | NDArray[Any]) -> NDArray[np.int64]:
    """Turn strings into 64-bit ids: XXH64 (seed 0) of the UTF-8 bytes, seen as int64 so that torch can hold them.

    The mapping is public and fixed: any XXH64 library computes the same ids. This is preprocessing, not a data path: a Python loop over the
    unique strings, each hashed once. Hash when the data set is written or loaded, not in the training step. Two of n unique strings share
    an id with probability about n**2 / 2**65.

    Args:
        strings: a flat sequence of str, or a NumPy array (any shape) of str, StringDType, or object holding str.

    Returns:
        int64 ids of the same shape.

    Raises:
        InvalidInputError: a bare string, an element that is not a str, or text that has no UTF-8 form.

    Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

    Example:
        >>> hash_ids(["socket", "AF_INET6", "socket"]).tolist()
        [-7455318800513058262, 2151866288613542769, -7455318800513058262]
    """
    if isinstance(strings, (str, bytes)):
        raise InvalidInputError(f"strings must be a sequence of str, got one {type(strings).__name__}; pass [value]")
    if isinstance(strings, np.ndarray):
        if strings.dtype.kind not in "UTO" and strings.size:
            raise InvalidInputError(f"strings must be an array of str or object, got dtype {strings.dtype}")
        flat, shape = strings.ravel().tolist(), strings.shape
    else:
        flat, shape = list(strings), (len(strings),)
    try:
        # Not np.unique: sorting the text took 1.3 to 5 times as long as all of this.
        known = {text: _hash_text(text) for text in set(flat)}
    except TypeError as error:  # An unhashable element.
        raise InvalidInputError(f"strings must be a flat sequence of str: {error}") from error
    return np.fromiter(map(known.__getitem__, flat), np.uint64, len(flat)).view(np.int64).reshape(shape)


def column_words(states: NDArray[np.uint64], first: int, out: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """Fill `out`, uint64 [m, w], with the counter generator's words: out[r, c] = mix64(states[r] + (first + c + 1) * GOLDEN)."""
    counters = np.arange(first + 1, first + 1 + out.shape[1], dtype=np.uint64)
    np.add(states[:, None], counters[None, :] * GOLDEN, out=out)
    mix64_inplace(out, scratch)


def row_blocks(n_rows: int, n_columns: int) -> Iterator[slice]:
    """Split rows into slices whose [rows, columns] buffers fit a core's cache, which also bounds memory."""
    step = max(1, _BLOCK_WORDS // max(1, n_columns))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def _payload(part: str | bytes | int) -> tuple[bytes, bytes]:
    if isinstance(part, str):
        return b"s", _utf8(part)
    if isinstance(part, bytes):
        return b"b", part
    try:
        number = operator.index(part)  # Also NumPy integers.
    except TypeError:
        raise InvalidInputError(f"digest parts must be str, bytes or int, got {type(part).__name__}") from None
    return b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{text!r} has no UTF-8 form: {error.reason}") from None


def _hash_text(text: object) -> int:
    if not isinstance(text, str):
        raise InvalidInputError(f"strings must hold only str, got {text!r} ({type(text).__name__})")
    return xxhash.xxh64_intdigest(_utf8(text), seed=0)


SLOT_SHIFT = 50
"""Bits of a key below the slot."""
MOST_GROUPED_IDS = 1 << SLOT_SHIFT
_BELOW = np.uint64(MOST_GROUPED_IDS - 1)


@dataclass(frozen=True)
class KeyOrder:
    """The order in which a table's rows are listed, in memory and on disk: by keys of 64 bits, each of which is one id's.

    A key's upper 14 bits are the id's slot (`kvemb.schema.slots`; a table of fewer groups has them in ranges of slots). So the rows of a
    slot, and of a bucket, lie side by side.

    A key is the mixed id; where neighbouring ids share a page, the slot, and then the id itself.
    """

    ids_per_group: int = 1  # so many neighbouring ids are mixed as one; above 1, every id is below 2**50

    def keys(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the key of each id: uint64 [n]."""
        if self.ids_per_group == 1:
            return mix64(ids)
        return self._slots_of(ids) | ids

    def ids(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the id of each key: uint64 [n]."""
        return unmix64(keys) if self.ids_per_group == 1 else keys & _BELOW

    @property
    def grain(self) -> int:
        """Rows whose keys are in one range of so many, aligned, have hashes in that range, and no others do."""
        return 1 if self.ids_per_group == 1 else 1 << SLOT_SHIFT

    def hashes(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return a hash of each id for a table in memory, evenly spread within its slot: uint64 [n], a new array.

        Slots have the same order by hash as by key, so that rows in a range of keys are found in a range of the table. Within a slot the
        order by key may be another: ids that share a page would be crowded there.
        """
        hashes = ids.copy()
        mix64_inplace(hashes, np.empty_like(hashes))
        if self.ids_per_group == 1:
            return hashes
        hashes >>= np.uint64(64 - SLOT_SHIFT)
        return self._slots_of(ids) | hashes

    def _slots_of(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return mix64(ids // np.uint64(self.ids_per_group)) & ~_BELOW
