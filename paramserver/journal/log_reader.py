"""The journal's way back: what earlier processes left in the folder, and entries in order. Nothing here writes entries."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvemb.errors import JournalDamagedError

from . import segment_files
from .segment import HEADER_SIZE, Position, SegmentHeader, damaged, entries, find_end, unpack_header


@dataclass(eq=False)
class Segment:
    """A segment and where its committed entries end."""

    path: Path
    header: SegmentHeader
    end: int


def recover(folder: Path, *, sync: bool) -> list[Segment]:
    """Find the segments of earlier processes and where each ends.

    Args:
        folder: of the journal.
        sync: make the last one durable, since what follows is going to build upon it.

    Raises:
        JournalDamagedError: a segment is missing, or is none; or the last one was damaged behind entries that had been durable.
        OSError: a file cannot be read.
    """
    numbers = segment_files.numbers(folder)
    for before, number in pairwise(numbers):
        if number != before + 1:
            raise JournalDamagedError(f"{segment_files.path_of(folder, before + 1)}: this segment of the journal is missing")
    headers = [_header(folder, number, last=number == numbers[-1]) for number in numbers]
    known = [(segment_files.path_of(folder, header.number), header) for header in headers if header is not None]
    ends = [header.previous_end for _, header in known[1:]]
    if known:
        ends.append(_end_of(*known[-1], sync=sync))
    return [Segment(path, header, end) for (path, header), end in zip(known, ends, strict=True)]


def read_entries(segments: Sequence[Segment], start: Position) -> Iterator[tuple[Position, memoryview]]:
    """Yield (position after it, payload) of every entry from `start` on.

    Raises:
        JournalDamagedError: a file does not hold what was written to it, or cannot be read.
    """
    for segment in segments:
        number = segment.header.number
        first = max(start.offset, HEADER_SIZE) if number == start.segment else HEADER_SIZE
        try:
            descriptor = segment_files.open_to_read(segment.path)
            try:
                for after, payload in entries(segment.header, segment_files.reader(descriptor), first, segment.end, str(segment.path)):
                    yield Position(number, after), memoryview(payload)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise JournalDamagedError(f"{segment.path}: {error.strerror}: this segment of the journal cannot be read") from error


def _header(folder: Path, number: int, *, last: bool) -> SegmentHeader | None:
    """Read a segment's header; a last segment that was never finished being created is removed: it holds nothing."""
    path = segment_files.path_of(folder, number)
    with open(path, "rb") as file:
        data = file.read(HEADER_SIZE + 1)
    try:
        header = unpack_header(data, str(path))
    except JournalDamagedError:
        if not last or len(data) > HEADER_SIZE:
            raise
        path.unlink()
        return None
    if header.number != number:
        raise damaged(str(path), 0, f"it says that it is segment {header.number}: files were renamed")
    return header


def _end_of(path: Path, header: SegmentHeader, *, sync: bool) -> int:
    descriptor = segment_files.open_to_read(path)
    try:
        end = find_end(header, segment_files.reader(descriptor), os.fstat(descriptor).st_size, str(path))
        if sync:
            segment_files.sync(descriptor)  # its writer may have died before its own sync
        return end
    finally:
        os.close(descriptor)
