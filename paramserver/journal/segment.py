"""One segment file of the journal: its header, the frame of each entry, and where it ends. Pure: bytes come through a function.

    segment header, 48 bytes: magic 8 | format version u32 | header size u32 | number u64 | nonce u64 | previous end u64 | check u64
    entry header, 40 bytes:   magic 8 | payload size u64 | durable u64 | xxh3-64 of the payload u64 | check u64
    payload

* A segment says where the one before it ended. So bytes behind that end are never read: a torn entry, or one whose sync failed and which
  was written again. A segment that was cut short, or is missing, is noticed.
* The check of an entry header depends on the segment's nonce and on the offset: no payload, and no older file's bytes, can pass for one.
* `durable` is the offset up to which the segment was known durable when the entry was written. The last segment of a writer may end in an
  entry that is not whole. When an entry after it says that those bytes had been durable, they were damaged later. When none does, they are
  a torn tail, for which no promise was made: a power failure keeps the blocks of an unfinished group in any order.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvemb.errors import JournalDamagedError, ParameterServerError, other_format

MAGIC = b"kvembjnl"
ENTRY_MAGIC = b"kvembent"
FORMAT_VERSION = 1
_HEAD = struct.Struct("<8sIIQQQQ")
_ENTRY = struct.Struct("<8sQQQQ")
HEADER_SIZE = _HEAD.size
ENTRY_HEADER_SIZE = _ENTRY.size
_CHUNK_BYTES = 1 << 20

ReadAt = Callable[[int, int], bytes]
"""(offset, size) -> the file's bytes there; fewer at its end."""


class Position(NamedTuple):
    """A place between two entries; positions order as the entries were written."""

    segment: int
    offset: int


START = Position(0, 0)


@dataclass(frozen=True)
class SegmentHeader:
    """The header of a journal's segment: its number, its nonce, and the end of the segment before it.

    Args:
        number: segments are numbered from 1 without gaps.
        nonce: random, so that entries of another file cannot pass for this one's.
        previous_end: offset at which the segment before it ends.
    """

    number: int
    nonce: int
    previous_end: int

    def pack(self) -> bytes:
        head = _HEAD.pack(MAGIC, FORMAT_VERSION, HEADER_SIZE, self.number, self.nonce, self.previous_end, 0)[:-8]
        return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def unpack_header(data: bytes, where: str) -> SegmentHeader:
    """Read a segment's header."""
    if len(data) < HEADER_SIZE or data[:8] != MAGIC:
        raise damaged(where, 0, "it does not begin as a journal segment")
    _, version, size, number, nonce, previous_end, check = _HEAD.unpack_from(data)
    if check != xxhash.xxh3_64_intdigest(data[: HEADER_SIZE - 8]):
        raise damaged(where, 0, "the checksum of the segment's header does not match")
    if (version, size) != (FORMAT_VERSION, HEADER_SIZE):
        raise ParameterServerError(other_format(f"{where}: a journal's segment", version, (FORMAT_VERSION,)))
    return SegmentHeader(number, nonce, previous_end)


def frame(header: SegmentHeader, offset: int, durable: int, pieces: list[bytes | memoryview]) -> bytes:
    """Return the header of the entry that is going to stand at `offset`."""
    checksum, size = xxhash.xxh3_64(), 0
    for piece in pieces:
        checksum.update(piece)
        size += len(piece)
    head = _ENTRY.pack(ENTRY_MAGIC, size, durable, checksum.intdigest(), 0)[:-8]
    return head + struct.pack("<Q", _check(header, offset, head))


def entries(header: SegmentHeader, read_at: ReadAt, start: int, end: int, where: str) -> Iterator[tuple[int, bytes]]:
    """Yield (offset after it, payload) of every entry from `start` to `end`; one payload is in memory at a time."""
    while start < end:
        found = _entry_header(header, read_at(start, ENTRY_HEADER_SIZE), start)
        if found is None or start + ENTRY_HEADER_SIZE + found.size > end:
            raise damaged(where, start, f"no entry begins here, and entries reach to offset {end}")
        payload = read_at(start + ENTRY_HEADER_SIZE, found.size)
        if len(payload) != found.size or xxhash.xxh3_64_intdigest(payload) != found.checksum:
            raise damaged(where, start, "the checksum of the entry does not match")
        start += ENTRY_HEADER_SIZE + found.size
        yield start, payload


def find_end(header: SegmentHeader, read_at: ReadAt, size: int, where: str) -> int:
    """Return where the last segment of a writer that is gone ends: after its last whole entry."""
    end = HEADER_SIZE
    while end < size:
        found = _entry_header(header, read_at(end, ENTRY_HEADER_SIZE), end)
        after = end + ENTRY_HEADER_SIZE + (found.size if found else 0)
        if found is None or after > size or _checksum(read_at, after - found.size, found.size) != found.checksum:
            break
        end = after
    for offset, later in _headers_behind(header, read_at, end, size):
        if later.durable > end:
            raise damaged(where, end, f"no whole entry begins here, but a later one, at offset {offset}, was written when it was durable")
    return end


def damaged(where: str, offset: int, why: str) -> JournalDamagedError:
    """Return the error that names file and offset."""
    return JournalDamagedError(
        f"{where}: offset {offset}: {why}. Nothing from there on was used. Put a good copy of the file back, or load a checkpoint."
    )


@dataclass(frozen=True)
class _EntryHeader:
    """An entry's header: payload size and checksum, and the offset up to which the segment was durable."""

    size: int
    durable: int
    checksum: int


def _entry_header(header: SegmentHeader, data: bytes, offset: int) -> _EntryHeader | None:
    """Read the header of the entry at `offset`; None when there is none."""
    if len(data) < ENTRY_HEADER_SIZE or data[:8] != ENTRY_MAGIC:
        return None
    _, size, durable, checksum, check = _ENTRY.unpack_from(data)
    return _EntryHeader(size, durable, checksum) if check == _check(header, offset, data[: ENTRY_HEADER_SIZE - 8]) else None


def _headers_behind(header: SegmentHeader, read_at: ReadAt, offset: int, size: int) -> Iterator[tuple[int, _EntryHeader]]:
    """Yield every entry header after `offset`, at any byte."""
    at = offset + 1
    while at < size:
        chunk = read_at(at, _CHUNK_BYTES + len(ENTRY_MAGIC) - 1)
        found = chunk.find(ENTRY_MAGIC)
        while found >= 0:
            entry = _entry_header(header, read_at(at + found, ENTRY_HEADER_SIZE), at + found)
            if entry is not None:
                yield at + found, entry
            found = chunk.find(ENTRY_MAGIC, found + 1)
        at += _CHUNK_BYTES


def _checksum(read_at: ReadAt, offset: int, size: int) -> int:
    checksum, end = xxhash.xxh3_64(), offset + size
    for start in range(offset, end, _CHUNK_BYTES):
        checksum.update(read_at(start, min(_CHUNK_BYTES, end - start)))
    return checksum.intdigest()


def _check(header: SegmentHeader, offset: int, head: bytes) -> int:
    return xxhash.xxh3_64_intdigest(head, seed=header.nonce ^ offset)
