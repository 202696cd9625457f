"""prepare: `fit` with rows that are pulled while the steps before theirs run.

What must not live here: how (`fit_ahead`).
"""

from typing import Any

from ...bridge.batches_ahead import BatchesAhead, checked_ahead
from ...lookahead.pool_sizes import AUTO
from ...lookahead.pull_threads import Executor
from ...report.step_report import StepReport
from .step_seam import connected_of


def prepare(
    model: Any,
    *,
    consistency: str = "stale",
    k: int | None = None,
    threads_num: int | str = AUTO,
    capacity: int | str = AUTO,
    executor: Executor | None = None,
    report: StepReport | None = None,
) -> BatchesAhead:
    """Pull the rows of batches before `fit` comes to them; data, callbacks and the call of `fit` stay as they are.

    It holds for every later `fit` of this model; called again, for the next one. Other steps (`train_on_batch`, `evaluate`, `predict`) pull
    when they are taken. `fit` reads up to `capacity` batches more of its data then: of a generator that outlives `fit` they are gone.

    Args:
        model: that `distribute` has connected.
        consistency, k, threads_num, capacity, executor, report: as `kvemb.torch.prepare`.

    Returns:
        What pulls: its `report` says what was chosen and measured, its `staleness` how old rows were.

    Raises:
        InvalidInputError: the model is not connected, or an option cannot be. In `fit`: whatever the data or a pull raises, at the batch
            concerned.

    Example:
        distribute(model, cluster)
        ahead = prepare(model, threads_num=4, capacity=8)
        model.fit(x, y, batch_size=4096, epochs=3)
        print(ahead.report)
    """
    connected = connected_of(model)
    ahead = checked_ahead(
        connected.shared.cluster, consistency=consistency, k=k, threads_num=threads_num, capacity=capacity, executor=executor, report=report
    )
    return connected.fit_ahead.prepare(ahead)
