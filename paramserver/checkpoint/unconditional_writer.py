"""Writes and erases rows in storage over any value there, waiting for nodes that are away. Which rows may change is decided elsewhere.

`portions` makes of several stretches of a row log what is written at once: rows of each stretch, so that the nodes of all have work.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import StorageError
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

from ..engine.row_access import RowAccess
from ..engine.storage_pace import Pause, RepairPort, Tries
from ..row_log.sorted_run import ERASED, ROWS, Bytes, Ids, Part

BLOCK_BYTES = 8 << 20
log = logging.getLogger("paramserver")
Portion = tuple[int, Ids, Bytes]
"""Kind, keys, and of rows their records."""


class UnconditionalWriter:
    """A way into storage that asks for no versions."""

    def __init__(
        self, store: Store, timeout_s: float, pause: Pause, repair: RepairPort, exist: Callable[[TableDef, Ids], NDArray[np.bool_]]
    ) -> None:
        self._exist, self._store, self._pause, self._repair = exist, store, pause, repair
        self._access = RowAccess(store, timeout_s)

    def store(self, definition: TableDef, portion: Portion) -> int:
        """Write the rows of a portion over any value that is there, or erase them, if they are there; return how many were written."""
        kind, keys, records = portion
        ids = definition.order.ids(keys)
        if kind == ROWS:
            self._in_pieces(lambda some: self._access.write_over(definition, ids[some], records[some]), definition, ids)
            return len(ids)
        exist = partial(self._exist, definition)
        self._in_pieces(lambda some: self._access.erase(definition, ids[some], exist=exist), definition, ids)
        return 0

    def _in_pieces(self, call: Callable[[slice], None], definition: TableDef, ids: Ids) -> None:
        """Call for these rows, one at least, as many at a time as storage takes before the deadline."""
        start = 0

        def piece() -> slice:
            return slice(start, start + max(1, min(BLOCK_BYTES, self._access.pace.n_bytes) // definition.record.size_bytes))

        def make_way(error: StorageError) -> None:
            if not self._store.repair.make_way(self._access.keys(definition, ids[piece()]), self._access.deadline()):
                raise error
            log.error("%s", error)

        while start < len(ids):
            for attempt in Tries(self._pause, self._repair, make_way):
                with attempt:
                    call(some := piece())
            start = some.stop


def portions(streams: Sequence[Iterator[Part]]) -> Iterator[Portion]:
    """Yield kind, keys and records in larger portions, of all streams in turn: as much as is written at once."""
    waiting: dict[int, list[Part]] = {ROWS: [], ERASED: []}
    n_bytes, turns = 0, chain.from_iterable(zip_longest(*streams))  # None for a stream that has ended
    for part in chain(filter(None, turns), [None]):
        if part is not None:
            waiting[part[0]].append(part)
            n_bytes += part[1].nbytes + part[3].nbytes
        if part is None or n_bytes >= BLOCK_BYTES:
            for kind, parts in waiting.items():
                if parts:
                    yield kind, np.concatenate([one[1] for one in parts]), np.concatenate([one[3] for one in parts])
            waiting, n_bytes = {ROWS: [], ERASED: []}, 0
