"""Storage keys of rows, and the slots they hash to: pure array functions, no I/O.

A key is 14 characters of base64url text: 3 of the table's tag and 11 of the id, most significant digit first. Text, because raw id bytes
may hold `{…}`, which Redis Cluster takes for a hash tag, or bytes that memcached's keys may not hold; constant length, because a batch of
requests is then an array with a constant stride; 14, because Redis keeps such a key in a 16-byte allocation.

Ids are split into one 4-bit and five 12-bit digits, and every digit is translated by one table gather: two characters of the key, or the
digit's share of the CRC. (CRC is linear over XOR, so the shares of the digits simply add up.) The slot is Redis Cluster's own: CRC16-XMODEM
of the key, modulo 16384; memcached and standalone nodes use the same slots under a map of ours.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvemb.hashing import digest64

TAG_SIZE = 3
KEY_SIZE = 14
N_SLOTS = 16384

_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)
_DIGIT_SHIFTS = (48, 36, 24, 12, 0)


def table_tag(table: str, attempt: int = 0) -> bytes:
    """Return the 3-character tag of a table's keys; the registry raises `attempt` while another table has that tag.

    Example:
        >>> len(table_tag("user")), table_tag("user") == table_tag("user", 1)
        (3, False)
    """
    digest = digest64("table tag", table, attempt)
    return bytes(_ALPHABET[[(digest >> shift) & 63 for shift in (58, 52, 46)]])


@dataclass(frozen=True, eq=False)
class RowKeys:
    """The keys of n rows of one table.

    Args:
        tag: the table's 3 characters.
        ids: uint64 [n].
    """

    tag: bytes
    ids: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> "RowKeys":
        """Return the keys of some rows; the ids are a view."""
        return RowKeys(self.tag, self.ids[rows])

    def take(self, order: NDArray[np.intp]) -> "RowKeys":
        """Return the keys at the given positions, in that order."""
        return RowKeys(self.tag, self.ids[order])

    def encode(self) -> NDArray[np.uint8]:
        """Return the keys as text: uint8 [n, 14].

        Example:
            >>> bytes(RowKeys(b"tab", np.array([1], dtype=np.uint64)).encode()[0])
            b'tabAAAAAAAAAAB'
        """
        head, pairs = _character_tables(self.tag)
        out = np.empty((len(self.ids), KEY_SIZE // 2), dtype=np.uint16)
        out[:, 0] = np.frombuffer(self.tag[:2], dtype=np.uint16)[0]
        out[:, 1] = head[(self.ids >> np.uint64(60)).astype(np.intp)]
        for column, digit in enumerate(_digits(self.ids), start=2):
            out[:, column] = pairs[digit]
        return out.view(np.uint8)

    def slots(self) -> NDArray[np.int64]:
        """Return each key's hash slot, as Redis Cluster computes it: int64 [n] in [0, 16384)."""
        head, digits = _crc_tables(self.tag)
        crc = head[(self.ids >> np.uint64(60)).astype(np.intp)]
        for table, digit in zip(digits, _digits(self.ids), strict=True):
            crc ^= table[digit]
        return (crc & np.uint16(N_SLOTS - 1)).astype(np.int64)

    def near(self) -> NDArray[np.uint16] | None:
        """Return a number that rows share which lie near each other in a server's memory: uint16 [n]; None when order does not matter."""
        return None


def text_slot(key: bytes) -> int:
    """Return the hash slot of any key, hash tags `{…}` honoured, as the Redis Cluster specification defines it.

    Example:
        >>> text_slot(b"123456789"), text_slot(b"x{123456789}y")
        (12739, 12739)
    """
    start = key.find(b"{")
    end = key.find(b"}", start + 1) if start >= 0 else -1
    return _crc16(key[start + 1 : end] if end > start + 1 else key) % N_SLOTS


def slot_tags() -> list[bytes]:
    """Return for every slot the first 3-character text that hashes to it: used as `{tag}`, it pins a key to that slot."""
    texts = np.arange(64**3)
    chars = np.stack([_ALPHABET[(texts >> shift) & 63] for shift in (12, 6, 0)], axis=1)
    table = _byte_table()
    crc = np.zeros(len(texts), dtype=np.uint16)
    for column in range(3):
        crc = (crc << np.uint16(8)) ^ table[(crc >> np.uint16(8)) ^ chars[:, column]]
    slots, first = np.unique(crc % N_SLOTS, return_index=True)
    assert len(slots) == N_SLOTS
    return [bytes(row) for row in chars[first]]


def _digits(ids: NDArray[np.uint64]) -> list[NDArray[np.intp]]:
    """The five 12-bit digits below the top four bits, most significant first: intp [n] each."""
    signed = ids.view(np.int64)
    return [(signed >> shift) & 0xFFF for shift in _DIGIT_SHIFTS]


@cache
def _character_tables(tag: bytes) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Two characters per entry: (last of the tag, first digit) for 16 values, and pairs for 4096."""
    head = np.stack([np.full(16, tag[2], dtype=np.uint8), _ALPHABET[:16]], axis=1)
    both = np.arange(4096)
    pairs = np.stack([_ALPHABET[both >> 6], _ALPHABET[both & 63]], axis=1)
    return head.view(np.uint16)[:, 0], pairs.view(np.uint16)[:, 0]


@cache
def _crc_tables(tag: bytes) -> tuple[NDArray[np.uint16], list[NDArray[np.uint16]]]:
    """Each digit's share of the CRC: the first table holds the tag and the top digit, the others differences from digit 0."""
    zero = _ALPHABET[0]
    head = np.array([_crc16(tag + bytes([c]) + bytes([zero] * 10)) for c in _ALPHABET[:16]], dtype=np.uint16)
    base = int(head[0])
    both = np.arange(4096)
    tables = []
    for pair in range(5):
        chars = np.full((4096, KEY_SIZE), zero, dtype=np.uint8)
        chars[:, :TAG_SIZE] = np.frombuffer(tag, dtype=np.uint8)
        chars[:, 4 + 2 * pair] = _ALPHABET[both >> 6]
        chars[:, 5 + 2 * pair] = _ALPHABET[both & 63]
        crc = np.zeros(4096, dtype=np.uint16)
        for column in range(KEY_SIZE):
            crc = (crc << np.uint16(8)) ^ _byte_table()[(crc >> np.uint16(8)) ^ chars[:, column]]
        tables.append(crc ^ np.uint16(base))
    return head, tables


@cache
def _byte_table() -> NDArray[np.uint16]:
    """CRC16-XMODEM (polynomial 0x1021) of every byte."""
    crc = np.arange(256, dtype=np.uint32) << 8
    for _ in range(8):
        crc = np.where(crc & 0x8000, (crc << 1) ^ 0x1021, crc << 1) & 0xFFFF
    return crc.astype(np.uint16)


def _crc16(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc = ((crc << 8) & 0xFFFF) ^ int(_byte_table()[(crc >> 8) ^ byte])
    return crc
