"""Keeps a projection as the cluster is: rows of the row log first, then what changes, and how far that is behind the rows.

There is one thing that a publisher does with ids, whatever it was told about them: it reads what storage has of them now, and makes the
target have the same. Doing it twice does no harm, and what comes later only makes a row newer: a row is read, and then written, by one
thread of one publisher, rows of storage never go back, and events of a row come in the order of its versions. So no version stands in the
target. docs/adr/0103 has the argument in full.

A session is one connection to the cluster, one feed, one position. Whatever breaks ends the session, and the next one goes on at the
position that the target has.
"""

import json
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.api import Cluster
from kvemb.arrays.ids import unique
from kvemb.errors import (
    ConfigError,
    DeadlineExceededError,
    FeedBehindError,
    NodeFullError,
    NodeRefusesError,
    NodeUnavailableError,
    NotProvisionedError,
    ShardUnavailableError,
    StorageError,
    UnknownTableError,
    n_of,
)
from kvemb.feed.cluster_feed import ClusterFeed, FeedEvent
from kvemb.feed.feed_messages import FeedPosition
from kvemb.net.deadline import WhyWaiting, pauses
from kvemb.process.work_ahead import work_ahead
from kvemb.projection.projected_rows import ALL_SLOTS, ProjectedTable, SlotShare
from kvemb.projection.projection_target import ProjectionTarget
from kvemb.schema.table_def import TableDef
from kvemb.wire.request_arrays import chunks

_AT_ONCE = 1 << 18  # ids that are gathered before they are read
_ROWS = 1 << 15  # read, or written, in one piece; the next piece is read meanwhile
_IDLE_S, _NOTE_S, _ASK_S, _REPORT_S = 0.25, 0.2, 1.0, 10.0
_FORMAT = 1
_TURNS = ("load", "drop", "caught-up")
# Waited for at the start, too.
_AWAY = (NodeUnavailableError, DeadlineExceededError, NodeFullError, NotProvisionedError, ShardUnavailableError)
log = logging.getLogger("kvemb")
Ids = NDArray[np.uint64]


class _BeginAgainError(Exception):
    """What the target has cannot be carried on: all rows are to be told again. Internal."""


_AGAIN = (_BeginAgainError, FeedBehindError, UnknownTableError)  # the last: dropped or altered since it was opened


@dataclass(frozen=True)
class Projection:
    """What is published."""

    tables: tuple[str, ...]  # names, each once; the layout "nve" numbers them in this order
    dtype: str = "float32"  # of the values, of `DTYPES`
    layout: str = "kvemb"  # of `LAYOUTS`
    share: SlotShare = ALL_SLOTS  # of the slots, which this publisher has

    def __post_init__(self) -> None:
        if not self.tables or len(set(self.tables)) < len(self.tables):
            raise ConfigError("--tables: name at least one table, and each once")
        if self.layout == "nve" and self.share.of > 1:
            raise ConfigError("--part: in the layout nve a table is one hash, which one publisher writes")


