"""Writes and erases rows in storage whatever is there, waiting for nodes that are away. What a row may become is decided elsewhere."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ForeignPageError, NodeLostError, NodeSuspectError, RecordError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, WritePart
from kvemb.stores.store import Store

from ..engine.batch_pieces import Pace
from ..engine.conditional_erase import erase_as_read
from ..engine.repair_port import NO_BATCH, Pause, RepairPort
from ..engine.storage_retry import RETRYABLE

BLOCK_BYTES = 8 << 20
log = logging.getLogger("paramserver")
_MAX_ROUNDS = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_CHANGING = "rows change while they are loaded; is another program writing to these nodes?"
Ids = NDArray[np.uint64]
T = TypeVar("T", bound=np.generic)


class UnconditionalWriter:
    """A way into storage that asks for no versions.

    Args:
        store: open.
        timeout_s: of one storage call.
        pause: between tries; raises to give up.
        repair: brings back nodes that have lost rows, or whose pages another program has replaced.
    """

    def __init__(self, store: Store, timeout_s: float, pause: Pause, repair: RepairPort) -> None:
        self._store, self._timeout_s, self._pause, self._repair = store, timeout_s, pause, repair
        self._pace = Pace(timeout_s)

    def write(self, definition: TableDef, ids: Ids, records: NDArray[np.uint8]) -> None:
        """Write whole records (uint8 [n, record bytes]) of distinct ids over whatever is there."""
        for _ in range(_MAX_ROUNDS):
            stored = self._patiently(partial(self._write_once, definition, ids, records), definition, ids)
            if stored.all():
                return
            ids, records = ids[~stored], records[~stored]
        raise StorageError(f"table {definition.name!r}: {_CHANGING}")

    def _write_once(self, definition: TableDef, ids: Ids, records: NDArray[np.uint8], some: slice) -> NDArray[np.bool_]:
        ids, records = ids[some], records[some]
        keys, deadline = definition.keys(ids, pages=self._store.capabilities.pages), Deadline.after(self._timeout_s)
        tokens = None
        if self._store.capabilities.cas:
            part = ReadPart(keys, records.shape[1], HEADER_SIZE, tokens=True, foreign=True)
            read = self._store.read([part], deadline)[0].in_key_order()
            assert read.tokens is not None
            assert read.foreign is not None
            tokens = np.where(read.found | read.foreign, read.tokens, np.uint64(0))
        return self._store.write([WritePart(keys, np.ascontiguousarray(records), tokens)], deadline)[0].stored

    def erase(self, definition: TableDef, ids: Ids) -> None:
        """Erase rows, also where they do not exist."""
        size = definition.record.size_bytes
        for at in range(0, len(ids), max(1, BLOCK_BYTES // size)):
            some = ids[at : at + max(1, BLOCK_BYTES // size)]
            for _ in range(_MAX_ROUNDS):
                some = self._patiently(partial(self._erase_once, definition, some), definition, some)
                if not len(some):
                    break
            else:
                raise StorageError(f"table {definition.name!r}: {_CHANGING}")

    def _erase_once(self, definition: TableDef, ids: Ids, some: slice) -> Ids:
        store, deadline = self._store, Deadline.after(self._timeout_s)
        return erase_as_read(definition, ids[some], deadline, read=store.read, erase=store.erase, pages=store.capabilities.pages)

    def _patiently(self, call: Callable[[slice], NDArray[T]], definition: TableDef, ids: Ids) -> NDArray[T]:
        """Call for these rows, one at least, as many at a time as storage takes before the deadline; return what the calls returned."""
        done, row_bytes = [], definition.record.size_bytes
        start, pause_s, n_repaired = 0, _FIRST_PAUSE_S, 0
        while start < len(ids):
            some = slice(start, min(len(ids), start + max(1, self._pace.n_bytes // row_bytes)))
            try:
                with self._pace.exchange((some.stop - start) * row_bytes):
                    done.append(call(some))
                start, pause_s, n_repaired = some.stop, _FIRST_PAUSE_S, 0
            except RETRYABLE as error:
                self._pause(error, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except (NodeLostError, NodeSuspectError, ForeignPageError) as error:
                n_repaired += 1
                if n_repaired > _MAX_ROUNDS:
                    raise
                suspects = [error.address] if isinstance(error, ForeignPageError) else []
                if not self._repair.nodes(NO_BATCH, self._pause, suspects=suspects):
                    self._pause(error, pause_s)
            except RecordError as error:
                keys = definition.keys(ids[some], pages=self._store.capabilities.pages)
                if not self._store.make_way(keys, Deadline.after(self._timeout_s)):
                    raise
                log.error("%s", error)
        return np.concatenate(done)
