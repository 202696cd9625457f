"""A serving client as a process of its own: `python -m chaos.serving_reader …`. Looks rows of the ledger up and checks that none goes back.
It reads the projection, too.

What it has seen is kept in a file, a moment late, so that the client of a process started again must not be behind it either. When
the harness has written what the table is in the end, it looks all of it up, says what came of it, and ends.
"""

import argparse
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import redis
from numpy.typing import NDArray

import kvemb.serve
from chaos.ledger import DIM, ROWS_PER_GENERATION, TABLE, Plan, torn
from kvemb.errors import KvembError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.process.interrupts import StopFlag
from kvemb.serve import ServingClient

_LOOKUP_MS = 2000.0
_PAUSE_S = 0.01
_KEEP_S = 0.5
_READY_S, _EQUAL_S = 60.0, 15.0
_NEAR = 4  # generations up to the newest that are looked up again and again


class SeenRows:
    """The newest that was seen of each row: counters, which only rise.

    Args:
        path: of the file.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     seen = SeenRows(Path(folder) / "seen.npy")
        ...     rows = np.zeros((ROWS_PER_GENERATION, DIM), np.float32)
        ...     seen.look(0, rows + 1), seen.look(0, rows)
        (0, 256)
    """

    def __init__(self, path: Path) -> None:
        self._path, self._kept_s = path, 0.0
        self._rows: NDArray[np.float32] = np.load(path) if path.exists() else np.zeros((0, ROWS_PER_GENERATION, DIM), np.float32)

    @property
    def newest(self) -> int:
        """The newest generation of which a row was seen."""
        return max(0, len(self._rows) - 1)

    def look(self, generation: int, rows: NDArray[np.float32]) -> int:
        """Compare a generation's rows; return how many are torn, or less than they were."""
        if generation >= len(self._rows):
            if not rows.any():
                return 0
            more = np.zeros((generation + 1 - len(self._rows), ROWS_PER_GENERATION, DIM), np.float32)
            self._rows = np.concatenate([self._rows, more])
        seen = self._rows[generation]
        bad = int(((rows < seen).any(axis=1) | torn(rows)).sum())
        np.maximum(seen, rows, out=seen)
        return bad

    def keep(self) -> None:
        """Write the file, now and then."""
        if time.monotonic() - self._kept_s > _KEEP_S:
            new = self._path.with_suffix(".new.npy")
            np.save(new, self._rows)
            new.replace(self._path)
            self._kept_s = time.monotonic()


class ProjectionReader:
    """Reads hashes of the ledger's projection as another program would.

    Args:
        port: of the target.
    """

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port, protocol=2, socket_timeout=_LOOKUP_MS / 1e3)
        self._keys: list[str] = []
        self._seen: dict[bytes, NDArray[np.float32]] = {}

    def look(self, chance: random.Random) -> int:
        """Read a hash; return how many of its rows are less than they were."""
        try:
            self._keys = self._keys or json.loads(self._client.get("kvemb:projection") or b"{}")["tables"][TABLE]["keys"]
            found = self._client.hgetall(chance.choice(self._keys))
        except (redis.RedisError, KeyError):  # it is down, or has nothing yet
            return 0
        raw = cast("dict[bytes, bytes]", found)  # as this client gives them
        rows = {row: np.frombuffer(value, np.float32) for row, value in raw.items() if row != b"-"}
        bad = sum(bool((now < self._seen[row]).any()) for row, now in rows.items() if row in self._seen)
        self._seen.update(rows)
        return bad


class ServingReader:
    """Looks rows up.

    Args:
        config: kvemb.yaml.
        plan: of the run.
        projection: of its table.
        folder: of its files.
    """

    def __init__(self, config: str, plan: Plan, projection: ProjectionReader, folder: Path) -> None:
        self._config, self._plan, self._projection, self._folder = config, plan, projection, folder
        self._seen, self._random = SeenRows(folder / "seen.npy"), random.Random()
        self.stop = StopFlag()

    def run(self) -> None:
        """Look rows up until `stop` is set, or the end was looked at."""
        while not self.stop.is_set():
            try:
                with kvemb.serve.connect(self._config, timeout_ms=_LOOKUP_MS, filter_mb=8, cache_mb=64) as client:
                    self._look_on(client)
            except KvembError as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                self.stop.wait(0.2)

    def _look_on(self, client: ServingClient) -> None:
        while not self.stop.is_set():
            newest = self._seen.newest
            self._look(client, self._random.choice((newest, newest + 1, max(0, newest - self._random.randrange(_NEAR)))))
            self._look(client, self._random.randrange(newest + 1))
            if bad := self._projection.look(self._random):
                self._note({"went_back": bad, "in": "the target"})
            self._seen.keep()
            if (self._folder / "expected.npz").exists():
                self._compare(client)
                self.stop.set()
            self.stop.wait(_PAUSE_S)

    def _look(self, client: ServingClient, generation: int) -> None:
        try:
            rows, sources = client.lookup(TABLE, self._plan.ids(generation), return_sources=True)
        except StorageError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self.stop.wait(0.1)
            return
        if bad := self._seen.look(generation, rows):
            found = {kvemb.serve.ServedFrom(one).name.lower(): n for one, n in enumerate(np.bincount(sources).tolist()) if n}
            self._note({"went_back": bad, "generation": generation, "at": time.strftime("%H:%M:%S"), "sources": found})

    def _compare(self, client: ServingClient) -> None:
        """Look all rows up, again until they are the table's."""
        with np.load(self._folder / "expected.npz") as expected:
            ids, rows = expected["ids"], expected["rows"]
        ready, deadline, different = client.wait_ready(_READY_S), Deadline.after(_EQUAL_S), len(ids)
        while different and not deadline.expired:
            try:
                got, sources = client.lookup(TABLE, ids, return_sources=True)
            except StorageError:
                continue
            different = int((got != rows).any(axis=1).sum())
        cached = int((sources == kvemb.serve.ServedFrom.CACHE).sum())
        self._note({"looked_up": len(ids), "different": different, "from_cache": cached, "ready": ready})

    def _note(self, what: dict[str, Any]) -> None:
        with (self._folder / "served.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")


def main() -> int:
    """Run the reader."""
    parser = argparse.ArgumentParser(prog="python -m chaos.serving_reader", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--trainers", type=int, required=True)
    parser.add_argument("--target-port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    reader = ServingReader(args.config, Plan(args.seed, args.trainers), ProjectionReader(args.target_port), args.folder)
    signal.signal(signal.SIGTERM, lambda *_: reader.stop.set())
    reader.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
