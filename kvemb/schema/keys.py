"""Storage keys of rows, and the slots they hash to: pure array functions, no I/O.

A key is 14 characters of base64url text: 3 of the table's tag and 11 of the id, most significant digit first. Text, because raw id bytes
may hold `{…}`, which Redis Cluster takes for a hash tag, or bytes that memcached's keys may not hold. Constant length, because a batch of
requests is then an array with a constant stride. 14, because Redis keeps such a key in a 16-byte allocation.

Ids are split into one 4-bit and five 12-bit digits. Every digit is translated by one table gather: two characters of the key, or the
digit's share of the CRC. (CRC is linear over XOR, so the shares of the digits simply add up, and those of the ids' digits are the same for
every table.) The slot is Redis Cluster's own: CRC16-XMODEM of the key, modulo 16384. memcached and standalone nodes use the same slots
under a map of ours.

Keys of many small tables can be joined: all of the above is then done once for all of them, instead of once per table.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import digest64

TAG_SIZE = 3
KEY_SIZE = 14
N_SLOTS = 16384

ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)
_DIGIT_SHIFTS = (48, 36, 24, 12, 0)


def table_tag(table: str, attempt: int = 0) -> bytes:
    """Return the 3-character tag of a table's keys; the registry raises `attempt` while another table has that tag.

    Example:
        >>> len(table_tag("user")), table_tag("user") == table_tag("user", 1)
        (3, False)
    """
    digest = digest64("table tag", table, attempt)
    return bytes(ALPHABET[[(digest >> shift) & 63 for shift in (58, 52, 46)]])


@dataclass(frozen=True, eq=False)
class RowTags:
    """The tables of rows of several tables.

    Args:
        tags: of each table.
        which: uint16 [n], whose each row is.
        names: of each table, for messages; () where nobody said them.
    """

    tags: tuple[bytes, ...]
    which: NDArray[np.uint16]
    names: tuple[str, ...] = ()

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "RowTags":
        """Return those of some rows."""
        return RowTags(self.tags, self.which[rows], self.names)


@dataclass(frozen=True, eq=False)
class RowKeys:
    """The keys of n rows of one table, or of several (`coalesce_keys`).

    Args:
        tag: the table's 3 characters; b"" of several.
        ids: uint64 [n].
        tables: of several: whose the rows are.
        name: the table's, for messages; "" of several, or where nobody said it.
    """

    tag: bytes
    ids: NDArray[np.uint64]
    tables: RowTags | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> "RowKeys":
        """Return the keys of some rows; the ids are a view."""
        return self._some(rows)

    def take(self, order: NDArray[np.intp]) -> "RowKeys":
        """Return the keys at the given positions, in that order."""
        return self._some(order)

    @property
    def coalesce_key(self) -> Hashable:
        """What keys of several tables have in common that can be joined."""
        return None

    def coalesced(self, keys: "Sequence[RowKeys]", ids: NDArray[np.uint64], tables: RowTags) -> "RowKeys":
        """Return keys like these of the rows of all tables; see `coalesce_keys`."""
        return RowKeys(b"", ids, tables=tables)

    @property
    def key_bytes(self) -> int:
        """The length of a key."""
        return KEY_SIZE

    def described(self, row: int) -> str:
        """Say which row this is, for messages.

        Example:
            >>> RowKeys(b"tab", np.array([1], dtype=np.uint64), name="user").described(0)
            "table 'user', id 1 (key tabAAAAAAAAAAB)"
        """
        one = self[row : row + 1]
        names = (one.name,) if one.tables is None else one.tables.names
        name = names[0 if one.tables is None else int(one.tables.which[0])] if any(names) else ""
        return (f"table {name!r}, " if name else "") + f"id {int(one.ids[0])} ({one._shown()})"

    def _shown(self) -> str:
        """The one row's place on its node, for messages."""
        return f"key {self.encode().tobytes().decode()}"

    def encode(self) -> NDArray[np.uint8]:
        """Return the keys as text: uint8 [n, 14].

        Example:
            >>> bytes(RowKeys(b"tab", np.array([1], dtype=np.uint64)).encode()[0])
            b'tabAAAAAAAAAAB'
        """
        digits = _digit_tables()
        tables, which, heads = self._heads()
        out = np.empty((len(self.ids), KEY_SIZE // 2), dtype=np.uint16)
        out[:, 0] = tables.firsts[which]
        out[:, 1] = tables.seconds[heads]
        for column, digit in enumerate(_digits(self.ids), start=2):
            out[:, column] = digits.characters[digit]
        return out.view(np.uint8)

    def slots(self) -> NDArray[np.int64]:
        """Return each key's hash slot, as Redis Cluster computes it: int64 [n] in [0, 16384)."""
        tables, _, heads = self._heads()
        crc = tables.crcs[heads]
        for table, digit in zip(_digit_tables().crcs, _digits(self.ids), strict=True):
            crc ^= table[digit]
        return (crc & np.uint16(N_SLOTS - 1)).astype(np.int64)

    def locality(self) -> NDArray[np.uint16] | None:
        """Return a number that rows share which lie near each other in a server's memory: uint16 [n]; None when order does not matter."""
        return None

    def containers(self) -> "Containers | None":
        """Return the values that hold these rows, each once, where a value holds several rows; None where every row has its own."""
        return None

    def _some(self, rows: slice | NDArray[np.intp]) -> "RowKeys":
        return RowKeys(self.tag, self.ids[rows], tables=self.tables and self.tables[rows], name=self.name)

    def _heads(self) -> tuple["_TagTables", NDArray[np.uint16] | int, NDArray[np.intp]]:
        """What a key begins with: the tables' share of it, and for each row its table and its place among heads (table, top digit)."""
        top = (self.ids >> np.uint64(60)).astype(np.intp)
        if self.tables is None:
            return _tag_tables((self.tag,)), 0, top
        return _tag_tables(self.tables.tags), self.tables.which, top + (self.tables.which.astype(np.intp) << 4)


@dataclass(frozen=True, eq=False)
class Containers:
    """Values of a server that hold several rows each.

    Args:
        keys: of them.
        kind: their type, in Redis's words.
        most_bytes: the length of a string; 0 of other types.
    """

    keys: RowKeys
    kind: Literal["string", "hash"]
    most_bytes: int = 0


def coalesce_keys(keys: Sequence[RowKeys]) -> RowKeys:
    """Return the keys of several tables' rows as those of one batch, one table's after the other's.

    Args:
        keys: of one table each, at least one and at most 65536; all of one `coalesce_key`.

    Example:
        >>> one, other = RowKeys(b"one", np.array([1], dtype=np.uint64)), RowKeys(b"two", np.array([2, 3], dtype=np.uint64))
        >>> [bytes(key) for key in coalesce_keys([one, other])[1:].encode()]
        [b'twoAAAAAAAAAAC', b'twoAAAAAAAAAAD']
    """
    if len(keys) == 1:
        return keys[0]
    which = np.repeat(np.arange(len(keys), dtype=np.uint16), [len(one) for one in keys])
    tags = RowTags(tuple(one.tag for one in keys), which, tuple(one.name for one in keys))
    return keys[0].coalesced(keys, np.concatenate([one.ids for one in keys]), tags)


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
    chars = np.stack([ALPHABET[(texts >> shift) & 63] for shift in (12, 6, 0)], axis=1)
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


@dataclass(frozen=True, eq=False)
class _DigitTables:
    """What the five lower digits of an id add to a key: two characters each (uint16 [4096]), and shares of the CRC (uint16 [4096] each)."""

    characters: NDArray[np.uint16]
    crcs: list[NDArray[np.uint16]]


@dataclass(frozen=True, eq=False)
class _TagTables:
    """What k tags and the ids' top digit add to a key.

    Args:
        firsts: uint16 [k], the first two characters of each tag.
        seconds: uint16 [16 k], its last and that of the top digit.
        crcs: uint16 [16 k], the CRC of both and of lower digits that are 0.
    """

    firsts: NDArray[np.uint16]
    seconds: NDArray[np.uint16]
    crcs: NDArray[np.uint16]


@cache
def _digit_tables() -> _DigitTables:
    both = np.arange(4096)
    pairs = np.stack([ALPHABET[both >> 6], ALPHABET[both & 63]], axis=1)
    crcs = []
    for pair in range(5):
        # A difference from digit 0: what stands before it does not matter then.
        chars = np.full((4096, KEY_SIZE), ALPHABET[0], dtype=np.uint8)
        chars[:, 4 + 2 * pair : 6 + 2 * pair] = pairs
        crc = np.zeros(4096, dtype=np.uint16)
        for column in range(KEY_SIZE):
            crc = (crc << np.uint16(8)) ^ _byte_table()[(crc >> np.uint16(8)) ^ chars[:, column]]
        crcs.append(crc ^ crc[0])
    return _DigitTables(pairs.view(np.uint16)[:, 0], crcs)


@cache
def _tag_tables_of(tag: bytes) -> _TagTables:
    seconds = np.stack([np.full(16, tag[2], dtype=np.uint8), ALPHABET[:16]], axis=1).view(np.uint16)[:, 0]
    zeros = bytes([ALPHABET[0]] * 10)
    crcs = np.array([_crc16(tag + bytes([top]) + zeros) for top in ALPHABET[:16]], dtype=np.uint16)
    return _TagTables(np.frombuffer(tag[:2], dtype=np.uint16), seconds, crcs)


@lru_cache(maxsize=64)  # which tables are asked for together may change from call to call
def _tag_tables(tags: tuple[bytes, ...]) -> _TagTables:
    each = [_tag_tables_of(tag) for tag in tags]
    if len(each) == 1:
        return each[0]
    firsts, seconds, crcs = zip(*((tables.firsts, tables.seconds, tables.crcs) for tables in each), strict=True)
    return _TagTables(np.concatenate(firsts), np.concatenate(seconds), np.concatenate(crcs))


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
