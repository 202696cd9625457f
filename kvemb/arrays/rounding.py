"""Storage dtypes of weights, and rounding to them: float32, float16, bfloat16 (kept as its 16 bits, NumPy has no such dtype), opaque bytes.

All arithmetic stays float32 or wider; a 16-bit type exists in storage only.

Strategy: both 16-bit formats are a float32's sign and magnitude with low bits dropped, and neighbouring magnitudes have neighbouring bit
patterns. So a random number in the range of the dropped bits is added before they are dropped. That rounds up with exactly the right
probability, across binades too. float16's subnormals have a grid of their own (multiples of 2**-24) and are done apart. Stateless, hence
thread- and fork-safe.
"""

import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import column_words, digest64, mix64, row_blocks
from kvemb.errors import InvalidInputError

ALGORITHM_VERSION: Final = 1
"""Rises whenever stochastic rounding would give other bits: journals are replayed to the same bits only under the same
version."""

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
NARROW: Final = ("float16", "int8")
"""The dtypes of copies of weights, beside a table's own; int8 with a scale for each row."""
_TINY: Final = np.finfo(np.float32).tiny
_BYTE: Final = np.dtype("|u1")
_BYTES: Final = re.compile(r"bytes:([1-9][0-9]{0,5})")
LARGEST: Final[dict[str, float]] = {"float32": float(np.finfo(np.float32).max), "float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}
"""The largest finite value of each storage dtype of numbers."""
_HALF: Final = np.uint32(16)  # Typed, so that shifts of uint32 arrays stay uint32 in the type checker's eyes too.
_INF_32: Final = np.uint32(0x7F800000)
_SIGN_32: Final = np.uint32(0x80000000)
_MAX_BFLOAT16: Final = np.uint32(0x7F7F)
_MAX_FLOAT16: Final = np.uint32(0x7BFF)
_MIN_NORMAL_FLOAT16: Final = np.uint32(0x38800000)  # 2**-14, as float32 bits.
_EXPONENT_SHIFT_FLOAT16: Final = np.uint32((127 - 15) << 10)  # Between the two biases, in float16's place.


def storage_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of stored weights: '<f4', '<f2', '<u2' (the bit pattern) for bfloat16, '|u1' for "bytes:N"."""
    known = _DTYPES.get(name) if isinstance(name, str) else None
    if known is not None:
        return known
    if opaque_bytes(name) is None:
        raise InvalidInputError(f"unknown storage dtype {name!r}; known: {', '.join(_DTYPES)}, and bytes:N for rows of N opaque bytes")
    return _BYTE


def opaque_bytes(name: object) -> int | None:
    """Return N of "bytes:N", the dtype of rows of N bytes that mean nothing to kvemb; None of any other dtype."""
    found = _BYTES.fullmatch(name) if isinstance(name, str) else None
    return None if found is None else int(found[1])


def to_float32(stored: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Return stored weights as float32, exactly, perhaps `stored` itself; opaque bytes have no value, and stay uint8."""
    dtype = storage_dtype(name)
    if stored.dtype != dtype:
        raise InvalidInputError(f"{name} weights are stored as {dtype.str}, got {stored.dtype.str}")
    if dtype is _BYTE:
        return stored
    if name != "bfloat16":
        return stored.astype(np.float32, copy=False)
    # a bfloat16 is the upper half of a float32: uint32 of the same shape, shifted there
    wide: NDArray[np.uint32] = np.left_shift(stored, 16, out=np.empty(stored.shape, np.uint32), dtype=np.uint32)
    return wide.view(np.float32)


def round_nearest(weights: NDArray[np.float32], name: str) -> NDArray[Any]:
    """Round to the nearest stored value, ties to even: for initial rows and assigned ones. May return float32 `weights` themselves.

    Finite weights beyond the largest finite value become that value, never infinity; infinities, NaN and opaque bytes stay what they are.
    """
    dtype = storage_dtype(name)
    _check_weights(weights, _BYTE if dtype is _BYTE else _DTYPES["float32"])
    if dtype is _BYTE or name == "float32":
        return weights.astype(dtype, copy=False)
    out = np.empty(weights.shape, dtype)
    flat, flat_out = np.ascontiguousarray(weights).reshape(-1), out.reshape(-1)
    for block in row_blocks(flat.size, 1):
        if name == "float16":
            part = flat[block]
            flat_out[block] = np.where(np.isinf(part), part, np.clip(part, -65504.0, 65504.0))
        else:
            # the bits of the float32 plus half a unit of the last bit that stays, less one where that bit is even
            bits = flat[block].view(np.uint32)
            flat_out[block] = _narrow_bfloat16(bits, ((bits >> _HALF) & np.uint32(1)) + np.uint32(0x7FFF))
    return out


def round_stochastic(
    weights: NDArray[np.float32],  # [n, d] float32
    name: str,  # the storage dtype, of numbers; "float32" returns the weights as they are (perhaps the same array)
    *,
    ids: NDArray[np.uint64],  # [n] uint64
    versions: NDArray[np.uint64] | int,  # [n] uint64 or one int in [0, 2**64): the version the rows are written with
    seed: int,
) -> NDArray[Any]:
    """Round up or down at random, to [n, d] of storage_dtype(name), so that the expected value is the weight: small updates are not lost.

    The draw is a pure function of (seed, id, column, version): replaying an apply gives the same bits. Values that are exact stay. Finite
    weights beyond the largest finite value become that value; infinities and NaN stay what they are. The probability of rounding up is
    exact, except among float16's subnormals, where it is rounded to a multiple of 2**-32.

    Source: Gupta et al., "Deep learning with limited numerical precision", ICML 2015.
    """
    dtype = storage_dtype(name)
    _check_weights(weights, _DTYPES["float32"])
    if weights.ndim != 2 or ids.dtype != np.uint64 or ids.shape != weights.shape[:1]:
        got = f"weights {list(weights.shape)}, ids {ids.dtype} {list(ids.shape)}"
        raise InvalidInputError(f"weights must be [n, d] and ids uint64 [n], got {got}")
    versions_of_rows = _versions(versions, len(ids))
    if name == "float32":
        return weights.astype(dtype, copy=False)
    states = _row_states(ids, versions_of_rows, seed)
    out = np.empty(weights.shape, dtype)
    for block in row_blocks(*weights.shape):
        bits = np.ascontiguousarray(weights[block]).view(np.uint32)
        lanes = _lanes(states[block], weights.shape[1])  # uint32 [rows of the block, d]: a draw for each weight
        if name == "bfloat16":
            out[block] = _narrow_bfloat16(bits, lanes >> _HALF)
        else:
            out[block] = _stochastic_float16(bits, lanes).view(np.float16)
    return out


def _check_weights(weights: NDArray[Any], expected: np.dtype[Any]) -> None:
    if weights.dtype != expected:
        raise InvalidInputError(f"weights must be {expected}, got {weights.dtype}")


def _versions(versions: NDArray[np.uint64] | int, n_rows: int) -> NDArray[np.uint64]:
    if isinstance(versions, (int, np.integer)) and 0 <= int(versions) < 1 << 64:
        return np.full(1, versions, np.uint64)
    array = np.asarray(versions)
    if array.dtype != np.uint64 or array.shape not in ((), (n_rows,)):
        got = f"{array.dtype} {list(array.shape)}"
        raise InvalidInputError(f"versions must be an int in [0, 2**64) or uint64 [{n_rows}], got {got}")
    return array.reshape(-1)


def _row_states(ids: NDArray[np.uint64], versions: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """[n] one generator state per (seed, id, version), mixed twice so that neighbouring versions share nothing."""
    # The word decides the bits of every row stored in 16 bits: it stays as it is when this module is renamed.
    key = np.array([digest64("kvemb.rounding", ALGORITHM_VERSION, part, seed) for part in ("id", "stream")], np.uint64)
    states = mix64(mix64(ids ^ key[0]) + versions)
    np.add(states, key[1], out=states)
    return states


def _lanes(states: NDArray[np.uint64], dim: int) -> NDArray[np.uint32]:
    """[m, dim] 32 random bits per column: each 64-bit word serves two columns, the even one with its lower half."""
    words = np.empty((len(states), (dim + 1) // 2), np.uint64)
    column_words(states, 0, words, np.empty_like(words))
    return words.astype("<u8", copy=False).view("<u4")[:, :dim].astype(np.uint32, copy=False)


def _narrow_bfloat16(bits: NDArray[np.uint32], addend: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Add `addend` (< 2**16) to a float32's magnitude, then drop its low 16 bits: the bits of a bfloat16."""
    magnitude = bits & ~_SIGN_32
    narrow = (magnitude + addend) >> _HALF
    np.minimum(narrow, _MAX_BFLOAT16, out=narrow)
    special = magnitude >= _INF_32
    if special.any():
        # A NaN whose payload sits in the dropped bits would turn into infinity: set the quiet bit.
        quiet = np.where(magnitude[special] > _INF_32, np.uint32(0x40), np.uint32(0))
        narrow[special] = (magnitude[special] >> _HALF) | quiet
    return narrow | ((bits & _SIGN_32) >> _HALF)


def _stochastic_float16(bits: NDArray[np.uint32], lanes: NDArray[np.uint32]) -> NDArray[np.uint16]:
    magnitude = bits & ~_SIGN_32
    # Wraps around below 2**-14, where it is overwritten.
    narrow = ((magnitude + (lanes & np.uint32(0x1FFF))) >> 13) - _EXPONENT_SHIFT_FLOAT16
    np.minimum(narrow, _MAX_FLOAT16, out=narrow)
    small = magnitude < _MIN_NORMAL_FLOAT16
    if small.any():
        # In units of 2**-24 a small magnitude is at most 1024, and the whole part is the float16's bit pattern (1024 =
        # 2**-14's).
        units = magnitude[small].view(np.float32).astype(np.float64) * 2.0**24
        whole = np.floor(units)
        up = (units - whole) * 2.0**32 > lanes[small] + 0.5
        narrow[small] = whole.astype(np.uint32) + up
    special = magnitude >= _INF_32
    if special.any():
        narrow[special] = np.where(magnitude[special] > _INF_32, np.uint32(0x7E00), np.uint32(0x7C00))
    return (narrow | ((bits & _SIGN_32) >> _HALF)).astype(np.uint16)


def to_int8(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return finite rows, float32 [n, dim], as int8 [n, dim], and what each row's are to be multiplied by, float32 [n].

    A value is off by at most scale / 2 and the rounding of float32. Rows whose largest magnitude is below 1.5e-36 become zeros.
    """
    scale = np.abs(rows).max(axis=1, initial=0.0) / np.float32(127)
    scale[scale < _TINY] = 0.0  # below it float32 has too few digits left to divide by
    values = np.rint(rows / np.where(scale, scale, np.float32(np.inf))[:, None])
    return np.clip(values, -127, 127).astype(np.int8), scale


def from_int8(values: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows of `to_int8`: float32 [n, dim]."""
    rows: NDArray[np.float32] = values.astype(np.float32) * scale.astype(np.float32, copy=False)[:, None]
    return rows
