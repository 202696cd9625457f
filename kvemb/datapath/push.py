"""Push: check ids and gradients, sum duplicates, and make the rows of a message. Pure, no I/O.

The same for assign and erase. Every wrong argument is found here, before anything is sent. Stateless, hence thread- and fork-safe.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.arrays.ids import normalize, refuse_masked, to_caller
from kvemb.arrays.rounding import LARGEST, opaque_bytes, round_nearest
from kvemb.arrays.segment_sum import Groups, group_by_id
from kvemb.errors import InvalidInputError
from kvemb.protocol.message_format import TableRows
from kvemb.schema.table_def import MAX_DIM, TableDef

_FLOAT32 = np.dtype(np.float32)


def prepare_push(
    definition: TableDef,
    ids: ArrayLike,
    grads: ArrayLike,  # floats [*ids.shape, dim]; rounded to float32
    versions: ArrayLike | None = None,  # as the pull returned them, [*ids.shape], or None. Of duplicates the oldest counts.
    hyper: Mapping[str, float] | None = None,
    wire_dtype: str = "float32",  # "float32", "float16" or "bfloat16"; sums are rounded to the nearest value, ties to even
    *,
    minus_one: bool = False,
) -> TableRows:
    """Check a push, sum gradients of duplicate ids, round to `wire_dtype`: rows with unique ids, perhaps views of the arguments."""
    definition.require_trained()
    # m: the ids as given; n: the unique ids, ascending in `groups.ids`. flat uint64 [m], rows float32 [m, dim]
    flat, shape = normalize(ids, definition.id_dtype, definition.name, definition.num_ids, minus_one=minus_one)
    rows = _rows(definition, grads, shape, "grads", definition.dim)
    groups = group_by_id(flat)
    with np.errstate(over="ignore", invalid="ignore"):  # found below, and refused by name
        sums = groups.sum(rows)  # float32 [n, dim]
    if not np.isfinite(sums).all():
        raise _not_finite(definition, flat, rows, groups, sums)
    # seen uint64 [n]: the oldest version that the caller pulled of each id; [0] where none are given
    seen = groups.minimum(checked_versions(definition, versions, shape)) if versions is not None else np.empty(0, np.uint64)
    in_force = definition.optimizer.check_hyper(hyper) if hyper else {}
    sent = _to_wire(definition, groups.ids, sums, wire_dtype)  # [n, dim] of the type that travels
    return TableRows(definition.name, definition.schema, groups.ids, sent, seen, in_force, wire_dtype, definition.placement)


def prepare_assign(
    definition: TableDef, ids: ArrayLike, rows: ArrayLike, state: ArrayLike | None = None, *, minus_one: bool = False
) -> TableRows:
    """Check an assign: unique ids, finite floats [*ids.shape, dim] (uint8 if opaque), perhaps state values; return rows in order of ids."""
    flat, shape = normalize(ids, definition.id_dtype, definition.name, definition.num_ids, minus_one=minus_one)
    values = _rows(definition, rows, shape, "rows", definition.dim, definition.row_dtype)
    if state is not None:
        if not definition.record.state_size:
            raise InvalidInputError(f"table {definition.name!r}: {definition.optimizer.kind} has no state beside its rows: leave state out")
        values = _with_state(definition, values, state, shape)
    groups = group_by_id(flat)
    if len(groups.ids) < len(flat):  # the first id with more than one row
        twice = groups.ids[np.argmax(np.diff(groups.starts, append=len(flat)) > 1)]
        raise InvalidInputError(f"table {definition.name!r}: assign: id {_shown(definition, twice)} stands twice; give each id one row")
    ordered = values if groups.order is None else values.take(groups.order, axis=0)  # [n, dim], as `groups.ids`
    if opaque_bytes(definition.dtype) is not None:
        return TableRows(definition.name, definition.schema, groups.ids, ordered, dtype=definition.dtype, placement=definition.placement)
    if not np.isfinite(ordered).all():
        raise _not_finite(definition, flat, values, groups, ordered)
    return TableRows(definition.name, definition.schema, groups.ids, ordered, placement=definition.placement)


def prepare_erase(definition: TableDef, ids: ArrayLike) -> TableRows:
    """Check an erase; duplicates are fine."""
    flat, _ = normalize(ids, definition.id_dtype, definition.name, definition.num_ids)
    unique = group_by_id(flat).ids
    return TableRows(definition.name, definition.schema, unique, np.empty((len(unique), 0), np.float32), placement=definition.placement)


def _with_state(definition: TableDef, values: NDArray[np.float32], state: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Put each row's state after its weights: float32 [n, dim + s]."""
    if (width := definition.dim + definition.record.state_size) > MAX_DIM:
        raise InvalidInputError(
            f"table {definition.name!r}: weights and state of a row are {width} values; at most {MAX_DIM} are assigned together. Leave "
            "the state out"
        )
    return np.concatenate([values, _rows(definition, state, shape, "state", definition.record.state_size)], axis=1)


