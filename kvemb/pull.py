"""Pull: from ids of any shape to their weights, with one storage read for all tables.

ids -> distinct ids -> keys -> one batch -> one check of all headers -> weights, rows that do not exist computed by the
table's initializer -> one gather into the caller's array. No loop over rows. A pull writes nothing. What must not live
here: connections and markers (kvemb.stores), the parameter servers. Stateless, hence thread- and fork-safe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.errors import InvalidInputError
from kvemb.ids import normalize
from kvemb.keys import RowKeys
from kvemb.net.deadline import Deadline
from kvemb.record import RecordFormat
from kvemb.rounding import round_nearest, to_float32
from kvemb.segment import Groups, group
from kvemb.stores.base import ReadPart, ReadResult, Store
from kvemb.table_def import TableDef


@dataclass(frozen=True, eq=False)
class PullRequest:
    """A validated pull of one table; make it with `prepare_pull`."""

    definition: TableDef
    groups: Groups
    shape: tuple[int, ...]
    out: NDArray[np.float32] | None


@dataclass(frozen=True, eq=False)
class Pulled:
    """What a pull found.

    Args:
        rows: float32 [*shape, dim].
        shape: of the ids.
        record: the table's format.
        result: what storage answered, in order of arrival; None for no ids.
        at: for every id asked for, where its row arrived.
    """

    rows: NDArray[np.float32]
    shape: tuple[int, ...]
    record: RecordFormat
    result: ReadResult | None
    at: NDArray[np.intp]

    @cached_property
    def versions(self) -> NDArray[np.uint64]:
        """uint64 [*shape], 0 where the row does not exist; put together when asked for, which most pulls never are."""
        if self.result is None:
            return np.zeros(self.shape, np.uint64)
        found = np.where(self.result.found, self.record.versions(self.result.records), np.uint64(0))
        return found[self.at].reshape(self.shape)


def prepare_pull(definition: TableDef, ids: ArrayLike, out: NDArray[np.float32] | None = None) -> PullRequest:
    """Check the arguments of a pull; no I/O.

    Args:
        definition: the table.
        ids: any integer array.
        out: float32 [*ids.shape, dim] to fill, of any strides, or None.

    Raises:
        InvalidInputError: see `kvemb.ids.normalize`; or `out` has another dtype or shape, or is read-only.
    """
    flat, shape = normalize(ids, definition.id_dtype, definition.name)
    if out is not None:
        _check_out(definition, out, (*shape, definition.dim))
    return PullRequest(definition, group(flat), shape, out)


def pull(store: Store, requests: Sequence[PullRequest], deadline: Deadline) -> list[Pulled]:
    """Read several tables in one round trip per node.

    Raises:
        StorageError: see `kvemb.errors`; every `out` is untouched then.
    """
    wanted = [request for request in requests if len(request.groups.ids)]
    parts = [_read_part(request) for request in wanted]
    results = iter(store.read(parts, deadline) if parts else [])
    nodes = ", ".join(store.addresses)
    checked = [_checked(r, next(results), nodes) if len(r.groups.ids) else None for r in requests]
    return [_gather(request, result) for request, result in zip(requests, checked, strict=True)]


def _read_part(request: PullRequest) -> ReadPart:
    record = request.definition.record
    return ReadPart(RowKeys(request.definition.tag, request.groups.ids), record.size_bytes, record.prefix_bytes)


def _checked(request: PullRequest, result: ReadResult, nodes: str) -> ReadResult:
    """Refuse a batch with a wrong record before any of it is used."""
    request.definition.record.check(result.records, _arrived(request, result), result.found, nodes)
    return result


def _arrived(request: PullRequest, result: ReadResult) -> NDArray[np.uint64]:
    ids = request.groups.ids
    return ids if result.order is None else ids[result.order]


def _gather(request: PullRequest, result: ReadResult | None) -> Pulled:
    definition, shape = request.definition, request.shape
    rows = request.out if request.out is not None else np.empty((*shape, definition.dim), np.float32)
    at = np.empty(0, np.intp)
    if result is not None:
        weights = _weights(definition, _arrived(request, result), result)
        at = _positions(request.groups, result.order)
        target = rows if rows.flags.c_contiguous else np.empty(rows.shape, np.float32)
        # mode="clip": with the default mode NumPy gathers into a buffer of its own first.
        np.take(weights, at, axis=0, out=target.reshape(-1, definition.dim), mode="clip")
        if target is not rows:
            rows[...] = target
    return Pulled(rows, shape, definition.record, result, at)


def _weights(definition: TableDef, ids: NDArray[np.uint64], result: ReadResult) -> NDArray[np.float32]:
    """The rows in order of arrival; those that do not exist as their first push will find them."""
    weights = definition.record.weights(result.records)
    missing = np.flatnonzero(~result.found)
    if len(missing):
        first = initial_rows(definition, ids[missing])
        if len(missing) == len(ids):
            return first
        weights[missing] = first
    return weights


def initial_rows(definition: TableDef, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
    """The first values of rows as the table's storage dtype holds them: float32 [n, dim]."""
    drawn = definition.initializer.rows(ids, definition.dim, table=definition.name, seed=definition.seed)
    return to_float32(round_nearest(drawn, definition.dtype), definition.dtype)


def _positions(groups: Groups, order: NDArray[np.intp] | None) -> NDArray[np.intp]:
    """For every asked-for id the position at which its row arrived."""
    if order is None:
        return groups.inverse
    arrived_at = np.empty(len(order), np.intp)
    arrived_at[order] = np.arange(len(order))
    return arrived_at[groups.inverse]


def _check_out(definition: TableDef, out: NDArray[np.float32], shape: tuple[int, ...]) -> None:
    good = isinstance(out, np.ndarray) and out.dtype == np.float32 and out.shape == shape and out.flags.writeable
    if not good:
        got = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InvalidInputError(f"table {definition.name!r}: out is {got}, expected a writable float32 array of shape {shape}")
