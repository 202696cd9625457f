"""How the rows of a projection lie in its target: keys and values of two layouts, and the share of one of several publishers. Pure.

In both layouts a table is one or more hashes, a field is the id's 8 bytes, least significant first, and a value is the row's weights alone:
float32, float16, or int8 and after them the row's scale, a float32. "kvemb" has the hashes of training storage (`kvemb.schema.buckets`),
"nve" one hash for each table, as the Redis plugin of NVIDIA's embedding cache reads it. A projected table describes itself in JSON, and its
description is in the target, for readers that have no kvemb.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.rounding import LARGEST, NARROW, from_int8, round_nearest, to_int8
from kvemb.errors import ConfigError, ForeignRowsError
from kvemb.process.cached_property import batch_value
from kvemb.schema.buckets import BucketKeys, WholeBuckets, buckets_for
from kvemb.schema.slots import N_SLOTS, Placement
from kvemb.schema.table_def import TableDef
from kvemb.wire.request_arrays import columns

LAYOUTS = ("kvemb", "nve")
DTYPES = ("float32", *NARROW)
_SCALE_BYTES = 4
_LISTED_KEYS = 4096
_MOST_TOLD_KEYS = N_SLOTS  # of a description


@dataclass(frozen=True)
class SlotShare:
    """The slots of one of several publishers."""

    number: int = 0  # of this one, from 0
    of: int = 1  # how many there are

    @staticmethod
    def parse(text: str) -> "SlotShare":
        """Read "1/4", counted from 1."""
        found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"--part {text!r} is no share; give the number of this publisher and how many there are, as 1/4")
        return SlotShare(int(found[1]) - 1, int(found[2]))

    def owns(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which slots are this one's: int64 [n] -> bool [n]."""
        mine: NDArray[np.bool_] = slots * self.of // N_SLOTS == self.number
        return mine

    def __str__(self) -> str:
        return f"{self.number + 1}/{self.of}"


ALL_SLOTS = SlotShare()


@batch_value
class _OneHash(BucketKeys):
    """The keys of n rows that lie in one hash of a given name."""

    key: bytes = field(default=b"", kw_only=True)
    named_by_tag: ClassVar[bool] = False

    @property
    def key_bytes(self) -> int:
        return len(self.key)

    def encode(self) -> NDArray[np.uint8]:
        return np.full(len(self.ids), np.void(self.key)).view(np.uint8).reshape(-1, len(self.key))

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "_OneHash":
        return _OneHash(b"", self.ids[rows], 1, name=self.name, compact=True, key=self.key)


@batch_value
class _PrefixedKeys(BucketKeys):
    """The keys of n rows whose hashes have the usual names behind a prefix."""

    prefix: bytes = field(default=b"", kw_only=True)
    named_by_tag: ClassVar[bool] = False

    @property
    def key_bytes(self) -> int:
        return len(self.prefix) + super().key_bytes

    def encode(self) -> NDArray[np.uint8]:
        usual = BucketKeys.with_buckets(BucketKeys(self.tag, self.ids, self.n_buckets), self.buckets)
        return columns(len(self.ids), self.prefix, usual.encode())

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "_PrefixedKeys":
        some = _PrefixedKeys(self.tag, self.ids[rows], self.n_buckets, name=self.name, compact=self.compact, prefix=self.prefix)
        some.__dict__["buckets"] = self.buckets[rows]
        return some


