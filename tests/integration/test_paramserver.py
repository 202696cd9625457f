"""The real shard process on loopback, over real gRPC, on a real storage server: what a trainer, an operator and a supervisor see."""

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvemb.init
import kvemb.optim
from kvemb.arrays.hashing import shard_of
from kvemb.config import StorageConfig
from kvemb.errors import (
    FencedError,
    KvembError,
    MessageError,
    PushRejectedError,
    TableMismatchError,
    UnknownTableError,
    WrongNodeError,
    from_wire,
)
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES, Message, TableRows
from kvemb.protocol.messages import (
    MAX_REQUEST_BYTES,
    SERVICE,
    ByeRequest,
    CountReply,
    CreateTableRequest,
    DescribeReply,
    Empty,
    FlushRequest,
    HelloReply,
    HelloRequest,
    IdsReply,
    IdsRequest,
    PushPart,
    PushReply,
    Reply,
    RowsRequest,
    StatusReply,
    TableReply,
    TableRequest,
    digest_tables,
)
from kvemb.schema.keys import RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.storage_kinds import open_store

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0
TABLE = TableDef("user", 2, kvemb.optim.sgd(0.5), kvemb.init.normal(std=1.0))
M = TypeVar("M", bound=Message)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


class Shard:
    """One running shard, and a raw client of it."""

    def __init__(self, process: Process, address: str) -> None:
        self.process, self.address = process, address
        # The client may send more than the server takes: the server must be the one that refuses.
        limits = [("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        self.channel = grpc.insecure_channel(address, options=limits)

    def raw(self, method: str, data: bytes) -> Reply:
        return Reply.decode(self.channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=PATIENCE_S, wait_for_ready=True))

    def call(self, method: str, request: Message, reply_type: type[M]) -> M:
        reply = self.raw(method, request.encode())
        if reply.error:
            raise from_wire(reply.error)
        return reply_type.decode(reply.body)

    def create(self, table: TableDef = TABLE, *, exist_ok: bool = False) -> TableDef:
        return TableDef.from_dict(self.call("CreateTable", CreateTableRequest(table.to_dict(), exist_ok), TableReply).table)

    def hello(self, trainer: str = "a", incarnation: int = 0) -> HelloReply:
        about = self.call("Describe", Empty(), DescribeReply)
        return self.call("Hello", HelloRequest(trainer, incarnation, about.cluster_id, about.n_shards), HelloReply)

    def flush(self) -> None:
        self.call("Flush", FlushRequest(PATIENCE_S), Empty)

    def count(self, table: str = "user") -> int:
        return self.call("Count", TableRequest(table), CountReply).n_rows

    def health(self) -> int:
        reply = health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        return int(reply.status)


class Pushes:
    """A push stream, part by part."""

    def __init__(self, shard: Shard) -> None:
        self._parts: queue.Queue[bytes | None] = queue.Queue(100)
        self._replies = shard.channel.stream_stream(f"/{SERVICE}/Push")(iter(self._parts.get, None), timeout=PATIENCE_S)

    def send(self, part: PushPart) -> None:
        self._parts.put(part.encode())

    def send_raw(self, data: bytes) -> None:
        self._parts.put(data)

    def next(self) -> PushReply:
        return PushReply.decode(next(self._replies))

    def error(self) -> KvembError:
        reply = self.next()
        assert reply.state == "failed"
        return from_wire(reply.error)

    def applied(self, part: PushPart) -> PushReply:
        """Send a part and see it through."""
        self.send(part)
        assert self.next().state == "accepted"
        return self.next()

    def end(self) -> list[bytes]:
        self._parts.put(None)
        return list(self._replies)


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
            f"cluster: test\nstorage: {{kind: {self.storage.kind}, nodes: {list(self.storage.nodes)}, timeout_s: 2}}\n"
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
            keys = RowKeys(table.tag, np.array(ids, np.uint64))
            read = store.read([ReadPart(keys, table.record.size_bytes, table.record.prefix_bytes)], Deadline.after(PATIENCE_S))[0]
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
    port = free_port()
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
    return TABLE.initializer.rows(np.array(ids, np.uint64), TABLE.dim, table=TABLE.name, seed=TABLE.seed)


def test_a_push_becomes_rows_in_storage(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    hello, pushes = shard.hello(), Pushes(shard)
    assert (hello.incarnation, hello.last_sequence, hello.mode) == (1, 0, "async")
    reply = pushes.applied(part(hello, 1, [3, 8]))
    assert (reply.state, reply.k) == ("applied", 1)
    np.testing.assert_array_equal(cluster.weights([3, 8]), first_rows([3, 8]) - np.float32(0.5))
    pushes.send(part(hello, 2, [8, 9]))
    assert pushes.next().state == "accepted"
    shard.flush()
    assert shard.count() == shard.count("") == 3
    ids = shard.call("Ids", IdsRequest("user", True, 0, 10), IdsReply).ids
    assert np.frombuffer(ids, "<u8").tolist() == [3, 8, 9]
    status = shard.call("Status", Empty(), StatusReply)
    assert (status.epoch, status.k, status.rows_applied, status.n_rows, status.n_trainers, status.failure) == (1, 2, 4, 3, 1, "")
    assert [PushReply.decode(data).state for data in pushes.end()] == ["applied"]
    shard.call("Bye", ByeRequest("a", hello.incarnation), Empty)
    assert shard.call("Status", Empty(), StatusReply).n_trainers == 0


@pytest.mark.parametrize("n_shards", [2])
def test_every_shard_owns_its_ids_and_knows_shard_0s_tables(cluster: Cluster, n_shards: int) -> None:
    cluster.write(n_shards)
    late = cluster.launch(1)  # waits for shard 0 to provision
    try:
        shards = [cluster.start(0)]
        until((cluster.folder / "ready-1").exists, late)
        shards.append(Shard(late, (cluster.folder / "ready-1").read_text().strip()))
        cluster.shards.append(shards[1])
        shards[0].create()
        incarnation = shards[0].hello().incarnation
        ids = np.arange(20, dtype=np.uint64)
        for number, shard in enumerate(shards):
            hello, mine = shard.hello("a", incarnation), ids[shard_of(ids, 2) == number].tolist()
            assert Pushes(shard).applied(part(hello, 1, mine)).state == "applied"
            with_foreign = part(hello, 2, ids.tolist())
            pushes = Pushes(shard)
            pushes.send(with_foreign)
            assert "belongs to shard" in str(pushes.error())
        assert sum(shard.count() for shard in shards) == 20
        np.testing.assert_array_equal(cluster.weights(ids.tolist()), first_rows(ids.tolist()) - np.float32(0.5))
    finally:
        late.end()


def test_assign_erase_and_ids(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    ids = np.array([1, 2, 2**64 - 1], np.uint64)
    rows = TableRows("user", TABLE.schema, ids, np.arange(6, dtype=np.float32).reshape(3, 2))
    shard.call("Assign", RowsRequest(rows, 10.0), Empty)
    assert cluster.weights([2**64 - 1]).tolist() == [[4.0, 5.0]]
    gone = TableRows("user", TABLE.schema, np.array([2, 5], np.uint64), np.empty((2, 0), np.float32))
    assert shard.call("Erase", RowsRequest(gone, 10.0), CountReply).n_rows == 1
    page = shard.call("Ids", IdsRequest("user", False, 1, 10), IdsReply).ids
    assert np.frombuffer(page, "<u8").tolist() == [2**64 - 1]


def test_tables_have_one_identity(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    with pytest.raises(TableMismatchError, match="dim"):
        shard.create(TableDef("user", 3, TABLE.optimizer, TABLE.initializer), exist_ok=True)
    with pytest.raises(UnknownTableError, match="existing: user"):
        shard.call("GetTable", TableRequest("usr"), TableReply)
    with pytest.raises(KvembError, match="table definition"):
        shard.call("CreateTable", CreateTableRequest({"name": "x"}, True), TableReply)
    assert [table["name"] for table in shard.call("Describe", Empty(), DescribeReply).tables] == ["user"]


def test_a_duplicate_gets_its_first_answer_and_a_gap_is_refused(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    hello, pushes = shard.hello(), Pushes(shard)
    first = part(hello, 1, [1])
    assert pushes.applied(first).k == 1
    assert pushes.applied(first).k == 1
    assert Pushes(shard).applied(first).k == 1
    pushes.send(part(hello, 3, [1]))
    error = pushes.error()
    assert isinstance(error, PushRejectedError)
    assert "part 3 after part 1" in str(error)
    pushes.send(part(hello, 1, [1], grad=7.0))
    assert "other data under sequence 1" in str(pushes.error())
    assert pushes.applied(part(hello, 2, [1])).k == 2
    np.testing.assert_array_equal(cluster.weights([1]), first_rows([1]) - np.float32(0.5) - np.float32(0.5))


def test_a_nan_refuses_the_whole_part_names_the_first_id_and_the_sequence_may_be_used_again(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    hello, pushes = shard.hello(), Pushes(shard)
    rows = np.ones((3, 2), np.float32)
    rows[1, 1] = rows[2, 0] = np.nan
    bad = TableRows("user", TABLE.schema, np.array([4, 5, 6], np.uint64), rows)
    pushes.send(PushPart("a", hello.incarnation, 1, 1, False, [bad], digest_tables([bad])))
    error = pushes.error()
    assert isinstance(error, PushRejectedError)
    assert "'user': NaN or infinity in 2 rows, first id 5" in str(error)
    assert shard.count() == 0
    assert pushes.applied(part(hello, 1, [4, 5, 6])).state == "applied"


def test_strangers_and_older_incarnations_are_refused(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    old, _new = shard.hello(), shard.hello()
    pushes = Pushes(shard)
    pushes.send(part(old, 1, [1]))
    assert isinstance(pushes.error(), FencedError)
    with pytest.raises(WrongNodeError, match="cluster"):
        shard.call("Hello", HelloRequest("b", 0, b"x" * 16, 1), HelloReply)
    cluster_id = shard.call("Describe", Empty(), DescribeReply).cluster_id
    with pytest.raises(PushRejectedError, match="knows 3 shards"):
        shard.call("Hello", HelloRequest("b", 0, cluster_id, 3), HelloReply)


@pytest.mark.parametrize("data", [b"", b"\x00" * 100, b"\xdd\xff\xff\xff\xff", Empty().encode()[:-2], HelloReply(1, 2, "x").encode()])
def test_malformed_bytes_are_a_message_error_and_harm_nobody(cluster: Cluster, data: bytes) -> None:
    shard = cluster.start()
    shard.create()
    for method in ("Describe", "Hello", "Assign", "CreateTable", "Flush", "Ids"):
        reply = shard.raw(method, data)
        assert reply.error["type"] == "MessageError"
        assert reply.body == b""
    pushes = Pushes(shard)
    pushes.send_raw(data)
    assert isinstance(pushes.error(), MessageError)
    assert Pushes(shard).applied(part(shard.hello(), 1, [1])).state == "applied"


def test_an_oversized_message_is_refused_and_harms_nobody(cluster: Cluster) -> None:
    shard = cluster.start()
    with pytest.raises(grpc.RpcError) as caught:
        shard.raw("Describe", bytes(MAX_REQUEST_BYTES + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert shard.call("Describe", Empty(), DescribeReply).shard == 0


def test_sigterm_drains_saves_and_a_restart_goes_on(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    assert shard.health() == health_pb2.HealthCheckResponse.SERVING
    hello, pushes = shard.hello(), Pushes(shard)
    for sequence in range(1, 6):
        pushes.send(part(hello, sequence, [sequence, 100]))
    assert [pushes.next().sequence for _ in range(10)].count(5) == 2
    before = shard.call("Status", Empty(), StatusReply)
    shard.process.child.send_signal(signal.SIGTERM)
    assert shard.process.wait() == 0, shard.process.text()
    again = cluster.start()
    assert again.count() == 6
    status = again.call("Status", Empty(), StatusReply)
    assert (status.epoch, status.k, status.rows_applied) == (2, before.k, before.rows_applied)
    back = again.hello("a", hello.incarnation)
    assert (back.incarnation, back.last_sequence) == (1, 5)
    pushes = Pushes(again)
    assert pushes.applied(part(hello, 5, [5, 100])).state == "applied"  # a duplicate: nothing changes
    assert pushes.applied(part(hello, 6, [100])).k == status.k + 1
    np.testing.assert_allclose(cluster.weights([100]), first_rows([100]) - np.float32(3.0), rtol=1e-6)  # six pushes, however merged
    assert again.hello("b").incarnation == 2


def test_what_was_accepted_before_a_sigterm_is_applied(cluster: Cluster, server: Server) -> None:
    shard = cluster.start()
    shard.create()
    hello, pushes = shard.hello(), Pushes(shard)
    server.pause()
    pushes.send(part(hello, 1, [1]))
    assert pushes.next().state == "accepted"
    shard.process.child.send_signal(signal.SIGTERM)
    until(lambda: "draining" in shard.process.text(), shard.process)
    with pytest.raises(KvembError, match="draining"):
        shard.hello("b")
    server.go_on()
    assert pushes.next().state == "applied"
    assert shard.process.wait() == 0, shard.process.text()
    np.testing.assert_array_equal(cluster.weights([1]), first_rows([1]) - np.float32(0.5))


def test_a_shard_that_cannot_drain_says_what_is_not_applied_and_exits_4(cluster: Cluster, server: Server) -> None:
    shard = cluster.start(0, "--drain-timeout", "0.2")
    shard.create()
    hello, pushes = shard.hello(), Pushes(shard)
    server.process.end()
    pushes.send(part(hello, 1, [1]))
    assert pushes.next().state == "accepted"
    until(lambda: "retrying because" in shard.process.text(), shard.process)
    assert f"127.0.0.1:{server.port}" in shard.call("Status", Empty(), StatusReply).failure
    shard.process.child.send_signal(signal.SIGTERM)
    assert shard.process.wait() == 4
    assert "not drained: 1 accepted changes are not applied: pushes of a (to step 1)" in shard.process.text()
    assert "in the journal: the next start applies it" in shard.process.text()
    assert "Traceback" not in shard.process.text()


def test_after_kill_9_a_restart_goes_on_from_the_journal(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    hello, pushes = shard.hello(), Pushes(shard)
    for sequence in range(1, 4):
        assert pushes.applied(part(hello, sequence, [sequence, 100])).k == sequence
    shard.process.end()
    again = cluster.start()
    status = again.call("Status", Empty(), StatusReply)
    assert (status.epoch, status.k, status.rows_applied, status.n_rows, status.recovered_rows) == (2, 3, 6, 4, 6)
    assert status.journal_bytes > 0
    back = again.hello("a", hello.incarnation)
    assert (back.incarnation, back.last_sequence) == (1, 3)
    pushes = Pushes(again)
    assert pushes.applied(part(hello, 3, [3, 100])).state == "applied"  # a duplicate: nothing changes
    assert pushes.applied(part(hello, 4, [100])).k == 4
    np.testing.assert_allclose(cluster.weights([100]), first_rows([100]) - np.float32(2.0), rtol=1e-6)
    assert again.hello("b").incarnation == 2
    again.process.end()
    third = cluster.start()
    assert third.call("Status", Empty(), StatusReply).recovered_rows == 1  # what the second start recovered need not be again
    assert third.hello("b").incarnation == 3


def test_a_changed_name_of_the_cluster_is_refused_and_the_old_one_goes_on(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    assert Pushes(shard).applied(part(shard.hello(), 1, [1])).state == "applied"
    shard.process.end()
    config = cluster.folder / "kvemb.yaml"
    config.write_text(config.read_text().replace("cluster: test", "cluster: another"))
    code, text = cluster.refused()
    assert code == 2
    assert text.strip().splitlines()[-1].startswith("ConfigError: cluster: got 'another', but ")
    assert "is of cluster 'test'" in text
    cluster.write(1)
    assert cluster.start().call("Describe", Empty(), DescribeReply).cluster == "test"


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [(["--shard", "7"], 2, "ConfigError: --shard 7"), (["--start-timeout", "0.1"], 3, "NodeUnavailableError")],
)
def test_a_start_that_cannot_be_is_one_line(tmp_path: Path, options: list[str], code: int, says: str) -> None:
    cluster = Cluster(tmp_path, StorageConfig("redis", (f"127.0.0.1:{free_port()}",)))
    got, text = cluster.refused(0, *options)
    assert (got, says in text.strip().splitlines()[-1], "Traceback" in text) == (code, True, False)


def test_a_start_that_finds_its_port_taken_does_not_use_up_the_saved_state(cluster: Cluster, server: Server) -> None:
    shard = cluster.start()
    shard.create()
    assert Pushes(shard).applied(part(shard.hello(), 1, [1])).state == "applied"
    shard.process.child.send_signal(signal.SIGTERM)
    assert shard.process.wait() == 0
    code, text = cluster.refused(0, "--listen", f"127.0.0.1:{server.port}")
    assert (code, f"cannot listen on 127.0.0.1:{server.port}" in text, "Traceback" in text) == (3, True, False)
    assert cluster.start().count() == 1


def test_two_processes_for_one_shard_are_refused(cluster: Cluster) -> None:
    cluster.start()
    code, text = cluster.refused()
    assert (code, "another process runs shard 0" in text) == (3, True)


def test_a_sync_step_is_released_to_all_at_once(cluster: Cluster) -> None:
    cluster.write(1, ", mode: sync, trainers: 2, barrier_timeout_s: 20")
    shard = cluster.start()
    table = shard.create(TableDef("m", 1, kvemb.optim.sgd(1.0), kvemb.init.zeros(), reduce="mean"))
    a, b = shard.hello("a"), shard.hello("b")
    with pytest.raises(KvembError, match="a, b"):
        shard.hello("c")
    of_a, of_b = Pushes(shard), Pushes(shard)
    for sequence in (1, 2):
        of_a.send(part(a, sequence, [1], 4.0, table=table))
        assert of_b.applied(part(b, sequence, [1, 2], 2.0, trainer="b", table=table)).k == sequence
        assert [of_a.next().state, of_a.next().k] == ["accepted", sequence]
    assert cluster.weights([1, 2], table).tolist() == [[-6.0], [-2.0]]


def test_the_same_on_memcached(tmp_path: Path, require_server: Callable[[str], str]) -> None:
    port = free_port()
    command = [require_server("memcached"), "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-M", "-o", "no_slab_reassign"]
    if os.geteuid() == 0:
        command += ["-u", "root"]
    server = Server(command, port, tmp_path)
    cluster = Cluster(tmp_path, StorageConfig("memcached", (f"127.0.0.1:{port}",)))
    try:
        shard = cluster.start()
        shard.create()
        hello, pushes = shard.hello(), Pushes(shard)
        for sequence in (1, 2):
            assert pushes.applied(part(hello, sequence, [1, 2**63])).k == sequence
        np.testing.assert_array_equal(cluster.weights([2**63]), first_rows([2**63]) - np.float32(0.5) - np.float32(0.5))
        shard.process.child.send_signal(signal.SIGTERM)
        assert shard.process.wait() == 0, shard.process.text()
        assert cluster.start().count() == 2
    finally:
        cluster.close()
        server.process.end()
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