class Publisher:
    """Publishes until it is ended from outside, or the target has all that was applied before a given time. One thread."""

    def __init__(
        self,
        projection: Projection,
        target: ProjectionTarget,
        connect: Callable[[], Cluster],
        *,
        patience_s: float,
        report: Callable[[str], None],
    ) -> None:
        self._projection, self._target, self._connect = projection, target, connect
        self._patience_s, self._tables = patience_s, dict[str, ProjectedTable]()
        self._tally = _Tally(report)
        self._begun, self._behind = False, False  # whether the target was ours once; whether its record does not hold any more
        self._well_s = time.monotonic()  # the last step that was done
        self._untold = set[int]()  # shards of which not every row was told
        self._filling: list[str] = []  # tables of which rows may not be in the target yet
        self._sweeps = False  # whether rows that were not told are to be found once all are
        self._noted_s = 0.0

    def run(self, until_s: float = math.inf) -> None:
        """Publish."""
        waiting, tries, failed_s = WhyWaiting(), pauses(0.05, 2.0), 0.0
        while True:
            try:
                with self._connect() as cluster:
                    return self._session(cluster, until_s)
            except (*_AGAIN, StorageError, ShardUnavailableError) as error:
                if self._well_s > failed_s:
                    waiting.over()
                    tries = pauses(0.05, 2.0)
                failed_s = time.monotonic()
                may_come = self._begun or (isinstance(error, _AWAY) and not isinstance(error, NodeRefusesError))
                if not may_come or failed_s - self._well_s > self._patience_s:
                    raise
                again = isinstance(error, _AGAIN)
                self._behind = self._behind or again
                why = str(error).partition(". ")[0] if again else str(error)  # the rest is for callers of the feed, and of tables
                if waiting.is_news(why):
                    log.warning("the publisher %s: %s", "tells every row again" if again else "waits", why)
            finally:
                self._target.close()
            threading.Event().wait(next(tries))

    def _session(self, cluster: Cluster, until_s: float) -> None:
        position = self._begin(cluster)
        with cluster.feed.open(self._projection.tables, from_=position or "start") as feed:
            self._untold = set() if position else set(feed.position)
            self._tally.begin()
            while self._tally.until_s < until_s:
                self._step(cluster, feed)

    def _begin(self, cluster: Cluster) -> Mapping[int, tuple[int, ...]] | None:
        """Find out what the target has, and prepare it where that is not what is published; return the position to go on from."""
        projection, share = self._projection, self._projection.share
        definitions: dict[str, TableDef] = {}
        for name in projection.tables:
            try:
                definitions[name] = cluster.table(name).definition
            except UnknownTableError:  # dropped meanwhile; it may come again
                if not self._begun:
                    raise
        self._tables = {name: self._projected(definition) for name, definition in definitions.items()}
        about: dict[str, Any] = {
            "format": _FORMAT,
            "cluster": cluster.cluster_id.hex(),
            "dtype": projection.dtype,
            "layout": projection.layout,
        }
        about["parts"] = share.of
        there = self._target.about()
        for key, value in about.items():
            if there is not None and there.get(key) != value:
                raise ConfigError(
                    f"target {self._target.address} holds a projection with {key} {there.get(key)!r}, and this one has {value!r}. "
                    "Give another server, or empty this one"
                )
        tables = {name: table.described() | {"definition": definitions[name].to_dict()} for name, table in self._tables.items()}
        about = json.loads(json.dumps(about | {"tables": tables}))  # as it comes back
        self._target.take_over()
        self._begun, record = True, self._target.record()
        told = record is not None and record["tables"] == self._record()["tables"]
        if record is not None and told and record["position"] and there == about and not self._behind:
            self._filling = record.get("filling", [])
            return {int(shard): tuple(at) for shard, at in record["position"].items()}
        record = record or {"tables": {}}
        others = {name: old for name, fields in record["tables"].items() if (old := ProjectedTable(**fields)) != self._tables.get(name)}
        filling = {*self._tables} - record["tables"].keys() | {*record.get("filling", ())} | others.keys()
        if others:  # whoever reads their rows is not to take those that go for ids without a row
            self._target.note({**record, "position": None, "filling": sorted(filling)})
        for old in others.values():
            for keys in old.hash_keys(share):
                self._target.remove(keys)
        self._sweeps = any(self._target.count_hashes(keys) for table in self._tables.values() for keys in table.hash_keys(share))
        self._filling = sorted(filling & self._tables.keys())
        self._target.begin(about, self._record())
        self._behind, self._tally.until_s = False, 0.0
        return None

    def _record(self, position: Mapping[int, FeedPosition] | None = None, until: float = 0.0) -> dict[str, Any]:
        tables = {name: asdict(table) for name, table in self._tables.items()}
        return {"tables": tables, "position": position, "until": until, "filling": self._filling}

    # --- what is told ----------------------------------------------------------------------------------------------------------------

    def _step(self, cluster: Cluster, feed: ClusterFeed) -> None:
        """Take what is told now, and note how far that is."""
        changed, erased, n_ids = defaultdict[str, list[Ids]](list), defaultdict[str, list[Ids]](list), 0
        event = feed.take(_IDLE_S)
        while event is not None and event.kind not in _TURNS:
            if len(event.ids):
                changed[event.table].append(event.ids.view(np.uint64))
            if event.kind == "erase":
                erased[event.table].append(event.ids.view(np.uint64))
            n_ids += len(event.ids)
            if n_ids >= _AT_ONCE:
                break
            event = feed.take(0.0)
        for name, ids in changed.items():
            self._mirror(cluster, name, np.concatenate(ids), np.concatenate([np.empty(0, np.uint64), *erased[name]]))
        if event is not None and event.kind in _TURNS:
            self._heed(cluster, event)
        if not self._untold and time.monotonic() - self._noted_s >= _NOTE_S:
            position = feed.position
            self._tally.date(cluster, feed)
            if self._tally.until_s:
                self._filling = []
            if not self._target.note(self._record(position, self._tally.until_s)):
                raise _BeginAgainError(f"target {self._target.address} has lost what it had")
            self._noted_s = time.monotonic()
        self._well_s = time.monotonic()
        self._tally.tell()

    def _heed(self, cluster: Cluster, event: FeedEvent) -> None:
        if event.kind == "drop":
            self._require_known(cluster, event.table)
        elif event.kind == "load":
            self._untold.add(event.shard)
            self._sweeps = True
        elif event.shard in self._untold:
            self._untold.discard(event.shard)
            if not self._untold and self._sweeps:
                self._sweep(cluster)

    def _sweep(self, cluster: Cluster) -> None:
        """Look for every row of the target in storage: those that it does not have any more go. The others were told before."""
        for name, table in self._tables.items():
            for keys in table.hash_keys(self._projection.share):
                for there in self._target.ids(keys):
                    ids = unique(there).ids
                    gone = ids[cluster.connection.pull_known([(cluster.table(name).definition, ids)])[0][1] == 0]
                    self._target.erase(table.keys(gone))
                    self._tally.n_erased += len(gone)
        self._sweeps = False

    def _require_known(self, cluster: Cluster, name: str) -> None:
        """Begin again if a table is not the one any more, or is there now, of which the target has rows."""
        try:
            now = self._projected(cluster.questions.get_table(name))
        except UnknownTableError:
            now = None
        if now != self._tables.get(name):
            raise _BeginAgainError(f"table {name!r} was {'created' if now else 'dropped'}")

    def _projected(self, definition: TableDef) -> ProjectedTable:
        number = self._projection.tables.index(definition.name)
        return ProjectedTable.of(definition, self._projection.dtype, self._projection.layout, number, self._target.hash_prefix)

    def _mirror(self, cluster: Cluster, name: str, ids: Ids, erased: Ids) -> None:
        """Make the target have of these ids, uint64 [n], what storage has; the others' share is left out."""
        projected = self._tables.get(name)
        if projected is None:
            self._require_known(cluster, name)
            return
        definition, ids = cluster.table(name).definition, unique(ids).ids
        if self._projection.share.of > 1:
            ids = ids[self._projection.share.owns(projected.keys(ids).slots())]
        pieces = [ids[some] for some in chunks(len(ids), _ROWS)]

        def pull(ids: Ids) -> tuple[NDArray[Any], NDArray[np.uint64]]:
            return cluster.connection.pull_known([(definition, ids)])[0]

        ahead = work_ahead(pull, pieces, n_threads=1, name="kvemb-publish") if len(pieces) > 1 else map(pull, pieces)
        for piece, (rows, versions) in zip(pieces, ahead, strict=True):
            there = versions != 0
            if there.all():
                self._target.write(projected.keys(piece), projected.values(piece, rows))
            else:
                self._target.write(projected.keys(piece[there]), projected.values(piece[there], rows[there]))
                self._target.erase(projected.keys(gone := np.intersect1d(piece[~there], erased)))
                self._tally.n_erased += len(gone)
            self._tally.n_written += int(there.sum())


