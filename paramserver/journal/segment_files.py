"""The journal's system calls: segment files and their folder. Every OSError passes through; `write_ahead_log` knows its meaning."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from ..shard_process.data_dir import FILE_MODE
from .segment import ReadAt

_MAX_BUFFERS = 512  # of one call; the system takes 1024
_SUFFIX = ".journal"


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}{_SUFFIX}"


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments that are there, ascending."""
    names = (path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}"))
    return sorted(int(name) for name in names if name.isdecimal())


def create(path: Path) -> int:
    """Create a file that is not there and return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)


def open_to_read(path: Path) -> int:
    """Return a descriptor of a file that is there."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def require_in_place(path: Path, descriptor: int) -> None:
    """Refuse an open file to which its path does not lead any more: a sync succeeds on that, too, and no start would read it."""
    try:
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return
    except FileNotFoundError:
        pass
    what = "this segment of the journal is gone, or another file is in its place: the shard's folder was deleted, unmounted, or copied over"
    raise FileNotFoundError(errno.ENOENT, what, str(path))


def reader(descriptor: int) -> ReadAt:
    """Return a function that reads at an offset; it returns fewer bytes at the file's end only."""

    def read_at(offset: int, size: int) -> bytes:
        # Never more than there is: a size that a damaged file claims must not be allocated.
        size = min(size, max(0, os.fstat(descriptor).st_size - offset))
        data = os.pread(descriptor, size, offset)
        if len(data) == size or not data:
            return data
        return data + read_at(offset + len(data), size - len(data))  # a read returns at most 2 GiB

    return read_at


def write_all(descriptor: int, pieces: Sequence[bytes | memoryview], offset: int) -> None:
    """Write pieces one after another from `offset` on; after an OSError any part of them may be there."""
    left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while left:
        written = os.pwritev(descriptor, left[:_MAX_BUFFERS], offset)
        offset += written
        n_whole = 0
        while n_whole < len(left) and written >= len(left[n_whole]):
            written -= len(left[n_whole])
            n_whole += 1
        left = left[n_whole:]
        if written:
            left[0] = left[0][written:]


def sync(descriptor: int) -> None:
    """Return when the file's data are on the disk."""
    os.fdatasync(descriptor)
