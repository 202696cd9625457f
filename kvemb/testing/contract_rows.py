"""Rows whose records follow from their ids, written and read: the contracts of a store are written with these."""

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64
from kvemb.net.deadline import Deadline
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.keys import RowKeys
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart
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
