"""Pull: from ids of any shape to their weights, with one storage read for all tables.

ids -> unique ids -> one batch (kvemb.datapath.multi_table_read), or several where that is too much (kvemb.datapath.piecewise_read) ->
weights, rows that do not exist computed by the table's initializer -> one gather into the caller's array. No loop over rows. A pull writes
nothing. What must not live here: connections and markers (kvemb.stores), the parameter servers, which rows a trainer may keep
(kvemb.datapath.row_cache). Kept rows are filled in first; storage is asked for the others.

Records are read into memory that each thread keeps for its next pull (kvemb.datapath.thread_arena). Thread- and fork-safe.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.arrays.ids import normalize
from kvemb.arrays.unique import Unique, unique
from kvemb.datapath.multi_table_read import Missing, TableShare, WantedRows, items
from kvemb.datapath.piecewise_read import ReadTimeout, read_piecewise
from kvemb.datapath.row_cache import CacheHits, RowCache
from kvemb.datapath.thread_arena import ThreadArena
from kvemb.errors import InvalidInputError
from kvemb.net.deadline import Deadline
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

_memory = ThreadArena()


@dataclass(frozen=True, eq=False)
class PullRequest:
    """A validated pull of one table; make it with `prepare_pull`."""

    definition: TableDef
    wanted: Unique
    shape: tuple[int, ...]
    out: NDArray[np.float32] | None


@dataclass(frozen=True, eq=False)
class Pulled:
    """The rows of one table that a pull returns, with their versions if those were asked for.

    Args:
        rows: float32 [*shape, dim].
        versions: uint64 [*shape], 0 where the row does not exist; [0] unless they were asked for.
    """

    rows: NDArray[np.float32]
    versions: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class _CacheLookup:
    """A request, and what the trainer's cache had of it.

    Args:
        request: as asked.
        ids: uint64 [k]: to be read from storage.
        kept: what was in the cache; None for nothing.
        rows: float32 [n, dim] of the unique ids, with that filled in.
        at: intp [k]: where `ids` stand among the unique ids.
    """

    request: PullRequest
    ids: NDArray[np.uint64]
    kept: CacheHits | None = None
    rows: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 1), np.float32))
    at: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))


def prepare_pull(definition: TableDef, ids: ArrayLike, out: NDArray[np.float32] | None = None, *, minus_one: bool = False) -> PullRequest:
    """Check the arguments of a pull; no I/O.

    Args:
        definition: the table.
        ids: any integer array.
        out: float32 [*ids.shape, dim] to fill, of any strides, or None.
        minus_one: see `kvemb.arrays.ids.normalize`.

    Raises:
        InvalidInputError: see `kvemb.arrays.ids.normalize`; or `out` has another dtype or shape, or is read-only.
    """
    flat, shape = normalize(ids, definition.id_dtype, definition.name, definition.num_ids, minus_one=minus_one)
    if out is not None:
        _check_out(definition, out, (*shape, definition.dim))
    return PullRequest(definition, unique(flat), shape, out)


def pull(
    store: Store,
    requests: Sequence[PullRequest],
    deadline: Deadline,
    *,
    versions: bool = False,
    cache: RowCache | None = None,
    renewed: bool = False,
    missing: Missing | None = None,
) -> list[Pulled]:
    """Read several tables in one round trip per node, or one per piece where that is too much; none where the cache has every row.

    Args:
        store: open.
        requests: one per table.
        deadline: of all of it.
        versions: whether the rows' versions are wanted, too.
        cache: of this trainer, if it has one.
        renewed: whether the deadline is that of each piece, instead of all.
        missing: takes the ids of rows that storage does not have, by table, where there are any.

    Raises:
        StorageError: see `kvemb.errors`; every `out` is untouched then.
    """
    _memory.reset(sum(len(request.wanted.ids) * 2 * request.definition.record.prefix_bytes for request in requests))
    lookups = [_look_up(request, cache) for request in requests]
    wanted = [WantedRows(lookup.request.definition, lookup.ids) for lookup in lookups if len(lookup.ids)]
    timeout = ReadTimeout(deadline, renewed)
    shares = iter(read_piecewise(store, wanted, timeout, _memory, versions=versions, missing=missing) if wanted else [])
    return [_gather(lookup, next(shares) if len(lookup.ids) else None, versions) for lookup in lookups]


def _look_up(request: PullRequest, cache: RowCache | None) -> _CacheLookup:
    """Take what the cache has, into the array that will be returned where that is possible; never into the caller's own."""
    ids, dim = request.wanted.ids, request.definition.dim
    if cache is None or not len(ids):
        return _CacheLookup(request, ids)
    rows = np.empty((len(ids), dim), np.float32) if _is_ours(request) else _memory.take(len(ids), 4 * dim).view(np.float32)
    kept = cache.fill(request.definition, ids, rows)
    if kept is None:
        return _CacheLookup(request, ids)
    at = np.flatnonzero(~kept.rows)
    return _CacheLookup(request, ids.take(at), kept, rows, at)


def _gather(lookup: _CacheLookup, share: TableShare | None, with_versions: bool) -> Pulled:
    if lookup.kept is not None:
        return _merge(lookup, lookup.kept, share, with_versions)
    request = lookup.request
    if share is None:
        empty = np.empty((*request.shape, request.definition.dim), np.float32) if request.out is None else request.out
        return Pulled(empty, np.zeros(request.shape if with_versions else 0, np.uint64))
    versions = share.versions(request.wanted.inverse).reshape(request.shape) if with_versions else np.zeros(0, np.uint64)
    return Pulled(_deliver(request, share), versions)


def _merge(lookup: _CacheLookup, kept: CacheHits, share: TableShare | None, with_versions: bool) -> Pulled:
    """The same where the cache had rows: put what was read between them."""
    request, rows, versions = lookup.request, lookup.rows, kept.versions
    if share is not None:
        items(rows)[lookup.at] = share.rows(None)
        if with_versions:
            versions[lookup.at] = share.versions(None)
    every = TableShare(items(rows), versions, None)
    found = versions[:0]
    if with_versions:
        found = every.versions(request.wanted.inverse).reshape(request.shape)
    return Pulled(rows.reshape(*request.shape, rows.shape[1]) if _is_ours(request) else _deliver(request, every), found)


def _is_ours(request: PullRequest) -> bool:
    """Whether rows of the unique ids, in their order, in an array of ours are what the pull returns."""
    return request.wanted.inverse is None and request.out is None


def _deliver(request: PullRequest, share: TableShare) -> NDArray[np.float32]:
    """Put rows where the ids stand that were asked for: in the caller's array, or a new one."""
    inverse, out, dim = request.wanted.inverse, request.out, request.definition.dim
    if out is None:
        return share.rows(inverse).view(np.float32).reshape(*request.shape, dim)
    if out.flags.c_contiguous:
        share.rows(inverse, items(out.reshape(-1, dim)))
    else:
        out[...] = share.rows(inverse).view(np.float32).reshape(out.shape)
    return out


def _check_out(definition: TableDef, out: NDArray[np.float32], shape: tuple[int, ...]) -> None:
    good = isinstance(out, np.ndarray) and out.dtype == np.float32 and out.shape == shape and out.flags.writeable
    if not good:
        got = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InvalidInputError(f"table {definition.name!r}: out is {got}, expected a writable float32 array of shape {shape}")
