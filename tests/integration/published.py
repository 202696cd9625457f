"""A publisher in a process of its own, its target, and what a stranger with redis-py finds there."""

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import redis

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.errors import ShardUnavailableError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.net.deadline import Deadline

PATIENCE_S = 90.0
DIM, N_IDS = 4, 3000
_BYTES = {"float32": 4, "float16": 2}
_PAGE = Path(__file__).resolve().parent.parent.parent / "docs/projection.md"
_READER = _PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


class Published:
    """A target and its publishers.

    Args:
        local: the cluster.
        target: an empty server.
        options: further ones of the command.
    """

    def __init__(self, local: LocalCluster, target: StorageServer, *options: str) -> None:
        self._local, self.target, self._options = local, target, options
        self.client = redis.Redis(port=target.port, protocol=2)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.output = local.folder  # of the last one: its log

    def start(self, *options: str) -> "subprocess.Popen[bytes]":
        words = ["publish", str(self._local.config_path), "--to", f"redis://{self.target.address}", "--tables", "user"]
        command = [sys.executable, "-m", "kvemb.cli", *words, *self._options, *options]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.output = self._local.folder / f"publisher-{len(self.processes)}.log"
        with self.output.open("wb") as out:
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env))
        return self.processes[-1]

    def succeed(self) -> "subprocess.Popen[bytes]":
        """Start a publisher, and wait until it has taken over."""
        before, deadline = self.client.get("kvemb:publisher:1/1"), Deadline.after(PATIENCE_S)
        process = self.start()
        while self.client.get("kvemb:publisher:1/1") == before:
            assert not deadline.expired, self.output.read_text()
            threading.Event().wait(0.02)
        return process

    def kill(self) -> None:
        """Kill -9 every publisher, and wait for their ends."""
        for process in self.processes:
            process.kill()
            process.wait(PATIENCE_S)

    def about(self) -> dict[str, Any]:
        tables: dict[str, dict[str, Any]] = json.loads(self.client.get("kvemb:projection") or b'{"tables": {}}')["tables"]
        return tables.get("user", {})

    def position(self, share: str = "1/1") -> dict[int, list[int]]:
        try:
            record = json.loads(self.client.get(f"kvemb:projection:{share}") or b"{}")
        except redis.ConnectionError:
            return {}
        return {int(shard): at for shard, at in (record.get("position") or {}).items()}

    def reach(self, cluster: kvemb.Cluster, *shares: str) -> None:
        """Wait until everything that is in storage now has been published."""
        wanted, deadline = {shard: k for shard, (_, k) in enumerate(cluster.progress())}, Deadline.after(PATIENCE_S)
        for share in shares or ("1/1",):
            while not (at := self.position(share)) or any(at[shard][1] < k for shard, k in wanted.items() if shard in at):
                if deadline.expired or all(one.poll() is not None for one in self.processes):
                    self.kill()
                    raise AssertionError((at, wanted, deadline.expired, self.output.read_text()))
                threading.Event().wait(0.02)

    def rows(self) -> dict[int, bytes]:
        """Every value of the table's hashes, by id; the rest of the target is checked to be the projection's own."""
        about = self.about()
        other = {key for key in self.client.keys("*") if not key.startswith((b"kvemb:projection", b"kvemb:publisher:"))}
        assert other <= {key.encode() for key in about["keys"]}
        found: dict[int, bytes] = {}
        for key in about["keys"]:
            fields = self.client.hgetall(key)
            fields.pop(b"-", None)
            assert not found.keys() & {int.from_bytes(field, "little", signed=True) for field in fields}
            found |= {int.from_bytes(field, "little", signed=True): value for field, value in fields.items()}
        return found

    def check(self, cluster: kvemb.Cluster) -> None:
        """Every row of the cluster is there, within the error of its dtype, and no other one."""
        ids, rows = cluster.table("user").export()
        about, found = self.about(), self.rows()
        assert found.keys() == set(ids.tolist())
        for row in ids[:20].tolist():  # as docs/projection.md reads them
            names = {"json": json, "r": self.client, "id": row % 2**64}
            exec(_READER, names)
            assert names["raw"] == found[row]
        raw = b"".join(found[row] for row in ids.tolist())
        if about["dtype"] == "int8":
            values = np.frombuffer(raw, np.uint8).reshape(len(ids), about["dim"] + 4)
            scale = np.ascontiguousarray(values[:, about["dim"] :]).view("<f4")
            got = values[:, : about["dim"]].view(np.int8) * scale
            assert (np.abs(got - rows) <= scale / 2 + np.abs(rows) * 2.0**-20).all()
        else:
            wanted = rows.astype(f"<f{_BYTES[about['dtype']]}")
            np.testing.assert_array_equal(np.frombuffer(raw, wanted.dtype).reshape(wanted.shape), wanted)


@contextmanager
def published(local: LocalCluster, *options: str, kind: str = "redis") -> Iterator[Published]:
    """A target that is empty, and no publisher yet."""
    (target,) = start_servers(kind, 1, local.folder, 64)
    one = Published(local, target, *options)
    try:
        yield one
    finally:
        one.kill()
        one.target.process.kill()


def user_table(cluster: kvemb.Cluster, dim: int = DIM) -> kvemb.Table:
    return cluster.create_table("user", dim=dim, optimizer=kvemb.optim.sgd(lr=0.1), initializer=kvemb.init.normal(std=0.1))


class Beside:
    """Something that a thread does until it is stopped; a context manager that raises what went wrong."""

    def __init__(self) -> None:
        self._end, self._thread = threading.Event(), threading.Thread(target=self._run)
        self.error: BaseException | None = None

    def do(self) -> None:
        """Go on until `_end` is set."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self.do()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(PATIENCE_S)
        if self.error is not None:
            raise self.error


class Churn(Beside):
    """Pushes to random rows, and erases some."""

    def __init__(self, url: str, seed: int = 1) -> None:
        super().__init__()
        self._url, self._random, self.n_steps = url, np.random.default_rng(seed), 0

    def do(self) -> None:
        with kvemb.connect(self._url, trainer=f"churn-{random.random()}", timeout_s=PATIENCE_S) as cluster:
            table = cluster.table("user")
            while not self._end.is_set():
                ids = self._random.choice(N_IDS, 200, replace=False)
                table.push(ids, self._random.standard_normal((200, DIM), np.float32), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)
                if self.n_steps % 5 == 0:
                    with suppress(ShardUnavailableError):  # it was killed; what it had erased is erased
                        table.erase(self._random.choice(N_IDS, 40, replace=False), timeout_s=PATIENCE_S)
                self.n_steps += 1
                self._end.wait(0.01)  # the cores are for what is tested


class Watch(Beside):
    """Reads all rows of a target, which only rise, again and again."""

    def __init__(self, one: Published) -> None:
        super().__init__()
        self._one, self.n_looks = one, 0

    def do(self) -> None:
        seen: dict[int, float] = {}
        while not self._end.is_set():
            for row, value in self._one.rows().items() if self._one.about() else ():
                now = abs(float(np.frombuffer(value, "<f4")[0]))
                assert now >= seen.get(row, 0), (row, now, seen[row])
                seen[row] = now
            self.n_looks += 1
