"""Which part of the traffic each storage node has: what its own counters of bytes gained between two looks, by whomever."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvemb.config import StorageConfig
from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import NodeStats

BETWEEN_S = 1.0


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes a second that a node received and sent, and their share of all nodes' (0 where there was none)."""

    bytes_per_s: float
    share: float

    def __str__(self) -> str:
        return f"{self.share:.0%}, {self.bytes_per_s / 1e6:,.1f} MB/s"


def look_twice(config: StorageConfig) -> tuple[Sequence[NodeStats], dict[str, NodeTraffic]]:
    """Return the nodes as they are, and the traffic of those that answered both times. Takes a second.

    Args:
        config: of the nodes, which need not be whole.
    """
    store = open_store(replace(config, on_lost_node="fail"), role="trainer")
    stats: list[NodeStats] = []

    def look() -> dict[str, int]:
        nonlocal stats
        stats = store.stats(Deadline.after(config.timeout_s))
        return {node.address: node.traffic_bytes for node in stats if not node.error}

    try:
        store.find_nodes(Deadline.after(config.timeout_s))
        traffic = traffic_between(look)
        return stats, traffic
    except StorageError:
        return stats, {}
    finally:
        store.close()


def traffic_between(look: Callable[[], Mapping[str, int]]) -> dict[str, NodeTraffic]:
    """Look twice, a second apart, and return what each node's traffic was meanwhile.

    Args:
        look: returns each node's bytes since its server started. One that has started again in between has no traffic here.
    """
    before, begun_s = look(), time.monotonic()
    time.sleep(BETWEEN_S)
    after, took_s = look(), time.monotonic() - begun_s
    return shares_of(before, after, took_s)


def shares_of(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> dict[str, NodeTraffic]:
    """Return rates and shares from two looks at counters.

    Example:
        >>> found = shares_of({"a": 0, "b": 5, "c": 9}, {"a": 3_000_000, "b": 1_000_005, "c": 1}, 2)
        >>> {node: str(traffic) for node, traffic in found.items()}
        {'a': '75%, 1.5 MB/s', 'b': '25%, 0.5 MB/s'}
    """
    gained = {node: n - before[node] for node, n in after.items() if n >= before.get(node, n + 1)}
    total = sum(gained.values())
    return {node: NodeTraffic(n / seconds, n / total if total else 0.0) for node, n in gained.items()}
