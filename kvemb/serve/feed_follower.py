"""Follows the feed for a serving client: one thread takes what changes, another builds the filters of ids.

Neither is needed for a look-up: without a shard both try again, and rows of the cache are good for as long as their age allows. A stream
that breaks goes on where it was; until all is told that changed meanwhile, the feed does not count as followed. While it is not, storage is
asked every second which tables there are: a table that was altered is not told of, and one that was dropped may not be. Not fork-safe: a
child makes one of its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvemb.api.cluster import Cluster
from kvemb.client import opened_before_fork
from kvemb.errors import FeedBehindError, KvembError
from kvemb.feed.cluster_feed import ClusterFeed, FeedEvent, open_feed
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.schema.table_def import TableDef
from kvemb.serve.served_tables import ServedTable, ServedTables

if TYPE_CHECKING:
    from kvemb.client.all_shards import AllShards
    from kvemb.client.shard_questions import ShardQuestions

_TAKE_S = 0.1
_PAUSE_S = 1.0
_AWAY_S = 10.0  # a shard that is away for longer: the feed is opened again
_JOIN_S = 5.0
_MAX_MB = 16.0
log = logging.getLogger("kvemb")


class FeedFollower:
    """Follows the feed of a cluster."""

    def __init__(self, cluster: Cluster, tables: ServedTables, *, forked: bool = False) -> None:
        self._cluster, self._tables, self._forked = cluster, tables, forked
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._asked: list[AllShards] = []  # while a thread asks them
        self._position: Mapping[int, Any] = {}
        self.started = False

    def start(self) -> None:
        """Begin, in threads of its own. Idempotent."""
        with self._lock:
            if self.started or self._closed.is_set():
                return
            self.started = True
            if self._forked or opened_before_fork():
                log.warning(
                    "this process is a fork of one that followed the feed, or was connected to shards: rows of the cache are good for "
                    "max_age_ms, and there is no filter. Look nothing up, and open no cluster but with read_only=True, before the fork."
                )
                return
            for name, work in (("kvemb-serve-feed", self._follow), ("kvemb-serve-filter", self._build_filters)):
                thread = threading.Thread(target=self._repeat, args=(work,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait, unless it is closed."""
        self._closed.wait(timeout_s)

    def close(self) -> None:
        """End both threads. Idempotent."""
        self._closed.set()
        for servers in [*self._asked]:
            servers.close()  # whoever waits for an answer gets an error
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _repeat(self, work: Callable[[], None]) -> None:
        waiting = WhyWaiting()
        while not self._closed.is_set():
            try:
                work()
                waiting.over()
            except KvembError as error:
                if not self._closed.is_set() and waiting.is_news(type(error).__name__):
                    log.warning("the feed is not followed; rows of the cache are good for max_age_ms meanwhile: %s", error)
            self._closed.wait(_PAUSE_S)

    # --- changes ---------------------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Take changes until the feed ends."""
        try:
            with self._shards() as shards, shards.feed(self._position or "now") as feed:
                if self._position:
                    behind: Mapping[int, int] | None = None
                else:
                    behind = {}
                    since_s = time.monotonic()
                    self._renew()  # a table that was dropped or altered before the feed began is not told of
                    self._tables.follow(since_s)
                while not self._closed.is_set():
                    event = feed.take(_TAKE_S)
                    if event is not None:
                        self._tell(event)
                    self._position = feed.position
                    away_s = feed.away_since_s
                    if away_s is not None:
                        self._tables.broken(away_s)
                        behind = None
                    elif behind is None:
                        behind = shards.questions.heads()
                    if behind is not None and not self._tables.followed and feed.has_told(behind):
                        self._tables.follow()
        except FeedBehindError:
            self._position = {}
            self._tables.lost()
            raise
        finally:
            self._tables.broken(time.monotonic())

    def _tell(self, event: FeedEvent) -> None:
        if event.kind == "load":
            self._tables.tell_all()
        elif event.kind == "drop":
            self._cluster.forget_table(event.table)  # first: a look-up opens what was dropped here
            self._tables.drop(event.table)
        elif len(event.ids):
            self._tables.tell(event.table, event.ids.view(np.uint64), event.versions, erased=event.kind == "erase")

    def _renew(self) -> None:
        """See by storage which tables were dropped or altered; what has their names now is opened when it is looked up."""
        self._tables.drop_all(self._cluster.forget_dropped())

    # --- filters ---------------------------------------------------------------------------------------------------------------------

    def _build_filters(self) -> None:
        renewed_s = time.monotonic()  # the first look-ups open their tables anyway
        while not self._closed.is_set():
            served = self._tables.unfiltered()
            if served is not None:
                with self._shards() as shards:
                    self._build(served, shards)
            elif not self._tables.followed and time.monotonic() - renewed_s >= _PAUSE_S:
                self._renew()
                renewed_s = time.monotonic()
            else:
                self._closed.wait(_TAKE_S)

    def _build(self, served: ServedTable, shards: "_FeedShards") -> None:
        """Add every id that there is: those that the feed tells from its start on, up to where it is followed already."""
        name = served.definition.name
        building = self._tables.begin_filter(served, shards.questions.count(name))
        if building is None:
            log.warning("table %r has no filter of ids: filter_mb has no byte for each", name)
            return
        with shards.feed("start", (name,)) as feed:
            missing, heads = set(feed.position), shards.questions.heads()
            while not self._closed.is_set() and served.building is building:
                event = feed.take(_TAKE_S)
                if event is not None and event.kind == "caught-up":
                    missing.discard(event.shard)
                elif event is not None and event.kind != "erase" and len(event.ids):
                    self._tables.fill(building, event.ids.view(np.uint64))
                if not missing & set(feed.position) and feed.has_told(heads):
                    self._tables.end_filter(served, building)
                    return

    @contextmanager
    def _shards(self) -> "Iterator[_FeedShards]":
        from kvemb.client.all_shards import AllShards  # imports gRPC, without which rows are served, too
        from kvemb.client.shard_questions import ShardQuestions

        servers = AllShards.of(self._cluster.config.servers, self._cluster.store.nodes)
        self._asked.append(servers)
        try:
            servers.describe(self._cluster.config, Deadline.after(_AWAY_S))
            yield _FeedShards(self._cluster, servers, ShardQuestions(servers, _AWAY_S))
        finally:
            servers.close()
            self._asked.remove(servers)


@dataclass(frozen=True)
class _FeedShards:
    """The shards, while one thread asks them."""

    cluster: Cluster
    servers: "AllShards"
    questions: "ShardQuestions"

    def feed(self, from_: str | Mapping[int, Any], names: tuple[str, ...] | None = None) -> ClusterFeed:
        return open_feed(self.servers, self._definition, names, from_, max_mb=_MAX_MB, away_timeout_s=_AWAY_S)

    def _definition(self, name: str) -> TableDef:
        return self.cluster.table(name).definition
