"""Rows saved beside dense weights, and brought back to the step of those that were loaded: for every framework.

What must not live here: what a checkpoint is (`kvemb.checkpoint`), what a state says (`step_mark`), any framework.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvemb.errors import InvalidInputError

from .step_mark import StepMark, saves_rows


class SavedRows:
    """Save the rows of a model's cluster beside its dense weights, under the step that these tell, and bring them back.

    Args:
        marks: by table, those of the model's layers over it; of one cluster, which must not be read-only. All its tables are saved and
            loaded.
        url: folder of the checkpoints, as for `Cluster.save`: a path, or a URL that all shards reach.
        keep: how many of the newest checkpoints are kept after a save; all unless given.

    Raises:
        InvalidInputError: `keep` is below 1.
    """

    def __init__(self, marks: Mapping[str, Sequence[StepMark]], url: str, *, keep: int | None) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise InvalidInputError(f"keep is {keep!r}: at least 1 checkpoint is kept, or all with None")
        self._marks, self._tables = marks, {name: of[0].table for name, of in marks.items()}
        self._cluster: Any = next(iter(self._tables.values())).cluster
        self._url, self._keep = str(url).rstrip("/"), keep
        saves_rows(self._cluster)

    def _once(self, action: Callable[[], bool]) -> bool:
        """Run it in one process of the job."""
        return action()

    def save(self) -> str:
        """Save all rows as they are between two steps; does nothing if that step is saved already.

        Returns:
            The URL of the checkpoint.

        Raises:
            CheckpointError, ShardUnavailableError: in every process; there may be a part of a checkpoint, which the next save there
                replaces.
        """
        self._cluster.flush()
        epoch = max(epoch for epoch, _ in self._cluster.progress())
        step = max(table.steps() for table in self._tables.values())
        url = self._url_of(epoch, step)
        self._once(lambda: self._save(url, step))
        return url

    def follow(self) -> bool:
        """Load the rows that were saved with the dense weights that were loaded last, unless the cluster has them.

        Call it after these are loaded and before training goes on: once a step has begun there is nothing to follow any more.

        Returns:
            Whether rows were loaded.

        Raises:
            CheckpointError: in every process; the rows of that step were not saved here, or cannot be loaded. If nothing else is said, the
                cluster is as it was.
        """
        # Of a table the first that has one: they were loaded together.
        wanted = {name: mark.loaded for name, marks in self._marks.items() for mark in marks[::-1] if mark.loaded is not None}
        if not wanted:
            return False
        url = self._url_of(max(epoch for epoch, _ in wanted.values()), max(step for _, step in wanted.values()))
        loaded = self._once(lambda: self._load(url, {name: step for name, (_, step) in wanted.items()}))
        for marks in self._marks.values():
            for mark in marks:
                mark.followed()
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

    def _load(self, url: str, steps: Mapping[str, int]) -> bool:
        self._cluster.flush()
        if all(self._tables[name].steps() == step for name, step in steps.items()):
            return False
        self._cluster.load(url)
        return True
