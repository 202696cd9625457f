"""Storage keys of rows: pure array functions, no I/O.

A key is 14 characters of base64url text: 3 of the table's tag and 11 of the id, most significant digit first. Text, because raw id bytes
may hold `{…}`, which Redis Cluster takes for a hash tag, or bytes that memcached's keys may not hold. Constant length, because a batch of
requests is then an array with a constant stride. 14, because Redis keeps such a key in a 16-byte allocation.

Ids are split into one 4-bit and five 12-bit digits. Every 12-bit digit becomes two characters of the key by one table gather. Keys of many
small tables can be joined: all of this is then done once for all of them, instead of once per table.
"""

from collections.abc import Hashable, Sequence
from dataclasses import field
from functools import cache, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import digest64
from kvemb.process.cached_property import batch_value
from kvemb.schema.slots import ALPHABET, EACH_SLOT, TAG_SIZE, Placement, slot_texts

KEY_SIZE = 14
PINNED_HEAD_SIZE = TAG_SIZE + 1 + TAG_SIZE + 1
_DIGIT_SHIFTS = (48, 36, 24, 12, 0)


def table_tag(table: str, attempt: int = 0) -> bytes:
    """Return the 3-character tag of a table's keys; the registry raises `attempt` while another table has that tag."""
    digest = digest64("table tag", table, attempt)
    return bytes(ALPHABET[[(digest >> shift) & 63 for shift in (58, 52, 46)]])


@batch_value
class RowTags:
    """The tables that rows of a joined batch belong to."""

    tags: tuple[bytes, ...]
    which: NDArray[np.uint16]  # uint16 [n], the number of each row's table
    names: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "RowTags":
        """Return the tables of some of the rows."""
        return RowTags(self.tags, self.which[rows], self.names, self.placements)


