"""What follows a ledger run in processes of its own: a subscriber of the feed, a publisher and its target, a serving client. And what they
have in the end, beside what the cluster has.

What must not live here: what a subscriber should have heard (heard), who kills and pauses them (catalogue).
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any

import numpy as np
import redis

import kvemb
from chaos.heard import HeardJudge, HeardVerdict
from chaos.ledger import DRIFT, STEPS, TABLE
from chaos.run import LedgerRun, chaos_env
from chaos.subscriber import HeardEvent, entries, heard
from kvemb.local_cluster.processes import LocalProcess, LocalProcessError, free_ports
from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.net.deadline import Deadline

SUBSCRIBER, PUBLISHER, TARGET, READER = "subscriber", "publisher", "target", "serving client"
FOLLOWERS = (SUBSCRIBER, PUBLISHER, TARGET, READER)
_PUBLISHED = (TABLE, DRIFT, STEPS)
_CATCH_UP_S = 120.0
_TARGET_MB = 256
_LOOK_S = 0.25


class DurableServer(StorageServer):
    """A Redis server that has on disk whatever it has acknowledged."""

    def _command(self) -> list[str]:
        files = ["--appenddirname", f"aof-{self.port}"]
        return [*super()._command(), "--appendonly", "yes", "--appendfsync", "always", *files]


@dataclass
class CopiesVerdict:
    """What the target and the serving client had in the end. Everything but the first three must be 0."""

    rows_projected: int = 0
    rows_served: int = 0
    from_cache: int = 0  # of these
    missing: int = 0  # rows of the cluster that the target lacks
    extra: int = 0  # rows of the target that the cluster lacks
    other: int = 0  # rows of the target that are not as the cluster has them
    served_other: int = 0  # rows that the serving client gave otherwise
    went_back: int = 0  # rows that it, or the target, gave older than before, or torn
    not_following: int = 0  # serving clients that did not follow the feed in the end
    examples: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether the promise was kept."""
        wrong = self.missing or self.extra or self.other or self.served_other or self.went_back or self.not_following
        return self.rows_projected > 0 and self.rows_served > 0 and not wrong

    def __str__(self) -> str:
        words = [f"{f.name.replace('_', ' ')} {getattr(self, f.name)}" for f in fields(self) if f.name != "examples"]
        return "copied: " + ", ".join(words) + "".join(f"\n  {example}" for example in self.examples[:20])

    def project(self, name: str, wanted: dict[int, bytes], found: dict[int, bytes]) -> None:
        """Compare the rows of a table, by id, with what its projection holds."""
        missing, extra = wanted.keys() - found.keys(), found.keys() - wanted.keys()
        other = {row for row in wanted.keys() & found.keys() if wanted[row] != found[row]}
        self.rows_projected += len(found)
        self.missing, self.extra, self.other = self.missing + len(missing), self.extra + len(extra), self.other + len(other)
        for what, some in (("missing", missing), ("extra", extra), ("other", other)):
            self.examples += [f"table {name!r}, id {row} is {what} in the target" for row in sorted(some)[:5]]

    def serve(self, notes: list[dict[str, Any]]) -> None:
        """Take over what the serving client has noted."""
        for note in notes:
            self.went_back += note.get("went_back", 0)
            self.rows_served += note.get("looked_up", 0)
            self.from_cache += note.get("from_cache", 0)
            self.served_other += note.get("different", 0)
            self.not_following += not note.get("ready", True)
            if note.get("went_back") or note.get("different") or not note.get("ready", True):
                self.examples.append(f"serving client: {note}")


