"""Checks ids as callers give them, and finds the unique ids of a batch; everything below sees ids as uint64 [m].

The one place where ids are validated. An int64 table holds -2**63 to 2**63-1, a uint64 table 0 to 2**64-1; both are carried as the same 64
bits. One table has one domain, so -1 and 2**64-1 can never be the same row. No loop over ids. Stateless: thread- and fork-safe. Bytes are
searched for a 0 or 1 where booleans' `all` and `any` would take ten times as long, which shows in small batches.

Unique ids are found by hashing: every row writes its number into a table at its id's hash. The row whose number remains owns the place, and
rows of the same id are done. Rows that find another id go on with another hash: about a fifth of those before, until few enough remain to
be sorted. The ids stay in the order of the batch, so that a gather of their rows walks memory forwards. In a batch without duplicates they
are the batch. It takes a quarter to four tenths of the time of sorting all of them.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.errors import InvalidInputError
from kvemb.process.cached_property import batch_value

_MINUS_ONE = np.array(2**64 - 1, np.uint64)
_RANGES = {"int64": "-2**63 to 2**63-1", "uint64": "0 to 2**64-1"}
_SHOWN = {"int64": "", "uint64": ", which is -1 as uint64"}
_HASH_FROM = 2048  # ids; below, sorting is as fast
# Odd, so that multiplying is a bijection of the 64 bits; the product's top bits depend on all of them.
_FACTORS = tuple(np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93))


def normalize(
    ids: ArrayLike, id_dtype: str, table: str, num_ids: int | None = None, *, minus_one: bool = True
) -> tuple[NDArray[np.uint64], tuple[int, ...]]:
    """Check ids (any integers, not changed) and return their 64 bits, uint64 [m] in C order, perhaps a view; and the shape that they had.

    With `minus_one`, -1, as uint64 2**64 - 1, is an id like any other of a table without num_ids, and not padding left in.
    """
    plain = type(ids) is np.ndarray and ids.dtype.kind in "iu"
    array = ids if plain and isinstance(ids, np.ndarray) else _integers(ids, id_dtype, table)
    flat = array.reshape(-1)
    if flat.dtype.kind == "i" and id_dtype == "uint64":
        _refuse(flat, flat < 0, id_dtype, table)
    elif flat.dtype == np.uint64 and id_dtype == "int64":
        _refuse(flat, flat > np.uint64((1 << 63) - 1), id_dtype, table)
    bits = np.ascontiguousarray(flat, np.uint64 if flat.dtype.kind == "u" else np.int64).view(np.uint64)
    if not minus_one and num_ids is None and 1 in np.equal(bits, _MINUS_ONE).tobytes():
        _refuse_minus_one(bits, id_dtype, table)
    at = None if num_ids is None else first_outside(bits, num_ids)
    if at is not None:
        raise InvalidInputError(
            f"table {table!r}: id {int(flat[at])} at position {at} is outside 0 to {num_ids} - 1, the ids of this table (its num_ids is "
            f"{num_ids}). Map ids into range, or use a table created without num_ids."
        )
    return bits, array.shape


def first_outside(ids: NDArray[np.uint64], num_ids: int | None) -> int | None:
    """Return the position of the first id that is not below num_ids, None when all are or num_ids is None."""
    if num_ids is None or not len(ids) or int(ids.max()) < num_ids:
        return None
    return int(np.argmax(ids >= np.uint64(num_ids)))  # an id is at most 2**64 - 1, so num_ids fits here


def to_caller(ids: NDArray[np.uint64], id_dtype: str) -> NDArray[Any]:
    """Return ids in the table's own dtype (a view)."""
    return ids.view(np.int64) if id_dtype == "int64" else ids


