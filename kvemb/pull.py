"""Pull: from ids of any shape to their weights, with one storage read for all tables.

ids -> distinct ids -> keys -> one batch -> one check of all headers -> weights, rows that do not exist computed by the
table's initializer -> one gather into the caller's array. No loop over rows. A pull writes nothing. What must not live
here: connections and markers (kvemb.stores), the parameter servers, which rows a trainer may keep (kvemb.row_cache; those are
filled in first, and storage is asked for the others).

Records are read into memory that each thread keeps for its next pull (kvemb.thread_memory). Thread- and fork-safe.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.distinct import Distinct, distinct
from kvemb.errors import InvalidInputError
from kvemb.ids import normalize
from kvemb.net.deadline import Deadline
from kvemb.record import HEADER_SIZE
from kvemb.rounding import round_nearest, to_float32
from kvemb.row_cache import Kept, RowCache
from kvemb.stores.base import ReadPart, ReadResult, Store
from kvemb.table_def import TableDef
from kvemb.thread_memory import ThreadMemory

_memory = ThreadMemory()


@dataclass(frozen=True, eq=False)
class PullRequest:
    """A validated pull of one table; make it with `prepare_pull`."""

    definition: TableDef
    wanted: Distinct
    shape: tuple[int, ...]
    out: NDArray[np.float32] | None


@dataclass(frozen=True, eq=False)
class Pulled:
    """What a pull found.

    Args:
        rows: float32 [*shape, dim].
        versions: uint64 [*shape], 0 where the row does not exist; [0] unless they were asked for.
    """

    rows: NDArray[np.float32]
    versions: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class _Lookup:
    """A request, and what the trainer's cache had of it.

    Args:
        request: as asked.
        ids: uint64 [k]: to be read from storage.
        kept: what was in the cache; None for nothing.
        rows: float32 [n, dim] of the distinct ids, with that filled in.
        at: intp [k]: where `ids` stand among the distinct ids.
    """

    request: PullRequest
    ids: NDArray[np.uint64]
    kept: Kept | None = None
    rows: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 1), np.float32))
    at: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))


def prepare_pull(definition: TableDef, ids: ArrayLike, out: NDArray[np.float32] | None = None) -> PullRequest:
    """Check the arguments of a pull; no I/O.

    Args:
        definition: the table.
        ids: any integer array.
        out: float32 [*ids.shape, dim] to fill, of any strides, or None.

    Raises:
        InvalidInputError: see `kvemb.ids.normalize`; or `out` has another dtype or shape, or is read-only.
    """
    flat, shape = normalize(ids, definition.id_dtype, definition.name, definition.num_ids)
    if out is not None:
        _check_out(definition, out, (*shape, definition.dim))
    return PullRequest(definition, distinct(flat), shape, out)


def pull(
    store: Store, requests: Sequence[PullRequest], deadline: Deadline, *, versions: bool = False, cache: RowCache | None = None
) -> list[Pulled]:
    """Read several tables in one round trip per node; no round trip where the cache has every row.

    Args:
        store: open.
        requests: one per table.
        deadline: of all of it.
        versions: whether the rows' versions are wanted, too.
        cache: of this trainer, if it has one.

    Raises:
        StorageError: see `kvemb.errors`; every `out` is untouched then.
    """
    _memory.reset(sum(len(request.wanted.ids) * 2 * request.definition.record.prefix_bytes for request in requests))
    lookups = [_look_up(request, cache) for request in requests]
    paged = store.capabilities.pages
    parts = [_read_part(lookup, paged) for lookup in lookups if len(lookup.ids)]
    results = iter(store.read(parts, deadline) if parts else [])
    nodes = ", ".join(store.addresses)
    checked = [_checked(lookup, next(results), nodes) if len(lookup.ids) else None for lookup in lookups]
    return [_gather(lookup, result, versions) for lookup, result in zip(lookups, checked, strict=True)]


def _look_up(request: PullRequest, cache: RowCache | None) -> _Lookup:
    """Take what the cache has, into the array that will be returned where that is possible; never into the caller's own."""
    ids, dim = request.wanted.ids, request.definition.dim
    if cache is None or not len(ids):
        return _Lookup(request, ids)
    rows = np.empty((len(ids), dim), np.float32) if _is_ours(request) else _memory.take(len(ids), 4 * dim).view(np.float32)
    kept = cache.fill(request.definition, ids, rows)
    if kept is None:
        return _Lookup(request, ids)
    at = np.flatnonzero(~kept.rows)
    return _Lookup(request, ids.take(at), kept, rows, at)


def _read_part(lookup: _Lookup, paged: bool) -> ReadPart:
    definition, ids = lookup.request.definition, lookup.ids
    record = definition.record
    into = _memory.take(len(ids), record.prefix_bytes)
    return ReadPart(definition.keys(ids, pages=paged), record.size_bytes, record.prefix_bytes, into=into)


def _checked(lookup: _Lookup, result: ReadResult, nodes: str) -> ReadResult:
    """Refuse a batch with a wrong record before any of it is used."""
    lookup.request.definition.record.check(result.records, _arrived(lookup.ids, result), result.found, nodes)
    return result