class Followers:
    """The processes that follow a run; a context manager.

    Args:
        run: whose tables are there.
    """

    def __init__(self, run: LedgerRun) -> None:
        self._run, self._folder = run, run.cluster.folder / "followers"
        self._heard, self._read, self._at = self._folder / "heard", list[HeardEvent](), 0
        self._position: dict[str, list[int]] = {}
        self._processes: dict[str, LocalProcess] = {}
        self.n_ended = 0
        """How often one has ended by itself, with an error that says why."""

    def __enter__(self) -> "Followers":
        self._folder.mkdir()
        self._heard.touch()
        self.target = DurableServer("redis", free_ports(1)[0], self._folder, _TARGET_MB)
        for name in (SUBSCRIBER, PUBLISHER, READER):
            self.start(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in (*self._processes.values(), self.target.process):
            process.signal(signal.SIGCONT)
            process.kill()

    def process(self, name: str) -> LocalProcess:
        """The present process of a follower."""
        return self.target.process if name == TARGET else self._processes[name]

    def start(self, name: str) -> None:
        """Start (again) one of them."""
        if name == TARGET:
            self.target.restart()
            return
        config, plan = str(self._run.cluster.config_path), self._run.plan
        command = {
            SUBSCRIBER: ["-m", "chaos.subscriber", "--config", config, "--file", str(self._heard)],
            PUBLISHER: ["-m", "kvemb.cli", "publish", config, "--to", f"redis://{self.target.address}", "--tables", ",".join(_PUBLISHED)],
            READER: ["-m", "chaos.serving_reader", "--config", config, "--folder", str(self._folder)],
        }[name]
        if name == READER:
            command += ["--seed", str(plan.seed), "--trainers", str(plan.n_trainers), "--target-port", str(self.target.port)]
        log = self._folder / f"{name.replace(' ', '-')}.log"
        self._processes[name] = LocalProcess(name, [sys.executable, *command], log, chaos_env())

    def revive(self) -> None:
        """Start those that have ended by themselves, as a supervisor would; raise if one did not say why in an error of its own.

        Raises:
            LocalProcessError: with its log.
        """
        for name, process in self._processes.items():
            code = process.poll()
            if code is None:
                continue
            if name != PUBLISHER or not process.log_tail().splitlines()[-1].startswith("  kvemb publish: "):
                raise LocalProcessError(f"{name} ended with exit code {code}:\n{process.log_tail()}")
            self.n_ended += 1
            self.start(name)

    def finish(self) -> tuple[HeardVerdict, CopiesVerdict]:
        """Wait until all have what the cluster has, and judge. Nothing is pushed any more, and all that was is applied.

        Raises:
            LocalProcessError: one does not come to its end.
            KvembError: the cluster cannot be read.
        """
        quiet_s = time.time()
        with kvemb.connect(self._run.cluster.url, timeout_s=_CATCH_UP_S) as cluster:
            table = cluster.table(TABLE)
            self._await(SUBSCRIBER, lambda: self._has_heard(cluster.questions.heads(_CATCH_UP_S)))
            ids, rows = table.export()
            versions = table.pull(ids.view(np.uint64), return_versions=True)[1]
            told = HeardJudge(self._run.plan, self._run.records(), self._run.cluster.slot_shards, self._read).run((ids, versions))
            self._await(PUBLISHER, lambda: self._published_until() > quiet_s)
            copies = CopiesVerdict()
            for name in _PUBLISHED:
                self._compare(cluster, name, copies)
        np.savez(self._folder / "expected.new.npz", ids=ids, rows=rows)
        (self._folder / "expected.new.npz").replace(self._folder / "expected.npz")
        reader = self._processes[READER]
        self._await(READER, lambda: reader.poll() is not None)
        served = self._folder / "served.jsonl"
        copies.serve([json.loads(line) for line in served.read_text(encoding="utf-8").splitlines()] if served.exists() else [])
        return told, copies

    def last_words(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{name} (exit code {self.process(name).poll()}):\n{self.process(name).log_tail()}" for name in FOLLOWERS)

    def _await(self, name: str, done: Callable[[], bool]) -> None:
        deadline = Deadline.after(_CATCH_UP_S)
        while not done():
            if deadline.expired:
                raise LocalProcessError(f"{name} has not caught up within {deadline.timeout_s:g} s:\n{self.process(name).log_tail()}")
            if name != READER:
                self.revive()
            time.sleep(_LOOK_S)

    def _has_heard(self, heads: Mapping[int, int]) -> bool:
        """Read what the subscriber has noted; return whether that is all up to these batches."""
        for entry, end in entries(self._heard, self._at):
            self._read.append(heard(entry))
            self._position, self._at = entry["position"], end
        return all(self._position.get(str(shard), (0, 0))[1] >= k for shard, k in heads.items())

    def _compare(self, cluster: kvemb.Cluster, name: str, copies: CopiesVerdict) -> None:
        """Compare a table with its projection; again as long as rows of it go meanwhile, by its policy."""
        wanted = _exported(cluster, name)
        while True:
            found = dict(self._rows_of(name))
            now = _exported(cluster, name)
            if found == wanted or now == wanted:
                copies.project(name, wanted, found)
                return
            wanted = now
            time.sleep(_LOOK_S)

    def _published_until(self) -> float:
        with redis.Redis(port=self.target.port, protocol=2) as client, suppress(redis.RedisError):
            return float(json.loads(client.get("kvemb:projection:1/1") or b"{}").get("until", 0))
        return 0.0

    def _rows_of(self, name: str) -> Iterator[tuple[int, bytes]]:
        with redis.Redis(port=self.target.port, protocol=2) as client:
            for key in json.loads(client.get("kvemb:projection"))["tables"][name]["keys"]:
                for row, value in client.hgetall(key).items():
                    if row != b"-":
                        yield int.from_bytes(row, "little", signed=True), value


def _exported(cluster: kvemb.Cluster, name: str) -> dict[int, bytes]:
    """Every row of a table, by id."""
    ids, rows = cluster.table(name).export()
    return dict(zip(ids.tolist(), (row.tobytes() for row in rows), strict=True))
