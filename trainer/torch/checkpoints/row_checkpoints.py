"""RowCheckpoints: rows saved beside the dense weights of a state_dict, and brought back to the step of the one that was loaded.

What must not live here: what a checkpoint is (`kvemb.checkpoint`), what a state says (`step_mark`), other trainers (`trainer_callbacks`).
"""

from collections.abc import Callable, Sequence

from torch import distributed, nn

from kvemb.errors import CheckpointError, InvalidInputError, KvembError

from ...bridge.step_mark import StepMark, saves_rows
from ..lookup.model_tables import modules_by_table
from ..lookup.parameter_walks import n_ranks
from ..lookup.table_module import TableModule


class RowCheckpoints:
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
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise InvalidInputError(f"keep is {keep!r}: at least 1 checkpoint is kept, or all with None")
        self._modules_of = modules_by_table(model)
        first = next(iter(self._modules_of.values()))[0]
        self._cluster, self._url, self._keep = first.table.cluster, str(url).rstrip("/"), keep
        saves_rows(self._cluster)

    def save(self) -> str:
        """Save all rows as they are between two steps; does nothing if that step is saved already.

        Returns:
            The URL of the checkpoint.

        Raises:
            CheckpointError, ShardUnavailableError: on every rank; there may be a part of a checkpoint, which the next save there replaces.
        """
        self._cluster.flush()
        epoch = max(epoch for epoch, _ in self._cluster.progress())
        step = max(modules[0].table.steps() for modules in self._modules_of.values())
        url = self._url_of(epoch, step)
        _on_rank_0(lambda: self._save(url, step))
        return url

    def follow(self) -> bool:
        """Load the rows that were saved with the dense weights that were loaded last, unless the cluster has them.

        Call it after load_state_dict and before training goes on: once a step has begun there is nothing to follow any more.

        Returns:
            Whether rows were loaded.

        Raises:
            CheckpointError: on every rank; the rows of that step were not saved here, or cannot be loaded. If nothing else is said, the
                cluster is as it was.
        """
        marks = {name: mark for name, modules in self._modules_of.items() for mark in [_newest(modules)] if mark is not None}
        if not marks:
            return False
        wanted = {name: mark.loaded for name, mark in marks.items() if mark.loaded is not None}
        url = self._url_of(max(epoch for epoch, _ in wanted.values()), max(step for _, step in wanted.values()))
        loaded = _on_rank_0(lambda: self._load(url, {name: step for name, (_, step) in wanted.items()}))
        for modules in self._modules_of.values():
            for module in modules:
                module.mark.followed()
        return loaded

    def _url_of(self, epoch: int, step: int) -> str:
        return f"{self._url}/epoch-{epoch}-step-{step}"

    def _save(self, url: str, step: int) -> bool:
        from kvemb.checkpoint.listing import list_checkpoints, prune  # many modules, which most jobs never need

        if any(one.name == url.rpartition("/")[2] and one.manifest is not None for one in list_checkpoints(self._url)):
            return False
        done = self._cluster.save(url, extra={"step": step})
        if self._keep is not None:
            prune(self._url, keep=self._keep, like=done.manifest)
        return True

    def _load(self, url: str, steps: dict[str, int]) -> bool:
        self._cluster.flush()
        if all(self._modules_of[name][0].table.steps() == step for name, step in steps.items()):
            return False
        self._cluster.load(url)
        return True


def _newest(modules: Sequence[TableModule]) -> StepMark | None:
    """Return the mark of a table's modules that has a state; they were loaded together."""
    return next((module.mark for module in modules if module.mark.loaded is not None), None)


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
