"""Where a serving client's rows come from: a cluster, or a target of projections and the view there that is in use.

A source has one set of rows at a time, with what is kept of them, and a look-up takes all its rows from the set that it began with. So a
switch from one view to another is one attribute that is set. What must not live here: what a look-up does (kvemb.serve.serving_client).
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.api.cluster import Cluster
from kvemb.errors import KvembError, UnknownViewError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.process import ForkLock
from kvemb.projection.projection_reader import ProjectedRows, ProjectionReader
from kvemb.schema.table_def import TableDef
from kvemb.serve.feed_follower import FeedFollower
from kvemb.serve.served_tables import ServedTables

_LOOK_S, _PAUSE_S = 0.1, 1.0  # between two looks at which view is in use; after one that failed
_JOIN_S = 5.0
log = logging.getLogger("kvemb")


@dataclass(eq=False)
class RowSet:
    """Rows that look-ups are answered from.

    Args:
        tables: what is kept of them.
        definition: of a table, by name.
        pull: as `Cluster.pull_known`.
        projected: those of a target; None of a cluster.
    """

    tables: ServedTables
    definition: Callable[[str], TableDef]
    pull: Callable[[Sequence[tuple[TableDef, NDArray[np.uint64]]], float], list[tuple[NDArray[Any], NDArray[np.uint64]]]]
    projected: ProjectedRows | None = None
    means: dict[str, tuple[float, NDArray[Any]]] = field(default_factory=dict)
    """By table, the mean row of `MeanOf`, and when it was computed."""

    @property
    def view(self) -> str:
        """The name of the view; "" of a cluster."""
        return "" if self.projected is None else self.projected.name


class ClusterSource:
    """The rows of a cluster, as they are now; with the first look-up of a process the feed is followed.

    Args:
        cluster: opened read-only; closed with this.
        tables: what is kept of it.
    """

    def __init__(self, cluster: Cluster, tables: ServedTables) -> None:
        self.name, self._cluster = cluster.config.cluster, cluster
        self._set = RowSet(tables, lambda name: cluster.table(name).definition, cluster.pull_known)
        self._follower, self._pid, self._lock = FeedFollower(cluster, tables), os.getpid(), ForkLock()

    def now(self) -> RowSet:
        """Return the rows for a look-up that begins now."""
        if os.getpid() != self._pid:  # a forked child begins with nothing
            with self._lock:
                if os.getpid() != self._pid:
                    self._set.tables.reset()
                    self._set.means.clear()
                    self._follower = FeedFollower(self._cluster, self._set.tables, forked=self._follower.started)
                    self._pid = os.getpid()
        if not self._follower.started:
            self._follower.start()
        return self._set

    def again(self, gone: RowSet, error: UnknownViewError, deadline: Deadline) -> RowSet:
        """Return other rows, since these are not there any more; raise the error where there are none."""
        raise error

    def wait(self, timeout_s: float) -> None:
        """Wait, unless it is closed."""
        self._follower.wait(timeout_s)

    def close(self) -> None:
        """End threads and connections. Idempotent."""
        self._follower.close()
        self._cluster.close()


class ViewSource:
    """The rows of one view, or of whichever is in use; with the first look-up of a process a thread looks which one that is.

    Args:
        reader: of the target; closed with this.
        wanted: name of the view; "" to follow the one in use.
        new_tables: makes what is kept of one view.
        timeout_s: of looking which view it is, and of opening it.

    Raises:
        UnknownViewError, StorageError: as `ProjectionReader.open`.
    """

    def __init__(self, reader: ProjectionReader, wanted: str, new_tables: Callable[[], ServedTables], timeout_s: float) -> None:
        self.name, self._reader, self._wanted, self._new_tables = reader.address, reader, wanted, new_tables
        self._timeout_s = timeout_s
        self._lock, self._closed, self._waiting = ForkLock(), threading.Event(), WhyWaiting()
        self._pid, self._thread = 0, threading.Thread()  # none looks yet
        self.before_use: list[Callable[[RowSet], object]] = []
        """Each is called with a set before it is used; what it raises keeps the set before in use."""
        self._set = self._opened(Deadline.after(timeout_s))

    def now(self) -> RowSet:
        """Return the rows for a look-up that begins now."""
        if os.getpid() != self._pid:
            with self._lock:
                if os.getpid() != self._pid:
                    if self._pid:  # forked: another thread may have been in the middle of a change of what is kept
                        self._set = self._set_of(self._set.projected)
                    self._thread = threading.Thread(target=self._follow, name="kvemb-serve-view", daemon=True)
                    self._thread.start()
                    self._pid = os.getpid()
        return self._set

    def again(self, gone: RowSet, error: UnknownViewError, deadline: Deadline) -> RowSet:
        """Return other rows, since these are not there any more; raise the error where there are none."""
        try:
            self._look(deadline)
        except UnknownViewError:
            raise error from None
        if self._set is gone:
            raise error
        return self._set

    def wait(self, timeout_s: float) -> None:
        """Wait, unless it is closed."""
        self._closed.wait(timeout_s)

    def close(self) -> None:
        """End threads and connections. Idempotent."""
        self._closed.set()
        if self._thread.ident is not None and self._pid == os.getpid():
            self._thread.join(_JOIN_S)
        self._reader.close()

    def _follow(self) -> None:
        pause_s = _LOOK_S
        while not self._closed.wait(pause_s):
            try:
                self._look(Deadline.after(self._timeout_s))
                self._waiting.over()
                pause_s = _LOOK_S
            except Exception as error:  # also of those who are called before a set is used
                pause_s = _PAUSE_S
                if not self._closed.is_set() and self._waiting.is_news(str(error)):
                    level = logging.WARNING if isinstance(error, KvembError) else logging.ERROR
                    log.log(level, "look-ups stay with view %r: %s: %s", self._set.view, type(error).__name__, error)

    def _look(self, deadline: Deadline) -> None:
        """See whether the rows are still the ones that are wanted; otherwise bring those into use."""
        with self._lock:
            projected = self._set.projected
            if projected is None or not self._reader.wants(self._wanted, projected, deadline):
                found = self._opened(deadline)
                for prepare in self.before_use:
                    prepare(found)
                self._set = found

    def _opened(self, deadline: Deadline) -> RowSet:
        return self._set_of(self._reader.open(self._wanted, deadline))

    def _set_of(self, projected: ProjectedRows | None) -> RowSet:
        assert projected is not None
        tables = self._new_tables()
        if projected.view is not None:
            tables.follow(0.0)  # its rows never change: what is kept is good for ever
        return RowSet(tables, projected.definition, projected.pull, projected)


ServingSource = ClusterSource | ViewSource
"""What a serving client is given."""
