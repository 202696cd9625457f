"""prepare: a loader whose batches come with their rows already pulled.

What must not live here: which parts of a batch feed which module (`feeds`, `trace`), threads (`trainer.lookahead`), steps (`optimizer`).

Strategy: threads work out what each module of the model will be asked for with a batch, and pull the rows of all tables at once; when
the batch is handed out, they are handed to the model's `SharedLookups`, which serve lookups of exactly these ids. A lookup that was not
foreseen is pulled when it is made, as without `prepare`: a wrong forecast costs time and never gives wrong rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn

from kvemb.errors import InvalidInputError
from trainer.lookahead.pipeline import Pipeline, Waited
from trainer.lookahead.prefetch import check_executor, size_of
from trainer.lookahead.rows import RowsAhead
from trainer.lookahead.sizes import AUTO, Sizes
from trainer.lookahead.staleness import MeanStaleness, StalenessLog
from trainer.lookahead.threads import Executor
from trainer.torch.feeds import Feed, Part, named_feeds
from trainer.torch.lookup import TableModule
from trainer.torch.ports import AckPort, ClusterPort
from trainer.torch.shared import SharedLookups
from trainer.torch.tables import modules_by_table, share_lookups


class Prepared:
    """A prepared loader; see `prepare`. Each `iter` is a new run over the loader (an epoch). Use it from one thread."""

    def __init__(
        self,
        loader: Iterable[Any],
        modules: Sequence[TableModule],
        feeds: Sequence[Feed],
        sizes: Sizes,
        executor: Executor | None,
    ) -> None:
        self._loader, self._modules, self._feeds, self._sizes, self._executor = loader, modules, feeds, sizes, executor
        self._cluster: ClusterPort = modules[0].table.cluster
        self._run: Pipeline[Any, RowsAhead] | None = None
        self._log = StalenessLog()
        self.waited = Waited()

    def __iter__(self) -> Iterator[Any]:
        self.close()
        # Now, not at the first batch: a loader's processes are forked here, before any thread of this run exists.
        return self._batches(iter(self._loader))

    def __len__(self) -> int:
        return len(cast(Sized, self._loader))

    def close(self) -> None:
        """End the present run: no thread of it is left. Idempotent; iterating again is fine."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def threads_num(self) -> int:
        """Threads in force."""
        return self._sizes.threads_num

    @property
    def capacity(self) -> int:
        """Batches ahead, in force."""
        return self._sizes.capacity

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
        return "\n".join(
            [
                f"{self._sizes}",
                f"{self.waited.n_batches} batches, waited {per_batch_ms:.3g} ms for the rows of each",
                f"staleness: {self._log.mean}",
            ]
        )

    def pushed(self, ack: AckPort) -> None:
        """Take note of a push. Called by SparseOptimizer."""
        self._log.add(ack)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._sizes}>"

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        run = Pipeline(batches, _work(self._feeds, self._cluster), self._sizes, waited=self.waited, executor=self._executor)
        del batches  # the run's: a loader's processes end with it
        self._run = run
        try:
            while True:
                try:
                    batch, rows = run.next()
                except StopIteration:
                    return
                self._install(rows)
                del rows
                yield batch
                del batch
        finally:
            run.close()
            self._release()

    def _install(self, rows: RowsAhead) -> None:
        for shared in self._shared():
            shared.install(rows.by_table)
            shared.lookahead = self

    def _release(self) -> None:
        """Leave nothing of a run that is over."""
        for shared in self._shared():
            if shared.lookahead is self:
                shared.install({})
                shared.lookahead = None

    def _shared(self) -> list[SharedLookups]:
        """The lookups that the modules share now: an optimizer that was made since may have given them others."""
        return list({id(module.shared): module.shared for module in self._modules}.values())


def prepare(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    features: Mapping[str, Part | Callable[[Any], Any] | None],
    consistency: str = "stale",
    threads_num: int | str = AUTO,
    capacity: int | str = AUTO,
    executor: Executor | None = None,
) -> Prepared:
    """Pull the rows of batches before they are used. The model and the training loop stay as they are.

    Args:
        model: with at least one module over a kvemb table.
        loader: any iterable of batches, a DataLoader for one, with or without worker processes.
        features: what feeds each module, by its path in the model: a key, attribute or index of the batch, a sequence of them, or a
            function of the batch that returns the module's argument or a tuple of its arguments; None for a module whose rows shall be
            pulled when it is called.
        consistency: "stale": rows of a batch may lack what was pushed for the `capacity` batches before it and what else happened since.
        threads_num: pulls at a time, 1 to 8; "auto" measures and chooses.
        capacity: batches that may lie ready or be pulled beyond the one in use; "auto" chooses, within 256 MB.
        executor: runs the pulls instead of threads of our own.

    Returns:
        What to iterate instead of the loader; a context manager, with the length of the loader if that has one.

    Raises:
        InvalidInputError: on any of these not being so. While iterating: what the loader, `features` or a pull raises, at the batch
            concerned; the iteration is over then.
    """
    modules_of = modules_by_table(model)
    share_lookups(modules_of)
    if consistency != "stale":
        raise InvalidInputError(f"consistency is {consistency!r}; give 'stale'")
    check_executor(executor, threads_num)
    modules = [module for ones in modules_of.values() for module in ones]
    return Prepared(loader, modules, named_feeds(model, features), Sizes(threads_num, capacity), executor)


def _work(feeds: Sequence[Feed], cluster: ClusterPort) -> Callable[[Any], tuple[RowsAhead, int]]:
    """What a thread does with a batch. It must not know the loader or its run, which would then never be collected."""

    def work(batch: Any) -> tuple[RowsAhead, int]:
        with torch.no_grad():
            rows = RowsAhead([asked for feed in feeds for asked in feed.asked(batch)])
        rows.pull(cluster)
        return rows, size_of(batch) + rows.nbytes

    return work
