"""What each slot weighs: the keys in it are counted, and a few of them measured."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ProtocolError
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.redis_cluster.scaling.admin_links import AdminLinks
from kvemb.stores.redis_cluster.scaling.cluster_nodes import ClusterView
from kvemb.wire.resp.resp_value import Value

_MEASURED_KEYS = 8  # of a slot: tables' buckets are about as large as each other, and a slot has one of most tables
_SLOTS_AT_ONCE = 1024
LEAST_LOAD = 256.0
"""Bytes of a slot that holds its marker alone: empty slots are shared out too, for tables to come."""


def slot_loads(links: AdminLinks, view: ClusterView, timeout_s: float) -> NDArray[np.float64]:
    """Return about how many bytes lie in each slot: float64 [16384], at least LEAST_LOAD.

    A slot whose node does not answer in time is an error of `AdminLinks.run`; commands that the user may not run count as nothing.
    """
    loads = np.full(N_SLOTS, LEAST_LOAD)
    for node in view.primaries:
        mine = np.flatnonzero(node.slots)
        for start in range(0, len(mine) if not node.failed else 0, _SLOTS_AT_ONCE):
            slots = mine[start : start + _SLOTS_AT_ONCE].tolist()
            loads[slots] = np.maximum(_loads(links, node.address, slots, timeout_s), LEAST_LOAD)
    return loads


def key_bytes(values: Sequence[Value]) -> list[int]:
    """Read the answers to MEMORY USAGE; a key that is gone weighs nothing."""
    return [value if isinstance(value, int) else 0 for value in values]


def keys_in(address: str, value: Value) -> list[bytes]:
    """Read an answer to CLUSTER GETKEYSINSLOT."""
    if not isinstance(value, list) or not all(isinstance(key, bytes) for key in value):
        raise ProtocolError(f"node {address}: CLUSTER GETKEYSINSLOT answered {value!r:.80}, expected keys")
    return [key for key in value if isinstance(key, bytes)]


def _loads(links: AdminLinks, address: str, slots: Sequence[int], timeout_s: float) -> NDArray[np.float64]:
    counts = links.run(address, [("CLUSTER", "COUNTKEYSINSLOT", slot) for slot in slots], timeout_s)
    listed = links.run(address, [("CLUSTER", "GETKEYSINSLOT", slot, _MEASURED_KEYS) for slot in slots], timeout_s)
    keys = [keys_in(address, value) for value in listed]
    sizes = key_bytes(links.run(address, [("MEMORY", "USAGE", key) for some in keys for key in some] or [("PING",)], timeout_s))
    loads, at = np.zeros(len(slots)), 0
    for index, (some, count) in enumerate(zip(keys, counts, strict=True)):
        measured = sum(sizes[at : at + len(some)])
        at += len(some)
        if some and isinstance(count, int):
            loads[index] = measured / len(some) * count
    return loads
