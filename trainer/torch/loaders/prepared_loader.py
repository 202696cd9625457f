"""A prepared loader: batches whose rows are already pulled when they come.

What must not live here: which parts of a batch feed which module (`feeds`, `batch_trace`), how batches get their rows
(`trainer.bridge.batches_ahead`), steps (`sparse_optimizer`), and what is asked for it (`prepare`).

Strategy: unless it is told, the first batches are watched while they are used. From the first that called a lookup module on, what a batch
will ask for is worked out ahead. A table that no forecast was right for, batch after batch, is left out.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from kvemb.errors import InvalidInputError

from ...bridge.batches_ahead import Ahead, BatchesAhead
from ...bridge.shared_lookups import Asked, SharedLookups
from ...lookahead.consistency import Exact
from ...lookahead.rows_ahead import RowsAhead
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


class Prepared(BatchesAhead):
    """A loader whose batches come with their rows already pulled; made by `prepare`."""

    def __init__(self, loader: Iterable[Any], model: nn.Module, plan: FeedPlan | None, ahead: Ahead) -> None:
        modules = [module for ones in modules_by_table(model).values() for module in ones]
        cluster = modules[0].table.cluster
        consistency = ahead.mode.of(cluster, lambda: modules[0].shared.state, grouped(model, cluster))
        super().__init__(loader, _nothing_asked if plan is None else _asked_of(plan), partial(_sharing, modules), consistency, ahead)
        self._model, self._plan = model, plan
        self._served: dict[str, bool] = {}  # tables asked in this batch: whether any of that was foreseen
        self._misses_in_a_row: Counter[str] = Counter()

    def looked_up(self, table: str, foreseen: bool) -> None:
        """Count a lookup. Called by the model's modules."""
        super().looked_up(table, foreseen)
        self._served[table] = self._served.get(table, False) or foreseen

    def _plan_lines(self) -> list[str]:
        return ["which module needs what is found out with the first batch" if self._plan is None else f"{self._plan}"]

    def _where(self, table: str) -> str:
        return f" ({_paths(self._model, table)})"

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
        run = super()._unreported(batches)
        del batches  # the run's: a loader's processes end with it
        yield from run

    def _take_plan(self, plan: TracedPlan) -> None:
        self._plan, self._asked = plan, _asked_of(plan)
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
        if len(self._sharing()) > 1 and isinstance(self._consistency, Exact):
            raise InvalidInputError(
                "consistency='exact' needs one SparseOptimizer, made from the model that was prepared, for all its tables"
            )
        super()._install(rows)


def _sharing(modules: Sequence[TableModule]) -> list[SharedLookups]:
    """The lookups that the modules share now: an optimizer that was made since may have given them others."""
    return list({id(module.shared): module.shared for module in modules}.values())


def _paths(model: nn.Module, table: str) -> str:
    return ", ".join(
        path or "the model" for path, module in model.named_modules() if isinstance(module, TableModule) and module.table.name == table
    )


def _nothing_asked(batch: Any) -> list[Asked]:
    return []


def _asked_of(plan: FeedPlan) -> Callable[[Any], list[Asked]]:
    """What a thread asks the plan; it must not know the loader or its run, which would then never be collected."""

    def asked(batch: Any) -> list[Asked]:
        with torch.no_grad():
            return plan.asked(batch)

    return asked
