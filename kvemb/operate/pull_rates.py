"""How fast a cluster's rows are read at this moment: pulls straight from storage, timed one by one. Nothing is written, no shard is asked.

Also each storage node's share of the traffic, of all clients: the growth of its own counters of bytes between two looks.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import to_caller
from kvemb.config import StorageConfig
from kvemb.datapath.multi_table_read import Missing
from kvemb.datapath.pull import prepare_pull, pull
from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.table_def import TableDef
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store
from kvemb.stores.store_nodes import NodeStats

Ids = NDArray[np.uint64]
_PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True)
class PullRate:
    """The times of some pulls."""

    n_pulls: int  # how many
    n_rows: int  # ids that they asked for
    n_missing: int  # of these, rows that storage does not have
    seconds: float  # of all of them
    # p50_ms, p90_ms, p99_ms, longest_ms: of one pull
    p50_ms: float
    p90_ms: float
    p99_ms: float
    longest_ms: float

    @property
    def rows_per_s(self) -> float:
        return self.n_rows / self.seconds


def measure(store: Store, table: TableDef, draw: Callable[[], Ids], seconds: float, timeout_s: float) -> PullRate:
    """Pull for about so long, at least once; a first pull, which opens connections, does not count."""
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
    addresses = [store.rows.node_of(table.keys(ids[at : at + 1], pages=pages)) for at in first]  # one for each slot, not for each id
    nodes = sorted(set(addresses))
    node = np.array([nodes.index(address) for address in addresses], np.intp)[which] if len(slots) else np.zeros(0, np.intp)
    return {address: ids[node == number] for number, address in enumerate(nodes)}


BETWEEN_S = 1.0


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes a second that a node received and sent, and their share of all nodes' (0 where there was none)."""

    bytes_per_s: float
    share: float

    def __str__(self) -> str:
        return f"{self.share:.0%}, {self.bytes_per_s / 1e6:,.1f} MB/s"


def look_twice(config: StorageConfig) -> tuple[Sequence[NodeStats], dict[str, NodeTraffic]]:
    """Return the nodes' statistics, and the traffic of those that answered both times. Takes a second."""
    store = open_store(replace(config, on_lost_node="fail"), role="trainer")
    stats: list[NodeStats] = []

    def look() -> dict[str, int]:
        nonlocal stats
        stats = store.nodes.stats(Deadline.after(config.timeout_s))
        return {node.address: node.traffic_bytes for node in stats if not node.error}

    try:
        store.nodes.find(Deadline.after(config.timeout_s))
        before, begun_s = look(), time.monotonic()
        time.sleep(BETWEEN_S)
        after, took_s = look(), time.monotonic() - begun_s
        return stats, shares_of(before, after, took_s)
    except StorageError:
        return stats, {}
    finally:
        store.close()


def shares_of(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> dict[str, NodeTraffic]:
    """Return rates and shares from two looks at counters."""
    gained = {node: n - before[node] for node, n in after.items() if n >= before.get(node, n + 1)}
    total = sum(gained.values())
    return {node: NodeTraffic(n / seconds, n / total if total else 0.0) for node, n in gained.items()}
