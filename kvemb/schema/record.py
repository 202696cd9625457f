"""The record: the bytes stored for one row, and nothing about how they travel.

    record = [12-byte header][W: dim x dtype][state: s x float32]
    header = schema 8 bits | id check 24 bits | version 64 bits (epoch 16, k 48), little-endian

Weights, state and version live in one value, so that a row is written atomically. The id check is there because a Redis reply carries no
key; it is compared for a whole batch in one vector operation. Everything here is an array function over n records at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import digest64, mix64_inplace
from kvemb.arrays.rounding import storage_dtype, to_float32
from kvemb.errors import RecordError
from kvemb.process.cached_property import cached_property

HEADER_SIZE = 12
MAX_EPOCH = (1 << 16) - 1
_SCHEMA_BITS, _CHECK_SHIFT = np.array(8, np.uint32), np.array(40, np.uint64)  # the id check is the upper 24 bits of a hash
MAX_K = (1 << 48) - 1


def make_version(epoch: int, k: int) -> int:
    """Pack (epoch, k) so that versions of a row compare as integers; 0 is kept for rows that do not exist."""
    if not (0 <= epoch <= MAX_EPOCH and 0 <= k <= MAX_K):
        raise OverflowError(f"version (epoch {epoch}, k {k}) does not fit 16 + 48 bits")
    return epoch << 48 | k


def split_version(version: int) -> tuple[int, int]:
    """Return (epoch, k) of a packed version."""
    return version >> 48, version & MAX_K


@dataclass(frozen=True)
class RecordFormat:
    """How the records of one table are laid out."""

    table: str  # the table's name (part of the id check and of error messages)
    dim: int  # weights per row
    dtype: str  # storage dtype of the weights: "float32", "float16" or "bfloat16"
    state_size: int  # float32 state values per row
    schema: int  # 8-bit digest of the table's definition

    @cached_property
    def prefix_bytes(self) -> int:
        """Header and weights: all that a trainer needs."""
        return HEADER_SIZE + self.dim * storage_dtype(self.dtype).itemsize

    @cached_property
    def size_bytes(self) -> int:
        """The whole record."""
        return self.prefix_bytes + 4 * self.state_size

    def header_words(self, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Return the first header word (schema and id check) that the records of these ids must carry: uint32 [n]."""
        mixed = np.bitwise_xor(ids, self._check_key)  # uint64 [n], hashed in place; of it the upper 24 bits remain
        mix64_inplace(mixed, np.empty_like(mixed))
        mixed >>= _CHECK_SHIFT
        words = mixed.astype(np.uint32)  # [n]: the id check, then moved up to make room for the schema
        words <<= _SCHEMA_BITS
        words |= np.uint32(self.schema)
        return words

    def encode(
        self,
        ids: NDArray[np.uint64],  # uint64 [n]
        versions: NDArray[np.uint64] | int,  # uint64 [n], or one version for all
        stored_weights: NDArray[np.generic],  # [n, dim] in the storage dtype (`kvemb.arrays.rounding`)
        state: NDArray[np.float32],  # float32 [n, state_size]
        out: NDArray[np.uint8] | None = None,  # uint8 [n, size_bytes], contiguous, to fill instead of a new array
    ) -> NDArray[np.uint8]:
        """Build n records: uint8 [n, size_bytes], contiguous."""
        records = np.empty((len(ids), self.size_bytes), dtype=np.uint8) if out is None else out
        fields = records.view(self._layout)[:, 0]  # structured [n]: the same bytes, by field of the header
        fields["word"] = self.header_words(ids)
        fields["version"] = versions
        records[:, HEADER_SIZE : self.prefix_bytes] = np.ascontiguousarray(stored_weights).view(np.uint8)
        if self.state_size:
            records[:, self.prefix_bytes :] = np.ascontiguousarray(state, dtype="<f4").view(np.uint8)
        return records

    def belong(self, records: NDArray[np.uint8], ids: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of n records (uint8 [n, >= 12]) are their ids' records of this table: bool [n]."""
        words = records[:, :4].view("<u4")[:, 0]  # uint32 [n], a view: no copy, byte by byte, of every header
        own: NDArray[np.bool_] = words == self.header_words(ids)
        return own

    def check(
        self,
        records: NDArray[np.uint8],
        ids: NDArray[np.uint64],  # uint64 [n], in the records' order
        found: NDArray[np.bool_],  # bool [n]
        where: Callable[[int], str] | None = None,
    ) -> None:
        """Refuse a batch in which any found record is not its id's record of this table."""
        words = records[:, :4].view("<u4")[:, 0]  # uint32 [n], a view: no copy, byte by byte, of every header
        wrong = (words != self.header_words(ids)) & found  # bool [n]
        if wrong.any():
            at = int(np.argmax(wrong))
            what = where(at) if where is not None else f"table {self.table!r}, id {int(ids[at])}"
            raise RecordError(
                f"{what}: the value is not this row's record (header {int(words[at]):#010x}, expected "
                f"{int(self.header_words(ids[at : at + 1])[0]):#010x}; {int(wrong.sum())} such rows in the batch). Another program wrote "
                "under this key, or the table was created with another definition. The next push that touches the row, or `kvemb repair "
                "--all`, writes it over."
            )

    @staticmethod
    def versions(records: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """Return the packed versions of n records (uint8 [n, >= 12]), of any tables: uint64 [n]."""
        return records[:, 4:HEADER_SIZE].view("<u8")[:, 0].astype(np.uint64)

    def weights(self, records: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the weights of n records: float32 [n, dim]; may be a view of `records`."""
        # stored [n, dim] in the storage dtype
        stored = np.ascontiguousarray(records[:, HEADER_SIZE : self.prefix_bytes]).view(storage_dtype(self.dtype))
        return to_float32(stored, self.dtype)

    def state(self, records: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the state of n whole records: float32 [n, state_size]; may be a view of `records`."""
        raw = np.ascontiguousarray(records[:, self.prefix_bytes : self.size_bytes])  # uint8 [n, 4 * state_size]
        return raw.view("<f4").astype(np.float32, copy=False) if self.state_size else np.empty((len(records), 0), np.float32)

    @cached_property
    def _check_key(self) -> NDArray[np.uint64]:  # []
        return np.array(digest64("id check", self.table), np.uint64)

    @cached_property
    def _layout(self) -> np.dtype[np.void]:
        rest = self.size_bytes - HEADER_SIZE
        return np.dtype([("word", "<u4"), ("version", "<u8"), ("rest", "u1", (rest,))])
