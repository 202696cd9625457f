"""The thread by which a shard follows the cluster map: looks for a newer one, keeps it in the data folder, reports its part of a plan.

Shard 0's carries the plan on, too (`move_carrier`).
"""

import logging
from collections.abc import Callable

from kvemb.coordination.move_report import MAX_TROUBLE, MoveReport, report_name
from kvemb.errors import FencedError, KvembError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.store import Store

from ..owned_thread import OwnedThread
from .plan_work import PlanWork

IDLE_S, BUSY_S = 0.25, 0.02
_TELL_EVERY = 50  # looks, between two reports that only tell of progress
_LOOK_TIMEOUT_S = 2.0
log = logging.getLogger("paramserver")


class MapFollower:
    """Owns that thread.

    Args:
        store: open.
        shard: number.
        epoch: returns that of the shard's process.
        mover: does the shard's part.
        keep: keeps a map in the data folder.
        wake: makes the apply thread look at the map.
        carry: carries a plan on; on shard 0 only.
        timeout_s: of one storage call.
    """

    def __init__(
        self,
        store: Store,
        shard: int,
        epoch: Callable[[], int],
        mover: PlanWork,
        *,
        keep: Callable[[ClusterMap], None],
        wake: Callable[[], None],
        carry: Callable[[], None] | None,
        timeout_s: float,
    ) -> None:
        self._store, self._shard, self._epoch, self._mover = store, shard, epoch, mover
        self._keep, self._wake, self._carry, self._timeout_s = keep, wake, carry, timeout_s
        self._kept: ClusterMap | None = None
        self._told: MoveReport | None = None
        self._said, self._n_looks = "", 0
        self.thread = OwnedThread(self._run, name="kvemb-map")

    def _run(self) -> None:
        while not self.thread.wait(BUSY_S if self._store.cluster_map.plan is not None else IDLE_S):
            try:
                self._look()
                self._said = ""
            except FencedError:
                return  # the watch of the nodes says it
            except (KvembError, OSError) as error:
                if self._said != (said := str(error)):
                    log.warning("the cluster map cannot be followed now: %s", said)
                self._said = said

    def _look(self) -> None:
        self._store.refresh_map(Deadline.after(min(self._timeout_s, _LOOK_TIMEOUT_S)))
        cluster_map = self._store.cluster_map
        if cluster_map is not self._kept:
            if self._kept is None or cluster_map.version != self._kept.version:
                self._keep(cluster_map)
            self._kept = cluster_map
            self._wake()
        if cluster_map.plan is not None:
            self._report(cluster_map)
            if self._carry is not None:
                self._carry()

    def _report(self, cluster_map: ClusterMap) -> None:
        """Tell the nodes how far this shard is, at once when that is news for whoever carries the plan, else now and then."""
        now = self._mover.progress
        done = now.done and now.version == cluster_map.version
        rows, n_rows = (now.rows, now.n_rows) if now.version == cluster_map.version else (0, 0)
        step, trouble = now.step if done else 0, self._mover.trouble[:MAX_TROUBLE]
        report = MoveReport(self._epoch(), cluster_map.version, done, rows, n_rows, trouble, step)
        self._n_looks += 1
        told = self._told
        news = told is None or (told.version, told.done, bool(told.trouble)) != (report.version, report.done, bool(report.trouble))
        if news or self._n_looks % _TELL_EVERY == 0:
            self._store.put_meta_where_possible(
                report_name(self._shard), report.encode(), Deadline.after(min(self._timeout_s, _LOOK_TIMEOUT_S))
            )
            self._told = report
