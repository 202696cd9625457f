"""A cluster in this process, for fast tests of the bridge: the same verbs, the real initializers and update rules, no
sockets.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb import init, optim
from kvemb.arrays.ids import normalize
from kvemb.client.ack import Staleness
from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from paramserver.optim import build_optimizer


class MemoryAck:
    def __init__(self, changed_rows: Mapping[str, Any] | None = None) -> None:
        self.waited_s: float | None = None
        self.n_waits = 0
        self.failure_seen = False
        self.error: Exception | None = None
        self.changed_rows = changed_rows
        self.staleness = Staleness(0.0, 0)

    def wait_applied(self, timeout_s: float | None = None) -> None:
        self.waited_s = timeout_s
        self.n_waits += 1
        if self.error is not None:
            raise self.error

    wait_released = wait_applied


class MemoryTable:
    def __init__(self, cluster: "MemoryCluster", definition: TableDef) -> None:
        self.cluster, self.definition = cluster, definition
        self.name, self.dim = definition.name, definition.dim
        self.n_pulls, self.step = 0, 0
        self.minus_one_allowed = False
        self.optimizer = build_optimizer(definition.optimizer)
        self.hyper = definition.optimizer.defaults()
        self.rows: dict[int, tuple[NDArray[np.float32], NDArray[np.float32], int]] = {}

    def pull(self, ids: NDArray[Any], *, return_versions: bool = False) -> Any:
        flat, shape = normalize(ids, self.definition.id_dtype, self.name)
        self.n_pulls += 1
        weights, _, versions = self._read(flat)
        rows = weights.reshape(*shape, self.dim)
        return (rows, versions.reshape(shape)) if return_versions else rows

    def steps(self) -> int:
        return self.step

    def allow_minus_one(self) -> None:
        self.minus_one_allowed = True

    def _read(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint64]]:
        weights = self.definition.initial_rows(ids)
        state, versions = self.optimizer.initial_state(len(ids), self.dim), np.zeros(len(ids), np.uint64)
        for at, row_id in enumerate(ids.tolist()):
            if row_id in self.rows:
                weights[at], state[at], versions[at] = self.rows[row_id]
        return weights, state, versions

    def apply(self, ids: NDArray[Any], grads: NDArray[np.float32], hyper: Mapping[str, float]) -> None:
        flat, _ = normalize(ids, self.definition.id_dtype, self.name)
        assert grads.shape == (len(flat), self.dim)
        assert grads.dtype == np.float32
        assert len(np.unique(flat)) == len(flat), "the bridge hands over distinct ids"
        self.step += 1
        weights, state, _ = self._read(flat)
        weights, state = self.optimizer.update(weights, state, grads, hyper, self.step)
        for at, row_id in enumerate(flat.tolist()):
            self.rows[row_id] = weights[at], state[at], make_version(1, self.step)

    def fresh(self, ids: NDArray[Any], versions: NDArray[np.uint64]) -> Any:
        flat, _ = normalize(ids, self.definition.id_dtype, self.name)
        assert len(np.unique(flat)) == len(flat)
        rows, _, current = self._read(flat)
        others = np.flatnonzero(current != versions)
        return flat[others], rows[others], current[others]


class MemoryCluster:
    read_only = False

    def __init__(self, mode: str = "async") -> None:
        self.mode = mode
        self.tables: dict[str, MemoryTable] = {}
        self.pushes: list[dict[str, tuple[NDArray[Any], NDArray[np.float32]]]] = []
        self.versions: list[Mapping[str, NDArray[np.uint64]]] = []
        self.hyper: list[Mapping[str, Mapping[str, float]]] = []
        self.failure: Exception | None = None
        self.n_pulls = self.changes = 0
        self.all_stored = True

    def table(self, name: str, dim: int, optimizer: OptimizerSpec | None = None, **identity: Any) -> MemoryTable:
        definition = TableDef(name, dim, optimizer or optim.sgd(0.5), init.normal(std=1.0), **identity)
        return self.tables.setdefault(name, MemoryTable(self, definition))

    def pull_versions(self, ids: Mapping[str, NDArray[Any]], *, stored: bool = True) -> dict[str, Any]:
        self.n_pulls += 1
        return {name: self.tables[name].pull(of, return_versions=True) for name, of in ids.items()}

    def push(
        self,
        tables: Mapping[str, tuple[NDArray[Any], NDArray[np.float32]]],
        *,
        versions: Mapping[str, NDArray[np.uint64]] | None = None,
        hyper: Mapping[str, Mapping[str, float]] | None = None,
        prefetched: Mapping[str, tuple[NDArray[Any], NDArray[np.uint64]]] | None = None,
    ) -> MemoryAck:
        self.changes += 2
        if self.failure is not None:
            raise self.failure
        if any(not np.isfinite(grads).all() for _, grads in tables.values()):
            raise InvalidInputError("gradients hold NaN or Inf")
        assert versions is not None
        assert hyper is not None
        for name, (ids, grads) in tables.items():
            assert versions[name].shape == (len(ids),)
            self.tables[name].apply(ids, grads, hyper[name])
        self.pushes.append({name: (ids.copy(), grads.copy()) for name, (ids, grads) in tables.items()})
        self.versions.append(versions)
        self.hyper.append(hyper)
        return MemoryAck(None if prefetched is None else {name: self.tables[name].fresh(*rows) for name, rows in prefetched.items()})

    def flush(self) -> None:
        """Everything is applied already."""

    def progress(self) -> list[tuple[int, int]]:
        return [(1, sum(table.step for table in self.tables.values()))]
