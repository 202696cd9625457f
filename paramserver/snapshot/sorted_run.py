"""One sorted run of a table's rows as bytes: rows in the order of their ids, and ids that were erased. Pure: bytes come through a function.

    header, 16 bytes: magic 8 | format version u32 | record size u32
    blocks:           ids '<u8' [n], ascending | rows: u8 [n, record size], erased: '<u8' [n], the version as of which the id is gone
    footer:           '<u8' [n_blocks, 7]: kind (0 rows, 1 erased), offset, n, first id, last id, xxh3-64 of the ids, of the rest
    tail, 32 bytes:   footer offset u64 | n_blocks u64 | xxh3-64 of header, footer and the two before u64 | magic 8

A run does not change once it is written. Erased ids are kept because the journal's entry that erased a row may be discarded while an older
run still has the row: created again later, the row must begin with its first value.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows
from kvemb.errors import JournalDamagedError, other_format

Ids = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
ReadAt = Callable[[int, int], bytes]
"""(offset, size) -> the file's bytes there; fewer at its end."""

ROWS, ERASED = 0, 1
MAGIC, END_MAGIC = b"kvembrun", b"runkvemb"
FORMAT_VERSION = 1
BLOCK_BYTES = 512 << 10
_HEAD = struct.Struct("<8sII")
_TAIL = struct.Struct("<QQQ8s")
_KIND, _OFFSET, _N, _FIRST, _LAST, _IDS_SUM, _REST_SUM = range(7)
_COLUMNS = 7