def _arrived(ids: NDArray[np.uint64], result: ReadResult) -> NDArray[np.uint64]:
    return ids if result.order is None else ids.take(result.order)


def _gather(lookup: _Lookup, result: ReadResult | None, with_versions: bool) -> Pulled:
    if lookup.kept is not None:
        return _merge(lookup, lookup.kept, result, with_versions)
    request = lookup.request
    versions = np.zeros(request.shape if with_versions else 0, np.uint64)
    if result is None:
        return Pulled(_new_rows(request), versions)
    weights = _weights(request.definition, _arrived(lookup.ids, result), result)
    if with_versions:
        _put_in_order(_versions(request.definition, result), versions.reshape(-1), request.wanted.inverse, result.order)
    return Pulled(_deliver(request, weights, result.order), versions)


def _merge(lookup: _Lookup, kept: Kept, result: ReadResult | None, with_versions: bool) -> Pulled:
    """The same where the cache had rows: put what was read between them."""
    request, rows, versions = lookup.request, lookup.rows, kept.versions
    if result is not None:
        at = lookup.at if result.order is None else lookup.at.take(result.order)
        _items(rows)[at] = _weights(request.definition, _arrived(lookup.ids, result), result)
        if with_versions:
            versions[at] = _versions(request.definition, result)
    inverse = request.wanted.inverse
    if with_versions and inverse is not None:
        versions = versions.take(inverse)
    every = rows.reshape(*request.shape, rows.shape[1]) if _is_ours(request) else _deliver(request, _items(rows), None)
    return Pulled(every, versions.reshape(request.shape) if with_versions else versions[:0])


def _is_ours(request: PullRequest) -> bool:
    """Whether rows of the distinct ids, in their order, in an array of ours are what the pull returns."""
    return request.wanted.inverse is None and request.out is None


def _deliver(request: PullRequest, weights: NDArray[Any], order: NDArray[np.intp] | None) -> NDArray[np.float32]:
    """Put rows, one item each, where the ids stand that were asked for: in the caller's array, or a new one."""
    rows = request.out if request.out is not None else _new_rows(request)
    target = rows if rows.flags.c_contiguous else _new_rows(request)
    _put_in_order(weights, _items(target.reshape(-1, request.definition.dim)), request.wanted.inverse, order)
    if target is not rows:
        rows[...] = target
    return rows


def _new_rows(request: PullRequest) -> NDArray[np.float32]:
    return np.empty((*request.shape, request.definition.dim), np.float32)


def _versions(definition: TableDef, result: ReadResult) -> NDArray[np.uint64]:
    """In order of arrival, 0 where the row does not exist."""
    return np.where(result.found, definition.record.versions(result.records), np.uint64(0))


def _weights(definition: TableDef, ids: NDArray[np.uint64], result: ReadResult) -> NDArray[Any]:
    """The rows in order of arrival, one item each; those that do not exist as their first push will find them."""
    record = definition.record
    missing = np.flatnonzero(~result.found)
    first = initial_rows(definition, ids.take(missing)) if len(missing) else None
    if first is not None and len(missing) == len(ids):
        return _items(first)
    if definition.dtype == "float32":  # where they lie, between the headers
        weights = result.records[:, HEADER_SIZE:].view(f"V{4 * definition.dim}")[:, 0]
    else:
        weights = _items(record.weights(result.records))
    if first is not None:
        weights[missing] = _items(first)
    return weights


def _items(rows: NDArray[np.float32]) -> NDArray[Any]:
    """See each row as one opaque item: these are copied whole, which is several times as fast as value by value."""
    return rows.view(f"V{4 * rows.shape[1]}")[:, 0]


def _put_in_order(values: NDArray[Any], out: NDArray[Any], inverse: NDArray[np.intp] | None, order: NDArray[np.intp] | None) -> None:
    """Put one value per distinct id, in order of arrival, where the ids stand that were asked for.

    Args:
        values: [n] items, of any stride.
        out: [m], contiguous.
        inverse: as in `Distinct`.
        order: as in `ReadResult`.
    """
    if inverse is None:
        out[slice(None) if order is None else order] = values
        return
    packed = values
    if order is not None or not values.flags.c_contiguous:
        packed = _memory.take(len(values), values.itemsize).view(values.dtype)[:, 0]
        packed[slice(None) if order is None else order] = values
    # mode="clip": with the default mode NumPy gathers into a buffer of its own first.
    np.take(packed, inverse, out=out, mode="clip")


def initial_rows(definition: TableDef, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
    """The first values of rows as the table's storage dtype holds them: float32 [n, dim]."""
    drawn = definition.initializer.rows(ids, definition.dim, table=definition.name, seed=definition.seed)
    return to_float32(round_nearest(drawn, definition.dtype), definition.dtype)


def _check_out(definition: TableDef, out: NDArray[np.float32], shape: tuple[int, ...]) -> None:
    good = isinstance(out, np.ndarray) and out.dtype == np.float32 and out.shape == shape and out.flags.writeable
    if not good:
        got = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InvalidInputError(f"table {definition.name!r}: out is {got}, expected a writable float32 array of shape {shape}")
