"""One sorted run of a table's rows: rows in the order of their keys, and ids that were erased. Pure: bytes come through functions.

    header:   magic 8 | format version u32 | record size u32 | rows of a block u32 | rows between fences u32 | zeros
    blocks:   pairs (key, version) '<u8' [n, 2], keys ascending | filters (`kvemb.arrays.id_filter`) '<u8'
              | of rows their records u8 [n, record size] | zeros
    footer:   '<u8' [n_blocks, 8]: kind (0 rows, 1 erased), offset, n, first key, last key, xxh3-64 of the pairs, of what is behind the
              filters, of the filters
              | fences '<u8': of the rows, and then of the erased, every 64th key
    tail, 32 bytes: footer offset u64 | n_blocks u64 | xxh3-64 of header, footer and the two before u64 | magic 8

Keys are those of `kvemb.arrays.key_order`. Header and blocks are filled up with zeros, so that the pairs between two fences never lie on
two pages. Of one kind all blocks are full but the last: the place of a row follows from its number.

Keys are looked up in the fences, which are in memory, and then among the pairs of one page of the mapped file. Where many of the keys
asked for lately were not here, filters are asked in between, in the mapped file too: the system keeps them in memory before the pairs,
which are 16 times as large. Before the first look at pairs or filters of a block these are read once and compared with their checksum. A
run does not change once it is written. Erased ids are kept because the journal's entry that erased a row may be discarded while an older
run still has the row: created again later, it must begin with its first value.

"""

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.arrays.id_filter import filter_words, group_words, passes
from kvemb.arrays.ids import as_items, as_rows
from kvemb.errors import JournalDamagedError, other_format

from ..journal.segment import ReadAt

