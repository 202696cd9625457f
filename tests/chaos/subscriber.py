"""A subscriber of the ledger's table, as a process of its own: `python -m chaos.subscriber …`. Notes every event until SIGTERM.

An event, its rows and the position behind it are one entry of its file. A process that is started again, after a SIGKILL at any point,
goes on behind the last whole entry: so the file has every event once. What must not live here: what the events should be (heard).
"""

import argparse
import os
import signal
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

import kvemb
from chaos.ledger import DIM, TABLE
from kvemb.errors import FeedBehindError, KvembError, StorageError
from kvemb.feed.cluster_feed import FeedEvent
from kvemb.process.interrupts import StopFlag

BATCHES, ROW = ("apply", "assign", "erase"), "row"
BEGUN, QUIET = "begun", "quiet"
_FRAME = struct.Struct("<II")  # length and checksum of an entry
_TAKE_S = 0.5
_PAUSE_S = 0.2


@dataclass(frozen=True, eq=False)
class HeardEvent:
    """An event as it was heard. Or "begun": what follows is told by a feed that was begun at the start, since no position held. Or "quiet":
    nothing is told of the table, and the position goes on.

    Args:
        kind, shard, epoch, k: as of `FeedEvent`.
        ids: int64 [n].
        versions: uint64 [n], as they were read with the rows.
        rows: float32 [n, DIM].
        why: of "begun", no position held.
    """

    kind: str
    shard: int = 0
    epoch: int = 0
    k: int = 0
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    versions: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    rows: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, DIM), np.float32))
    why: str = ""


class HeardFile:
    """What a subscriber has heard. An entry that was cut short by a kill is cut off when the file is opened to go on.

    Args:
        path: appended to.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.position: Mapping[int, Sequence[int]] = {}
        """Of the last entry; {} where the feed is to begin at the start."""
        whole = 0
        for entry, end in entries(path):
            self.position, whole = {int(shard): at for shard, at in entry["position"].items()}, end
        os.ftruncate(self._fd, whole)
        os.lseek(self._fd, whole, os.SEEK_SET)

    def note(self, event: HeardEvent, position: Mapping[int, Sequence[int]]) -> None:
        """Write one entry."""
        self.position = {shard: list(at) for shard, at in position.items()}
        arrays = {"ids": event.ids.tobytes(), "versions": event.versions.tobytes(), "rows": event.rows.tobytes()}
        what = {"kind": event.kind, "shard": event.shard, "epoch": event.epoch, "k": event.k, "why": event.why, **arrays}
        data = msgpack.packb({**what, "position": {str(shard): at for shard, at in self.position.items()}})
        os.write(self._fd, _FRAME.pack(len(data), zlib.crc32(data)) + data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def entries(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each whole entry of a file from a place on, and where it ends."""
    with path.open("rb") as file:
        file.seek(start)
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            size, checksum = _FRAME.unpack(frame)
            data = file.read(size)
            if len(data) < size or zlib.crc32(data) != checksum:
                return
            yield msgpack.unpackb(data), file.tell()


def heard(entry: Mapping[str, Any]) -> HeardEvent:
    """Return the event of an entry."""
    ids, versions = np.frombuffer(entry["ids"], np.int64), np.frombuffer(entry["versions"], np.uint64)
    rows = np.frombuffer(entry["rows"], np.float32).reshape(len(ids), DIM)
    return HeardEvent(entry["kind"], entry["shard"], entry["epoch"], entry["k"], ids, versions, rows, entry["why"])


def listen(config: str, file: HeardFile, stop: StopFlag) -> None:
    """Note what is told, until `stop` is set, whatever happens."""
    while not stop.is_set():
        try:
            with kvemb.connect(config, timeout_s=20) as cluster:
                _take_all(cluster, file, stop)
        except KvembError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if isinstance(error, FeedBehindError):
                file.note(HeardEvent(BEGUN, why=str(error)), {})
            stop.wait(_PAUSE_S)


def _take_all(cluster: kvemb.Cluster, file: HeardFile, stop: StopFlag) -> None:
    with cluster.feed.open([TABLE], from_=file.position or "start", weights=True) as feed:
        position = feed.position
        while not stop.is_set():
            try:
                event = feed.take(_TAKE_S)
            except StorageError as error:  # its rows could not be read: it is the next one again
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                stop.wait(_PAUSE_S)
                continue
            if event is not None or feed.position != position:
                position = feed.position
                file.note(HeardEvent(QUIET) if event is None else _as_heard(event), position)


def _as_heard(event: FeedEvent) -> HeardEvent:
    rows = np.empty((len(event.ids), DIM), np.float32) if event.weights is None else event.weights
    return HeardEvent(event.kind, event.shard, event.epoch, event.k, event.ids.astype(np.int64), event.versions, rows)


def main() -> int:
    """Run the subscriber."""
    parser = argparse.ArgumentParser(prog="python -m chaos.subscriber", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--file", type=Path, required=True)
    args = parser.parse_args()
    file, stop = HeardFile(args.file), StopFlag()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    listen(args.config, file, stop)
    file.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
