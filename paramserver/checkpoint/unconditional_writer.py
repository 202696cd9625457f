"""Writes and erases rows in storage over any value there, waiting for nodes that are away. Which rows may change is decided elsewhere."""

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import StorageError
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

from ..engine.row_access import RowAccess
from ..engine.storage_pace import Pause, RepairPort, until_stored

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
        """Write whole records (uint8 [n, record bytes]) of unique ids over any value that is there."""
        self._in_pieces(lambda some: self._access.write_over(definition, ids[some], records[some]), definition, ids)

    def erase(self, definition: TableDef, ids: Ids) -> None:
        """Erase rows, also where they do not exist."""
        self._in_pieces(lambda some: self._access.erase(definition, ids[some]), definition, ids)

    def _in_pieces(self, call: Callable[[slice], None], definition: TableDef, ids: Ids) -> None:
        """Call for these rows, one at least, as many at a time as storage takes before the deadline."""
        start = 0

        def piece() -> slice:
            return slice(start, start + max(1, min(BLOCK_BYTES, self._access.pace.n_bytes) // definition.record.size_bytes))

        def one_piece() -> int:
            stop: int = (some := piece()).stop
            call(some)
            return stop

        def make_way(error: StorageError) -> None:
            if not self._store.repair.make_way(self._access.keys(definition, ids[piece()]), self._access.deadline()):
                raise error
            log.error("%s", error)

        while start < len(ids):
            start = until_stored(one_piece, self._pause, self._repair, make_way)