def refuse_masked(array: object, what: str) -> None:
    """Refuse a NumPy array with masked elements: as a plain array it would hold the values under the mask."""
    first = array[0] if isinstance(array, list | tuple) and array else array
    if not isinstance(first, np.ma.MaskedArray):
        return
    n_masked = int(np.ma.getmaskarray(np.ma.asarray(array)).sum())
    if n_masked:
        raise InvalidInputError(
            f"{what}: {n_masked} elements of a numpy.ma array are masked, and what lies under the mask would be taken. Give its "
            "compressed(), or filled(value) with a value that you choose"
        )


def _integers(ids: ArrayLike, id_dtype: str, table: str) -> NDArray[Any]:
    """An integer array of the same shape."""
    refuse_masked(ids, f"table {table!r}: ids")
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # ragged lists; tensors that refuse
        raise InvalidInputError(f"table {table!r}: ids cannot be read as an array: {error}") from error
    if array.dtype.kind in "iu":
        return array
    if array.size == 0 and array.dtype.kind == "f":  # what NumPy makes of []
        return array.astype(np.int64)
    if not isinstance(ids, np.ndarray) and array.dtype.kind in "fO":
        return _large_integers(ids, array, id_dtype, table)
    raise _wrong_dtype(array, table)


def _large_integers(ids: ArrayLike, array: NDArray[Any], id_dtype: str, table: str) -> NDArray[Any]:
    """Lists whose integers do not all fit int64: NumPy reads them as float64 or objects."""
    exact = np.asarray(ids, dtype=object)
    if set(map(type, exact.reshape(-1).tolist())) != {int}:
        raise _wrong_dtype(array, table)
    fits = np.iinfo(id_dtype)
    outside = (exact < fits.min) | (exact > fits.max)  # NumPy 1.26 would wrap some of them around
    if outside.any():
        raise InvalidInputError(
            f"table {table!r}: an id is outside {_RANGES[id_dtype]}, the range of its id_dtype {id_dtype} ({exact[outside][0]})"
        )
    return exact.astype(id_dtype)


def _refuse_minus_one(bits: NDArray[np.uint64], id_dtype: str, table: str) -> None:
    found = bits == _MINUS_ONE
    shown = int(to_caller(bits[found], id_dtype)[0])
    raise InvalidInputError(
        f"table {table!r}: id {shown} at position {int(np.argmax(found))} ({int(found.sum())} in all){_SHOWN[id_dtype]}. Most likely "
        f"it is padding; in a table without num_ids it would get a row, and be trained. Leave padding out, give the torch module "
        f"padding_idx={shown}, or call table.allow_minus_one() if it is an id of yours"
    )


def _refuse(ids: NDArray[Any], outside: NDArray[np.bool_], id_dtype: str, table: str) -> None:
    if outside.any():
        at = int(np.argmax(outside))
        raise InvalidInputError(
            f"table {table!r}: id {int(ids[at])} at position {at} is outside {_RANGES[id_dtype]}, the range of its "
            f"id_dtype {id_dtype}. Hash ids into range, or create the table with the other id_dtype."
        )


def _wrong_dtype(array: NDArray[Any], table: str) -> InvalidInputError:
    return InvalidInputError(
        f"table {table!r}: ids have dtype {array.dtype}, expected integers. Convert them yourself (floats lose digits "
        "above 2**53); turn strings into ids with kvemb.hash_ids."
    )


@batch_value
class Unique:
    """The unique ids of a batch; make one with `unique` or `unique_ascending`."""

    ids: NDArray[np.uint64]  # uint64 [n], unique; ascending, or in no defined order
    inverse: NDArray[np.intp] | None  # intp [m]: for each id of the batch its position in `ids`; None when that is 0, 1, 2, …