@batch_value
class RowKeys:
    """The keys of n rows of one table, or of several (`coalesce_keys`)."""

    tag: bytes
    ids: NDArray[np.uint64]  # uint64 [n]
    tables: RowTags | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True)
    placement: Placement = field(default=EACH_SLOT, kw_only=True)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "RowKeys":
        """Return the keys of some rows, in that order; of a slice the ids are a view."""
        tables = self.tables and self.tables[rows]
        return RowKeys(self.tag, self.ids[rows], tables=tables, name=self.name, placement=self.placement)

    def of_any_rows(self) -> "RowKeys":
        """Return the same keys, without knowledge of the rows there: for a node that may not have them."""
        return self

    @property
    def coalesce_key(self) -> Hashable:
        """Return a value that the keys of several tables share if they can be joined."""
        return None

    def coalesced(self, keys: "Sequence[RowKeys]", ids: NDArray[np.uint64], tables: RowTags) -> "RowKeys":
        """Return keys like these of the rows of all tables; see `coalesce_keys`."""
        return RowKeys(b"", ids, tables=tables)

    @property
    def key_bytes(self) -> int:
        """The length of a key."""
        return KEY_SIZE

    def described(self, row: int) -> str:
        """Say which row this is, for messages."""
        one = self[row : row + 1]
        names = (one.name,) if one.tables is None else one.tables.names
        name = names[0 if one.tables is None else int(one.tables.which[0])] if any(names) else ""
        return (f"table {name!r}, " if name else "") + f"id {int(one.ids[0])} ({one._shown()})"

    def _shown(self) -> str:
        """The one row's place on its node, for messages."""
        return f"key {self.encode().tobytes().decode()}"

    def encode(self) -> NDArray[np.uint8]:
        """Return the keys as text: uint8 [n, 14]."""
        which = 0 if self.tables is None else self.tables.which  # the number of each row's table: [n], or 0 for all
        firsts, seconds = _heads_of((self.tag,) if self.tables is None else self.tables.tags)  # characters 1 and 2, 3 and 4
        out = np.empty((len(self.ids), KEY_SIZE // 2), dtype=np.uint16)  # [n, 7]: two characters in each item
        out[:, 0] = firsts[which]
        out[:, 1] = seconds[(self.ids >> np.uint64(60)).astype(np.intp) + (np.asarray(which, dtype=np.intp) << 4)]
        for column, digit in enumerate(_digits(self.ids), start=2):
            out[:, column] = _digit_characters()[digit]
        return out.view(np.uint8)

    def slots(self) -> NDArray[np.int64]:
        """Return each row's slot: int64 [n] in [0, 16384)."""
        if self.tables is None:
            return self.placement.slots(self.ids)
        placements = self.tables.placements
        slots = placements[0].slots(self.ids)  # int64 [n]: right for the tables placed as the first; the others' rows are overwritten
        for other in set(placements) - {placements[0]}:
            rows = np.flatnonzero(np.array([one == other for one in placements])[self.tables.which])
            slots[rows] = other.slots(self.ids[rows])
        return slots

    def locality(self) -> NDArray[np.uint16] | None:
        """Return a number that rows near each other in a server's memory share: uint16 [n]; None when order does not matter."""
        return None

    def containers(self) -> "Containers | None":
        """Return the values that hold these rows, each once, if a value holds several rows; None if every row has its own."""
        return None


@batch_value
class Containers:
    """Values of a server that hold several rows each."""

    keys: RowKeys
    kind: Literal["string", "hash"]
    most_bytes: int = 0


def coalesce_keys(keys: Sequence[RowKeys]) -> RowKeys:
    """Return the keys of several tables' rows as those of one batch, one table's after the other's."""
    if len(keys) == 1:
        return keys[0]
    which = np.repeat(np.arange(len(keys), dtype=np.uint16), [len(one) for one in keys])  # [n]: the number of each row's table
    tags = RowTags(tuple(one.tag for one in keys), which, tuple(one.name for one in keys), tuple(one.placement for one in keys))
    return keys[0].coalesced(keys, np.concatenate([one.ids for one in keys]), tags)


def pinned_head(keys: RowKeys, out: NDArray[np.uint8]) -> None:
    """Write the head of keys that are pinned to their slots, the table's tag and the slot's in braces, into `out`, uint8 [n, >= 8]."""
    if keys.tables is None:
        out[:, :TAG_SIZE] = np.frombuffer(keys.tag, dtype=np.uint8)
    else:
        out[:, :TAG_SIZE] = np.frombuffer(b"".join(keys.tables.tags), dtype=np.uint8).reshape(-1, TAG_SIZE)[keys.tables.which]
    out[:, TAG_SIZE], out[:, PINNED_HEAD_SIZE - 1] = ord("{"), ord("}")
    out[:, TAG_SIZE + 1 : PINNED_HEAD_SIZE - 1] = slot_texts()[keys.slots()]  # uint8 [n, 3]


def _digits(ids: NDArray[np.uint64]) -> list[NDArray[np.intp]]:
    """The five 12-bit digits below the top four bits, most significant first: intp [n] each."""
    signed = ids.view(np.int64)  # indices without a conversion; the sign bit is masked away
    return [(signed >> shift) & 0xFFF for shift in _DIGIT_SHIFTS]


@cache
def _digit_characters() -> NDArray[np.uint16]:
    """The two characters of each 12-bit digit: uint16 [4096]."""
    both = np.arange(4096)  # digits; their upper and lower 6 bits are a character each
    return np.stack([ALPHABET[both >> 6], ALPHABET[both & 63]], axis=1).view(np.uint16)[:, 0]


@lru_cache(maxsize=64)  # which tables are asked for together may change from call to call
def _heads_of(tags: tuple[bytes, ...]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """The heads of keys of k tags: the tags' first two characters, uint16 [k]; the third and that of an id's top digit, uint16 [16 k]."""
    firsts = [np.frombuffer(tag[:2], dtype=np.uint16) for tag in tags]
    seconds = [np.stack([np.full(16, tag[2], dtype=np.uint8), ALPHABET[:16]], axis=1).view(np.uint16)[:, 0] for tag in tags]
    return np.concatenate(firsts), np.concatenate(seconds)
