"""Rows that a trainer has prefetched for later steps: how shards learn of them, and what a step's release brings. Pure, no I/O.

A trainer in a sync job that pulls ahead registers the rows with its push: ids, and the versions that its pull saw. When the step is
released, the shards answer with the rows that the step changed: their weights and versions right after it. A row that does not exist
(erased, or never created) has version 0 and its initial weights, which are computed here. Stateless, hence thread- and fork-safe.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.arrays.ids import normalize, to_caller
from kvemb.arrays.rounding import storage_dtype, to_float32
from kvemb.arrays.segment_sum import group_by_id
from kvemb.datapath.push import checked_versions
from kvemb.errors import InvalidInputError, MessageError
from kvemb.protocol.message_format import ChangedRowsBlock, TableRows
from kvemb.protocol.messages import MAX_PART_BYTES
from kvemb.protocol.shard_routing import route, split
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef

_ROW_BYTES = 4 + 8 + 16  # of a row beside its weights: position and version in the answer, id and version in the question


@dataclass(frozen=True, eq=False)
class PrefetchedRows:
    """Rows of one table; make it with `prepare_prefetched`."""

    definition: TableDef  # the table
    ids: NDArray[np.uint64]  # uint64 [n], unique
    versions: NDArray[np.uint64]  # uint64 [n], as pulled

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's weights as they travel."""
        return self.definition.dim * storage_dtype(self.definition.dtype).itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the question about these rows and of its answer, if every row has changed."""
        return len(self.ids) * (_ROW_BYTES + self.row_bytes)

    def to_message(self) -> TableRows:
        """As they stand in a part of a push: rows of dim 0."""
        return TableRows(self.definition.name, self.definition.schema, self.ids, np.empty((len(self.ids), 0), np.float32), self.versions)

    def slots(self) -> NDArray[np.int64]:
        """The slot of each row: int64 [n]."""
        return self.definition.placement.slots(self.ids)

    def take(self, which: NDArray[np.intp] | slice) -> "PrefetchedRows":
        """Return some of the rows."""
        return replace(self, ids=self.ids[which], versions=self.versions[which])


class ChangedRows(NamedTuple):
    """Prefetched rows of one table that a step changed: ids uint64 [m], rows [m, dim], versions uint64 [m], 0 = does not exist."""

    ids: NDArray[np.uint64]
    rows: NDArray[Any]
    versions: NDArray[np.uint64]


def prepare_prefetched(definition: TableDef, ids: ArrayLike, versions: ArrayLike) -> PrefetchedRows:
    """Check the rows that a trainer says it holds, and copy them; versions, uint64 [*ids.shape], are as the pull returned them."""
    flat, shape = normalize(ids, definition.id_dtype, definition.name, definition.num_ids)  # flat uint64 [n]
    seen = checked_versions(definition, versions, shape, "versions of prefetched rows")
    groups = group_by_id(flat)
    if len(groups.ids) < len(flat):
        twice = groups.ids[np.argmax(np.diff(groups.starts, append=len(flat)) > 1)]
        shown = int(to_caller(np.array([twice], np.uint64), definition.id_dtype)[0])
        raise InvalidInputError(f"table {definition.name!r}: prefetched: id {shown} stands twice; give each id once")
    return PrefetchedRows(definition, flat.copy(), seen.copy())


def route_prefetched(
    prefetched: Sequence[PrefetchedRows], cluster_map: ClusterMap, limit_bytes: int = MAX_PART_BYTES
) -> list[list[list[PrefetchedRows]]]:
    """Distribute prefetched rows over shards: of each its messages, as few as question and answer allow, each a list of rows per table."""
    routed = [route(rows, cluster_map) for rows in prefetched]
    shares = [[share[shard] for share in routed if len(share[shard].ids)] for shard in range(cluster_map.n_shards)]
    return [split(share, limit_bytes) if share else [] for share in shares]


def check_changed_rows(prefetched: Sequence[PrefetchedRows], changed: Sequence[ChangedRowsBlock]) -> None:
    """Refuse an answer that does not fit the question."""
    if len(prefetched) != len(changed):
        raise MessageError(f"rows of {len(prefetched)} tables are prefetched, the answer has {len(changed)}")
    for rows, got in zip(prefetched, changed, strict=True):
        # got.at [m]: which of the n rows have changed, ascending; got.versions [m]; got.rows: the weights of those that exist, raw bytes
        n_existing = int(np.count_nonzero(got.versions))
        if (len(got.at) and int(got.at[-1]) >= len(rows.ids)) or len(got.rows) != n_existing * rows.row_bytes:
            raise MessageError(
                f"table {rows.definition.name!r}: {len(rows.ids)} rows of {rows.row_bytes} bytes are prefetched; the answer has "
                f"{len(got.rows)} bytes for {n_existing} of them"
            )


def changed_rows_of(prefetched: PrefetchedRows, got: ChangedRowsBlock) -> ChangedRows:
    """Turn the (checked) answer about prefetched rows into rows."""
    definition, ids = prefetched.definition, prefetched.ids.take(got.at)  # ids uint64 [m]: of the rows that changed
    exists = got.versions != 0  # bool [m]
    stored = np.frombuffer(got.rows, storage_dtype(definition.dtype)).reshape(-1, definition.dim)  # [those that exist, dim]
    if exists.all():
        return ChangedRows(ids, to_float32(stored, definition.dtype), got.versions)
    rows = np.empty((len(ids), definition.dim), definition.row_dtype)
    rows[exists], rows[~exists] = to_float32(stored, definition.dtype), definition.initial_rows(ids[~exists])
    return ChangedRows(ids, rows, got.versions)


def join_changed_rows(parts: Sequence[ChangedRows]) -> ChangedRows:
    """Put the answers about one table together; at least one."""
    if len(parts) == 1:
        return parts[0]
    ids, rows, versions = zip(*parts, strict=True)
    return ChangedRows(np.concatenate(ids), np.concatenate(rows), np.concatenate(versions))
