"""Shard 0's part in a plan: it begins one, carries it from phase to phase, and ends it. docs/adr/0060 says why it may be one process.

Which phase follows is `move_phases`'; this asks the shards, keeps the map, gives it to the nodes.

The map in this shard's data folder decides: a phase is written there first, then followed, then given to the nodes. So a phase that any
process has seen outlives the death of any process and any node. The next process of shard 0 goes on with the newest map that its folder and
the nodes have.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvemb.client.all_shards import AllShards
from kvemb.coordination.shard_notes import MoveReport, newest_report, report_name
from kvemb.coordination.shard_owners import newest_owner, owner_name
from kvemb.errors import MoveRefusedError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import MovePlan, refuses

from ..recovery.join_cluster import keep_map
from ..recovery.shard_parts import ShardParts
from .left_sessions import LeftSessions
from .move_phases import KEEP_SESSIONS, RENEW_MARKERS, Transition, on_abort, on_reports
from .move_planner import MovePlanner, WantedMove

_LOOK_TIMEOUT_S = 2.0  # of one look; the next one comes soon
_GIVE_AGAIN_S = 1.0  # to nodes that have lost it since
log = logging.getLogger("paramserver")


class MoveCarrier:
    """Begins, carries on and ends plans; on shard 0 only. Any thread, one at a time.

    Attributes:
        taken_back: why the last move was taken back, as far as this process knows; "" where it was not.
    """

    def __init__(self, parts: ShardParts, shards: AllShards, look: threading.Event) -> None:
        self._parts, self._store, self._timeout_s, self._look = parts, parts.store, parts.timeout_s, look
        self._planner, self.left = MovePlanner(parts), LeftSessions(parts, shards)
        self._given: tuple[ClusterMap, float] | None = None  # the map that every node has, and since when
        self._heard: tuple[int, list[MoveReport | None]] = 0, []
        self._lock = threading.Lock()
        self._waiting, self.taken_back = WhyWaiting(), ""

    def begin(self, wanted: WantedMove, deadline: Deadline) -> ClusterMap:
        """Begin a plan; return the map with it.

        Raises:
            StorageError: a new node cannot be used; nothing was changed.
        """
        with self._lock:
            planned = self._planner.plan(self._store.nodes.cluster_map, wanted, deadline)
            self.taken_back = ""
            self._follow(planned)
            log.info("a move of slots begins (map version %d)", planned.version)
            return planned

    @contextmanager
    def no_shard_move(self) -> Iterator[None]:
        """Keep slots with their shards while a block runs."""
        with self._lock:
            if why := refuses(self._store.nodes.cluster_map.plan):
                raise MoveRefusedError(why)
            yield

    def abort(self, why: str) -> ClusterMap:
        """Take a plan back that is not flipped yet; return the map. Calling it again changes nothing."""
        with self._lock:
            transition = on_abort(self._store.nodes.cluster_map, why)
            if transition is not None:
                self._take(transition)
            return self._store.nodes.cluster_map

    def replace_address(self, number: int, address: str, version: int, deadline: Deadline) -> ClusterMap:
        """Let a node that is gone for good be at another, empty address; the shards bring its rows back there, as after any loss.

        Raises:
            StorageError: the new one cannot be used; nothing was changed.
        """
        with self._lock:
            now = self._store.nodes.cluster_map
            changed = self._planner.exchanged(now, number, address, version, deadline)
            before = self._store.nodes.places[number]
            self._follow(changed)
            log.warning("node %d, which was at %s, is now at %s: its rows are brought back there", number, before, address)
            return self._store.nodes.cluster_map

    def heard(self, cluster_map: ClusterMap) -> list[MoveReport | None]:
        """Return each shard's report on this map, by the last look; None where its present process has sent none."""
        version, reports = self._heard
        return reports if version == cluster_map.version else [None] * cluster_map.n_shards

    def carry(self) -> None:
        """Take the next step of the plan under way, if it can be taken."""
        with self._lock:
            now = self._store.nodes.cluster_map
            if now.plan is None:
                return
            if self._given is None or self._given[0] is not now or time.monotonic() - self._given[1] > _GIVE_AGAIN_S:
                self._publish(now)
            reports = self._reports(now)
            self._heard = now.version, reports
            transition = on_reports(now, reports, sync=self._parts.sync)
            if transition is not None and all(self._can(what, now, now.plan) for what in transition.first):
                self._take(transition)

    def _can(self, what: str, now: ClusterMap, plan: MovePlan) -> bool:
        """Do one of the tasks before a transition; return whether it is done."""
        if what == KEEP_SESSIONS:
            return self.left.keep(plan.leaving, now.version, self._deadline())
        assert what == RENEW_MARKERS
        if missed := self._store.nodes.renew_markers(Deadline.after(self._timeout_s)):
            self._say(f"a move waits until every node's marker names the new map, and cannot be aborted any more: {'; '.join(missed)}")
        return not missed

    def _take(self, transition: Transition) -> None:
        if transition.taken_back:
            log.warning("the move is taken back: %s", transition.taken_back)
            self.taken_back = transition.taken_back
        flipped = (plan := self._store.nodes.cluster_map.plan) is not None and plan.flipped
        self._follow(transition.map)
        if transition.map.plan is None:
            log.info("the move is %s (map version %d)", "done" if flipped else "taken back", transition.map.version)

    def _follow(self, cluster_map: ClusterMap) -> None:
        keep_map(self._parts.data, self._store.nodes, cluster_map, self._parts.claim.require)
        self._publish(cluster_map)
        self._look.set()

    def _publish(self, cluster_map: ClusterMap) -> None:
        missed = self._store.nodes.publish_map(cluster_map, Deadline.after(self._timeout_s))
        self._given = None if missed else (self._store.nodes.cluster_map, time.monotonic())
        if missed:
            self._say(f"nodes do not have the newest map yet: {'; '.join(missed)}")

    def _say(self, text: str) -> None:
        if self._waiting.is_news(text):
            log.warning("%s", text)

    def _reports(self, now: ClusterMap) -> list[MoveReport | None]:
        """Each shard's report on this map; None where its present process has sent none."""
        shards = range(now.n_shards)
        names = [name(shard) for name in (report_name, owner_name) for shard in shards]
        copies = self._store.values.get_where_possible(names, self._deadline())
        found: list[MoveReport | None] = []
        for shard, reports, owners in zip(shards, copies, copies[now.n_shards :], strict=False):
            # A process that claims a shard puts its record on every node before it begins: any node's record will do.
            report, owner = newest_report(reports), newest_owner(owners, shard)
            ours = report is not None and owner is not None and (report.version, report.epoch) == (now.version, owner.epoch)
            found.append(report if ours else None)
        return found

    def _deadline(self) -> Deadline:
        return Deadline.after(min(self._timeout_s, _LOOK_TIMEOUT_S))
