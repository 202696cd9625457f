"""How old rows may be that were pulled before their batch is used: "stale", "bounded", "exact". NumPy only.

* "stale", `Consistency` itself: as pulled. The pull of a batch begins at the earliest when the batch `capacity` before it is handed out. It
  may lack the pushes of those `capacity` batches, pushes that are still on their way then, and changes by other processes meanwhile.
* `Bounded`: a pull notes beforehand how far each shard has come in storage (its rows have all of that). When the batch is used, the shards
  are asked again. If one has applied more than k batches since, the rows are pulled again.
* `Exact`, in sync jobs: rows change by steps, and by assign and erase. The connection counts its own changes, for any model: rows are exact
  if their pull began after the last one. Rows pulled before are registered with the step's push, by ids and versions. The release brings
  those that the step changed, and they replace the prefetched ones. Versions are compared row by row, so this corrects a row whichever
  earlier changes its pull has seen. Rows that other processes assign or erase are corrected a step later. So a release need not wait until
  storage has the step, and comes earlier. Rows whose pull began meanwhile are exact only once they have been registered.

`pull` is called in any thread, the others in the one that trains.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvemb.errors import InvalidInputError, StorageError

from .cluster_ports import Changed, ClusterPort, Prefetched, PullPort
from .rows_ahead import RowsAhead, prefetched_of_all

MODES = ("stale", "bounded", "exact")
_PUSH = 2  # changes that a push counts as


class Consistency:
    """The rule by which prefetched rows may be used, and the others are corrected. This one, "stale": they are used as they were pulled."""

    def __init__(self, cluster: ClusterPort, *, ahead: PullPort | None = None) -> None:
        self._cluster = cluster
        self._ahead: PullPort = cluster if ahead is None else ahead

    def pull(self, rows: RowsAhead) -> None:
        """Look a batch's rows up."""
        rows.pull(self._ahead)

    def use(self, rows: RowsAhead) -> None:
        """Make rows fit for use when their batch comes: by another pull, if necessary."""

    def fit(self, rows: RowsAhead) -> bool:
        """Whether rows that were made fit for use are still fit when they are looked up."""
        return True

    def hold(self, coming: Sequence[RowsAhead]) -> Prefetched | None:
        """Take note that a step is about to be pushed; return what to register with it of the batches that come next."""
        return None

    def released(self, changed: Changed | None) -> None:
        """Take over the changed rows that the step's release brought; None if the shards could not tell."""

    def __str__(self) -> str:
        return "stale"


class Bounded(Consistency):
    """At most k batches of any shard behind, when the batch is used."""

    def __init__(self, cluster: Any, k: int, *, ahead: PullPort | None = None) -> None:
        super().__init__(cluster, ahead=ahead)
        self._progress: Callable[[], Sequence[tuple[int, int]]] = cluster.progress
        self._k = k
        self._n_used = self._n_again = 0

    def pull(self, rows: RowsAhead) -> None:
        """Look a batch's rows up, and note the shards' progress that is at least in them."""
        rows.as_of = self._progress()
        rows.pull(self._ahead)

    def use(self, rows: RowsAhead) -> None:
        """Pull rows that are too old again. The new ones have all changes that were in storage when the shards were asked."""
        now = self._progress()
        self._n_used += 1
        if behind(rows.as_of, now) > self._k:
            self._n_again += 1
            rows.as_of = now
            rows.pull(self._cluster)

    def __str__(self) -> str:
        return f"bounded, k={self._k}: the rows of {self._n_again} of {self._n_used} batches were too old when they came, and pulled again"


class Exact(Consistency):
    """As if pulled when the batch is used, in a sync job."""

    def __init__(
        self,
        cluster: ClusterPort,
        state: Callable[[], int],
        changes: Callable[[], int],
        all_stored: Callable[[], bool],
        *,
        ahead: PullPort | None = None,
    ) -> None:
        super().__init__(cluster, ahead=ahead)
        self._state, self._changes, self._all_stored = state, changes, all_stored
        self._prefetched: Sequence[RowsAhead] = ()
        self._prefetched_at = 0
        self._n_used = self._n_again = self._n_prefetched = self._n_changed = 0

    def pull(self, rows: RowsAhead) -> None:
        """Pull rows, and note when that began, if storage had all changes then. If it does not answer, the error comes with the batch."""
        now = self._now()
        as_of = now if self._all_stored() else None
        try:
            rows.pull(self._ahead, stored=False)
        except StorageError:
            as_of = None
        rows.as_of = as_of

    def use(self, rows: RowsAhead) -> None:
        """Pull rows again that were neither pulled nor brought up to date since the last change; that pull waits until storage has all."""
        self._n_used += 1
        if not self.fit(rows):
            self._n_again += 1
            now = self._now()
            rows.pull(self._cluster)
            rows.as_of = now

    def fit(self, rows: RowsAhead) -> bool:
        """Whether no row has changed since, as far as this connection knows."""
        now = self._now()
        return rows.as_of == now and now[0] % 2 == 0

    def hold(self, coming: Sequence[RowsAhead]) -> Prefetched | None:
        """Register the rows of the batches that come next."""
        self._prefetched, self._prefetched_at = coming, self._changes()
        prefetched = prefetched_of_all(coming)
        self._n_prefetched += sum(len(ids) for ids, _ in prefetched.values())
        return prefetched

    def released(self, changed: Changed | None) -> None:
        """Bring the rows that were registered up to date, if nothing but the step's own push has changed rows meanwhile."""
        prefetched, self._prefetched = self._prefetched, ()
        now = self._now()
        if changed is None or now[1] != self._prefetched_at + _PUSH:
            return
        self._n_changed += sum(len(ids) for ids, _, _ in changed.values())
        for rows in prefetched:
            if rows.pulled:
                rows.change(changed)
                rows.as_of = now

    def _now(self) -> tuple[int, int]:
        return self._state(), self._changes()

    def __str__(self) -> str:
        changed = f"{self._n_changed / max(1, self._n_prefetched):.2%} of the rows prefetched over a step changed in it"
        return f"exact: {changed}; the rows of {self._n_again} of {self._n_used} batches were pulled again when they came"


def behind(then: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]]) -> float:
    """Return the most batches by which a shard has advanced; infinity if one began another epoch."""
    steps = [k_now - k if epoch == epoch_now else float("inf") for (epoch, k), (epoch_now, k_now) in zip(then, now, strict=True)]
    return max(steps, default=0)


def check_consistency(consistency: object, k: object, cluster: Any) -> None:
    """Refuse an unknown mode, or one that this cluster cannot keep."""
    if consistency not in MODES:
        raise InvalidInputError(f"consistency is {consistency!r}; give one of {', '.join(MODES)}")
    if (k is not None) != (consistency == "bounded"):
        raise InvalidInputError(f"k is {k!r} with consistency={consistency!r}: k goes with 'bounded', which needs it")
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 0):
        raise InvalidInputError(f"k is {k!r}; give a whole number of batches, 0 or more")
    if consistency == "exact" and cluster.mode != "sync":
        raise InvalidInputError(
            f"consistency='exact' needs a cluster in sync mode, this one is {cluster.mode}: its rows change at any time. Use 'bounded' "
            "or 'stale', or set parameter_servers.mode to sync."
        )
