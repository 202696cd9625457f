"""A shard's part in plans of either kind, phase by phase: between two batches, a slice at a time. Apply thread only, unless said otherwise.

The slices are `slot_mover`'s for slots that move between nodes, `handover_work`'s between shards. A phase begins again after an error, and
after a restart; parts of it that are done already are found done.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvemb.errors import JournalFullError, StorageError
from kvemb.net.deadline import WhyWaiting
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import SHARDS

from ..engine.storage_pace import Pause
from ..recovery.shard_parts import ShardParts
from ..row_log.log_flush import FlushSchedule
from ..shard_process import freed_memory

_RETRY_S, _TROUBLE_S = 0.2, 3.0
_AFTER_A_HANDOVER_S = 0.1
_SLICES_S = 0.01  # of slices done together: one range of slots may have a row or two, and a move hundreds of ranges
_LEFT_TO_BATCHES, _LONGEST_PAUSE_S = 6.0, 1.0  # times the time of these slices; at most so long, also after a disk that was slow once
log = logging.getLogger("paramserver")


@dataclass
class PhaseProgress:
    """How far the shard is in the phase of one version of the map. The apply thread changes it, any thread may read it.

    Args:
        version: of the map.
        rows, n_rows: gone through, and in all.
        step: of a sync job, while all hold: the last one handed out.
        done: set last.
    """

    version: int
    rows: int = 0
    n_rows: int = 0
    step: int = 0
    done: bool = False

    def expect(self, n_rows: int) -> None:
        """So many rows more are to be gone through."""
        self.n_rows += n_rows

    def gone_through(self, n_rows: int) -> None:
        """So many rows more are done."""
        self.rows += n_rows

    def hold_at(self, step: int) -> None:
        """All hold after this step."""
        self.step = step


class PhaseWork(ABC):
    """A shard's work in the phases of one kind of plan."""

    @abstractmethod
    def phase(self, cluster_map: ClusterMap, progress: PhaseProgress) -> Iterator[float]:
        """Do this map's phase: a slice for every value asked for, which says for how many seconds there is nothing to do then."""

    def follow(self, cluster_map: ClusterMap) -> None:  # noqa: B027  # most work keeps nothing of an older map
        """Forget the state of an older map, or of a failed try of this one; called for plans of every kind."""

    @property
    def changes_runs(self) -> bool:
        """Whether index and row log may change otherwise than by batches; then no flush may be under way."""
        return False

    @abstractmethod
    def held_up(self, error: Exception) -> str:
        """Return why the phase has to be begun over again; raises an error that ends the shard."""

    @property
    @abstractmethod
    def trouble(self) -> str:
        """Why the shard does not come further, errors apart; any thread."""


class PhaseRunner:
    """Works at the phase of the map in force. `step` is for the apply thread, the rest for any thread."""

    name = "a move of slots"
    passing: tuple[type[Exception], ...] = ()  # its own tries are sooner

    def __init__(self, parts: ShardParts, flushes: FlushSchedule, nodes: PhaseWork, shards: PhaseWork, done: Callable[[], None]) -> None:
        self._maps, self._engine, self._flushes, self._done = parts.maps, parts.engine, flushes, done
        self._nodes, self._shards, self._k = nodes, shards, -1
        self._map: ClusterMap | None = None  # whose phase is worked at
        self._slices: Iterator[float] = iter(())
        self._not_before_s, self._held_up = 0.0, WhyWaiting()
        self.progress = PhaseProgress(0, done=True)

    @property
    def trouble(self) -> str:
        """Why this shard does not come further, if it has not for seconds."""
        return self._work(self._maps.cluster_map).trouble or self._held_up.lasting(_TROUBLE_S)

    @property
    def due_s(self) -> float:
        if self._map is not self._maps.cluster_map:
            return 0.0
        return math.inf if self.progress.done else self._not_before_s

    def step(self, pause: Pause) -> bool:
        """Do some slices of the work for the map in force; return whether more can be done at once."""
        cluster_map = self._maps.cluster_map
        loaded, self._k = self._engine.k != self._k, self._engine.k
        if self._shards.changes_runs:
            self._flushes.give_way(_AFTER_A_HANDOVER_S)
        if cluster_map is not self._map:
            self._begin(cluster_map)
        begun_s = time.monotonic()
        try:
            wait_s: float | None = 0.0
            while wait_s == 0.0 and time.monotonic() - begun_s < _SLICES_S:
                wait_s = next(self._slices, None)
        except (StorageError, JournalFullError, OSError) as error:
            self._fail(cluster_map, self._work(cluster_map).held_up(error))
            return False
        self._held_up.over()
        if wait_s is None:
            self.progress.done = True
            self._done()
            if cluster_map.plan is None:  # a start, with what it loaded or read, or a move is over
                freed_memory.give_back()
            return False
        pause_s = min(_LEFT_TO_BATCHES * (time.monotonic() - begun_s), _LONGEST_PAUSE_S) if loaded else 0.0
        self._not_before_s = time.monotonic() + max(wait_s, pause_s)
        return time.monotonic() >= self._not_before_s

    def _begin(self, cluster_map: ClusterMap) -> None:
        self._map, self._not_before_s, self.progress = cluster_map, 0.0, PhaseProgress(cluster_map.version)
        self._shards.follow(cluster_map)
        self._slices = iter(()) if cluster_map.plan is None else self._work(cluster_map).phase(cluster_map, self.progress)

    def _fail(self, cluster_map: ClusterMap, why: str) -> None:
        if not self._held_up.why:
            log.warning("a move of slots is held up: %s", why)
        self._held_up.is_news(why)
        self._begin(cluster_map)  # from the first row: finished parts are found done
        self._not_before_s = time.monotonic() + _RETRY_S

    def _work(self, cluster_map: ClusterMap) -> PhaseWork:
        plan = cluster_map.plan
        return self._shards if plan is not None and plan.kind == SHARDS else self._nodes
