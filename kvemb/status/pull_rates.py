"""How fast a cluster's rows are read at this moment: pulls straight from storage, timed one by one. Nothing is written, no shard is asked.

What must not live here: which ids, and what the figures are compared with (kvemb.commands.bench_command).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import to_caller
from kvemb.datapath.multi_table_read import Missing
from kvemb.datapath.pull import prepare_pull, pull
from kvemb.net.deadline import Deadline
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

Ids = NDArray[np.uint64]
_PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True)
class PullRate:
    """What some pulls took.

    Args:
        n_pulls: how many.
        n_rows: ids that they asked for.
        n_missing: of these, rows that storage does not have.
        seconds: of all of them.
        p50_ms, p90_ms, p99_ms, longest_ms: of one pull.
    """

    n_pulls: int
    n_rows: int
    n_missing: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    longest_ms: float

    @property
    def rows_per_s(self) -> float:
        return self.n_rows / self.seconds


def measure(store: Store, table: TableDef, draw: Callable[[], Ids], seconds: float, timeout_s: float) -> PullRate:
    """Pull for about so long, at least once; a first pull, which opens connections, does not count.

    Args:
        store: open.
        table: whose rows.
        draw: unique ids of the next pull; its time does not count.
        seconds: of all pulls.
        timeout_s: of each.

    Raises:
        StorageError: see `kvemb.errors`.
    """
    _pull(store, table, draw(), timeout_s)
    took_s: list[float] = []
    n_rows = n_missing = 0
    while not took_s or sum(took_s) < seconds:
        ids = draw()
        started_s = time.perf_counter()
        n_missing += _pull(store, table, ids, timeout_s)
        took_s.append(time.perf_counter() - started_s)
        n_rows += len(ids)
    return PullRate(len(took_s), n_rows, n_missing, sum(took_s), *(np.percentile(took_s, _PERCENTILES) * 1e3).tolist())


def _pull(store: Store, table: TableDef, ids: Ids, timeout_s: float) -> int:
    missing: Missing = []
    request = prepare_pull(table, to_caller(ids, table.id_dtype), minus_one=True)
    pull(store, [request], Deadline.after(timeout_s), missing=missing)
    return sum(len(gone) for _, gone in missing)


def by_node(store: Store, table: TableDef, ids: Ids) -> dict[str, Ids]:
    """Return the ids by the address of the node that holds their rows."""
    slots, first, which = np.unique(table.placement.slots(ids), return_index=True, return_inverse=True)
    pages = store.capabilities.pages
    addresses = [store.node_of(table.keys(ids[at : at + 1], pages=pages)) for at in first]  # one for each slot, not for each id
    nodes = sorted(set(addresses))
    node = np.array([nodes.index(address) for address in addresses], np.intp)[which] if len(slots) else np.zeros(0, np.intp)
    return {address: ids[node == number] for number, address in enumerate(nodes)}
