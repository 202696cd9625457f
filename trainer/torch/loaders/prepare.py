"""prepare: have the rows of a loader's batches pulled before they are used.

What must not live here: how that is done (`prepared_loader`). Arguments are checked here, all of them before anything is begun.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ...bridge.batches_ahead import checked_ahead
from ...lookahead.pool_sizes import AUTO
from ...lookahead.pull_threads import Executor
from ...report.step_report import StepReport
from ..lookup.model_tables import modules_by_table, share_lookups
from .feeds import Features, named_plan
from .prepared_loader import Prepared


def prepare(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    features: Features | None = None,
    consistency: str = "stale",
    k: int | None = None,
    threads_num: int | str = AUTO,
    capacity: int | str = AUTO,
    executor: Executor | None = None,
    report: StepReport | None = None,
) -> Prepared:
    """Pull the rows of batches before they are used. The model and the training loop stay as they are.

    Args:
        model: with at least one module over a kvemb table.
        loader: any iterable of batches, a DataLoader for one, with or without worker processes.
        features: what feeds each module, by its path in the model. A key, attribute or index of the batch, or a sequence of them. Or a
            function of the batch that returns the module's argument, or a tuple of its arguments. None for a module whose rows are
            pulled when it is called. Without `features`, the first batch is watched while it is used. `Prepared.report` says what was
            found, and why where nothing was.
        consistency: what rows may lack when their batch is used. "stale": what is pushed for the `capacity` batches before it, and what
            else happens since. "bounded": k batches of any shard. "exact": nothing of what steps and this connection do; for clusters
            in sync mode. Given the same draws, training is then what it is without `prepare`, bit for bit.
        k: batches, with "bounded"; every pull and every batch then cost one more small call to each shard.
        threads_num: pulls at a time, 1 to 8; "auto" measures and chooses.
        capacity: batches that may lie ready or be pulled beyond the one in use; "auto" chooses, within 256 MB.
        executor: runs the pulls instead of threads of our own.
        report: measures the steps while the result is iterated, and says at the end of each run what to turn.

    Returns:
        What to iterate instead of the loader; a context manager, with the length of the loader if that has one.

    Raises:
        InvalidInputError: on any of these not being so. While iterating: what the loader, `features` or a pull raises, at the batch
            concerned; the iteration is over then.

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
    ahead = checked_ahead(
        cluster, consistency=consistency, k=k, threads_num=threads_num, capacity=capacity, executor=executor, report=report
    )
    plan = None if features is None else named_plan(model, features)
    return Prepared(loader, model, plan, ahead)
