"""A prepared loader: batches whose rows are already pulled when they come.

Unless `features` are given, the first batches are watched while they are used, until one has called a lookup module. A table without a
right forecast, batch after batch, is left out. All arguments of `prepare` are checked before anything is begun.

A batch's rows are one pull; of modules with groups (`emb_num_groups`) each group is a pull of its own, one after another.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kvemb.errors import InvalidInputError

from ...bridge.batches_ahead import Ahead, AheadOptions, BatchesAhead, checked_ahead
from ...bridge.shared_lookups import Asked, SharedLookups
from ...lookahead.cluster_ports import GradientPart
from ...lookahead.consistency import Exact
from ...lookahead.rows_ahead import RowsAhead
from ..lookup.table_module import TableModule, modules_by_table, share_lookups
from ..modules.table_collection import TableCollection
from .batch_trace import Trace, TracedPlan
from .feeds import Features, FeedPlan, named_plan
from .rank_exchange import RankExchange, check_group, ordered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GroupedPulls:
    """A cluster's pulls, in groups of tables."""

    def __init__(self, cluster: Any, groups: Sequence[Sequence[str]]) -> None:
        self._cluster = cluster
        self._group_of = {name: at for at, group in reversed(list(enumerate(groups))) for name in group}

    def pull_versions(
        self, ids: Mapping[str, NDArray[Any]], *, stored: bool = True
    ) -> dict[str, tuple[NDArray[np.float32], NDArray[np.uint64]]]:
        """Fetch rows and versions of several tables; see `Cluster.pull_versions`, whose errors leave nothing behind."""
        groups: dict[int, dict[str, NDArray[Any]]] = {}
        for name, of in ids.items():
            groups.setdefault(self._group_of.get(name, -1), {})[name] = of
        pulled: dict[str, tuple[NDArray[np.float32], NDArray[np.uint64]]] = {}
        for group in groups.values():
            pulled.update(self._cluster.pull_versions(group, stored=stored))
        return pulled

    def progress(self) -> Any:
        """Return the progress of the shards."""
        return self._cluster.progress()


def grouped(model: nn.Module, cluster: Any) -> Any:
    """Return the object that pulls for a model: the cluster itself, unless a module of it has its tables in several groups."""
    collections = [module for module in model.modules() if isinstance(module, TableCollection) and len(module.groups) > 1]
    groups = [group for collection in collections for group in collection.groups]
    return GroupedPulls(cluster, groups) if groups else cluster


log = logging.getLogger("kvemb")
_WATCHED = 8
"""Batches without a call of a lookup module after which a log line says so; a loop may skip any number of batches when it resumes."""
_MISSES = 16
"""Batches in a row none of whose lookups in a table was foreseen, after which the watched plan leaves the table out."""