def _rows(
    definition: TableDef, rows: ArrayLike, shape: tuple[int, ...], name: str, width: int, dtype: "np.dtype[Any]" = _FLOAT32
) -> NDArray[Any]:
    """Return one row of `width` values for each id: [m, width] of dtype, float32 or uint8."""
    refuse_masked(rows, f"table {definition.name!r}: {name}")
    try:
        array = np.asarray(rows)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; tensors that require grad
        raise InvalidInputError(f"table {definition.name!r}: {name} cannot be read as an array: {error}") from error
    if array.size == 0 and 0 in shape and array.ndim <= 1:  # [] beside []
        array = array.reshape((*shape, width))
    if array.shape != (*shape, width):
        raise InvalidInputError(
            f"table {definition.name!r}: {name} have shape {array.shape}, expected {(*shape, width)}: one row of dim "
            f"{width} for each of the ids of shape {shape}"
        )
    if array.dtype.kind != "f" if dtype == _FLOAT32 else array.dtype != dtype:
        expected = "floats" if dtype == _FLOAT32 else str(dtype)
        raise InvalidInputError(f"table {definition.name!r}: {name} have dtype {array.dtype}, expected {expected}")
    with np.errstate(over="ignore"):  # becomes infinity, which is refused by name
        return array.astype(dtype, copy=False).reshape(-1, width)


def _to_wire(definition: TableDef, ids: NDArray[np.uint64], sums: NDArray[np.float32], wire_dtype: str) -> NDArray[Any]:
    """Round gradients to `wire_dtype`: to the nearest, not stochastically.

    The error is relative to each gradient (2**-9 of it for bfloat16), and the shard adds in float32. So a small value is never lost in a
    large one, the case for which stochastic rounding exists. Rounding to the nearest costs half as much, and no key is needed to send the
    same bits again.
    """
    if wire_dtype != "float32":
        largest = LARGEST[wire_dtype]
        if sums.size and max(float(sums.max()), -float(sums.min())) > largest:
            beyond = (np.abs(sums) > largest).any(axis=1)  # bool [n]: the rows that do not fit
            first, value = _shown(definition, ids[np.argmax(beyond)]), float(np.abs(sums[np.argmax(beyond)]).max())
            raise InvalidInputError(
                f"table {definition.name!r}, id {first}: a gradient of {value:g} does not fit wire_dtype {wire_dtype}, which ends at "
                f"{largest:g} ({int(beyond.sum())} such rows); nothing was sent. Scale the loss down"
                + (', or use set_wire_dtype("bfloat16").' if wire_dtype == "float16" else ".")
            )
    return round_nearest(sums, wire_dtype)


def checked_versions(definition: TableDef, versions: ArrayLike, shape: tuple[int, ...], whose: str = "versions") -> NDArray[np.uint64]:
    """Return the versions of n rows that a pull saw as uint64 [n]; raises InvalidInputError for another dtype, or another shape."""
    array = np.asarray(versions)
    if array.dtype != np.uint64 and array.size:
        raise InvalidInputError(
            f"table {definition.name!r}: {whose} have dtype {array.dtype}, expected uint64 as pull(return_versions=True) gives"
        )
    if array.shape != shape:
        raise InvalidInputError(f"table {definition.name!r}: {whose} have shape {array.shape}, expected {shape} as the ids")
    return array.astype(np.uint64, copy=False).reshape(-1)


def _not_finite(
    definition: TableDef, ids: NDArray[np.uint64], rows: NDArray[np.float32], groups: Groups, sums: NDArray[np.float32]
) -> InvalidInputError:
    bad = ~np.isfinite(rows).all(axis=1)  # bool [m]; where no row is bad, the sum of some is
    at = f"table {definition.name!r}, id "
    if bad.any():
        first = _shown(definition, ids[np.argmax(bad)])
        return InvalidInputError(f"{at}{first}: NaN or infinity in its row ({int(bad.sum())} such rows); nothing was sent")
    first = _shown(definition, groups.ids[np.argmax(~np.isfinite(sums).all(axis=1))])
    return InvalidInputError(f"{at}{first}: the sum of its gradients exceeds float32; nothing was sent")


def _shown(definition: TableDef, row_id: np.uint64) -> int:
    return int(to_caller(np.array([row_id], np.uint64), definition.id_dtype)[0])


def gradients_of_now(rows: TableRows, now: TableDef) -> TableRows:
    """Return gradients by an earlier definition of a table as the present one takes them: without columns that are gone, new ones zeros."""
    if rows.schema == now.schema:
        return rows
    now.require_trained()
    grads = np.zeros((len(rows.ids), now.dim), rows.rows.dtype)
    kept = min(now.dim, rows.rows.shape[1])
    grads[:, :kept] = rows.rows[:, :kept]
    none = np.empty(0, np.uint64)  # of the rows that were copied nobody has seen versions
    hyper = rows.hyper if rows.hyper.keys() <= now.optimizer.defaults().keys() else {}
    return replace(rows, schema=now.schema, rows=grads, versions=none, hyper=hyper, placement=now.placement)