@dataclass(frozen=True)
class ProjectedTable:
    """A table as it lies in a target."""

    # name, dim: the table's
    name: str
    dim: int
    dtype: str  # of the values: "float32", "float16", "int8"; "bytes" for a table of opaque bytes
    life: int  # how many tables of this name were dropped before: another life is another table
    # tag, n_buckets, compact: of its hashes in the layout "kvemb"
    tag: str
    n_buckets: int
    compact: bool
    hash_key: str  # the name of its hash in the layout "nve"; else ""
    prefix: str = ""  # of the names of its hashes in a view; else ""

    @staticmethod
    def of(definition: TableDef, dtype: str, layout: str, number: int, prefix: str = "") -> "ProjectedTable":
        """Return how a table lies in a target."""
        dtype = "bytes" if definition.row_dtype == np.uint8 else dtype
        name, dim, life = definition.name, definition.dim, definition.life
        if layout == "nve":
            return ProjectedTable(name, dim, dtype, life, "", 1, True, f"nv_nve_table{{{number}/0}}")
        n_buckets = definition.n_buckets or buckets_for(definition.num_ids, 4 * dim)
        return ProjectedTable(name, dim, dtype, life, definition.tag.decode(), n_buckets, definition.layout == "compact", "", prefix)

    def described(self) -> dict[str, Any]:
        """Return the description for readers, as JSON has it. `keys` are the names of the hashes, in order, unless they are very many."""
        keys = [key.decode() for some in self.hash_keys(ALL_SLOTS) for key in some] if self.n_buckets <= _MOST_TOLD_KEYS else []
        return {**asdict(self), "row_bytes": self.row_bytes, "keys": keys}

    @property
    def row_bytes(self) -> int:
        """The length of a value."""
        return {"float32": 4 * self.dim, "float16": 2 * self.dim, "int8": self.dim + _SCALE_BYTES, "bytes": self.dim}[self.dtype]

    def keys(self, ids: NDArray[np.uint64]) -> BucketKeys:
        """Return the keys of rows, ids uint64 [n]."""
        if self.hash_key:
            return _OneHash(b"", ids, 1, name=self.name, compact=True, key=self.hash_key.encode())
        tag, prefix = self.tag.encode(), self.prefix.encode()
        if prefix:
            return _PrefixedKeys(tag, ids, self.n_buckets, name=self.name, compact=self.compact, prefix=prefix)
        return BucketKeys(tag, ids, self.n_buckets, name=self.name, compact=self.compact)

    def hash_keys(self, share: SlotShare) -> Iterator[list[bytes]]:
        """Yield the names of the hashes of a share of the slots, some thousands at a time."""
        if self.hash_key:
            yield [self.hash_key.encode()]
            return
        for start in range(0, self.n_buckets, _LISTED_KEYS):
            numbers = np.arange(start, min(start + _LISTED_KEYS, self.n_buckets), dtype=np.uint64)
            mine = numbers[share.owns(Placement(self.n_buckets).slots_of(numbers.astype(np.int64)))]
            if len(mine):
                names = WholeBuckets(self.tag.encode(), mine, self.n_buckets).encode()
                yield [self.prefix.encode() + bytes(name) for name in names]

    def values(self, ids: NDArray[np.uint64], rows: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the values of rows, uint8 [n, row_bytes], from rows as pulls give them, [n, dim]; the ids are for messages."""
        if self.dtype in NARROW:
            self._check(ids, rows)
        if self.dtype == "int8":
            integers, scale = to_int8(rows)
            return np.concatenate([integers.view(np.uint8), scale[:, None].view(np.uint8)], axis=1)
        narrow = round_nearest(rows, "float16") if self.dtype == "float16" else rows
        return np.ascontiguousarray(narrow).view(np.uint8)

    def rows(self, values: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the rows in values, uint8 [n, row_bytes]: [n, dim], float32, or uint8 of opaque bytes."""
        if self.dtype == "bytes":
            return values
        if self.dtype == "int8":
            return from_int8(values[:, : self.dim].view(np.int8), np.ascontiguousarray(values[:, self.dim :]).view("<f4")[:, 0])
        return values.view("<f2" if self.dtype == "float16" else "<f4").astype(np.float32, copy=False)

    def _check(self, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        limit = LARGEST["float16" if self.dtype == "float16" else "float32"]
        if rows.size and not float(np.abs(rows).max()) <= limit:  # NaN is not
            bad = int(np.argmax(~(np.abs(rows).max(axis=1) <= limit)))
            raise ForeignRowsError(
                f"table {self.name!r}, id {int(ids[bad])}: a weight is {float(np.abs(rows[bad]).max()):.4g}, which {self.dtype} does not "
                "hold. Set the row right (Table.assign), or publish float32"
            )
