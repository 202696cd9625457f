"""Rows in this process's memory behind the interface of a cluster: the cost of a step if no row had to be fetched.

What must not live here: sockets, threads. A row is at its id in one array per table; a push updates it at once with the parameter servers'
own rules. It counts the seconds that pulls and pushes take.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvemb import init
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec
from kvemb.schema.table_def import TableDef
from paramserver.optim import build_optimizer
from trainer.lookahead.cluster_ports import Prefetched

if TYPE_CHECKING:
    from trainer.lookahead.cluster_ports import ClusterPort, TablePort


class LocalAck:
    """A push that is applied already; `trainer.lookahead.cluster_ports.AckPort`."""

    staleness = None
    failure_seen = False
    changed_rows = None

    def wait_applied(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    wait_released = wait_applied


class LocalTable:
    """One table; `trainer.lookahead.cluster_ports.TablePort`.

    Args:
        cluster: it belongs to.
        definition: with num_ids. Rows are zeros until they are assigned; rows that are never touched take no memory.
    """

    def __init__(self, cluster: "LocalRows", definition: TableDef) -> None:
        assert definition.num_ids is not None
        self.cluster, self.definition = cluster, definition
        self.name, self.dim, self.hyper = definition.name, definition.dim, definition.optimizer.defaults()
        self.minus_one_allowed = False
        self._optimizer, self._step = build_optimizer(definition.optimizer), 0
        self._weights = np.zeros((definition.num_ids, definition.dim), np.float32)
        self._state = self._optimizer.initial_state(definition.num_ids, definition.dim)

    def assign(self, ids: NDArray[Any], rows: NDArray[np.float32]) -> None:
        """Set rows [n, dim]."""
        self._weights[ids] = rows

    def pull(self, ids: NDArray[Any], *, return_versions: Literal[True]) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """Copy rows [n, dim]; versions are all 0: there are none."""
        return self._weights.take(ids, axis=0), np.zeros(len(ids), np.uint64)

    def steps(self) -> int:
        """How many steps of training the rows have had."""
        return self._step

    def allow_minus_one(self) -> None:
        """There is no row of it: ids are below num_ids."""

    def push(self, ids: NDArray[Any], grads: NDArray[np.float32], hyper: Mapping[str, float]) -> None:
        """Apply gradients of distinct ids."""
        self._step += 1
        weights, state = self._weights.take(ids, axis=0), self._state.take(ids, axis=0)
        self._weights[ids], self._state[ids] = self._optimizer.update(weights, state, grads, hyper, self._step)


class LocalRows:
    """Several tables; `trainer.lookahead.cluster_ports.ClusterPort`."""

    mode = "async"
    all_stored = True

    def __init__(self) -> None:
        self.tables: dict[str, LocalTable] = {}
        self.changes = 0
        self.pull_s = self.push_s = 0.0

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        optimizer: OptimizerSpec,
        initializer: Initializer | None,
        dtype: str,
        seed: int,
        reduce: str,
        num_ids: int | None,
        exist_ok: bool,
    ) -> LocalTable:
        """Make a table; arguments as `kvemb.Cluster.create_table`. All rows are zeros until they are assigned."""
        definition = TableDef(name, dim, optimizer, initializer or init.zeros(), dtype, "int64", seed, reduce, num_ids=num_ids)
        return self.tables.setdefault(name, LocalTable(self, definition))

    def table(self, name: str) -> LocalTable:
        """Return a table."""
        return self.tables[name]

    def pull_versions(
        self, ids: Mapping[str, NDArray[Any]], *, stored: bool = True
    ) -> dict[str, tuple[NDArray[np.float32], NDArray[np.uint64]]]:
        """Copy rows of several tables; every row is stored."""
        began_s = time.perf_counter()
        pulled = {name: self.tables[name].pull(some, return_versions=True) for name, some in ids.items()}
        self.pull_s += time.perf_counter() - began_s
        return pulled

    def push(
        self,
        tables: Mapping[str, tuple[NDArray[Any], NDArray[np.float32]]],
        *,
        versions: Mapping[str, NDArray[np.uint64]] | None = None,
        hyper: Mapping[str, Mapping[str, float]] | None = None,
        prefetched: Prefetched | None = None,
    ) -> LocalAck:
        """Apply gradients. Only sync jobs register prefetched rows, and this is none."""
        assert not prefetched
        began_s = time.perf_counter()
        self.changes += 1
        for name, (ids, grads) in tables.items():
            self.tables[name].push(ids, grads, (hyper or {}).get(name, {}))
        self.push_s += time.perf_counter() - began_s
        return LocalAck()

    def flush(self) -> None:
        """Nothing is under way."""


if TYPE_CHECKING:

    def _is_a_cluster(rows: LocalRows, table: LocalTable) -> tuple[ClusterPort, TablePort]:
        return rows, table
