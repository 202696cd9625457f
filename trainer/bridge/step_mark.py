"""At which step of training rows and dense weights are: a state says how far its rows were, and who loads one hears of a difference.

What must not live here: bringing rows back (`saved_rows`). Strategy: a table counts its steps, in checkpoints, too (`Table.steps`).
The state of a module or layer over it holds that number. Where a state is loaded the two are compared, and once more at the first
lookup. So dense weights and rows may be loaded in any order; what still differs then is told.
"""

import logging
import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from kvemb.errors import KvembError

from .cluster_ports import TablePort

log = logging.getLogger("kvemb")
_saving: "WeakSet[Any]" = WeakSet()  # clusters whose rows are saved beside states, or whose user was told that states have none
_mixed: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()  # by cluster, its `changes` when a difference was told: once for all tables


class MixedStepsWarning(UserWarning):
    """Dense weights of one step of training are used with rows of another one."""


def saves_rows(cluster: Any) -> None:
    """Take note that the rows of this cluster are saved beside states."""
    _saving.add(cluster)


class StepMark:
    """The step of one module's table, in states and behind them. One thread.

    Args:
        table: of the module or layer.
    """

    def __init__(self, table: TablePort) -> None:
        self.table = table
        self.loaded: tuple[int, int] | None = None
        """Epoch and step of the state that was loaded last, until a lookup trains the rows."""
        self._unlike = False

    def state(self) -> dict[str, int]:
        """Return what a state says of the rows as they are now; nothing where the shards cannot be asked."""
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
        """Take note of what a state says of its rows."""
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
        """The step of the rows, once what this process pushed is applied."""
        self.table.cluster.flush()
        return self.table.steps()
