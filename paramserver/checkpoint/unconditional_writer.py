"""Writes and erases rows in storage whatever is there, waiting for nodes that are away. What a row may become is decided elsewhere."""

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ForeignPageError, NodeLostError, NodeSuspectError, RecordError
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

from ..engine.repair_port import NO_BATCH, Pause, RepairPort
from ..engine.row_access import RowAccess
from ..engine.storage_retry import MAX_CONFLICT_ROUNDS, RETRYABLE, retry_pauses

BLOCK_BYTES = 8 << 20
log = logging.getLogger("paramserver")
Ids = NDArray[np.uint64]


class UnconditionalWriter:
    """A way into storage that asks for no versions.

    Args:
        store: open.
        timeout_s: of one storage call.
        pause: between tries; raises to give up.
        repair: brings back nodes that have lost rows, or whose pages another program has replaced.
    """

    def __init__(self, store: Store, timeout_s: float, pause: Pause, repair: RepairPort) -> None:
        self._store, self._pause, self._repair = store, pause, repair
        self._access = RowAccess(store, timeout_s)

    def write(self, definition: TableDef, ids: Ids, records: NDArray[np.uint8]) -> None:
        """Write whole records (uint8 [n, record bytes]) of distinct ids over whatever is there."""
        self._patiently(lambda some: self._write_some(definition, ids[some], records[some]), definition, ids)

    def _write_some(self, definition: TableDef, ids: Ids, records: NDArray[np.uint8]) -> None:
        self._access.write_over(definition, ids, records)

    def erase(self, definition: TableDef, ids: Ids) -> None:
        """Erase rows, also where they do not exist."""
        self._patiently(lambda some: self._access.erase(definition, ids[some]), definition, ids)

    def _patiently(self, call: Callable[[slice], None], definition: TableDef, ids: Ids) -> None:
        """Call for these rows, one at least, as many at a time as storage takes before the deadline."""
        row_bytes = definition.record.size_bytes
        start, waits, n_repaired = 0, retry_pauses(), 0
        while start < len(ids):
            stop = min(len(ids), start + max(1, min(BLOCK_BYTES, self._access.pace.n_bytes) // row_bytes))
            try:
                call(slice(start, stop))
                start, waits, n_repaired = stop, retry_pauses(), 0
            except RETRYABLE as error:
                self._pause(error, next(waits))
            except (NodeLostError, NodeSuspectError, ForeignPageError) as error:
                n_repaired += 1
                if n_repaired > MAX_CONFLICT_ROUNDS:
                    raise
                suspects = [error.address] if isinstance(error, ForeignPageError) else []
                if not self._repair.nodes(NO_BATCH, self._pause, suspects=suspects):
                    self._pause(error, next(waits))
            except RecordError as error:
                if not self._store.make_way(self._access.keys(definition, ids[start:stop]), self._access.deadline()):
                    raise
                log.error("%s", error)
