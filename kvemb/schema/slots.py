"""Slots: the classes of ids that rows are placed by. A slot lies on one node and has one writer. Pure; no I/O, no protocol.

A fixed mix of the id's 64 bits says which slot an id belongs to, the same on every kind of storage. Rows that share a value on a server
(a bucket, a page) share a slot. There are as many slots as Redis Cluster has, and they are its own there: a hash tag in the key of a bucket
or a page pins it to its slot.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64_inplace
from kvemb.process.cached_property import cached_property

N_SLOTS = 16384
TAG_SIZE = 3
ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)
_SLOT_BITS = N_SLOTS.bit_length() - 1
_ID_BITS = 64


@dataclass(frozen=True)
class Placement:
    """How the ids of a table fall into groups, and groups into slots."""

    # a power of two up to 2**32. The upper bits of the mix choose the group. Up to 16,384 groups have a slot each, evenly spread; if there
    # are more, several share a slot.
    n_groups: int
    ids_per_group: int = 1  # so many neighbouring ids are mixed as one: those of a page

    def groups(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the group of each id: int64 [n] in [0, n_groups)."""
        if self.n_groups == 1:
            return np.zeros(len(ids), dtype=np.int64)
        words = ids.copy() if self.ids_per_group == 1 else ids // np.uint64(self.ids_per_group)  # uint64 [n], mixed in place
        mix64_inplace(words, np.empty_like(words))  # of it the upper bits remain
        words >>= self._shift
        return words.view(np.int64)

    def slots(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the slot of each id: int64 [n] in [0, 16384)."""
        return self.slots_of(self.groups(ids))

    def slots_of(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each group: int64 [n] -> int64 [n]."""
        spare = _SLOT_BITS - self._bits
        return groups << spare if spare >= 0 else groups >> -spare

    @cached_property
    def _shift(self) -> NDArray[np.uint64]:  # []
        return np.array(_ID_BITS - self._bits, np.uint64)

    @property
    def _bits(self) -> int:
        return self.n_groups.bit_length() - 1


EACH_SLOT = Placement(N_SLOTS)
"""One group a slot."""


def runs_of(owners: NDArray[np.uint16]) -> bytes:
    """Return the owners of slots, uint16 [16384], as runs: of each its first slot and its owner, uint16, least significant byte first."""
    begins = np.flatnonzero(np.concatenate([[True], owners[1:] != owners[:-1]]))  # intp [r]: the first slot of each run
    return np.stack([begins, owners[begins]], axis=1).astype("<u2").tobytes()


def from_runs(data: object, n_owners: int) -> NDArray[np.uint16]:
    """Return the owner of each slot: uint16 [16384]."""
    if not isinstance(data, bytes) or not data or len(data) % 4:
        raise ValueError("no runs of slots")
    begins, owners = np.frombuffer(data, dtype="<u2").astype(np.int64).reshape(-1, 2).T  # int64 [r] each: by run
    if begins[0] != 0 or (np.diff(begins) <= 0).any() or begins[-1] >= N_SLOTS or owners.max() >= n_owners:
        raise ValueError("runs of slots that overlap, leave slots out, or name an owner that there is not")
    return np.repeat(owners, np.diff(begins, append=N_SLOTS)).astype(np.uint16)


def text_slot(key: bytes) -> int:
    """Return the hash slot of any key, hash tags `{…}` honoured, as the Redis Cluster specification defines it."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1) if start >= 0 else -1
    return _crc16(key[start + 1 : end] if end > start + 1 else key) % N_SLOTS


@cache
def slot_texts() -> NDArray[np.uint8]:
    """Return for every slot the first 3-character text that hashes to it: used as `{tag}`, it pins a key to that slot. uint8 [16384, 3]."""
    texts = np.arange(64**TAG_SIZE)  # the number of every text of 3 characters, 6 bits for each: t texts
    characters = np.stack([ALPHABET[(texts >> shift) & 63] for shift in (12, 6, 0)], axis=1)  # uint8 [t, 3]
    table = _byte_table()
    crc = np.zeros(len(texts), dtype=np.uint16)  # [t]: CRC16 of the characters so far
    for column in range(TAG_SIZE):
        crc = (crc << np.uint16(8)) ^ table[(crc >> np.uint16(8)) ^ characters[:, column]]
    slots, first = np.unique(crc % N_SLOTS, return_index=True)  # first [16384]: of each slot the first text that hashes to it
    assert len(slots) == N_SLOTS
    return characters[first]


def slot_tags() -> list[bytes]:
    """Return the same texts one by one."""
    return [bytes(row) for row in slot_texts()]


@cache
def _byte_table() -> NDArray[np.uint16]:
    """CRC16-XMODEM (polynomial 0x1021) of every byte: uint16 [256]."""
    crc = np.arange(256, dtype=np.uint32) << 8  # 32 bits: the bit that is shifted out is masked away below
    for _ in range(8):
        crc = np.where(crc & 0x8000, (crc << 1) ^ 0x1021, crc << 1) & 0xFFFF
    return crc.astype(np.uint16)


def _crc16(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc = ((crc << 8) & 0xFFFF) ^ int(_byte_table()[(crc >> 8) ^ byte])
    return crc