def unique(ids: NDArray[np.uint64]) -> Unique:
    """Find the unique ids of uint64 [m]."""
    if len(ids) < _HASH_FROM:
        in_order = ids.copy()  # most small batches have no duplicates, and sorted values tell in a fraction of the time of an order
        in_order.sort()
        if 1 not in (in_order[1:] == in_order[:-1]).tobytes():
            return Unique(ids, None)
        order, starts, inverse = _sorted(ids)
        return Unique(ids.take(order.take(starts)), inverse)
    if bool((ids[1:] > ids[:-1]).all()):
        return Unique(ids, None)
    owners = _owners(ids, 0)  # [m]: for each row the row that stands for its id
    own = owners == np.arange(len(ids))
    if own.all():
        return Unique(ids, None)
    positions = np.cumsum(own)  # [m]: of an owner its position among the owners, counted from 1
    positions -= 1
    return Unique(ids[own], positions.take(owners))


def unique_ascending(ids: NDArray[np.uint64]) -> Unique:
    """Find the unique ids of uint64 [m] in ascending order, as pushes want them: only they are sorted, not their duplicates."""
    found = unique(ids)
    if bool((found.ids[1:] > found.ids[:-1]).all()):
        return found
    order = np.argsort(found.ids)  # not the stable kind: without equal ids there is one order, and this one uses vector instructions
    places = np.empty_like(order)  # [n]: where each unique id comes to stand
    places[order] = np.arange(len(order))
    return Unique(found.ids.take(order), places if found.inverse is None else places.take(found.inverse))


def _owners(ids: NDArray[np.uint64], attempt: int) -> NDArray[np.intp]:
    """For every row one row of the same id, the same one for all of them: uint64 [m] -> intp [m]."""
    if len(ids) < _HASH_FROM or attempt == len(_FACTORS):
        order, starts, inverse = _sorted(ids)
        return order.take(starts).take(inverse)
    bits = len(ids).bit_length() + 1
    # places [m]: of each row its hash, a place of a table at least twice as large as the batch
    places = ((ids * _FACTORS[attempt]) >> np.uint64(64 - bits)).view(np.intp)
    table = np.empty(1 << bits, np.intp)  # only places that were written to are read
    table[places] = np.arange(len(ids))  # the last row of a place stays
    owners = table.take(places)  # [m]: for each row the row found at its place
    # All rows of an id meet the same owner, so that it is of their id for all of them, or for none.
    left = np.flatnonzero(ids.take(owners) != ids)
    if len(left):
        owners[left] = left.take(_owners(ids.take(left), attempt + 1))
    return owners


def _sorted(ids: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Sort ids: uint64 [m], at least 1. Return the order, [m]; where in it each id's rows begin, [n]; for each row which id it has, [m]."""
    order = np.argsort(ids)  # not the stable kind: which of an id's rows comes first does not matter, and this one uses vector instructions
    in_order = ids.take(order)
    first = np.empty(len(ids), np.bool_)  # [m]: in sorted order, whether an id begins there
    first[0] = True
    np.not_equal(in_order[1:], in_order[:-1], out=first[1:])
    number = np.cumsum(first, dtype=np.intp)  # [m]: in sorted order, which unique id it is
    number -= 1
    inverse = np.empty_like(order)
    inverse[order] = number
    return order, np.flatnonzero(first), inverse


def are_among(ids: NDArray[np.uint64], some: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which ids are among some, which ascend as a rule: uint64 [n], uint64 [m] -> bool [n]."""
    if not len(some):
        return np.zeros(len(ids), np.bool_)
    some = some if (some[1:] > some[:-1]).all() else np.sort(some)
    found: NDArray[np.bool_] = some[np.minimum(np.searchsorted(some, ids), len(some) - 1)] == ids
    return found


def as_items(rows: NDArray[Any]) -> NDArray[np.void]:
    """View rows, [n, d], as n opaque items: NumPy moves them two to nine times as fast as bytes. A row's bytes lie side by side."""
    return rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]


def as_rows(items: NDArray[np.void]) -> NDArray[np.uint8]:
    """See items that lie side by side as rows of bytes: uint8 [n, size of an item], a view."""
    return items.view(np.uint8).reshape(len(items), items.itemsize)
