"""A loader whose batches come with their rows already pulled, for every framework.

Threads work out a batch's lookups, and pull the rows of all tables at once. The `SharedLookups` serve lookups of exactly these ids; one
that was not foreseen is pulled when it is made: a wrong forecast costs time and never gives wrong rows.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from kvemb.errors import InvalidInputError

from ..lookahead.cluster_ports import AckPort, Changed, GradientPart, Prefetched, PullPort
from ..lookahead.consistency import Bounded, Consistency, Exact, check_consistency
from ..lookahead.loader_runs import LoaderRuns
from ..lookahead.pipeline import Pipeline, Waited
from ..lookahead.pool_sizes import AUTO, Sizes
from ..lookahead.prefetch import check_executor, size_of
from ..lookahead.pull_threads import Executor
from ..lookahead.rows_ahead import RowsAhead
from ..report.step_report import MeanStaleness, StalenessLog, StepReport, current_report
from .shared_lookups import Asked, SharedLookups

_PULLS_END_S = 86_400.0  # a pull has a deadline of its own, and says more than the end of a wait for it
_EXECUTOR_S = 600.0  # … but a foreign executor may never get to it
AskedOf = Callable[[Any], Sequence[Asked]]
"""From a batch to its lookups; called in the threads that pull."""


class AheadOptions(TypedDict, total=False):
    """How rows are pulled ahead: the options of every bridge's `prepare`."""

    consistency: str
    k: int | None
    threads_num: int | str
    capacity: int | str
    executor: Executor | None
    report: StepReport | None


@dataclass(frozen=True)
class Ahead:
    """`AheadOptions`, checked."""

    consistency: str
    k: int | None
    sizes: Sizes
    executor: Executor | None
    steps: StepReport | None

    def rule(self, cluster: Any, state: Callable[[], int], pulls: Any = None, ahead: PullPort | None = None) -> Consistency:
        """Make the object that keeps the consistency."""
        pulls = cluster if pulls is None else pulls
        if self.consistency == "exact":
            return Exact(pulls, state, lambda: cluster.changes, lambda: cluster.all_stored, ahead=ahead)
        return Consistency(pulls, ahead=ahead) if self.k is None else Bounded(pulls, self.k, ahead=ahead)

    def batches(self, loader: Iterable[Any], asked: AskedOf, shared: SharedLookups) -> "BatchesAhead":
        """Stand in a loader's place, for lookups that all share rows here; see `BatchesAhead`."""
        return BatchesAhead(loader, asked, lambda: [shared], self.rule(shared.cluster, lambda: shared.state), self)


log = logging.getLogger("kvemb")
_told_stale: list[bool] = []


def checked_ahead(
    cluster: Any,
    *,
    consistency: str | None = None,
    k: int | None = None,
    threads_num: int | str = AUTO,
    capacity: int | str = AUTO,
    executor: Executor | None = None,
    report: StepReport | None = None,
) -> Ahead:
    """Check the options of a `prepare`, all of them before anything is begun."""
    asked, consistency = consistency, consistency or "stale"
    check_consistency(consistency, k, cluster)
    if asked is None and not _told_stale:
        _told_stale.append(True)  # once in a process
        better = '"exact" trains as without prepare' if cluster.mode == "sync" else '"bounded" with k= limits how old they are'
        log.warning('prepare: consistency is "stale" unless given: rows may lack the pushes of batches that were read ahead. %s', better)
    check_executor(executor, threads_num)
    if report is not None and not isinstance(report, StepReport):
        raise InvalidInputError(f"report is {type(report).__name__}; give a trainer.StepReport")
    return Ahead(consistency, k, Sizes(threads_num, capacity, own_threads=executor is None), executor, report)


