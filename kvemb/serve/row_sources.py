"""Where a serving client's rows come from: a cluster, or a target of projections and the view there that is in use.

A source has one set of rows at a time, with what is kept of them, and a look-up takes all its rows from the set that it began with. So a
switch from one view to another is one attribute that is set.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.api.cluster import Cluster
from kvemb.errors import KvembError, StorageError, UnknownViewError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.process import ForkLock
from kvemb.projection.projection_reader import ProjectedRows, ProjectionReader
from kvemb.projection.views import View, ViewList
from kvemb.schema.table_def import TableDef
from kvemb.serve.feed_follower import FeedFollower
from kvemb.serve.served_tables import ServedTables

_LOOK_S, _PAUSE_S = 0.1, 1.0  # between two looks at which view is in use; after one that failed
_JOIN_S = 5.0
log = logging.getLogger("kvemb")


@dataclass(eq=False)
class RowSet:
    """Rows that look-ups are answered from."""

    tables: ServedTables  # what is kept of them
    definition: Callable[[str], TableDef]  # of a table, by name
    # as `Connection.pull_known`
    pull: Callable[[Sequence[tuple[TableDef, NDArray[np.uint64]]], float], list[tuple[NDArray[Any], NDArray[np.uint64]]]]
    projected: ProjectedRows | None = None  # those of a target; None of a cluster
    _made: dict[Callable[["RowSet"], Any], Any] = field(default_factory=dict)
    _making: ForkLock = field(default_factory=ForkLock)

    def made(self, make: Callable[["RowSet"], Any]) -> Any:
        """Return what a function makes of these rows, a dense part loaded, say: it is called once. Thread-safe."""
        if make not in self._made:
            with self._making:
                if make not in self._made:
                    self._made[make] = make(self)
        return self._made[make]

    def with_cache(self, tables: ServedTables) -> "RowSet":
        """Return these rows, with what was made of them, and nothing kept but what is in `tables`."""
        return replace(self, tables=tables)

    @property
    def view(self) -> str:
        """The name of the view; "" of a cluster."""
        return "" if self.projected is None else self.projected.name


class ClusterSource:
    """The rows of a cluster, as they are now; with the first look-up of a process the feed is followed."""

    def __init__(self, cluster: Cluster, tables: ServedTables) -> None:
        self.name, self._cluster = cluster.config.cluster, cluster
        self.current = RowSet(tables, lambda name: cluster.table(name).definition, cluster.connection.pull_known)
        self._follower, self._pid, self._lock = FeedFollower(cluster, tables), os.getpid(), ForkLock()

    def now(self) -> RowSet:
        """Return the rows for a look-up that begins now."""
        if os.getpid() != self._pid:  # a forked child begins with nothing
            with self._lock:
                if os.getpid() != self._pid:
                    self.current.tables.reset()
                    self._follower = FeedFollower(self._cluster, self.current.tables, forked=self._follower.started)
                    self._pid = os.getpid()
        if not self._follower.started:
            self._follower.start()
        return self.current

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

    Where it follows the one in use, the thread makes the newest view ready ahead, and keeps the one before ready: so a switch forth or back
    loads nothing.
    """

    def __init__(self, reader: ProjectionReader, wanted: str, new_tables: Callable[[], ServedTables], timeout_s: float) -> None:
        self.name, self._reader, self._wanted, self._new_tables = reader.address, reader, wanted, new_tables
        self._timeout_s = timeout_s
        self._lock, self._closed, self._waiting = ForkLock(), threading.Event(), WhyWaiting()
        self._pid, self._thread = 0, threading.Thread()  # none looks yet
        self.before_use: list[Callable[[RowSet], object]] = []
        """Each is called with a set before it is used (`RowSet.made`); what it raises keeps the set before in use."""
        self._ready: dict[View, RowSet] = {}
        """Sets that are not in use: of the newest view, and of the one before."""
        self._unready: View | None = None  # the newest, of which none could be made
        self._before: View | None = None  # in use before the one that is
        self.current = self._set_of(reader.open(wanted, Deadline.after(timeout_s)))

    def now(self) -> RowSet:
        """Return the rows for a look-up that begins now."""
        if os.getpid() != self._pid:
            with self._lock:
                if os.getpid() != self._pid:
                    if self._pid:  # forked: another thread may have been in the middle of a change of what is kept
                        self.current = self.current.with_cache(self._cache(self._projected))
                    self._thread = threading.Thread(target=self._follow, name="kvemb-serve-view", daemon=True)
                    self._thread.start()
                    self._pid = os.getpid()
        return self.current

    def is_ready(self, name: str) -> bool:
        """Whether the view of this name is in use, or would be without loading anything."""
        return name in {self.current.view, *(rows.view for rows in self._ready.values())}

    def again(self, gone: RowSet, error: UnknownViewError, deadline: Deadline) -> RowSet:
        """Return other rows, since these are not there any more; raise the error where there are none."""
        try:
            self._look(deadline)
        except UnknownViewError:
            raise error from None
        if self.current is gone:
            raise error
        return self.current

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
                self._make_ready(self._look(Deadline.after(self._timeout_s)))
                self._waiting.over()
                pause_s = _LOOK_S
            except Exception as error:  # also of those who are called before a set is used
                pause_s = _PAUSE_S
                if isinstance(error, UnknownViewError) and self._wanted and self.current.tables.followed:
                    self.current = self.current.with_cache(self._new_tables())  # it was dropped: no id is answered, kept or not
                if not self._closed.is_set() and self._waiting.is_news(str(error)):
                    level = logging.WARNING if isinstance(error, KvembError) else logging.ERROR
                    log.log(level, "look-ups stay with view %r: %s: %s", self.current.view, type(error).__name__, error)

    def _look(self, deadline: Deadline) -> ViewList:
        """See whether the rows are still the ones that are wanted; otherwise bring those into use. Return the views that there are."""
        with self._lock:
            before, now = self.current, self._projected
            views, record = self._reader.look(now, deadline)
            view = views.named(self._wanted)
            if view != now.view or (view is None and not now.same_tables(record)):
                found = self._ready.get(view) if view else None
                found = found or self._set_of(self._reader.open_view(view, deadline))
                self._prepare(found)
                self.current, self._before = found, now.view
                self._keep_ready(views, before.with_cache(self._cache(now)))
        return views

    def _make_ready(self, views: ViewList) -> None:
        """Open the newest view, and do what is done before one is used; look-ups go on with the one in use."""
        newest = views.complete()[-1:]
        if self._wanted or not newest or newest[0] in (self._unready, self._projected.view):
            return
        try:
            found = self._ready.get(newest[0]) or self._set_of(self._reader.open_view(newest[0], Deadline.after(self._timeout_s)))
            self._prepare(found)
        except StorageError:
            raise
        except Exception as error:  # also of those who are called; it is tried again when the view is to be used
            self._unready = newest[0]
            log.warning("view %r cannot be used as it is: %s: %s", newest[0].name, type(error).__name__, error)
            return
        with self._lock:
            self._keep_ready(views, found)

    def _keep_ready(self, views: ViewList, more: RowSet) -> None:
        """Keep the sets of the newest view and of the one in use before, as far as these are there, and not in use; others go."""
        there = views.complete()
        wanted = {self._before, *there[-1:]} & {*there} - {self._projected.view}
        sets = [*self._ready.values(), more]
        self._ready = {view: rows for rows in sets if rows.projected and (view := rows.projected.view) and view in wanted}

    @property
    def _projected(self) -> ProjectedRows:
        projected = self.current.projected
        assert projected is not None
        return projected

    def _prepare(self, rows: RowSet) -> None:
        for make in self.before_use:
            rows.made(make)

    def _set_of(self, projected: ProjectedRows) -> RowSet:
        return RowSet(self._cache(projected), projected.definition, projected.pull, projected)

    def _cache(self, projected: ProjectedRows) -> ServedTables:
        tables = self._new_tables()
        if projected.view is not None:
            tables.follow(0.0)  # its rows never change: what is kept is good for ever
        return tables


ServingSource = ClusterSource | ViewSource
"""What a serving client is given."""
