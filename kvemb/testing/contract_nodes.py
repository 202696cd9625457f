"""A backend's part of the contracts: empty nodes, ways to mishandle them, an open store, and rows whose records follow from ids."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64
from kvemb.config import StorageConfig
from kvemb.net.deadline import Deadline
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.slots import text_slot
from kvemb.stores.redis_server.stored_rows import row_keys_in
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store

CLUSTER, GENERATION = b"contract-cluster", b"lifetime"
SIZE = 76
TAG = b"tab"
N_PAGED_IDS = 1 << 17
# Text inside a record that a reader may take for the protocol.
PROTOCOL_TEXT = (
    b"$-1\r\n",
    b"VA 76 c1\r\n",
    b"EN\r\n",
    b"+OK\r\n",
    b"-ERR no\r\n",
    b"HD\r\n",
    b"$76\r\n",
    b"VA 76\r\n",
    b"\r\n",
    b"*3\r\n",
)


def within(timeout_s: float = 60.0) -> Deadline:
    """A deadline that a test does not mean to reach."""
    return Deadline.after(timeout_s)


def row_keys(n: int, first: int = 1, tag: bytes = TAG) -> RowKeys:
    """Return n keys of scattered ids, for storage that holds every row under a key of its own."""
    return RowKeys(tag, mix64(np.arange(first, first + n, dtype=np.uint64)))


def bucket_keys(n: int, first: int = 1, tag: bytes = TAG, n_buckets: int = 64) -> BucketKeys:
    """Return the same rows' keys for storage that holds them in buckets."""
    return BucketKeys(tag, row_keys(n, first).ids, n_buckets)


def keys_for(store: Store, n: int, first: int = 1) -> RowKeys:
    """Return the same rows' keys as a kind of storage holds them."""
    return bucket_keys(n, first) if store.capabilities.pages else row_keys(n, first)


def records_of(keys: RowKeys, size: int = SIZE, salt: int = 0) -> NDArray[np.uint8]:
    """Return records that follow from the ids, so that a row in another's place is noticed: uint8 [n, size]."""
    words = np.arange(size // 8 + 1, dtype=np.uint64) + np.uint64(salt << 32)
    records: NDArray[np.uint8] = mix64(keys.ids[:, None] + mix64(words)[None, :]).view(np.uint8)
    return records[:, :size].copy()


def protocol_records(n: int, size: int = SIZE) -> NDArray[np.uint8]:
    """Return records made of protocol text at every alignment: uint8 [n, size]."""
    longest = max(len(text) for text in PROTOCOL_TEXT)
    tiled = [np.frombuffer(text * (size + longest), dtype=np.uint8)[: size + longest] for text in PROTOCOL_TEXT]
    row = np.arange(n)
    shifts = row // len(tiled) % longest
    records: NDArray[np.uint8] = np.stack(tiled)[(row % len(tiled))[:, None], shifts[:, None] + np.arange(size)[None, :]]
    return records


def read(store: Store, keys: RowKeys, size: int = SIZE, *, tokens: bool = False, deadline: Deadline | None = None) -> ReadResult:
    """Read whole records, in the order of the keys."""
    return store.rows.read([ReadPart(keys, size, size, tokens)], deadline or within())[0].in_key_order()


def write(store: Store, keys: RowKeys, records: NDArray[np.uint8], *, deadline: Deadline | None = None) -> NDArray[np.bool_]:
    """Write records over any that are there; return which were stored."""
    tokens = read(store, keys, records.shape[1], tokens=True).tokens if store.capabilities.cas else None
    return store.rows.write([WritePart(keys, records, tokens)], deadline or within())[0].stored


def require_rows(store: Store, keys: RowKeys, records: NDArray[np.uint8]) -> None:
    """Fail unless every row is there with exactly that record."""
    result = read(store, keys, records.shape[1])
    assert result.found.all()
    np.testing.assert_array_equal(result.records, records)


def own_node_of(key: bytes, n_nodes: int) -> int:
    """Which of nodes under a new map of ours a key belongs to: a row's own key by its id, others by their hash tag."""
    rows = list(row_keys_in([key]))
    slot = int(rows[0].slots()[0]) if rows else text_slot(key)
    return int(ClusterMap.first(n_nodes, 1).slot_nodes[slot])


class Nodes:
    """Empty nodes of one backend. A subclass overrides the operations that its backend can do; tests of the rest are skipped.

    Args:
        config: reaches all of them, in the order of the cluster map.
        own_map: whether the order of `config.nodes` is the cluster map's (a cluster may keep its own).
        over_wire: whether rows travel in kvemb.wire's replies.
        finds_others: whether a store that is told of one node finds the others.
    """

    own_map = True
    over_wire = True
    finds_others = True

    def __init__(self, config: StorageConfig) -> None:
        self.config = config

    def store(self, *, nodes: Sequence[str] | None = None, role: str = "shard:0") -> Store:
        """Return a store that is not opened yet, of these nodes or of some of them."""
        return open_store(self.config if nodes is None else replace(self.config, nodes=tuple(nodes)), role=role)

    def put_foreign(self, key: bytes, value: bytes) -> None:
        """Write a value where the key belongs, as another program would."""
        pytest.skip("no foreign writer")

    def delete(self, key: bytes) -> None:
        """Delete a key, as another program would."""
        pytest.skip("no foreign writer")

    def put_markers(self, values: Sequence[bytes]) -> None:
        """Overwrite every marker; in the order of `Store.open`'s."""
        pytest.skip("markers cannot be overwritten")

    def flush(self, index: int) -> None:
        """Lose everything that the node holds, while it goes on running."""
        pytest.skip("a node cannot be flushed")

    def restart(self, index: int, *, saved: bool = False) -> None:
        """Start the node's server again: empty, or with its keys at the last `save`."""
        pytest.skip("a node has no server to start again")

    def save(self, index: int) -> None:
        """Let the node's server save its keys."""
        pytest.skip("a node saves nothing")

    def go_back(self, index: int) -> None:
        """Let the node's server have its keys at the last `save` again, while it goes on running."""
        pytest.skip("a node cannot go back")

    def stop(self, index: int) -> None:
        """End the node's server."""
        pytest.skip("a node has no server to end")

    def pause(self, index: int) -> None:
        """Let the node's server hang."""
        pytest.skip("a node has no server to pause")

    def resume(self, index: int) -> None:
        """Let it run again."""
        pytest.skip("a node has no server to resume")


class StoreOnNodes:
    """A store, open on a backend's nodes: the fixtures of every contract.

    `keys` says where rows lie: here under keys of their own, in `BucketedStoreContract` in buckets, in `PagedStoreContract` in pages.
    """

    smallest_record_bytes = 1

    def keys(self, n: int, first: int = 1, tag: bytes = TAG, size: int = SIZE) -> RowKeys:
        """Return n keys of scattered ids, for records of so many bytes."""
        return row_keys(n, first, tag)

    def n_keys_of(self, keys: RowKeys) -> int:
        """How many keys a server holds when it holds these rows."""
        return len(keys)

    @pytest.fixture
    def nodes(self) -> Nodes:
        """Two or more empty nodes; may as well be a generator that cleans up."""
        raise NotImplementedError("a backend's test class brings this fixture")

    @pytest.fixture
    def store(self, nodes: Nodes) -> Iterator[Store]:
        """A store that is provisioned and open."""
        with nodes.store() as store:
            store.provision(CLUSTER, GENERATION, within())
            store.open(within())
            yield store
