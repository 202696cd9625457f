"""The parts of a table, a cluster and an ack that a trainer needs: `kvemb` has them; benchmarks and tests bring their own. No code here."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.table_def import TableDef

Prefetched = Mapping[str, tuple[NDArray[Any], NDArray[np.uint64]]]
"""Per table: ids [n] and the versions [n] in which a trainer holds their rows."""
Changed = Mapping[str, tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.uint64]]]
"""Per table: ids [n], rows float32 [n, dim] and versions [n]."""
Pushes = Mapping[str, tuple[NDArray[Any], NDArray[np.float32]]]
"""Per table: ids [n] and gradients float32 [n, dim]."""

GradientPart = tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.uint64]]
"""Unique ids [n], gradients [n, dim], versions [n] of one table."""


class AckPort(Protocol):
    """The fate of a push. `staleness` is known once the push was released."""

    def wait_applied(self, timeout_s: float | None = None) -> None:
        """Wait until the push was applied."""

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Wait until `staleness` and `changed_rows` are known: of a push with prefetched rows, before storage has it."""

    @property
    def failure_seen(self) -> bool:
        """Whether the push failed and its error has been raised."""

    @property
    def staleness(self) -> Any:
        """How far the rows pulled lagged behind those the push met; None until it was released."""

    @property
    def changed_rows(self) -> Changed | None:
        """Those of the push's prefetched rows that its step changed; None while and where that is not known."""


class LookaheadPort(Protocol):
    """A loader that pulls rows before their batch is used, as the optimizer sees it."""

    def looked_up(self, table: str, foreseen: bool) -> None:
        """Take note of a lookup, and whether its rows had been pulled ahead."""

    def fit(self) -> bool:
        """Return whether the rows that were installed may still be used."""

    def prefetched(self) -> Prefetched | None:
        """Return ids and versions, by table, of the rows of the batches to come that a step's push is to register; None for none."""

    def pushed(self, ack: AckPort) -> None:
        """Take note of a step's push."""

    def released(self, changed: Changed | None) -> None:
        """Take over those of the prefetched rows that the step changed; None if that is not known."""

    def merge(self, parts: Mapping[str, GradientPart]) -> Mapping[str, GradientPart]:
        """Return what this trainer pushes of a step, by table: its parts, or its share of all ranks' parts where ranks exchange them."""


class PullPort(Protocol):
    """The pull of several tables at once."""

    def pull_versions(
        self, ids: Mapping[str, NDArray[Any]], *, stored: bool = True
    ) -> Mapping[str, tuple[NDArray[np.float32], NDArray[np.uint64]]]:
        """Fetch rows and versions of several tables at once, by table name; each as `TablePort.pull`."""


class ClusterPort(PullPort, Protocol):
    """The part of a cluster that a bridge needs: pulls and pushes of several tables at once."""

    @property
    def mode(self) -> str:
        """Either "sync" or "async"."""

    @property
    def changes(self) -> int:
        """How often this connection has changed rows, see `Cluster.changes`."""

    @property
    def all_stored(self) -> bool:
        """Whether storage has every step that was released, see `Cluster.all_stored`."""

    def push(
        self,
        tables: Pushes,
        *,
        versions: Mapping[str, NDArray[np.uint64]] | None = None,
        hyper: Mapping[str, Mapping[str, float]] | None = None,
        prefetched: Prefetched | None = None,
    ) -> AckPort:
        """Hand over gradients; the ids of each table are unique. `prefetched`: in a sync job, see `Cluster.push`."""


class TablePort(Protocol):
    """The pull of rows, and the table's properties."""

    @property
    def name(self) -> str:
        """The table's name."""

    @property
    def dim(self) -> int:
        """Weights per row."""

    @property
    def definition(self) -> TableDef:
        """Identity and defaults."""

    @property
    def hyper(self) -> dict[str, float]:
        """The optimizer's run-time values that this client's next push would carry."""

    def steps(self) -> int:
        """How many steps of training the rows have had, see `Table.steps`."""

    @property
    def minus_one_allowed(self) -> bool:
        """Whether -1 is an id like any other, see `Table.allow_minus_one`."""

    def allow_minus_one(self) -> None:
        """Make it one."""

    @property
    def cluster(self) -> Any:
        """The `ClusterPort` that the table was opened from."""

    def pull(self, ids: NDArray[Any], *, return_versions: Literal[True]) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """Fetch rows [n, dim] and their versions [n]; ids that no push created have their initial rows and version 0."""
