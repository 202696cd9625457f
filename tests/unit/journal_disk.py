"""A disk below the journal that fails on request, and what a journal holds."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvemb import process
from paramserver.journal import START, Journal, Position, segment_files


class FaultyOs:
    """The system's calls, some of which fail when told to."""

    def __init__(self) -> None:
        self.room: int | None = None  # bytes that may still be written
        self.fail_syncs = False
        self.next_syncs: list[bool] = []  # whether each fails, before the rule above holds again
        self.calls: list[str] = []

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.room is None:
            return os.pwritev(descriptor, buffers, offset)
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        data = b"".join(bytes(buffer) for buffer in buffers)[: self.room]
        self.room -= len(data)
        return os.pwrite(descriptor, data, offset)

    def fdatasync(self, descriptor: int) -> None:
        self.calls.append("fdatasync")
        if self.next_syncs.pop(0) if self.next_syncs else self.fail_syncs:
            raise OSError(errno.EIO, "Input/output error")

    def fsync(self, descriptor: int) -> None:
        self.calls.append("fsync")

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> FaultyOs:
    faulty = FaultyOs()
    for module in (segment_files, process):
        monkeypatch.setattr(module, "os", faulty)
    return faulty


def payloads(journal: Journal, start: Position = START) -> list[bytes]:
    return [bytes(payload) for _, payload in journal.read(start)]


def put(journal: Journal, *entries_: bytes) -> list[Position]:
    positions = [journal.append([entry]) for entry in entries_]
    journal.commit()
    return positions


def refuse(self: Path, missing_ok: bool = False) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def last_file(folder: Path) -> Path:
    return max(folder.glob("*.journal"))
