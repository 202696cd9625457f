"""Pull: from ids of any shape to their weights, with one storage read for all tables.

ids -> unique ids -> one batch (kvemb.datapath.multi_table_read), or several where that is too much (kvemb.datapath.piecewise_read) ->
weights, rows that do not exist computed by the table's initializer -> one gather into the caller's array. No loop over rows. A pull writes
nothing. What must not live here: connections and markers (kvemb.stores), the parameter servers.

Records are read into memory that each thread keeps for its next pull (kvemb.datapath.thread_arena). Thread- and fork-safe.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.arrays.ids import normalize
from kvemb.arrays.unique import Unique, unique
from kvemb.datapath.multi_table_read import Missing, TableShare, WantedRows, items
from kvemb.datapath.piecewise_read import ReadTimeout, read_piecewise
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
    renewed: bool = False,
    missing: Missing | None = None,
) -> list[Pulled]:
    """Read several tables in one round trip per node, or one per piece where that is too much; none where no id is asked for.

    Args:
        store: open.
        requests: one per table.
        deadline: of all of it.
        versions: whether the rows' versions are wanted, too.
        renewed: whether the deadline is that of each piece, instead of all.
        missing: takes the ids of rows that storage does not have, by table, where there are any.

    Raises:
        StorageError: see `kvemb.errors`; every `out` is untouched then.
    """
    _memory.reset(sum(len(request.wanted.ids) * 2 * request.definition.record.prefix_bytes for request in requests))
    wanted = [WantedRows(request.definition, request.wanted.ids) for request in requests if len(request.wanted.ids)]
    timeout = ReadTimeout(deadline, renewed)
    shares = iter(read_piecewise(store, wanted, timeout, _memory, versions=versions, missing=missing) if wanted else [])
    return [_gather(request, next(shares) if len(request.wanted.ids) else None, versions) for request in requests]


def _gather(request: PullRequest, share: TableShare | None, with_versions: bool) -> Pulled:
    if share is None:
        empty = np.empty((*request.shape, request.definition.dim), np.float32) if request.out is None else request.out
        return Pulled(empty, np.zeros(request.shape if with_versions else 0, np.uint64))
    versions = share.versions(request.wanted.inverse).reshape(request.shape) if with_versions else np.zeros(0, np.uint64)
    return Pulled(_deliver(request, share), versions)


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
