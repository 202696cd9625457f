"""The thread by which a shard follows the cluster map: looks for a newer one, keeps it in the data folder, reports its part of a plan.

It looks at once when something has changed: the apply thread has done its part, another shard has said so, shard 0 has changed the map;
and now and then. Shard 0's thread carries the plan on, too (`move_carrier`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from kvemb.client.all_shards import AllShards
from kvemb.client.shard_channel import PendingCall
from kvemb.coordination.shard_notes import MAX_TROUBLE, MoveReport, report_name
from kvemb.errors import FencedError, KvembError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.protocol.messages import Empty
from kvemb.scaling.move_messages import MOVE_NEWS
from kvemb.schema.cluster_map import ClusterMap

from ..recovery.join_cluster import keep_map
from ..recovery.shard_parts import ShardParts
from ..shard_process.owned_thread import OwnedThread
from .move_carrier import MoveCarrier
from .phase_runner import PhaseProgress, PhaseRunner

_LOOK_S = 0.25
_TELL_S = 1.0  # between two reports that only tell of progress
_LOOK_TIMEOUT_S, _NEWS_TIMEOUT_S = 2.0, 1.0
log = logging.getLogger("paramserver")


class MapFollower:
    """Owns that thread."""

    def __init__(
        self,
        parts: ShardParts,
        runner: PhaseRunner,
        carrier: MoveCarrier | None,
        *,
        shards: AllShards,
        look: threading.Event,
        wake: Callable[[], None],
    ) -> None:
        self._parts, self._store, self._shard, self._timeout_s = parts, parts.store, parts.shard, parts.timeout_s
        self._runner, self._carrier, self._shards, self._due, self._wake = runner, carrier, shards, look, wake
        self._kept: ClusterMap | None = None
        self._kept_nodes: tuple[tuple[str, ...], Mapping[int, str]] = (), {}
        self._told: MoveReport | None = None
        self._told_s, self._waiting = 0.0, WhyWaiting()
        self._news: dict[int, PendingCall[Empty]] = {}  # gRPC cancels calls that nobody holds
        self.thread = OwnedThread(self._run, name="kvemb-map", wakes=(self._due.set,))

    def _run(self) -> None:
        while True:
            told = self._due.wait(_LOOK_S)
            self._due.clear()
            if self.thread.told_to_end:
                return
            try:
                self._look(told=told)
                self._waiting.over()
            except FencedError:
                return  # the node watch says it
            except (KvembError, OSError) as error:
                if self._waiting.is_news(str(error)):
                    log.warning("the cluster map cannot be followed now: %s", error)
            except Exception as error:  # without this thread a move would never end, and nobody be told
                if self._waiting.is_news(f"{type(error).__name__}: {error}"):
                    log.exception("the cluster map cannot be followed now")

    def _look(self, *, told: bool) -> None:
        if self._carrier is None or not told:  # shard 0 has the newest, unless another process is shard 0 now
            self._store.nodes.refresh_map(Deadline.after(min(self._timeout_s, _LOOK_TIMEOUT_S)))
        cluster_map = self._store.nodes.cluster_map
        nodes, is_new = (self._store.nodes.addresses, self._store.nodes.repairs), cluster_map is not self._kept
        newer = self._kept is None or cluster_map.version != self._kept.version
        if newer and self._carrier is not None:  # which has changed it, or just started
            self._tell(shard for shard in cluster_map.shard_numbers if shard != self._shard)
        if newer or nodes != self._kept_nodes:
            keep_map(self._parts.data, self._store.nodes, cluster_map, self._parts.claim.require)
        self._kept, self._kept_nodes = cluster_map, nodes
        if is_new:
            self._wake()
        if cluster_map.plan is not None:
            self._report(cluster_map)
            if self._carrier is not None:
                self._carrier.carry()

    def _tell(self, shards: Iterable[int]) -> None:
        """Have other shards look at once."""
        for shard in shards:
            with suppress(KvembError):
                if (channel := self._shards.channels.get(shard)) is not None:
                    self._news[shard] = channel.start(MOVE_NEWS, Empty(), Deadline.after(_NEWS_TIMEOUT_S))

    def _report(self, cluster_map: ClusterMap) -> None:
        """Tell the nodes how far this shard is, at once when the plan waits for that."""
        now, trouble = self._runner.progress, self._runner.trouble[:MAX_TROUBLE]
        if now.version != cluster_map.version:
            now = PhaseProgress(cluster_map.version)
        done = now.done  # first: what follows does not change after it
        epoch, told = self._parts.engine.epoch, self._told
        report = MoveReport(epoch, now.version, done, now.rows, now.n_rows, trouble, now.step if done else 0)
        news = told is None or (told.version, told.done, bool(told.trouble)) != (report.version, report.done, bool(report.trouble))
        if news or time.monotonic() - self._told_s >= _TELL_S:
            self._store.values.put_where_possible(
                report_name(self._shard), report.encode(), Deadline.after(min(self._timeout_s, _LOOK_TIMEOUT_S))
            )
            self._told, self._told_s = report, time.monotonic()
            if self._carrier is None and (report.done or report.trouble):
                self._tell([0])