class Prepared(BatchesAhead):
    """A loader whose batches come with their rows already pulled; made by `prepare`."""

    def __init__(
        self, loader: Iterable[Any], model: nn.Module, plan: FeedPlan | None, ahead: Ahead, group: "ProcessGroup | None" = None
    ) -> None:
        modules_of = modules_by_table(model)
        modules = [module for ones in modules_of.values() for module in ones]
        cluster = modules[0].table.cluster
        pulls = grouped(model, cluster)
        self._exchange: RankExchange | None = None
        if group is not None:
            settings = f"consistency {ahead.consistency}, k={ahead.k}, capacity {ahead.sizes.capacity}"
            self._exchange = RankExchange(group, {name: ones[0].table for name, ones in modules_of.items()}, pulls, settings)
            ahead = replace(ahead, executor=self._exchange.threads)
        self._n_used = 0  # batches of this run that were handed out with rows pulled ahead
        consistency = ahead.rule(cluster, lambda: modules[0].shared.state, pulls, self._exchange)
        asked = _nothing_asked if plan is None else _asked_of(plan, self._exchange)
        super().__init__(loader, asked, partial(_sharing, modules), consistency, ahead)
        self._model, self._plan = model, plan
        self._served: dict[str, bool] = {}  # tables asked in this batch: whether any of that was foreseen
        self._misses_in_a_row: Counter[str] = Counter()

    def looked_up(self, table: str, foreseen: bool) -> None:
        """Count a lookup. Called by the model's modules."""
        super().looked_up(table, foreseen)
        self._served[table] = self._served.get(table, False) or foreseen

    def _plan_lines(self) -> list[str]:
        return ["the first batch tells which module needs which features" if self._plan is None else f"{self._plan}"]

    def _where(self, table: str) -> str:
        return f" ({_paths(self._model, table)})"

    def _unreported(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        run = self._planned(batches if self._exchange is None else self._exchange.reading(batches))
        del batches  # the run's: a loader's processes end with it
        return run if self._exchange is None else self._exchanged(run, self._exchange)

    def _planned(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
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
        del batches
        yield from run

    def _exchanged(self, run: Generator[Any, None, None], exchange: RankExchange) -> Generator[Any, None, None]:
        """Let the other ranks know when this run begins and ends."""
        self._n_used, ended = 0, False
        exchange.begin()
        try:
            yield from run
            ended = True
        finally:
            exchange.end(wait=ended)

    def merge(self, parts: Mapping[str, GradientPart]) -> Mapping[str, GradientPart]:
        """Return what is to be pushed of a step: this rank's share of all gradients, if the batch's rows were exchanged."""
        exchange = self._exchange
        return parts if exchange is None or not 0 < self._n_used <= exchange.n_rounds else exchange.merge(parts)

    def _take_plan(self, plan: TracedPlan) -> None:
        self._plan, self._asked = plan, _asked_of(plan, self._exchange)
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
        self._n_used += 1
        super()._install(rows)


def _sharing(modules: Sequence[TableModule]) -> list[SharedLookups]:
    """Return the modules' present shared lookups: an optimizer that was made since may have replaced them."""
    return list({id(module.shared): module.shared for module in modules}.values())


def _paths(model: nn.Module, table: str) -> str:
    return ", ".join(
        path or "the model" for path, module in model.named_modules() if isinstance(module, TableModule) and module.table.name == table
    )


def _nothing_asked(batch: Any) -> list[Asked]:
    return []


def _asked_of(plan: FeedPlan, exchange: RankExchange | None) -> Callable[[Any], list[Asked]]:
    """Return the plan's question for a thread; it must not know the loader or its run, which would then never be collected."""

    def asked(batch: Any) -> list[Asked]:
        with torch.no_grad():
            return plan.asked(batch)

    return asked if exchange is None else exchange.asking(asked)


def prepare(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    features: Features | None = None,
    exchange: "ProcessGroup | None" = None,
    **options: Unpack[AheadOptions],
) -> Prepared:
    """Pull the rows of batches before they are used. The model and the training loop stay as they are.

    With `exchange` every rank of the group calls this, with the same tables and options.

    Args:
        model: with at least one module over a kvemb table.
        loader: any iterable of batches, a DataLoader for one, with or without worker processes.
        features: each module's source of ids, by its path in the model. A key, attribute or index of the batch, or a sequence of them. Or a
            function of the batch that returns the module's argument, or a tuple of its arguments. None for a module whose rows are
            pulled when it is called. Without `features`, the first batch is watched while it is used. `Prepared.report` has the sources
            found, and the reason where none was.
        exchange: a group of torch.distributed whose ranks train in step, in a cluster in sync mode. A row that several ranks need for their
            batches is pulled by one of them, and its gradients are summed and pushed by one. What is trained stays the same.
        options: `AheadOptions`: consistency, k, threads_num, capacity, executor, report.

    Returns:
        An iterable to use instead of the loader; a context manager, with the length of the loader if that has one.

    Raises:
        RankLostError: another rank of `exchange` ended, or did not answer within the group's timeout. Also while iterating, and in steps.
        InvalidInputError: a wrong argument. While iterating: any error of the loader, `features` or a pull, at the batch concerned; the
            iteration is over then.

    Example:
        >>> import kvemb, torch
        >>> from kvemb.torch import Embedding, SparseOptimizer
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     model = Embedding(cluster.create_table("word", dim=2, optimizer=kvemb.optim.sgd(0.5), initializer=kvemb.init.zeros()))
        ...     optimizer = SparseOptimizer(model)
        ...     loader = prepare(model, [{"words": torch.tensor([7, 8])}, {"words": torch.tensor([9])}], threads_num=1, capacity=2)
        ...     for batch in loader:
        ...         model(batch["words"]).sum().backward()
        ...         optimizer.step()
        >>> print(loader.report.splitlines()[-1])
        looked up ahead: the model: batch['words']
    """
    cluster = share_lookups(modules_by_table(model)).cluster
    group = None if exchange is None else check_group(exchange)
    ahead = checked_ahead(cluster, **(options if group is None else ordered(options, cluster)))
    plan = None if features is None else named_plan(model, features)
    return Prepared(loader, model, plan, ahead, group)
