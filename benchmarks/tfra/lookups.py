"""TFRA's lookup as contenders of `pull`: the same rows, the same batches of ids, the same server."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Contender
from benchmarks.peers import PeerError
from benchmarks.servers import Filled, ids_of
from benchmarks.tfra.peer import Tfra, started

TFRA_STORES = ("redis", "valkey")
_CALLS = {"lookup": "TFRA Variable.lookup (C++)", "lookup_unique": "TFRA tf.unique, lookup, gather (C++)"}


class Asked(Protocol):
    """The arrays used of a batch of `pull`: positions int64 [m] and ids uint64 [m]."""

    @property
    def positions(self) -> NDArray[np.int64]: ...

    @property
    def ids(self) -> NDArray[np.uint64]: ...


def tfra_lookups(stack: ExitStack, target: Filled, batches: Sequence[Asked], versions: dict[str, str]) -> list[Contender]:
    """Fill a TFRA table with the target's rows and return its two lookups.

    Args:
        stack: ends TFRA's process.
        target: whose weights and ids.
        batches: to look up.
        versions: TFRA's are added.

    Raises:
        PeerAbsentError: TFRA is not installed.
        PeerError: it did not read the written rows.
    """
    other = stack.enter_context(started())
    other.open(target.ports[0], target.weights.shape[1])
    versions.update(other.versions)
    other.fill(ids_of(target.table.definition, np.arange(target.n_rows)), target.weights)
    other.batches([batch.ids for batch in batches])
    for call in _CALLS:
        require_rows(other, call, batches[0], target.weights)
    return [Contender(name, lambda seconds, call=call: other.turn(call, seconds)) for call, name in _CALLS.items()]  # type: ignore[misc]


def require_rows(other: Tfra, call: str, batch: Asked, weights: NDArray[np.float32]) -> None:
    """Compare one batch of TFRA's with the written rows; rows that do not exist must be zeros.

    Raises:
        PeerError: how many differ.
    """
    exists = batch.positions < len(weights)
    expected = np.zeros((len(batch.ids), weights.shape[1]), np.float32)
    expected[exists] = weights[batch.positions[exists]]
    n_wrong = int((other.rows(batch.ids, call) != expected).any(axis=1).sum())
    if n_wrong:
        raise PeerError(f"TFRA ({call}): {n_wrong} of {len(expected)} rows differ from what was written")
