"""The first rows of tables that were a model's weights: exactly one trainer of a job assigns them, the others wait until it has.

What must not live here: which weights become tables, and any framework. Strategy: who made the table assigns its rows, in ascending order,
in chunks. Another trainer that finds the table sees by the last chunk that this is done. That one comes into being last, though not in all
shards at once. So no trainer trains before the rows are there, and rows that were trained are not overwritten by a trainer that joins or
starts again.
"""

import time
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import DeadlineExceededError

CHUNK_BYTES, CHUNK_ROWS = 4 << 20, 1 << 16
STALL_S = 120.0
"""How long a trainer waits for another one that assigns and does not get on; generous, a chunk takes far less than a second."""
_POLL_S = 0.2


class Weights(Protocol):
    """A weight of a model that becomes a table; its text says which."""

    @property
    def n_rows(self) -> int:
        """Rows: ids are 0 to n_rows - 1."""
        ...

    @property
    def dim(self) -> int:
        """Weights per row."""
        ...

    @property
    def padding(self) -> list[int]:
        """Ids whose rows pad, ascending."""
        ...

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows [n, dim] as the model has them; zeros where it holds none."""
        ...


class AssignPort(Protocol):
    """What the transfer of weights needs of a table."""

    def assign(self, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Set rows."""
        ...

    def pull(self, ids: NDArray[np.int64], *, return_versions: Literal[True]) -> Any:
        """Fetch rows [n, dim] and versions [n]."""
        ...

    def __len__(self) -> int:
        """The number of rows that exist."""
        ...


def assign_padding(table: AssignPort, site: Weights) -> None:
    """Set the rows that pad, and do not exist yet, to what the module has there: zeros, which no initializer gives.

    Every trainer does; all have the same, and no push of a module that pads changes them.
    """
    ids = np.array(site.padding, np.int64)
    if len(ids):
        versions = table.pull(ids, return_versions=True)[1]
        assign_weights(table, site, ids[versions == 0])


def assign_weights(table: AssignPort, site: Weights, ids: NDArray[np.int64]) -> None:
    """Set the rows of these ids to the model's."""
    n_chunk = chunk_rows(site)
    for low in range(0, len(ids), n_chunk):
        chunk = ids[low : low + n_chunk]
        table.assign(chunk, site.rows_of(chunk))


def wait_assigned(table: AssignPort, site: Weights) -> None:
    """Return when all rows are there, whoever assigns them.

    Raises:
        DeadlineExceededError: no row came for STALL_S seconds.
    """
    n_rows, since = -1, time.monotonic()
    last = np.arange((site.n_rows - 1) // chunk_rows(site) * chunk_rows(site), site.n_rows)
    while not (_exist(table, last[-1:]) and _exist(table, last)):  # the whole chunk only when it has begun to come
        n_now, now = len(table), time.monotonic()
        if n_now != n_rows:
            n_rows, since = n_now, now
        if now - since > STALL_S:
            raise DeadlineExceededError(
                f"{site}: it exists, rows of the ids up to {last[-1]} do not, and for {STALL_S:g} s no row was added to its {n_now}. The "
                "trainer that made the table assigns the first rows and may have ended before it was done, or the table was made without "
                'weights. In one trainer, call distribute with carry_weights="overwrite"; or erase what is not wanted'
            )
        time.sleep(_POLL_S)


def chunk_rows(site: Weights) -> int:
    """Return how many rows are assigned at a time."""
    return min(max(1, CHUNK_BYTES // (4 * site.dim)), CHUNK_ROWS)


def _exist(table: AssignPort, ids: NDArray[np.int64]) -> bool:
    return bool(table.pull(ids, return_versions=True)[1].all())