class SortedRunEncoder:
    """Turns blocks of rows into the bytes of a run, in the order in which they are to be written.

    Args:
        record_bytes: size of a record.

    Example:
        >>> encoder = SortedRunEncoder(4)
        >>> pieces = [encoder.header(), *encoder.add(ROWS, np.array([3, 9], np.uint64), np.ones((2, 4), np.uint8)), encoder.footer()]
        >>> data = b"".join(pieces)
        >>> run = SortedRun(lambda offset, size: data[offset : offset + size], len(data), "example")
        >>> [(ids.tolist(), rows.shape) for ids, rows in run.blocks(ROWS)]
        [([3, 9], (2, 4))]
    """

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.size_bytes = _HEAD.size
        self.n_rows = [0, 0]
        self._blocks: list[list[int]] = []
        self._last = [-1, -1]

    def header(self) -> bytes:
        """Return the file's first bytes."""
        return _HEAD.pack(MAGIC, FORMAT_VERSION, self.record_bytes)

    def add(self, kind: int, ids: Ids, rest: Bytes) -> Iterator[memoryview]:
        """Yield the bytes of rows, or of erased ids, behind those of the same kind that were added before.

        Args:
            kind: ROWS or ERASED.
            ids: uint64 [n], ascending, behind the last ones.
            rest: uint8 [n, record bytes], or [n, 8] with versions.
        """
        assert len(ids) == 0 or (int(ids[0]) > self._last[kind] and bool((ids[1:] > ids[:-1]).all()))
        n_block = max(1, BLOCK_BYTES // (8 + rest.shape[1]))
        for start in range(0, len(ids), n_block):
            yield from self._block(kind, ids[start : start + n_block], rest[start : start + n_block])

    def footer(self) -> bytes:
        """Return the file's last bytes; nothing may be added afterwards."""
        footer = np.array(self._blocks, "<u8").reshape(-1, _COLUMNS).tobytes()
        place = struct.pack("<QQ", self.size_bytes, len(self._blocks))
        checksum = xxhash.xxh3_64_intdigest(self.header() + footer + place)
        self.size_bytes += len(footer) + _TAIL.size
        return footer + place + struct.pack("<Q8s", checksum, END_MAGIC)

    def _block(self, kind: int, ids: Ids, rest: Bytes) -> Iterator[memoryview]:
        pieces = [_raw(ids.astype("<u8", copy=False)), _raw(rest)]
        sums = [xxhash.xxh3_64_intdigest(piece) for piece in pieces]
        self._blocks.append([kind, self.size_bytes, len(ids), int(ids[0]), int(ids[-1]), *sums])
        self._last[kind] = int(ids[-1])
        self.n_rows[kind] += len(ids)
        self.size_bytes += ids.nbytes + rest.nbytes
        yield from pieces


class SortedRun:
    """A run that was written. The footer is in memory, blocks are read and checked when they are needed.

    Args:
        read_at: the file's bytes.
        size_bytes: of the file.
        where: its path, for messages.

    Raises:
        JournalDamagedError: header or footer do not hold the bytes that were written. The methods raise it for a block.
    """

    def __init__(self, read_at: ReadAt, size_bytes: int, where: str) -> None:
        self._read_at, self._where, self.size_bytes = read_at, where, size_bytes
        head = read_at(0, _HEAD.size)
        if size_bytes < _HEAD.size + _TAIL.size or head[:8] != MAGIC:
            raise self._damaged(0, "it is no run of rows, or cut off")
        _, version, self.record_bytes = _HEAD.unpack(head)
        if version != FORMAT_VERSION:
            raise JournalDamagedError(other_format(f"{where}: offset {len(MAGIC)}: the run of rows", version, (FORMAT_VERSION,)))
        footer = self._read_footer(head)
        self._blocks = [footer[footer[:, _KIND] == kind] for kind in (ROWS, ERASED)]
        self._check_blocks(footer)

    def ids(self, kind: int) -> Iterator[Ids]:
        """Yield the ids block by block, ascending."""
        for block in self._blocks[kind]:
            yield self._ids(block)

    def blocks(self, kind: int) -> Iterator[tuple[Ids, Bytes]]:
        """Yield ids uint64 [n] and their records (uint8 [n, record bytes]) or versions (uint8 [n, 8]), ascending."""
        for block in self._blocks[kind]:
            yield self._ids(block), self._rest(block)

    def find(self, kind: int, ids: Ids) -> Iterator[tuple[NDArray[np.intp], Bytes]]:
        """Yield, for those ids that are here, their positions in `ids` and their records or versions, block by block.

        Args:
            kind: ROWS or ERASED.
            ids: uint64 [n], ascending.
        """
        blocks = self._blocks[kind]
        if len(ids) == 0 or len(blocks) == 0:
            return
        holder = np.searchsorted(blocks[:, _LAST], ids)  # intp [n]: the only block that can hold each id; n_blocks: none
        starts = np.flatnonzero(np.diff(holder, prepend=-1))  # where the ids of the next block begin
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            if holder[start] == len(blocks) or blocks[holder[start], _FIRST] > ids[stop - 1]:
                continue
            block, asked = blocks[holder[start]], ids[start:stop]
            block_ids = self._ids(block)  # uint64 [m], ascending
            at = np.searchsorted(block_ids, asked)  # places in the block; never behind its end: no id asked is above its last one
            hit = block_ids[at] == asked  # bool, of each id asked: whether the block has it
            if hit.any():
                yield start + np.flatnonzero(hit), as_rows(as_items(self._rest(block))[at[hit]])

    def _read_footer(self, head: bytes) -> NDArray[Any]:
        at = self.size_bytes - _TAIL.size
        tail = self._read_at(at, _TAIL.size)
        if len(tail) < _TAIL.size or tail[-8:] != END_MAGIC:
            raise self._damaged(at, "it does not end as a run")
        offset, n_blocks, checksum, _ = _TAIL.unpack(tail)
        if offset < _HEAD.size or n_blocks > self.size_bytes or offset + 8 * _COLUMNS * n_blocks != at:
            raise self._damaged(at, "its tail claims a footer that does not fit")
        footer = self._read_at(offset, 8 * _COLUMNS * n_blocks)
        if xxhash.xxh3_64_intdigest(head + footer + tail[:16]) != checksum:
            raise self._damaged(offset, "the checksum of its header and footer does not match")
        return np.frombuffer(footer, "<u8").astype(np.uint64, copy=False).reshape(n_blocks, _COLUMNS)

    def _check_blocks(self, footer: NDArray[Any]) -> None:
        """Check that blocks follow each other without gaps, and in order: allocation and search in a reader rely on it."""
        row_bytes = [8 + self.record_bytes, 16]
        end = _HEAD.size
        for kind, offset, n in footer[:, :3].tolist():
            if kind not in (ROWS, ERASED) or offset != end or not 0 < n <= self.size_bytes:
                raise self._damaged(offset, "its footer claims a block that does not fit")
            end += n * row_bytes[kind]
        if end != self.size_bytes - _TAIL.size - footer.nbytes:
            raise self._damaged(end, "blocks and footer do not meet")
        for blocks in self._blocks:
            if (blocks[:, _FIRST] > blocks[:, _LAST]).any() or (blocks[1:, _FIRST] <= blocks[:-1, _LAST]).any():
                raise self._damaged(0, "its blocks are not in the order of their ids")

    def _ids(self, block: NDArray[Any]) -> Ids:
        offset, n = int(block[_OFFSET]), int(block[_N])
        data = self._read_at(offset, 8 * n)
        if len(data) != 8 * n or xxhash.xxh3_64_intdigest(data) != block[_IDS_SUM]:
            raise self._damaged(offset, "the checksum of the block's ids does not match")
        return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)

    def _rest(self, block: NDArray[Any]) -> Bytes:
        kind, offset, n = (int(value) for value in block[:3])
        offset, size = offset + 8 * n, n * (self.record_bytes if kind == ROWS else 8)
        data = self._read_at(offset, size)
        if len(data) != size or xxhash.xxh3_64_intdigest(data) != block[_REST_SUM]:
            raise self._damaged(offset, "the checksum of the block does not match")
        return np.frombuffer(data, np.uint8).reshape(n, -1)

    def _damaged(self, offset: int, why: str) -> JournalDamagedError:
        return JournalDamagedError(f"{self._where}: offset {offset}: {why}. Put a good copy of the file back, or load a checkpoint.")


def _raw(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
