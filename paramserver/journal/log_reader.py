"""Reading the journal: the segments of earlier processes, their entries in order, and how far they reach. Nothing here writes entries.

`last_batch` changes nothing at all, so a caller that finds batches missing can stop with all files as they were.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvemb.errors import JournalBehindError, JournalDamagedError
from kvemb.schema.record import split_version

from . import segment_files
from .entry import version_of
from .segment import HEADER_SIZE, START, Position, SegmentHeader, damaged, entries, find_end, unpack_header


@dataclass(eq=False)
class Segment:
    """A segment and where its committed entries end."""

    path: Path
    header: SegmentHeader
    end: int


def recover(folder: Path, *, sync: bool) -> list[Segment]:
    """Find the segments of earlier processes and where each ends."""
    numbers = segment_files.numbers(folder)
    for before, number in pairwise(numbers):
        if number != before + 1:
            raise JournalDamagedError(
                f"{segment_files.path_of(folder, before + 1)}: this segment of the journal is missing. Put the data folder of the "
                "shard's last owner back, whole: a copy that was made while the shard ran is none."
            )
    headers = [_header(folder, number, last=number == numbers[-1]) for number in numbers]
    known = [(segment_files.path_of(folder, header.number), header) for header in headers if header is not None]
    ends = [header.previous_end for _, header in known[1:]]
    if known:
        ends.append(_end_of(*known[-1], sync=sync))
    return [Segment(path, header, end) for (path, header), end in zip(known, ends, strict=True)]


def read_entries(segments: Sequence[Segment], start: Position) -> Iterator[tuple[Position, memoryview]]:
    """Yield (position after it, payload) of every entry from `start` on."""
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
    """Read a segment's header; a last segment whose creation was not finished is removed: it holds nothing."""
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


def last_batch(folder: Path, start: Position = START) -> int:
    """Return the k of the last batch from a position on; 0 when there is none."""
    try:
        segments = recover(folder, sync=False)
    except OSError as error:
        raise JournalDamagedError(f"{folder}: the journal cannot be read: {error.strerror}") from error
    last = Position(segments[-1].header.number, segments[-1].end) if segments else START
    # A failed sync moves entries to another segment, and positions behind them stay; but then that segment is there.
    if start > last:
        raise JournalBehindError(
            f"{segment_files.path_of(folder, start.segment)}: the saved state goes on from offset {start.offset} of this segment, but the "
            f"journal ends at offset {last.offset} of segment {last.segment}: the pushes acknowledged after that are missing. Put the "
            "files of that folder back as they were, or the data folder of the shard's last owner."
        )
    k = 0
    for _, payload in read_entries([one for one in segments if one.header.number >= start.segment], start):
        version = version_of(payload)
        k = split_version(version)[1] if version else k
    return k
