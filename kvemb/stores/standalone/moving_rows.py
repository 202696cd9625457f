"""Rows of slots under way at their other node: where a plan brings them, or where they were before (docs/adr/0058)."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.move_plan import CLEANING
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.standalone.node_rows import NodeRows


class MovingRows:
    """Reads and writes rows of moving slots at their other node. Good for as long as the map is that one; see `OtherNodes`.

    Args:
        rows: of the store.
        cluster_map: with a plan that moves slots between nodes.
    """

    def __init__(self, rows: NodeRows, cluster_map: ClusterMap) -> None:
        plan = cluster_map.plan
        assert plan is not None
        self._rows, self._owners = rows, plan.slot_owners
        self.written = plan.writes_both
        self._moving = cluster_map.slot_nodes != self._owners
        if not self.written:  # a node on its way out keeps its rows, and need not be there any more
            self._moving &= ~np.isin(self._owners, plan.leaving if plan.phase == CLEANING else plan.joining)
        self._failing_since_s, self._why = 0.0, ""

    def has(self, keys: RowKeys) -> NDArray[np.bool_]:
        moving: NDArray[np.bool_] = self._moving[keys.slots()]
        return moving

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        with self._noting():
            return self._rows.read(parts, deadline, owners=self._owners)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        with self._noting():
            return self._rows.write(parts, deadline, owners=self._owners)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        with self._noting():
            return self._rows.erase(parts, deadline, owners=self._owners)

    def trouble(self, longer_than_s: float) -> str:
        since_s = self._failing_since_s
        return self._why if since_s and time.monotonic() - since_s >= longer_than_s else ""

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self._why = f"{type(error).__name__}: {error}"
            self._failing_since_s = self._failing_since_s or time.monotonic()
            raise
        self._failing_since_s = 0.0
