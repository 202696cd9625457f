"""The changed rows in the release of a sync step: which of the rows that a trainer has prefetched for later steps the step changed.

Versions are compared with those of the step's batch, which need not be stored yet. For all other rows the index is the truth. The rows come
from the batch and from the shard's cache; storage is read only for rows that neither has. When storage does not give them, the answer is
empty, and the trainer pulls: a release does not wait for a node to come back. Apply thread only: no other batch changes rows meanwhile, so
all rows of an answer are of one moment.
"""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows
from kvemb.errors import KvembError, LostRowError
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import ChangedRowsBlock
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.store import Store

from ..engine.batch_records import PreparedRows
from ..model.batch import CheckedRows
from ..model.tables import Tables

Ids = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
log = logging.getLogger("paramserver")


class ChangedRowsFinder:
    """Finds, for one shard, the prefetched rows that a step changed."""

    def __init__(self, store: Store, tables: Tables, timeout_s: float) -> None:
        self._store, self._tables, self._timeout_s = store, tables, timeout_s

    def answer(self, prefetched: Sequence[CheckedRows], batch: Sequence[PreparedRows]) -> list[ChangedRowsBlock]:
        """Return the rows that changed.

        Returns:
            One entry per table; [] when storage did not give a row.
        """
        try:
            changed = {one.rows.definition.name: one for one in batch if len(one.rows.ids)}
            return [self._changed_of(rows, changed.get(rows.definition.name)) for rows in prefetched]
        except KvembError as error:
            log.warning("a trainer has to pull rows that it holds again: %s: %s", type(error).__name__, error)
            return []

    def _changed_of(self, prefetched: CheckedRows, changed: PreparedRows | None) -> ChangedRowsBlock:
        definition = prefetched.definition
        # n: prefetched rows of this table; of these, c have changed, and of the changed ones, e exist.
        # versions: uint64 [n], in force, first by the index; 0 = no such row. places: intp [n], the row's place in the batch, or -1.
        versions = self._tables.state(definition).versions(prefetched.ids)
        places = np.full(len(prefetched.ids), -1, np.intp) if changed is None else _places(prefetched.ids, changed.rows.ids)
        if changed is not None:
            here = np.flatnonzero(places >= 0)  # the rows that the batch changes: the index learns of them later
            versions[here] = definition.record.versions(changed.part.records)[places[here]]
        at = np.flatnonzero(versions != prefetched.versions)  # intp [c]: their places among the n
        versions = versions[at]  # uint64 [c]
        there = at[versions != 0]  # intp [e]: those that exist, as places among the n
        # uint8 [e, row bytes]: their weights as they are stored, first those from the batch, then those from cache or storage.
        rows = np.empty((len(there), definition.record.prefix_bytes - HEADER_SIZE), np.uint8)
        places = places[there]  # intp [e]: in the batch, or -1
        new = np.flatnonzero(places >= 0)
        if changed is not None:
            rows[new] = _weights_of(changed.part.records, definition, places[new])
        if len(new) < len(there):
            left = np.flatnonzero(places < 0)  # places among the e, as in `new`
            rows[left] = self._weights(definition, prefetched.ids[there[left]], versions[versions != 0][left])
        return ChangedRowsBlock(at.astype(np.uint32), versions, rows.tobytes())

    def _weights(self, definition: TableDef, ids: Ids, versions: Ids) -> Bytes:
        """The weights of n existing rows, which the batch does not change, as they are stored: uint8 [n, row bytes]."""
        cache = self._tables.state(definition).cache
        at = cache.find(ids)  # int64 [n]: places in the cache, or -1
        kept = at >= 0  # bool [n]: which rows the cache has
        if kept.all():
            return _weights_of(cache.records, definition, at)
        rows = np.empty((len(ids), definition.record.prefix_bytes - HEADER_SIZE), np.uint8)
        rows[kept] = _weights_of(cache.records, definition, at[kept])
        rows[~kept] = self._read(definition, ids[~kept], versions[~kept])
        return rows

    def _read(self, definition: TableDef, ids: Ids, versions: Ids) -> Bytes:
        record = definition.record
        keys = definition.keys(ids, pages=self._store.capabilities.pages)
        part = ReadPart(keys, record.size_bytes, record.prefix_bytes)
        # records: uint8 [n, record bytes] of which only the header and the weights are read; found: bool [n].
        got = self._store.rows.read([part], Deadline.after(self._timeout_s))[0].in_key_order()
        record.check(got.records, ids, got.found, self._store.rows.whereabouts(keys))
        if not (got.found & (record.versions(got.records) == versions)).all():
            raise LostRowError(f"table {definition.name!r}: rows in storage are not those that the shard's index knows")
        return got.records[:, HEADER_SIZE : record.prefix_bytes]


def _places(ids: Ids, known: Ids) -> NDArray[np.intp]:
    """The place of each id in `known`, or -1: intp [n]. `known` is ascending, as in every batch, and not empty."""
    # The first place whose id is not smaller, cut to the last place: only the id itself stands there, or another one.
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[at] == ids, at, -1)


def _weights_of(records: Bytes, definition: TableDef, at: NDArray[np.intp] | NDArray[np.int64]) -> Bytes:
    """Gather the weights out of whole records: uint8 [m, row bytes]."""
    return as_rows(as_items(records[:, HEADER_SIZE : definition.record.prefix_bytes])[at])
