"""Redis Cluster's slot map, and the keys of the per-slot markers."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, NodeUnavailableError
from kvemb.keys import N_SLOTS, slot_tags
from kvemb.net.deadline import Deadline
from kvemb.stores import redis_admin
from kvemb.stores.markers import MARKER_KEY

_PATIENCE_S = 1.0  # with a node that does not tell the map while there are others to ask


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Which primary holds each slot.

    Args:
        addresses: primaries, "host:port".
        nodes: int64 [16384], index into addresses.
        source: the node that told it.
    """

    addresses: tuple[str, ...]
    nodes: NDArray[np.int64]
    source: str

    def address_of(self, slot: int) -> str:
        """The primary of a slot."""
        return self.addresses[int(self.nodes[slot])]


@cache
def marker_keys() -> list[bytes]:
    """The marker's key of every slot, pinned there by a hash tag."""
    return [MARKER_KEY + b":{" + tag + b"}" for tag in slot_tags()]


def fetch_slot_map(candidates: Iterable[str], config: StorageConfig, deadline: Deadline) -> SlotMap:
    """Ask one node after the other until one answers; each may take its share of the time, so that one that hangs does not take all of it.

    Raises:
        NodeUnavailableError: no node answered, or a slot has no primary.
        ConfigError: the node is not part of a cluster.
    """
    failures, addresses = [], list(candidates)
    for index, address in enumerate(addresses):
        try:
            n_left = len(addresses) - index - 1
            share_s = min(_PATIENCE_S, deadline.remaining_s() / (n_left + 1)) if n_left else deadline.remaining_s()
            return _ask_one(address, config, Deadline.after(share_s))
        except NodeUnavailableError as error:
            failures.append(str(error))
    raise NodeUnavailableError("no node of the cluster answers: " + "; ".join(failures))


def _ask_one(address: str, config: StorageConfig, deadline: Deadline) -> SlotMap:
    with redis_admin.client(address, config, deadline) as client:
        if client.info("cluster").get("cluster_enabled") != 1:
            raise ConfigError(f"storage.kind: node {address} is a standalone server; use kind redis or valkey")
        ranges = client.execute_command("CLUSTER SLOTS")
    host, _, _ = address.rpartition(":")
    nodes = np.full(N_SLOTS, -1, dtype=np.int64)
    addresses: list[str] = []
    for first, last, primary, *_ in ranges:
        owner_host, owner_port = primary[:2]
        owner = f"{owner_host or host}:{owner_port}"  # an empty host means "where you asked"
        if owner not in addresses:
            addresses.append(owner)
        nodes[int(first) : int(last) + 1] = addresses.index(owner)
    if (nodes < 0).any():
        raise NodeUnavailableError(
            f"node {address}: slot {int(np.argmin(nodes))} of the cluster has no primary (`CLUSTER INFO` tells more). Assign it."
        )
    order = sorted(range(len(addresses)), key=lambda i: addresses[i])
    rank = np.argsort(order)
    return SlotMap(tuple(addresses[i] for i in order), rank[nodes], address)