Ids = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or that of some threads."""
Part = tuple[int, Ids, Ids, Bytes]
"""Kind, keys uint64 [n] ascending, versions uint64 [n], records uint8 [n, record bytes]: [n, 0] of erased ids, or if none are asked for."""

ROWS, ERASED = 0, 1
MAGIC, END_MAGIC = b"kvembrun", b"runkvemb"
FORMAT_VERSION = 3
BLOCK_ROWS, BLOCK_BYTES, FENCE_ROWS = 4096, 512 << 10, 64
"""Of a block that is written: at most so many rows, of about so many bytes; and rows from one fence to the next. Powers of two."""
HEAD = struct.Struct("<8sIIII")
TAIL = struct.Struct("<QQQ8s")
_KIND, _OFFSET, _N, _FIRST, _LAST, _PAIRS_SUM, _REST_SUM, _FILTER_SUM = range(8)
COLUMNS = 8
_LOOKED_AT, _FILTERED_AT = 2048, 8192  # keys that one thread looks for, among pairs and in filters
_PORTIONS = 32  # of blocks that are to be checked: each is one thread's
_FEW_ABSENT = 1 / 8  # of the keys: above it a filter is asked, which costs an eighth of what it spares
_NOTHING = np.empty(0, np.intp), np.empty(0, np.int64), np.empty(0, np.uint64)


def rows_of_a_block(record_bytes: int) -> int:
    """Return how many rows a full block has."""
    most = BLOCK_BYTES // max(1, record_bytes)
    return max(FENCE_ROWS, min(BLOCK_ROWS, 1 << max(0, most.bit_length() - 1)))


class SortedRun:
    """A run that was written. The footer is in memory, blocks are read and checked when they are needed.

    One class: every way to read a run needs its footer, its map and its checks.
    """

    def __init__(
        self, read_at: ReadAt, words: NDArray[Any], size_bytes: int, where: str, each: Each = map, newest: int = (1 << 64) - 1
    ) -> None:
        self._read_at, self._words, self.size_bytes, self.where, self._each = read_at, words, size_bytes, where, each
        self.newest = newest
        head = self._read_head()
        footer, fences = self._read_footer(head)
        self._check_footer(footer, len(head), fences.nbytes)
        self._blocks = [footer[footer[:, _KIND] == kind] for kind in (ROWS, ERASED)]
        self.n_rows = tuple(int(blocks[:, _N].sum()) for blocks in self._blocks)
        self._fences = self._split_fences(fences)
        self._starts = [(blocks[:, _OFFSET] // np.uint64(8)).astype(np.int64) for blocks in self._blocks]  # in words
        self._checked = [np.zeros((2, len(blocks)), bool) for blocks in self._blocks]  # pairs; filters
        # Of each kind the share of the keys asked for lately that were not here. Threads may lose each other's: it decides on speed alone.
        self._absent = [1.0, 1.0]

    def blocks(self, kind: int, low: int = 0, *, records: bool = True, above: int = 0) -> Iterator[Part]:
        """Yield the rows, or the erased ids, block by block."""
        blocks = self._blocks[kind]
        for block in blocks[int(np.searchsorted(blocks[:, _LAST], np.uint64(low))) :]:
            pairs = self._pairs(block)
            some = np.empty((len(pairs), self.record_bytes if records and kind == ROWS else 0), np.uint8)
            if some.size and (not above or bool((pairs[:, 1] > np.uint64(above)).any())):
                some = self._rest(block)
            yield kind, pairs[:, 0], pairs[:, 1], some

    def find(self, kind: int, keys: Ids) -> tuple[NDArray[np.intp], Rows, Ids]:
        """Return, for those keys that are here, their positions in `keys`, the numbers of their rows, and their versions.

        Args:
            keys: uint64 [n], ascending.

        Returns:
            intp [m], int64 [m], uint64 [m].
        """
        fences = self._fences[kind]
        before = int(np.searchsorted(keys, fences[0])) if len(fences) else len(keys)  # keys below all that are here
        keys = keys[before:]
        if not len(keys):
            return _NOTHING
        rows = (np.searchsorted(fences, keys, side="right") - 1) * self._fence_rows  # int64 [n]: the only 64 rows that may have the key
        n_asked, may = len(keys), None
        if self._absent[kind] > _FEW_ABSENT:
            may = self._may_have(kind, keys, rows)  # intp [m]: of the keys that may be here
            keys, rows = keys[may], rows[may]
        at, rows, versions = self._find(kind, keys, rows) if len(keys) else _NOTHING
        self._absent[kind] += (1 - len(at) / n_asked - self._absent[kind]) / 4
        return (at if may is None else may[at]) + before, rows, versions

    def _find(self, kind: int, keys: Ids, rows: Rows) -> tuple[NDArray[np.intp], Rows, Ids]:
        """Return as `find`, where `rows` (int64 [n]) are the first of the 64 that may have each key."""
        blocks = self._check(kind, rows, self._pairs)
        starts = self._starts[kind]
        # low, int64 [n]: the word where the highest key that is not above is known to be; it rises to that place.
        low = starts[blocks] + 2 * (rows % self._block_rows)
        rows -= low // 2
        last = starts[-1] + 2 * (int(self._blocks[kind][-1, _N]) - 1)  # the word of the last key of all
        list(self._by_parts(partial(self._bisect, last), low, keys, _LOOKED_AT))  # low's parts are views
        at = np.flatnonzero(self._words.take(low, mode="clip") == keys)
        low = low[at]
        return at, rows[at] + low // 2, self._words.take(low + 1, mode="clip").astype(np.uint64, copy=False)

    def _may_have(self, kind: int, keys: Ids, rows: Rows) -> NDArray[np.intp]:
        """Return the places of the keys that pass their filters; `rows` as in `_find`."""
        blocks = self._check(kind, rows, self._filter)
        starts = self._starts[kind] + 2 * self._blocks[kind][:, _N].astype(np.int64)  # int64 [blocks]: in words, of their filters
        groups = starts[blocks] + rows % self._block_rows // self._fence_rows * self._filter_words
        return np.flatnonzero(np.concatenate(list(self._by_parts(self._passes, groups, keys, _FILTERED_AT))))

    def _passes(self, part: tuple[Rows, Ids]) -> NDArray[np.bool_]:
        groups, keys = part
        return passes(self._words.take(filter_words(keys, groups, self._filter_words), mode="clip"), keys)

    def _by_parts(self, look: Callable[[tuple[Rows, Ids]], Any], places: Rows, keys: Ids, at_once: int) -> Iterable[Any]:
        """Look at places in the mapped file, some by each thread: they wait side by side for the disk, without the interpreter's lock."""
        n = -(-len(keys) // at_once)
        return (map if n == 1 else self._each)(look, zip(np.array_split(places, n), np.array_split(keys, n), strict=True))

    def _bisect(self, last: int, part: tuple[Rows, Ids]) -> None:
        """Raise the words of `low` (int64 [n]) to where the highest key is that is not above the one of `keys` (uint64 [n])."""
        low, keys = part
        step = self._fence_rows
        while step > 1:
            step //= 2
            middle = np.minimum(low + 2 * step, last)
            np.copyto(low, middle, where=self._words.take(middle, mode="clip") <= keys)

    def records(self, rows: Rows) -> Bytes:
        """Return the records of rows by number (int64 [m], ascending): uint8 [m, record bytes]."""
        found = np.empty((len(rows), self.record_bytes), np.uint8)
        blocks = rows // self._block_rows
        edges = [*np.flatnonzero(np.diff(blocks, prepend=-1)), len(rows)]  # where the rows of the next block begin
        for start, stop in pairwise(edges):
            some = as_items(self._rest(self._blocks[ROWS][blocks[start]]))
            found[start:stop] = as_rows(some[rows[start:stop] % self._block_rows])
        return found

    def _read_head(self) -> bytes:
        head = self._read_at(0, HEAD.size)
        if len(head) < HEAD.size or head[:8] != MAGIC:
            raise self._damaged(0, "it is no run of rows, or cut off")
        _, version, self.record_bytes, self._block_rows, self._fence_rows = HEAD.unpack(head)
        if version != FORMAT_VERSION:
            raise JournalDamagedError(other_format(f"{self.where}: offset {len(MAGIC)}: the run of rows", version, (FORMAT_VERSION,)))
        if not 0 < self._fence_rows <= self._block_rows or any(n & (n - 1) for n in (self._fence_rows, self._block_rows)):
            raise self._damaged(0, "its header claims blocks that cannot be")
        self._filter_words = group_words(self._fence_rows)
        return self._read_at(0, 16 * self._fence_rows)

    def _read_footer(self, head: bytes) -> tuple[NDArray[Any], Ids]:
        at = self.size_bytes - TAIL.size
        tail = self._read_at(max(0, at), TAIL.size)
        if len(tail) < TAIL.size or tail[-8:] != END_MAGIC:
            raise self._damaged(at, "it does not end as a run")
        offset, n_blocks, checksum, _ = TAIL.unpack(tail)
        size = at - offset
        if offset < len(head) or n_blocks > self.size_bytes or size < 8 * COLUMNS * n_blocks or size % 8:
            raise self._damaged(at, "its tail claims a footer that does not fit")
        data = self._read_at(offset, size)
        if xxhash.xxh3_64_intdigest(head + data + tail[:16]) != checksum:
            raise self._damaged(offset, "the checksum of its header and footer does not match")
        numbers = np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
        n = COLUMNS * n_blocks
        return numbers[:n].reshape(n_blocks, COLUMNS), numbers[n:]

    def _check_footer(self, footer: NDArray[Any], start: int, fences_bytes: int) -> None:
        """Check that blocks follow each other without gaps, and in order: allocation and search in a reader rely on it."""
        kinds, offsets, counts = footer[:, _KIND], footer[:, _OFFSET], footer[:, _N]
        if (kinds > ERASED).any() or (offsets > self.size_bytes).any():
            raise self._damaged(0, "its footer claims blocks that there cannot be")
        align = 16 * self._fence_rows
        row_bytes = np.array([16 + self.record_bytes, 16], np.uint64)[kinds]
        if (counts == 0).any() or (counts > np.uint64(self.size_bytes) // row_bytes).any():
            raise self._damaged(0, "its footer claims a block that does not fit")
        ends = offsets + (counts * row_bytes + self._filter_bytes(counts) + np.uint64(align - 1)) // np.uint64(align) * np.uint64(align)
        end = self.size_bytes - TAIL.size - footer.nbytes - fences_bytes
        if [start, *ends.tolist()] != [*offsets.tolist(), end]:
            raise self._damaged(0, "blocks and footer do not meet")
        for blocks in (footer[kinds == kind] for kind in (ROWS, ERASED)):
            if (blocks[:, _FIRST] > blocks[:, _LAST]).any() or (blocks[1:, _FIRST] <= blocks[:-1, _LAST]).any():
                raise self._damaged(0, "its blocks are not in order")
            if (blocks[:-1, _N] != self._block_rows).any() or (blocks[-1:, _N] > self._block_rows).any():
                raise self._damaged(0, "its blocks are not full")

    def _split_fences(self, fences: Ids) -> list[Ids]:
        n, n_erased = (-(-n // self._fence_rows) for n in self.n_rows)
        both = [fences[:n], fences[n:]]
        if len(fences) != n + n_erased:
            raise self._damaged(0, "its footer claims fences that there cannot be")
        for some, blocks in zip(both, self._blocks, strict=True):
            firsts = some[:: self._block_rows // self._fence_rows]
            if not np.array_equal(firsts, blocks[:, _FIRST]) or (some[1:] <= some[:-1]).any() or (some[-1:] > blocks[-1:, _LAST]).any():
                raise self._damaged(0, "its fences do not fit its blocks")
        return both

    def _check(self, kind: int, rows: Rows, read: Callable[[NDArray[Any]], Any]) -> Rows:
        """Return the blocks of rows (int64 [n], ascending), of which the mapped file can be trusted from here on.

        Pairs or filters of blocks that nobody has looked at before are read, and so compared with their checksums.
        """
        blocks: Rows = rows // self._block_rows
        met, checked = blocks[np.flatnonzero(np.diff(blocks, prepend=-1))], self._checked[kind][int(read == self._filter)]
        new = met[~checked[met]]
        if len(new):
            list(self._each(partial(_read_all, read), np.array_split(self._blocks[kind][new], min(len(new), _PORTIONS))))
            checked[new] = True
        return blocks

    def _pairs(self, block: NDArray[Any]) -> Ids:
        """Keys and versions of a block: uint64 [n, 2]."""
        offset, n = int(block[_OFFSET]), int(block[_N])
        return self._read(offset, 16 * n, block[_PAIRS_SUM], "keys").view("<u8").reshape(n, 2).astype(np.uint64, copy=False)

    def _filter(self, block: NDArray[Any]) -> Bytes:
        """The filters of a block."""
        offset, n = int(block[_OFFSET]), int(block[_N])
        return self._read(offset + 16 * n, self._filter_bytes(n), block[_FILTER_SUM], "filters")

    def _filter_bytes(self, n: Any) -> Any:
        return (n + self._fence_rows - 1) // self._fence_rows * (8 * self._filter_words)

    def _rest(self, block: NDArray[Any]) -> Bytes:
        """The records of a block of rows: uint8 [n, record bytes]."""
        offset, n = int(block[_OFFSET]), int(block[_N])
        size, align = n * self.record_bytes, 16 * self._fence_rows
        start = offset + 16 * n + self._filter_bytes(n)
        data = self._read(start, -(-(start + size) // align) * align - start, block[_REST_SUM], "records")
        return data[:size].reshape(n, self.record_bytes)

    def _read(self, offset: int, size: int, checksum: int, what: str) -> Bytes:
        data = self._read_at(offset, size)
        if len(data) != size or xxhash.xxh3_64_intdigest(data) != checksum:
            raise self._damaged(offset, f"the checksum of the block's {what} does not match")
        return np.frombuffer(data, np.uint8)

    def _damaged(self, offset: int, why: str) -> JournalDamagedError:
        return JournalDamagedError(f"{self.where}: offset {offset}: {why}. Put a good copy of the file back, or load a checkpoint.")


def _read_all(read: Callable[[NDArray[Any]], Any], blocks: NDArray[Any]) -> None:
    for block in blocks:
        read(block)
