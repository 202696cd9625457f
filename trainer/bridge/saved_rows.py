"""Rows saved beside dense weights, and brought back to the step of those that were loaded: for every framework.

The state of a module or layer holds its table's number of steps (`Table.steps`), which is compared when a state is loaded, and once more at
the first lookup. So dense weights and rows may be loaded in any order; a difference that remains is reported.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from kvemb.errors import InvalidInputError, KvembError

from ..lookahead.cluster_ports import TablePort

if TYPE_CHECKING:
    from kvemb.checkpoint.format.checkpoint_manifest import CheckpointManifest
    from kvemb.checkpoint.listing import Listed

log = logging.getLogger("kvemb")
_saving: "WeakSet[Any]" = WeakSet()  # clusters whose rows are saved beside states, or whose user was warned that states have none
_mixed: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()  # by cluster, its `changes` when a difference was told: once for all tables


class MixedStepsWarning(UserWarning):
    """Dense weights of one step of training are used with rows of another one."""


def saves_rows(cluster: Any) -> None:
    """Take note that the rows of this cluster are saved beside states."""
    _saving.add(cluster)


class StepMark:
    """The step of one module's table, in states and after them. One thread."""

    def __init__(self, table: TablePort) -> None:
        self.table = table
        self.loaded: tuple[int, int] | None = None
        """Epoch and step of the state that was loaded last, until a lookup trains the rows."""
        self._unlike = False

    def state(self) -> dict[str, int]:
        """Return the rows' present step, for a state; nothing if the shards cannot be asked."""
        cluster = self.table.cluster
        if cluster not in _saving:
            _saving.add(cluster)
            log.warning(
                "saved weights are the dense ones; of table %r, as of every table, only its name and its step. Rows stay in the cluster: "
                "save them beside it with cluster.save(url), or RowCheckpoints of kvemb.torch or kvemb.keras (docs/checkpoints.md)",
                self.table.name,
            )
        try:
            return {} if cluster.read_only else {"step": self._now(), "epoch": max(epoch for epoch, _ in cluster.progress())}
        except KvembError as error:
            log.warning("the state of table %r does not say at which step its rows are: %s", self.table.name, error)
            return {}

    def load(self, given: Mapping[str, Any]) -> None:
        """Take note of the step of the rows in a state."""
        self.loaded = (given["epoch"], given["step"]) if "step" in given and not self.table.cluster.read_only else None
        try:
            self._unlike = self.loaded is not None and self.loaded[1] != self._now()
        except KvembError:  # asked again at the first lookup
            self._unlike = True

    def followed(self) -> None:
        """Take note that the rows are those of the state."""
        self.loaded, self._unlike = None, False

    def before_lookup(self, recording: bool) -> None:
        """Warn if rows are about to be used with dense weights of another step."""
        if self._unlike and self.loaded is not None:
            self._compare(self.loaded[1])
        self._unlike = False
        if recording:
            self.loaded = None

    def _compare(self, step: int) -> None:
        cluster, now = self.table.cluster, self._now()
        if now != step and _mixed.get(cluster) != cluster.changes:
            _mixed[cluster] = cluster.changes
            warnings.warn(
                f"the dense weights that were loaded are of step {step} of table {self.table.name!r}, and its rows are at step {now}. "
                "Bring the rows back that belong to them, with cluster.load(url) or RowCheckpoints(…).follow() of your bridge, or go on "
                "if it is meant",
                MixedStepsWarning,
                stacklevel=2,
            )

    def _now(self) -> int:
        """Return the step of the rows, once this process's pushes are applied."""
        self.table.cluster.flush()
        return self.table.steps()


class SavedRows:
    """Save the rows of a model's cluster beside its dense weights, under their step, and bring them back."""

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
        """Save all rows as they are between two steps, unless that step is saved already; return the checkpoint's URL.

        Raises:
            CheckpointError, ShardUnavailableError: in every process; there may be a part of a checkpoint, which the next save replaces.
        """
        self._cluster.flush()
        epoch = max(epoch for epoch, _ in self._cluster.progress())
        steps = {name: table.steps() for name, table in self._tables.items()}
        url = self._url_of(epoch, steps)
        self._once(lambda: self._save(url, steps))
        return url

    def follow(self) -> bool:
        """Load the rows of the dense weights that were loaded last, unless the cluster has them; return whether rows were loaded.

        Call it after these are loaded and before training goes on: once a step has begun there is nothing to follow any more.

        Raises:
            CheckpointError: in every process; rows of that step were not saved here, or cannot be loaded. The cluster is as it was, unless
                the message says otherwise.
        """
        # Of a table the first that has one: they were loaded together.
        wanted = {name: mark.loaded for name, marks in self._marks.items() for mark in marks[::-1] if mark.loaded is not None}
        if not wanted:
            return False
        epoch, steps = max(epoch for epoch, _ in wanted.values()), {name: step for name, (_, step) in wanted.items()}
        loaded = self._once(lambda: self._load(epoch, steps))
        for marks in self._marks.values():
            for mark in marks:
                mark.followed()
        return loaded

    def _url_of(self, epoch: int, steps: Mapping[str, int]) -> str:
        """The folder for rows of these steps: tables that were not trained in every step differ, and the largest alone would not tell."""
        most, every = max(steps.values()), sum(steps.values())
        return f"{self._url}/epoch-{epoch}-step-{most}" + ("" if every == most * len(steps) else f"-of-{every}")

    def _save(self, url: str, steps: Mapping[str, int]) -> bool:
        if any(one.name == url.rpartition("/")[2] for one in self._whole()):
            return False
        from kvemb.checkpoint.listing import prune

        done = self._cluster.save(url, extra={"step": max(steps.values()), "steps": dict(steps)})
        if self._keep is not None:
            prune(self._url, keep=self._keep, like=done.manifest)
        return True

    def _load(self, epoch: int, steps: Mapping[str, int]) -> bool:
        self._cluster.flush()
        if all(self._tables[name].steps() == step for name, step in steps.items()):
            return False
        of_epoch = [one for one in self._whole() if one.name.startswith(f"epoch-{epoch}-step-")]
        self._cluster.load(next((one.url for one in of_epoch if _has(one.manifest, steps)), self._url_of(epoch, steps)))
        return True

    def _whole(self) -> "list[Listed]":
        from kvemb.checkpoint.listing import list_checkpoints  # many modules, which most jobs never need

        return [one for one in list_checkpoints(self._url) if one.manifest is not None]


def _has(manifest: "CheckpointManifest | None", steps: Mapping[str, int]) -> bool:
    """Whether a checkpoint has the rows of these steps, be it of all tables or of some; kvemb 0.1 wrote the largest step only."""
    extra = {} if manifest is None else manifest.extra
    return steps.items() <= extra["steps"].items() if "steps" in extra else extra.get("step") == max(steps.values())
