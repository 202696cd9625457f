"""Rows of chosen slots of a Redis Cluster, and what moves such slots from node to node, a phase at a time."""

import time
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.keys import RowKeys
from kvemb.schema.pages import PagedKeys, page_layout, paged_keys
from kvemb.schema.slots import N_SLOTS
from kvemb.testing.store_contract import SIZE, TAG, row_keys
from tests.real_servers import ServerNodes, redis_client

N_BUCKETS = 4 * N_SLOTS  # four buckets a slot


def keys_of(ids: NDArray[np.uint64]) -> BucketKeys:
    return BucketKeys(TAG, ids, N_BUCKETS)


ALL = keys_of(mix64(np.arange(1, 1_000_000, dtype=np.uint64)))
SLOTS = ALL.slots()
SLOT = 1234


def rows_in(slot: int) -> BucketKeys:
    """About sixty rows of one slot."""
    return ALL[np.flatnonzero(slot == SLOTS)]


PAGES = paged_keys(TAG, np.arange(3_000_000, dtype=np.uint64), page_layout(SIZE))
PAGE_SLOTS = PAGES[:: PAGES.layout.rows_per_page].slots()


def paged_rows_in(slot: int) -> PagedKeys:
    """Every row of about three pages of one slot."""
    n = PAGES.layout.rows_per_page
    pages = np.flatnonzero(slot == PAGE_SLOTS)
    assert len(pages)
    rows = (pages[:, None] * n + np.arange(n)).reshape(-1)
    return PAGES[rows[rows < len(PAGES)]]


def mixed_paged(slot: int) -> PagedKeys:
    """The same between rows of pages of all slots."""
    return PAGES[np.unique(np.concatenate([paged_rows_in(slot).ids, np.arange(0, 60_000, 41, dtype=np.uint64)])).astype(np.intp)]


def mixed(slot: int) -> BucketKeys:
    """Rows of one slot between rows of all others."""
    keys = keys_of(np.concatenate([rows_in(slot).ids, row_keys(1500).ids]))
    order = np.unique(keys.ids, return_index=True)[1]
    return keys[order]


class Mover:
    """Moves single slots from one node to another, a phase at a time."""

    def __init__(self, nodes: ServerNodes | LocalCluster, stack: ExitStack) -> None:
        self.clients = [stack.enter_context(redis_client(server)) for server in nodes.servers]
        self.ports = [server.port for server in nodes.servers]
        self.begun: set[int] = set()
        self.names = [client.execute_command("CLUSTER MYID").decode() for client in self.clients]

    def owner(self, slot: int) -> int:
        for first, last, primary, *_ in self.clients[0].execute_command("CLUSTER SLOTS"):
            if first <= slot <= last:
                return self.ports.index(int(primary[1]))
        raise AssertionError(f"slot {slot} has no owner")

    def begin(self, slot: int, to: int) -> int:
        """From now on the owner answers ASK for keys of the slot that it does not hold; return the owner."""
        source = self.owner(slot)
        self.begun.add(slot)
        deadline = Deadline.after(30)  # a target that has not heard of the source's claim would make none that is later
        while self._epoch(to, "cluster_current_epoch") < self._epoch(source, "cluster_my_epoch"):
            assert not deadline.expired, "the nodes do not hear of each other"
            time.sleep(0.01)
        self.clients[to].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.names[source])
        self.clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.names[to])
        return source

    def _epoch(self, node: int, name: str) -> int:
        told = self.clients[node].execute_command("CLUSTER INFO")
        return int(dict(line.split(":") for line in told.decode().split())[name] if isinstance(told, bytes) else told[name])

    def migrate(self, source: int, to: int, keys: list[bytes]) -> None:
        if keys:
            self.clients[source].execute_command("MIGRATE", "127.0.0.1", self.ports[to], "", 0, 5000, "KEYS", *keys)

    def finish(self, slot: int, source: int, to: int) -> None:
        """Move what is left, then tell everybody: from now on the old owner answers MOVED."""
        while keys := self.clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 1000):
            self.migrate(source, to, keys)
        for index in (to, source, *range(len(self.clients))):
            self.clients[index].execute_command("CLUSTER SETSLOT", slot, "NODE", self.names[to])

    def move(self, slot: int, to: int) -> None:
        source = self.begin(slot, to)
        self.finish(slot, source, to)


def encoded(keys: RowKeys) -> list[bytes]:
    return list(dict.fromkeys(bytes(key) for key in keys.encode()))
