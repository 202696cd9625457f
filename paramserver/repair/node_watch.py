"""Watches the storage nodes: for rows that they evicted, and for nodes that lost everything while no batch wrote to them. And whether the
shard is still ours.

Nodes that may evict are refused when they are connected, but settings can be changed while a server runs. And memcached can lose rows by
moving slab pages without counting an eviction. A node that restarted empty is noticed by the next batch that touches it. A shard that has
no batch must notice too, because every shard has a part in the repair. In the same way a shard that another process has taken over is told
by its next batch. One without batches would stay, hold its port and answer questions.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvemb.errors import FencedError, KvembError, NodeLostError, ParameterServerError, UnsafeNodeError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.stores.marked_nodes import LostNode
from kvemb.stores.store import Store
from kvemb.stores.store_nodes import NodeStats

from ..shard_process.owned_thread import OwnedThread

_EVICTIONS_INTERVAL_S = 5.0  # between two looks for evictions, or more where even one look at the markers takes long
_EVICTIONS_TIMEOUT_S = 2.0  # of such a look, for each node: one that hangs is soon known not to be up
MARKERS_INTERVAL_S = 1.0  # at least, between two looks at the markers
_SHARE_OF_TIME = 50  # of which one is spent on looking: a Redis Cluster has thousands of markers. Waiting for a node is no work
_LONGEST_PAUSE_S = 20.0  # the first look makes what later ones use
log = logging.getLogger("paramserver")


@dataclass(frozen=True, eq=False)
class NodesSeen:
    """The nodes as the watch saw them last.

    Args:
        stats: their own counters and settings.
        lost: why a node is lost, by address.
        away: the addresses that gave the last look at the markers no answer.
        known: whether the last look at the markers came to an end; else `lost` says nothing.
        open_slots: how many slots stand open between two nodes, and did so at the look before: none that is moving just now.
    """

    stats: Sequence[NodeStats] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    away: Collection[str] = ()
    known: bool = False
    open_slots: int = 0


Lost = Callable[[str, NodeLostError], None]
"""(address of a node, its loss): takes note of it."""


class NodeWatch:
    """Owns the thread that looks for nodes that lost rows, evicted some, or have another owner."""

    def __init__(
        self,
        store: Store,
        timeout_s: float,
        *,
        evicted: Lost = lambda address, error: None,
        unsafe: Callable[[UnsafeNodeError], object] = lambda error: None,
        moves_only: bool = False,
        lost: Callable[[], object] = lambda: None,
        away: Callable[[], object] = lambda: None,
        copies: Callable[[], object] = lambda: None,
        whole: Callable[[], None] = lambda: None,
        still_ours: Callable[[], None] = lambda: None,
        looking: WhyWaiting | None = None,
        fenced: Callable[[FencedError], object] = lambda error: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._evicted, self._unsafe, self._moves_only, self._lost, self._fenced = evicted, unsafe, moves_only, lost, fenced
        self._copies, self._away = copies, away
        self._still_ours, self._whole, self._clock = still_ours, whole, clock
        self.thread = OwnedThread(self._run, name="kvemb-node-watch")
        self._before: dict[str, int] = {}
        self._open_before = set[int]()
        self.seen = NodesSeen()
        self._asking = WhyWaiting()  # whose the shard is
        self._looking, self._copying = looking or WhyWaiting(), WhyWaiting()

    def start(self) -> None:
        """Take the counters as they are now, and begin to watch."""
        self.look_for_evictions()
        self.thread.start()

    def look_for_evictions(self) -> None:
        """Compare the counters with those seen before. A node that does not answer is looked at next time."""
        try:
            nodes = self._store.nodes.stats(Deadline.after(min(self._timeout_s, _EVICTIONS_TIMEOUT_S * len(self._store.nodes.addresses))))
        except KvembError as error:
            nodes = [NodeStats(address, "-", 0, 0, 0, 0, error=str(error)) for address in self._store.nodes.addresses]
        self.seen = replace(self.seen, stats=nodes, open_slots=self._open_slots())
        for node in nodes:
            if node.error:
                continue
            if node.unsafe:  # it was safe when it was connected
                unsafe = UnsafeNodeError(node.unsafe)
                log.error("%s", unsafe)
                self._unsafe(unsafe)
            counted = node.moved if self._moves_only else node.evicted
            before = self._before.setdefault(node.address, counted)
            self._before[node.address] = counted  # a restarted server counts from 0 again; its marker tells of the restart
            if counted > before:
                lost = NodeLostError(
                    f"node {node.address}: has thrown {counted - before} keys away since it was looked at last (evictions, or moved "
                    "slab pages). Rows are lost there; nothing was re-initialised. Was its eviction policy or memory changed while it ran?"
                )
                log.error("%s", lost)
                self._evicted(node.address, lost)

    def _open_slots(self) -> int:
        try:
            now = set(self._store.nodes.open_slots(Deadline.after(self._timeout_s)))
        except KvembError:
            return self.seen.open_slots
        before, self._open_before = self._open_before, now
        return len(before & now)

    def look_for_lost_nodes(self) -> None:
        """Look at every node's marker."""
        try:
            lost = self._see_lost_nodes()
            if lost or self.seen.away:
                self._away()
            if lost:
                self._lost()
            elif not self.seen.away:
                self._whole()
        except FencedError:
            raise
        except KvembError as error:  # said again by the next batch, which cannot go on either
            self._away()
            if self._looking.is_news(str(error)):
                log.warning("%s", error)
        else:
            if self._looking.over():
                log.info("the nodes answer as they should again")

    def _see_lost_nodes(self) -> list[LostNode]:
        try:
            lost = self._store.repair.lost_nodes(Deadline.after(self._timeout_s))
        except KvembError:
            self.seen = replace(self.seen, known=False)
            raise
        away = [*self._store.repair.away]
        self.seen = replace(self.seen, lost={node.address: node.why for node in lost}, away=away, known=True)
        return lost

    def look_at_copies(self) -> None:
        """Have damaged copies mended; nodes that do not answer are looked at next time."""
        try:
            self._copies()
        except (KvembError, OSError) as error:  # of a node, or of the shard's own folder
            if self._copying.is_news(str(error)):
                log.warning("%s", error)
        else:
            if self._copying.over():
                log.info("small values are whole on every node again")

    def look_for_another_owner(self) -> None:
        """Ask whether the shard is still ours; where that cannot be told, the next batch will say so."""
        try:
            self._still_ours()
        except FencedError:
            raise
        except (OSError, ParameterServerError) as error:
            if self._asking.is_news(str(error)):
                log.warning("cannot tell whether this process still owns the shard: %s", error)
        else:
            self._asking.over()

    def _run(self) -> None:
        while True:
            try:
                return self._look_now_and_then()
            except FencedError as error:
                self._fenced(error)
                return
            except Exception:  # without this thread no lost node would be noticed, and nobody be told
                log.exception("the nodes could not be looked at; the next look comes soon")

    def _wait(self, pause_s: float) -> bool:
        """Wait before the next look, less where a glance gives reason for it; return whether the watch is to end."""
        while pause_s > MARKERS_INTERVAL_S:
            if self.thread.wait(MARKERS_INTERVAL_S):
                return True
            pause_s -= MARKERS_INTERVAL_S
            with suppress(KvembError):  # the look says it
                if self._store.repair.looks_lost(Deadline.after(self._timeout_s)):
                    return False
        return self.thread.wait(pause_s)

    def _look_now_and_then(self) -> None:
        pause_s, evictions_due = MARKERS_INTERVAL_S, Deadline.after(_EVICTIONS_INTERVAL_S)
        while not self._wait(pause_s):
            self.look_for_another_owner()
            started_s = self._clock()
            self.look_for_lost_nodes()
            pause_s = min(max(MARKERS_INTERVAL_S, _SHARE_OF_TIME * (self._clock() - started_s)), _LONGEST_PAUSE_S)
            if evictions_due.expired:
                self.look_for_evictions()
                if not self.seen.away:  # else it would wait for that node, too
                    self.look_at_copies()
                evictions_due = Deadline.after(_EVICTIONS_INTERVAL_S)
