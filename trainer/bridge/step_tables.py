"""The tables behind a step function of arrays: rows go in, their gradients come out and are pushed.

One thread per step function. It does not survive fork(): in a fork TensorFlow and JAX have no threads, and a step would wait for ever.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import normalize
from kvemb.errors import ClosedError, InvalidInputError

from ..lookahead.cluster_ports import AckPort, ClusterPort, GradientPart, TablePort
from .pushed_steps import PushedSteps, merge_parts
from .shared_lookups import Asked, LookupResult, SharedLookups

Gradient = tuple[str, LookupResult, NDArray[np.float32]]
"""A table's name, the result of a lookup, and the gradient [n, dim] of its rows."""


class StepTables:
    """Tables of one cluster, with their lookups and pushes."""

    def __init__(
        self, tables: Sequence[TablePort], *, timeout_s: float | None, max_unapplied: int, shared: SharedLookups | None = None
    ) -> None:
        for table in tables:
            check_table(table)
        clusters = {id(table.cluster) for table in tables}
        if len(clusters) != 1:
            raise InvalidInputError(f"give tables of one cluster, got {len(tables)} tables of {len(clusters)}")
        self.cluster: ClusterPort = tables[0].cluster
        self.by_name: dict[str, TablePort] = {table.name: table for table in tables}
        self.shared = SharedLookups(self.by_name, self.cluster) if shared is None else shared
        id_dtypes = {name: table.definition.id_dtype for name, table in self.by_name.items()}
        self._steps = PushedSteps(self.cluster, id_dtypes, timeout_s=timeout_s, max_unapplied=max_unapplied)
        self.hyper: dict[str, dict[str, float]] = {name: dict(table.hyper) for name, table in self.by_name.items()}
        """The optimizers' run-time values by table, as the next push carries them. Schedules change them."""

    def look_up(self, asked: Sequence[Asked]) -> list[LookupResult]:
        """Look several up: from rows pulled ahead, the others in one pull."""
        return self.shared.look_up(asked, recording=False)

    def push(self, gradients: Sequence[Gradient], loss: Any = None, *, use_up: Callable[[], None] = lambda: None) -> None:
        """Push the gradients of all lookups since the last step; if some are wrong, nothing is sent. In a sync job it may have none."""
        self._steps.take([self.shared], lambda: self._parts(gradients), self._checked_hyper, use_up=use_up, loss=loss)

    @property
    def last_ack(self) -> AckPort | None:
        """Of the newest push; None before."""
        return self._steps.last_ack

    def _parts(self, gradients: Sequence[Gradient]) -> dict[str, GradientPart]:
        of: dict[str, list[GradientPart]] = {name: [] for name in self.by_name}
        for name, found, gradient in gradients:
            of[name].append((found.ids, gradient, found.versions))
        return {name: merge_parts(parts, self.by_name[name].dim) for name, parts in of.items()}

    def _checked_hyper(self) -> dict[str, dict[str, float]]:
        return {name: self.by_name[name].definition.optimizer.check_hyper(dict(values)) for name, values in self.hyper.items()}


def check_table(table: Any) -> None:
    """Refuse an object that is no table of kvemb, or whose rows are no weights."""
    if not all(hasattr(table, name) for name in ("pull", "dim", "definition", "cluster")):
        raise InvalidInputError(f"table must be a kvemb table (cluster.table(…)), got {type(table).__name__}")
    if table.definition.row_dtype != np.float32:
        raise InvalidInputError(f"table {table.definition.name!r} has rows of {table.definition.dtype}: no layer can use them. Pull them")


def asked_of(table: TablePort, ids: NDArray[Any]) -> Asked:
    """Return the table and the checked ids of a lookup."""
    of = table.definition
    return table, normalize(ids, of.id_dtype, of.name, of.num_ids, minus_one=table.minus_one_allowed)[0]


def has_long_ids(table: TablePort) -> bool:
    """Whether 32 bits are too few for a table's ids."""
    num_ids = table.definition.num_ids
    return num_ids is None or num_ids > 1 << 31


class OwnProcess:
    """The process that makes this object."""

    def __init__(self, framework: str) -> None:
        self._framework, self._pid = framework, os.getpid()

    def check(self) -> None:
        """Raise ClosedError in a fork, before anything is done."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this step was made in process {self._pid}, and this is a fork of it, in which {self._framework} has no threads and would "
                "hang. Here rows can be pulled (table.pull); to train or evaluate, start the process with 'spawn' or 'forkserver', and "
                "call kvemb.connect() in it"
            )