class BatchesAhead(LoaderRuns[Any]):
    """Stands in a loader's place; each `iter` is a new run over it.

    `asked` returns the lookups of a batch, and must not refer to this object, which would then never be collected; `sharing` the lookups
    that share rows now.
    """

    def __init__(
        self, loader: Iterable[Any], asked: AskedOf, sharing: Callable[[], Sequence[SharedLookups]], consistency: Consistency, ahead: Ahead
    ) -> None:
        super().__init__(loader, ahead.sizes)
        self._asked, self._sharing, self._consistency = asked, sharing, consistency
        self._executor, self._steps = ahead.executor, ahead.steps
        self._pipeline: Pipeline[Any, RowsAhead] | None = None
        self._installed: RowsAhead | None = None
        self._n_since_step = 0
        self._foreseen: Counter[tuple[str, bool]] = Counter()
        self._log = StalenessLog()
        self.waited = Waited()

    @property
    def staleness(self) -> Any:
        """Staleness of the rows of the newest batch with an applied push: changed_fraction, batches_elapsed. None before the first."""
        return self._log.last

    @property
    def mean_staleness(self) -> MeanStaleness:
        """The mean staleness over all applied pushes."""
        return self._log.mean

    @property
    def report(self) -> str:
        """The sizes chosen and the times measured."""
        per_batch_ms = 1e3 * self.waited.working_s / max(1, self.waited.n_batches)
        lines = [
            f"{self._sizes}",
            f"{self.waited.n_batches} batches, waited {per_batch_ms:.3g} ms for the rows of each",
            f"consistency: {self._consistency}; staleness: {self._log.mean}",
            *self._plan_lines(),
        ]
        return "\n".join([*lines, *self._misses()])

    def _plan_lines(self) -> list[str]:
        """Return lines on the known lookups of batches."""
        return []

    def _where(self, table: str) -> str:
        """Say where a table is looked up, for the report."""
        return ""

    def looked_up(self, table: str, foreseen: bool) -> None:
        """Count a lookup. See `LookaheadPort`."""
        self._foreseen[table, foreseen] += 1

    def fit(self) -> bool:
        """Return whether the rows that were installed may still be used. See `LookaheadPort`."""
        return self._installed is None or self._consistency.fit(self._installed)

    def prefetched(self) -> Prefetched | None:
        """Return the rows of coming batches that a step is to register: of as many as came since the last step. See `LookaheadPort`."""
        n, self._n_since_step = max(1, self._n_since_step), 0
        if not isinstance(self._consistency, Exact) or self._pipeline is None:
            return None
        return self._consistency.hold(self._pipeline.coming(n))

    def released(self, changed: Changed | None) -> None:
        """Take over the rows that a step changed. See `LookaheadPort`."""
        self._consistency.released(changed)

    def merge(self, parts: Mapping[str, GradientPart]) -> Mapping[str, GradientPart]:
        """Return what is to be pushed of a step: all of it. See `LookaheadPort`."""
        return parts

    def pushed(self, ack: AckPort) -> None:
        """Take note of a push. See `LookaheadPort`."""
        self._log.add(ack)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._sizes}>"

    def _misses(self) -> list[str]:
        """Say of which tables lookups were not foreseen."""
        tables = sorted({table for table, foreseen in self._foreseen if not foreseen})
        return [
            f"table {table!r}: {self._foreseen[table, False]} of {self._foreseen[table, False] + self._foreseen[table, True]} lookups were "
            f"not foreseen, and pulled when they were made{self._where(table)}"
            for table in tables
        ]

    def _batches(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        run = self._unreported(batches)
        return run if self._steps is None else _reported(run, self._steps)

    def _unreported(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        work = _work(self._asked, self._consistency)
        latest_s = _PULLS_END_S if self._executor is None else _EXECUTOR_S
        run = self._pipeline = Pipeline(batches, work, self._sizes, waited=self.waited, executor=self._executor, timeout_s=latest_s)
        del batches  # the run's: a loader's processes end with it
        try:
            while True:
                try:
                    batch, rows = run.next()
                except StopIteration:
                    return
                try:
                    self._install(rows)
                except (KeyboardInterrupt, SystemExit):
                    run.hurry()
                    raise
                del rows
                yield batch
                del batch
        finally:
            run.close()
            self._release()

    def _install(self, rows: RowsAhead) -> None:
        sharing = self._sharing()
        began_s = time.perf_counter()
        self._consistency.use(rows)
        self._installed = rows if isinstance(self._consistency, Exact) else None
        self.waited.waited(time.perf_counter() - began_s)
        self._n_since_step += 1
        for shared in sharing:
            shared.install(rows.by_table)
            shared.lookahead = self

    def _release(self) -> None:
        """Leave nothing of a run that is over."""
        self._pipeline = self._installed = None
        for shared in self._sharing():
            if shared.lookahead is self:
                shared.install({})
                shared.lookahead = None


def _reported(run: Generator[Any, None, None], steps: StepReport) -> Generator[Any, None, None]:
    if current_report() is steps:  # a loop inside of a loop that is reported already
        yield from run
        return
    with steps:
        yield from run


def _work(asked: AskedOf, consistency: Consistency) -> Callable[[Any], tuple[RowsAhead, int]]:
    """Return the work of a thread on a batch. It must not know the loader or its run, which would then never be collected."""

    def work(batch: Any) -> tuple[RowsAhead, int]:
        rows = RowsAhead(asked(batch))
        consistency.pull(rows)
        return rows, size_of(batch) + rows.nbytes

    return work
