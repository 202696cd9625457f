"""Buckets: the rows of a table as fields of a few hashes, on servers that have hashes (Redis, Valkey). Pure; no I/O, no protocol.

A server answers for many rows of one hash in half the time that it takes for as many keys: one key is looked up per command, the names of
fields are short, and rows that are asked for one after another lie close in its cache. docs/adr/0046 has the measurements.

A fixed mix of the id's 64 bits says where its row lies (`kvemb.schema.slots`): its upper bits are the bucket, and the slot follows from the
bucket. A bucket's key holds a hash tag that pins it to its slot on Redis Cluster; on nodes of ours the cluster map says which node has it.

A hash of few short values is kept as one string that is searched from its beginning (up to 512 values of up to 64 bytes, unless the server
is told otherwise: `bucket_limits`). There are two layouts. "fast": few large buckets, which are hash tables. If records are short, a bucket
has a longer field of no row, written with the rows, which makes it a hash table. "compact": some dozens of rows in each bucket, which stays
one string: less memory, and fewer rows that share a command.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.process.cached_property import batch_value, cached_property
from kvemb.schema.keys import PINNED_HEAD_SIZE, Containers, RowKeys, RowTags, pinned_head
from kvemb.schema.slots import ALPHABET, N_SLOTS, Placement

MAX_BUCKETS = 1 << 32
FIELD_BYTES = 8
_SLOT_BITS = N_SLOTS.bit_length() - 1
_MOST_TABLE_BITS = 8  # of the 16 bits of `locality`
_SPARSE = 8  # buckets per row: rows that share a bucket would save one command of sixteen
_COMPACT_VALUE_BYTES = 64  # the longest value that both servers keep in their compact form, as they come
FILLER = b"kvemb: no row; it makes this hash a hash table, which a server searches faster."
LAYOUTS = ("fast", "compact")
_COMPACT_ROWS = 48  # of a bucket, at most on average: twice as many rows as expected still fit `bucket_limits`
MOST_COMPACT_BYTES = 1024  # of a record: at this size the layout saves a few per cent per row
_DEFAULT_BUCKETS = 256
_ROWS_FOR_DEFAULT = 1 << 14
_FEWEST_ROWS = 64  # of a bucket, on average, where the rows expected are few
_MOST_BYTES = 4 << 20  # of a bucket: a server that moves a slot moves whole keys
_SUB_CHARACTERS = 3  # of the key of a bucket that shares its slot with others: 18 bits


def buckets_for(expected_rows: int | None, record_bytes: int, layout: str = "fast") -> int:
    """Return how many buckets a table has: a power of two."""
    if layout not in LAYOUTS:
        raise InvalidInputError(f"layout is {layout!r}; give one of {', '.join(LAYOUTS)}")
    if expected_rows is None:
        if layout == "compact":
            raise InvalidInputError('layout="compact" needs expected_rows, by which the number of buckets is chosen')
        return _DEFAULT_BUCKETS
    if expected_rows < 1:
        raise InvalidInputError(f"expected_rows is {expected_rows}; give how many rows the table will have, roughly, or None")
    if layout == "compact":
        if record_bytes > MOST_COMPACT_BYTES:
            raise InvalidInputError(
                f'layout="compact" saves memory for records up to {MOST_COMPACT_BYTES} bytes, these have {record_bytes}; leave it out'
            )
        least = -(-expected_rows // _COMPACT_ROWS)
    else:
        few = _DEFAULT_BUCKETS if expected_rows >= _ROWS_FOR_DEFAULT else expected_rows // _FEWEST_ROWS
        least = max(few, -(-expected_rows * record_bytes // _MOST_BYTES))
    n_buckets = 1 << max(0, least - 1).bit_length()
    if n_buckets > MAX_BUCKETS:
        raise InvalidInputError(f"expected_rows is {expected_rows} of {record_bytes} bytes each; at most {MAX_BUCKETS} buckets hold them")
    return n_buckets


@batch_value
class BucketKeys(RowKeys):
    """The keys of n rows that lie in buckets; the ids are the rows', uint64 [n]. See `RowKeys`."""

    n_buckets: int
    compact: bool = field(default=False, kw_only=True)
    named_by_tag: ClassVar[bool] = True
    """Whether a bucket's key follows from tag and number, as here; or only `encode` knows it."""

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "BucketKeys":
        if isinstance(rows, slice) and rows == slice(0, len(self.ids)):
            return self
        tables = self.tables and self.tables[rows]
        some = BucketKeys(self.tag, self.ids[rows], self.n_buckets, tables=tables, name=self.name, compact=self.compact)
        return self.with_buckets(some, self.buckets[rows])

    @property
    def coalesce_key(self) -> tuple[int, bool]:
        return self.n_buckets, self.compact

    def coalesced(self, keys: Sequence[RowKeys], ids: NDArray[np.uint64], tables: RowTags) -> "BucketKeys":
        buckets = [one.buckets for one in keys if isinstance(one, BucketKeys)]
        return self.with_buckets(BucketKeys(b"", ids, self.n_buckets, tables=tables, compact=self.compact), np.concatenate(buckets))

    @cached_property
    def buckets(self) -> NDArray[np.int64]:
        """The bucket of each row: int64 [n] in [0, n_buckets)."""
        return Placement(self.n_buckets).groups(self.ids)

    @property
    def key_bytes(self) -> int:
        """The length of the table's bucket keys."""
        return PINNED_HEAD_SIZE + (_SUB_CHARACTERS if self.n_buckets > N_SLOTS else 0)

    def encode(self) -> NDArray[np.uint8]:
        """Return the keys of the rows' buckets as text: uint8 [n, key_bytes]."""
        out = np.empty((len(self.ids), self.key_bytes), dtype=np.uint8)
        pinned_head(self, out)
        for column in range(PINNED_HEAD_SIZE, self.key_bytes):  # the bucket's lower bits, which tell it from others of its slot
            shift = 6 * (self.key_bytes - 1 - column)
            out[:, column] = ALPHABET[(self.buckets & ((1 << self._bits - _SLOT_BITS) - 1)) >> shift & 63]
        return out

    def fields(self) -> NDArray[np.uint8]:
        """Return the names of the rows' fields, the ids' bytes, least significant first: uint8 [n, 8]."""
        return self.ids.astype("<u8", copy=False).view(np.uint8).reshape(-1, FIELD_BYTES)

    def slots(self) -> NDArray[np.int64]:
        return Placement(self.n_buckets).slots_of(self.buckets)

    @property
    def sparse(self) -> bool:
        """Whether so few rows share a bucket that each may be asked for by a command of its own, in any order."""
        n_tables = 1 if self.tables is None else len(self.tables.tags)
        return len(self.ids) < 2 or len(self.ids) * _SPARSE <= self.n_buckets * n_tables

    def locality(self) -> NDArray[np.uint16] | None:
        # A bucket's rows come one after another: a command asks for rows of one bucket.
        if self.sparse:
            return None
        table_bits = 0 if self.tables is None else min((len(self.tables.tags) - 1).bit_length(), _MOST_TABLE_BITS)
        excess = max(0, self.n_buckets.bit_length() - 1 + table_bits - 16)
        number = (self.buckets >> excess).astype(np.uint16)  # [n]: the row's table in the upper `table_bits`, its bucket below
        if self.tables is not None:
            number |= self.tables.which << np.uint16(16 - table_bits)
        return None if (number[1:] >= number[:-1]).all() else number

    def runs(self) -> NDArray[np.intp]:
        """Return where runs of neighbouring rows of one bucket begin: intp [k], the first of them 0."""
        begins = np.empty(len(self.ids), dtype=bool)  # [n]: whether the row is in another bucket than the one before it
        begins[:1] = True
        np.not_equal(self.buckets[1:], self.buckets[:-1], out=begins[1:])
        if self.tables is not None:
            begins[1:] |= self.tables.which[1:] != self.tables.which[:-1]
        return begins.nonzero()[0]

    def containers(self) -> Containers:
        """Return the rows' buckets; the keys are those of one row of each."""
        # int64: the bucket of each row, [n], or its bucket and table, [n, 2]; the first row of each different one gives the key
        tables = self.buckets if self.tables is None else np.stack([self.buckets, self.tables.which.astype(np.int64)], axis=1)
        return Containers(self[np.unique(tables, axis=0, return_index=True)[1]], "hash")

    def _shown(self) -> str:
        field = "".join(f"\\x{byte:02x}" for byte in self.fields().tobytes())
        return f'key {self.encode().tobytes().decode()}, field "{field}"'

    @property
    def _bits(self) -> int:
        return self.n_buckets.bit_length() - 1

    @staticmethod
    def with_buckets(keys: "BucketKeys", buckets: NDArray[np.int64]) -> "BucketKeys":
        """Set the buckets that the keys would compute, int64 [n], and return the keys: rows are cut and put in order several times."""
        keys.__dict__["buckets"] = buckets
        return keys


@batch_value
class WholeBuckets(BucketKeys):
    """The keys of k buckets themselves, to delete them with all their fields; the ids, uint64 [k], are the buckets' numbers."""

    @cached_property
    def buckets(self) -> NDArray[np.int64]:
        return self.ids.astype(np.int64)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "WholeBuckets":
        return WholeBuckets(self.tag, self.ids[rows], self.n_buckets, name=self.name)

    def locality(self) -> None:
        return None


def needs_filler(record_bytes: int, *, compact: bool) -> bool:
    """Whether buckets of such records get a longer field of no row: without it a server would not keep them as hash tables."""
    return not compact and record_bytes <= _COMPACT_VALUE_BYTES
