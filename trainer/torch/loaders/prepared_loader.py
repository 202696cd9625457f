"""A prepared loader: batches whose rows are already pulled when they come.

What must not live here: which parts of a batch feed which module (`feeds`, `batch_trace`), threads (`trainer.lookahead`), steps
(`sparse_optimizer`), and what is asked for it (`prepare`).

Strategy: threads work out what each module of the model will be asked for with a batch, and pull the rows of all tables at once. When the
batch is handed out, the rows go to the model's `SharedLookups`, which serve lookups of exactly these ids. A lookup that was not foreseen
is pulled when it is made, as without `prepare`: a wrong forecast costs time and never gives wrong rows.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvemb.errors import InvalidInputError

from ...bridge.cluster_ports import AckPort, Changed, Prefetched
from ...bridge.shared_lookups import SharedLookups
from ...lookahead.consistency import Bounded, Consistency, Exact, Stale
from ...lookahead.loader_runs import LoaderRuns
from ...lookahead.pipeline import Pipeline, Waited
from ...lookahead.pool_sizes import Sizes
from ...lookahead.prefetch import size_of
from ...lookahead.pull_threads import Executor
from ...lookahead.rows_ahead import RowsAhead
from ...report.push_staleness import MeanStaleness, StalenessLog
from ...report.step_report import StepReport, current_report
from ..lookup.model_tables import modules_by_table
from ..lookup.table_module import TableModule
from .batch_trace import Trace, TracedPlan
from .feeds import FeedPlan
from .grouped_pulls import grouped

log = logging.getLogger("kvemb")
_WATCHED = 8
"""Batches without a call of a lookup module after which a log line says so; a loop may skip any number of batches when it resumes."""
_MISSES = 16
"""Batches in a row none of whose lookups in a table was foreseen, after which the watched plan leaves the table out."""


@dataclass(frozen=True)
class Mode:
    """A consistency ("stale", "bounded", "exact") and its bound k, checked."""

    consistency: str
    k: int | None

    def of(self, model: nn.Module, modules: Sequence[TableModule]) -> Consistency:
        """Make what keeps it for these modules of a model."""
        cluster = modules[0].table.cluster
        pulls = grouped(model, cluster)
        if self.consistency == "exact":
            return Exact(pulls, lambda: modules[0].shared.state, lambda: cluster.changes, lambda: cluster.all_stored)
        return Stale(pulls) if self.k is None else Bounded(pulls, self.k)


class Prepared(LoaderRuns[Any]):
    """A loader whose batches come with their rows already pulled; made by `prepare`."""

    def __init__(
        self,
        loader: Iterable[Any],
        model: nn.Module,
        plan: FeedPlan | None,
        mode: "Mode",
        sizes: Sizes,
        executor: Executor | None,
        steps: StepReport | None = None,
    ) -> None:
        super().__init__(loader, sizes)
        self._model, self._plan, self._executor, self._steps = model, plan, executor, steps
        self._modules = [module for ones in modules_by_table(model).values() for module in ones]
        self._consistency = mode.of(model, self._modules)
        self._pipeline: Pipeline[Any, RowsAhead] | None = None
        self._installed: RowsAhead | None = None
        self._n_since_step = 0
        self._foreseen: Counter[tuple[str, bool]] = Counter()
        self._served: dict[str, bool] = {}  # tables asked in this batch: whether any of that was foreseen
        self._misses_in_a_row: Counter[str] = Counter()
        self._log = StalenessLog()
        self.waited = Waited()

    @property
    def staleness(self) -> Any:
        """How stale the rows of the newest batch were whose push was applied: changed_fraction, batches_elapsed. None before."""
        return self._log.last

    @property
    def mean_staleness(self) -> MeanStaleness:
        """The same over all pushes that were applied."""
        return self._log.mean

    @property
    def report(self) -> str:
        """What was chosen and measured."""
        per_batch_ms = 1e3 * self.waited.working_s / max(1, self.waited.n_batches)
        lines = [
            f"{self._sizes}",
            f"{self.waited.n_batches} batches, waited {per_batch_ms:.3g} ms for the rows of each",
            f"consistency: {self._consistency}; staleness: {self._log.mean}",
            "which module needs what is found out with the first batch" if self._plan is None else f"{self._plan}",
        ]
        return "\n".join([*lines, *self._misses()])

    def looked_up(self, table: str, foreseen: bool) -> None:
        """Count a lookup. Called by the model's modules."""
        self._foreseen[table, foreseen] += 1
        self._served[table] = self._served.get(table, False) or foreseen

    def fit(self) -> bool:
        """Return whether the rows that were installed may still be used. Called by the model's modules."""
        return self._installed is None or self._consistency.fit(self._installed)

    def prefetched(self) -> Prefetched | None:
        """Return what a step is to register of the batches to come: of as many as there were since the last step. See `LookaheadPort`."""
        n, self._n_since_step = max(1, self._n_since_step), 0
        if not isinstance(self._consistency, Exact) or self._pipeline is None:
            return None
        return self._consistency.hold(self._pipeline.coming(n))

    def released(self, changed: Changed | None) -> None:
        """Take over what a step changed. See `LookaheadPort`."""
        self._consistency.released(changed)

    def pushed(self, ack: AckPort) -> None:
        """Take note of a push. Called by SparseOptimizer."""
        self._log.add(ack)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._sizes}>"

    def _misses(self) -> list[str]:
        """Say of which tables lookups were not foreseen."""
        tables = sorted({table for table, foreseen in self._foreseen if not foreseen})
        return [
            f"table {table!r}: {self._foreseen[table, False]} of {self._foreseen[table, False] + self._foreseen[table, True]} lookups were "
            f"not foreseen, and pulled when they were made ({_paths(self._model, table)})"
            for table in tables
        ]

    def _batches(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        run = self._unreported(batches)
        return run if self._steps is None else _reported(run, self._steps)

    def _unreported(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        for n, batch in enumerate(self.waited.reading(batches) if self._plan is None else (), start=1):
            trace = Trace(self._model, batch)
            self._n_since_step += 1
            with trace:
                yield batch
            del batch
            if trace.called:
                self._take_plan(trace.plan())
                break
            if n == _WATCHED:
                log.warning(
                    "no lookup module was called with the first %d batches, so nothing is looked up ahead until one is. Call the "
                    "modules, not their forward(), or name what feeds them with prepare(features=…)",
                    n,
                )
        if self._plan is None:
            return  # the loader ended before the model was called
        work = _work(self._plan, self._consistency)
        run = self._pipeline = Pipeline(batches, work, self._sizes, waited=self.waited, executor=self._executor)
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

    def _take_plan(self, plan: TracedPlan) -> None:
        self._plan = plan
        for path, why in plan.unforeseen.items():
            log.warning("rows of %s are pulled when it is called: %s", path or "the model", why)

    def _drop_what_misses(self) -> None:
        """Give up forecasts that never come true: they cost pulls, of ids that may never have been asked for."""
        for table, served in self._served.items():
            self._misses_in_a_row[table] = 0 if served else self._misses_in_a_row[table] + 1
            if self._misses_in_a_row[table] == _MISSES and isinstance(self._plan, TracedPlan):
                self._plan.drop(table)
                log.warning("rows of table %r are no longer looked up ahead: %d batches in a row asked for others", table, _MISSES)
        self._served.clear()

    def _install(self, rows: RowsAhead) -> None:
        self._drop_what_misses()
        sharing = self._shared()
        if len(sharing) > 1 and isinstance(self._consistency, Exact):
            raise InvalidInputError(
                "consistency='exact' needs one SparseOptimizer, made from the model that was prepared, for all its tables"
            )
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
        for shared in self._shared():
            if shared.lookahead is self:
                shared.install({})
                shared.lookahead = None

    def _shared(self) -> list[SharedLookups]:
        """The lookups that the modules share now: an optimizer that was made since may have given them others."""
        return list({id(module.shared): module.shared for module in self._modules}.values())


def _reported(run: Generator[Any, None, None], steps: StepReport) -> Generator[Any, None, None]:
    if current_report() is steps:  # a loop inside of a loop that is reported already
        yield from run
        return
    with steps:
        yield from run


def _paths(model: nn.Module, table: str) -> str:
    return ", ".join(
        path or "the model" for path, module in model.named_modules() if isinstance(module, TableModule) and module.table.name == table
    )


def _work(plan: FeedPlan, consistency: Consistency) -> Callable[[Any], tuple[RowsAhead, int]]:
    """What a thread does with a batch. It must not know the loader or its run, which would then never be collected."""

    def work(batch: Any) -> tuple[RowsAhead, int]:
        with torch.no_grad():
            rows = RowsAhead(plan.asked(batch))
        consistency.pull(rows)
        return rows, size_of(batch) + rows.nbytes

    return work
