"""RowCheckpoints: rows saved beside the dense weights of a state_dict, and brought back to the step of the one that was loaded.

What must not live here: how (`trainer.bridge.saved_rows`), other trainers (`trainer_callbacks`).
"""

from collections.abc import Callable

from torch import distributed, nn

from kvemb.errors import CheckpointError, KvembError

from ...bridge.saved_rows import SavedRows
from ..lookup.model_tables import modules_by_table
from ..lookup.parameter_walks import n_ranks


class RowCheckpoints(SavedRows):
    """Save the rows of a model's cluster beside its dense weights, under the step that its state_dict tells, and bring them back.

    In a job of several ranks (torch.distributed) every rank calls `save` and `follow`; rank 0 does the work, and the others wait for it.

    Args:
        model: over tables of one cluster, which must not be read-only. All tables of the cluster are saved and loaded.
        url: folder of the checkpoints, as for `Cluster.save`: a path, or a URL that all shards reach.
        keep: how many of the newest checkpoints are kept after a save; all unless given.

    Raises:
        InvalidInputError: the model has no tables, or `keep` is below 1.

    Example: rows and dense weights of the best epoch.
        rows = RowCheckpoints(model, "/data/run/rows", keep=1)
        for epoch in range(n_epochs):
            train(model)
            if (auc := evaluate(model)) > best_auc:
                best_auc, best = auc, copy.deepcopy(model.state_dict())
                rows.save()
        model.load_state_dict(best)
        rows.follow()
    """

    def __init__(self, model: nn.Module, url: str, *, keep: int | None = None) -> None:
        marks = {name: [module.mark for module in modules] for name, modules in modules_by_table(model).items()}
        super().__init__(marks, url, keep=keep)

    def _once(self, action: Callable[[], bool]) -> bool:
        return _on_rank_0(action)


def _on_rank_0(action: Callable[[], bool]) -> bool:
    """Run it in one process of the job, once all have come here; return what it says, or raise what it raised, in all of them."""
    if n_ranks() == 1:
        return action()
    distributed.barrier()
    said: list[bool | str] = [False]
    error: KvembError | None = None
    if distributed.get_rank() == 0:
        try:
            said = [action()]
        except KvembError as raised:
            error, said = raised, [f"{type(raised).__name__}: {raised}"]
    distributed.broadcast_object_list(said, src=0)
    if error is not None:
        raise error
    if isinstance(said[0], str):
        raise CheckpointError(f"rank 0 failed: {said[0]}")
    return said[0]
