"""Shards as processes of their own on one storage server, and a trainer that speaks their protocol by hand."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvemb.init
import kvemb.optim
from kvemb.config import StorageConfig
from kvemb.local_cluster.processes import free_ports
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import TableRows, digest_tables
from kvemb.protocol.messages import (
    CountReply,
    CreateTableRequest,
    FlushReply,
    FlushRequest,
    HelloReply,
    PushPart,
    TableReply,
    TableRequest,
)
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.storage_kinds import open_store
from tests.raw_shard import PATIENCE_S, RawShard

ROOT = Path(__file__).resolve().parents[2]
TABLE = TableDef("user", 2, kvemb.optim.sgd(0.5), kvemb.init.normal(std=1.0))


class Process:
    """A child process of the test, ended by its id."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self.child = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def wait(self) -> int:
        return self.child.wait(PATIENCE_S)

    def end(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(PATIENCE_S)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def until(ready: Callable[[], bool], process: Process) -> None:
    deadline = Deadline.after(PATIENCE_S)
    while not ready():
        assert process.child.poll() is None, process.text()
        assert not deadline.expired, process.text()
        time.sleep(0.02)


class Shard(RawShard):
    """One running shard, and a raw client of it."""

    def __init__(self, process: Process, address: str) -> None:
        super().__init__(address)
        self.process = process

    def create(self, table: TableDef = TABLE, *, exist_ok: bool = False) -> TableDef:
        return TableDef.from_dict(self.call("CreateTable", CreateTableRequest(table.to_dict(), exist_ok), TableReply).table)

    def flush(self) -> None:
        self.call("Flush", FlushRequest(PATIENCE_S), FlushReply)

    def count(self, table: str = "user") -> int:
        return self.call("Count", TableRequest(table), CountReply).n_rows

    def health(self) -> int:
        reply = health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        return int(reply.status)


def part(hello: HelloReply, sequence: int, ids: list[int], grad: float = 1.0, *, trainer: str = "a", table: TableDef = TABLE) -> PushPart:
    rows = TableRows(table.name, table.schema, np.array(ids, np.uint64), np.full((len(ids), table.dim), grad, np.float32))
    return PushPart(trainer, hello.incarnation, sequence, sequence, False, [rows], digest_tables([rows]))


class Cluster:
    """A configuration file, its storage server, and the shards that a test starts."""

    def __init__(self, folder: Path, storage: StorageConfig, *, n_shards: int = 1, extra: str = "") -> None:
        self.folder, self.storage, self.n_shards = folder, storage, n_shards
        self.shards: list[Shard] = []
        self.write(n_shards, extra)

    def write(self, n_shards: int, extra: str = "") -> None:
        shards = [f"127.0.0.1:{port}" for port in range(1, n_shards + 1)]  # never bound: every shard is told where to listen
        self.folder.joinpath("kvemb.yaml").write_text(
            f"cluster: test\nstorage: {{kind: {self.storage.kind}, nodes: {list(self.storage.nodes)}, timeout_s: 10}}\n"
            f"parameter_servers: {{shards: {shards}, data_dir: {self.folder}/data{extra}}}\n"
        )

    def launch(self, shard: int = 0, *options: str) -> Process:
        command = [sys.executable, "-m", "paramserver", "--config", f"{self.folder}/kvemb.yaml", "--shard", str(shard)]
        command += ["--listen", "127.0.0.1:0", "--ready-file", f"{self.folder}/ready-{shard}", *options]
        self.folder.joinpath(f"ready-{shard}").unlink(missing_ok=True)
        return Process(command, self.folder / f"shard-{shard}-{len(self.shards)}.log")

    def start(self, shard: int = 0, *options: str) -> Shard:
        process = self.launch(shard, *options)
        ready = self.folder / f"ready-{shard}"
        try:
            until(ready.exists, process)
        except BaseException:
            process.end()
            raise
        self.shards.append(Shard(process, ready.read_text().strip()))
        return self.shards[-1]

    def refused(self, shard: int = 0, *options: str) -> tuple[int, str]:
        """Start a shard that must not come up; return exit code and log."""
        process = self.launch(shard, *options)
        try:
            return process.wait(), process.text()
        finally:
            process.end()

    def weights(self, ids: list[int], table: TableDef = TABLE) -> np.ndarray:
        """Read rows as a trainer does."""
        with open_store(self.storage, role="trainer") as store:
            store.open(Deadline.after(PATIENCE_S))
            keys = table.keys(np.array(ids, np.uint64), pages=store.capabilities.pages)
            read = store.rows.read([ReadPart(keys, table.record.size_bytes, table.record.prefix_bytes)], Deadline.after(PATIENCE_S))[0]
        got = read.in_key_order()
        assert got.found.all()
        table.record.check(got.records, keys.ids, got.found)
        return table.record.weights(got.records)

    def close(self) -> None:
        for shard in self.shards:
            shard.channel.close()
            shard.process.end()


def redis_command(path: str, port: int) -> list[str]:
    return [path, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]


class Server:
    """A storage server that a test may stop and start again."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self._command, self.port, self._folder = command, port, folder
        self.start()

    def start(self) -> None:
        self.process = Process(self._command, self._folder / "storage.log")
        until(self._answers, self.process)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def pause(self) -> None:
        os.kill(self.process.child.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        if self.process.child.poll() is None:
            os.kill(self.process.child.pid, signal.SIGCONT)


@pytest.fixture
def server(tmp_path: Path, require_server: Callable[[str], str]) -> Iterator[Server]:
    port = free_ports(1)[0]
    made = Server(redis_command(require_server("redis-server"), port), port, tmp_path)
    yield made
    made.go_on()
    made.process.end()


@pytest.fixture
def cluster(tmp_path: Path, server: Server) -> Iterator[Cluster]:
    made = Cluster(tmp_path, StorageConfig("redis", (f"127.0.0.1:{server.port}",)))
    yield made
    made.close()


def first_rows(ids: list[int]) -> np.ndarray:
    return TABLE.initial_rows(np.array(ids, np.uint64))
