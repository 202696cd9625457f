"""What the disk alone does with the same bytes: the peers of journal and checkpoints. Nothing of ours runs here.

Bytes are random, as rows and gradients nearly are: a disk that compresses would otherwise look faster than it is.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Moved:
    """Bytes that went to disk, and the seconds it took."""

    n_bytes: int
    seconds: float

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10**6) per second."""
        return self.n_bytes / 1e6 / self.seconds


def append_durably(path: Path, n_bytes: int, n_pieces: int) -> Moved:
    """Append random bytes to a new file in pieces of one size, fdatasync after each; the file is deleted again.

    Args:
        path: of the file.
        n_bytes: at least; the last piece is as long as the others.
        n_pieces: at least 1.
    """
    piece = os.urandom(-(-n_bytes // n_pieces))
    try:
        with path.open("xb", buffering=0) as file:
            start_s = time.perf_counter()
            for _ in range(n_pieces):
                file.write(piece)
                os.fdatasync(file.fileno())
            return Moved(len(piece) * n_pieces, time.perf_counter() - start_s)
    finally:
        path.unlink(missing_ok=True)


def copy_raw(source: Path, target: Path) -> Moved:
    """Copy a folder's files into a new folder, each read, written and fsynced, one after the other."""
    start_s, n_bytes = time.perf_counter(), 0
    for file in sorted(one for one in source.rglob("*") if one.is_file()):
        to = target / file.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb", buffering=0) as old, to.open("xb", buffering=0) as new:
            while chunk := old.read(_CHUNK_BYTES):
                n_bytes += new.write(chunk)
            os.fsync(new.fileno())
    return Moved(n_bytes, time.perf_counter() - start_s)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below."""
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def file_system(path: Path, mounts: Iterable[str] | None = None) -> str:
    """Return the kind of file system that a path lies on: on a tmpfs an fsync costs nothing.

    Args:
        path: need not exist.
        mounts: lines of /proc/self/mounts, which are read unless given.

    Example:
        >>> file_system(Path("/tmp/a"), ["/dev/vda / ext4 rw 0 0", "tmp /tmp tmpfs rw 0 0", "x /tmp/ab xfs rw 0 0"])
        'tmpfs'
    """
    if mounts is None:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    resolved, found, kind = path.resolve(), -1, "unknown"
    for line in mounts:
        fields = line.split()
        depth = len(Path(fields[1]).parts)
        if depth >= found and resolved.is_relative_to(fields[1]):  # the last one mounted on a place hides those before
            found, kind = depth, fields[2]
    return kind
