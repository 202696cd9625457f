"""What the release of a sync step says of rows that a trainer holds for later steps: which are others now, and how they are.

Versions are compared with the index, which is the truth; the rows come from the shard's cache, from the batch that was just applied, and
only what neither has from storage. When storage does not give them, nothing is said, and the trainer pulls: a release does not wait for a
node to come back. What must not live here: how rows become a batch, and what travels (`kvemb.messages`). Apply thread only, between
batches: no row changes while it is at work, so all rows that it names are of the same moment.
"""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import KvembError, LostRowError
from kvemb.message_format import FreshRows
from kvemb.net.deadline import Deadline
from kvemb.record import HEADER_SIZE
from kvemb.stores.base import ReadPart, Store
from kvemb.table_def import TableDef
from paramserver.batch import CheckedRows
from paramserver.prepared import Prepared
from paramserver.tables import Tables

Ids = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
log = logging.getLogger("paramserver")


class HeldRows:
    """Answers for one shard.

    Args:
        store: open.
        tables: whose indexes and caches hold the rows.
        timeout_s: deadline of the one read that an answer may need.
    """

    def __init__(self, store: Store, tables: Tables, timeout_s: float) -> None:
        self._store, self._tables, self._timeout_s = store, tables, timeout_s

    def answer(self, held: Sequence[CheckedRows], written: Sequence[Prepared]) -> list[FreshRows]:
        """Say what changed.

        Args:
            held: ids and versions of each table.
            written: what the engine wrote last.

        Returns:
            One entry per table; [] when storage did not give a row.
        """
        try:
            return [self._fresh(rows, written) for rows in held]
        except KvembError as error:
            log.warning("a trainer has to pull rows that it holds again: %s: %s", type(error).__name__, error)
            return []

    def _fresh(self, held: CheckedRows, written: Sequence[Prepared]) -> FreshRows:
        versions = self._tables.state(held.definition).versions(held.ids)
        at = np.flatnonzero(versions != held.versions)
        versions = versions[at]
        exist = versions != 0
        ids = held.ids[at[exist]]
        rows = self._weights(held.definition, ids, versions[exist], written) if len(ids) else np.empty((0, 0), np.uint8)
        return FreshRows(at.astype(np.uint32), versions, rows.tobytes())

    def _weights(self, definition: TableDef, ids: Ids, versions: Ids, written: Sequence[Prepared]) -> Bytes:
        """The weights of n existing rows as they are stored: uint8 [n, row bytes]."""
        cache = self._tables.state(definition).cache
        at = cache.find(ids)
        kept = at >= 0
        if kept.all():
            return _weights_of(cache.records, definition, at)
        rows = np.empty((len(ids), definition.record.prefix_bytes - HEADER_SIZE), np.uint8)
        rows[kept] = _weights_of(cache.records, definition, at[kept])
        left = np.flatnonzero(~kept)
        for one in written:
            if one.rows.definition.name == definition.name and len(one.rows.ids):
                left = self._from_batch(one, ids, versions, left, rows)
        if len(left):
            rows[left] = self._read(definition, ids[left], versions[left])
        return rows

    def _from_batch(self, written: Prepared, ids: Ids, versions: Ids, left: NDArray[np.intp], rows: Bytes) -> NDArray[np.intp]:
        """Fill in rows of the last batch; return those still missing."""
        definition, known = written.rows.definition, written.rows.ids  # ascending, as those of every batch
        at = np.minimum(np.searchsorted(known, ids[left]), len(known) - 1)
        found = known[at] == ids[left]
        found &= definition.record.versions(written.part.records[at]) == versions[left]
        rows[left[found]] = _weights_of(written.part.records, definition, at[found])
        missing: NDArray[np.intp] = left[~found]
        return missing

    def _read(self, definition: TableDef, ids: Ids, versions: Ids) -> Bytes:
        record = definition.record
        keys = definition.keys(ids, pages=self._store.capabilities.pages)
        part = ReadPart(keys, record.size_bytes, record.prefix_bytes)
        got = self._store.read([part], Deadline.after(self._timeout_s))[0].in_key_order()
        record.check(got.records, ids, got.found, ", ".join(self._store.addresses))
        if not (got.found & (record.versions(got.records) == versions)).all():
            raise LostRowError(f"table {definition.name!r}: rows in storage are not those that the shard's index knows")
        return got.records[:, HEADER_SIZE : record.prefix_bytes]


def _weights_of(records: Bytes, definition: TableDef, at: NDArray[np.intp] | NDArray[np.int64]) -> Bytes:
    """Gather the weights out of whole records: uint8 [m, row bytes]."""
    row_bytes = definition.record.prefix_bytes - HEADER_SIZE
    fields = {"names": ["weights"], "formats": [f"V{row_bytes}"], "offsets": [HEADER_SIZE], "itemsize": records.shape[1]}
    rows = records.view(np.dtype(fields))["weights"][:, 0]  # type: ignore[call-overload]  # weights as items, which are copied at once
    return rows[at].view(np.uint8).reshape(len(at), row_bytes)