class _Tally:
    """What was done since it was last said."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said_s = say, time.monotonic()
        self.n_written = self.n_erased = 0
        self.until_s = 0.0  # unix time; all that was applied before is in the target. 0 while that is not known.
        self._asked_s, self._wanted, self._ask_s = 0.0, dict[int, int](), 0.0  # how far the shards were at a time; when to ask again

    def begin(self) -> None:
        """Another feed has begun: what the shards had applied is asked anew."""
        self._wanted, self._ask_s = {}, 0.0

    def date(self, cluster: Cluster, feed: ClusterFeed) -> None:
        """See whether the feed has told what the shards had applied when they were asked last; ask again, now and then."""
        if self._wanted and feed.has_told(self._wanted):
            self.until_s, self._wanted = self._asked_s, {}
        if not self._wanted and time.monotonic() >= self._ask_s:
            asked_s, wait_s = time.time(), _ASK_S
            try:
                self._wanted = cluster.questions.heads(_ASK_S)
                self._asked_s = asked_s
            except ShardUnavailableError:  # the others' rows are not to wait for it
                wait_s = _REPORT_S
            self._ask_s = time.monotonic() + wait_s

    def tell(self) -> None:
        """Say it, now and then."""
        took_s = time.monotonic() - self._said_s
        if took_s < _REPORT_S:
            return
        lag = f"{time.time() - self.until_s:.2f} s behind" if self.until_s else "not caught up yet"
        self._say(f"{n_of(self.n_written, 'row')} written and {self.n_erased:,} erased in {took_s:.0f} s; {lag}")
        self.n_written = self.n_erased = 0
        self._said_s = time.monotonic()
