"""What a shard lets one peer, and all of them together, take of it: streams, bytes, names, tables. Real gRPC and a real storage server."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

import kvemb
from kvemb.config import load
from kvemb.errors import InvalidInputError
from kvemb.local_cluster.processes import free_ports
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import MAX_REQUEST_BYTES, CreateTableRequest, Empty, PushPart, PushReply, StatusReply, TableReply
from paramserver.ingest import sessions
from paramserver.ingest.work_queue import Limits
from paramserver.lifecycle.start import start
from paramserver.model import table_registry
from paramserver.rpc import push_streams
from tests.integration.shard_processes import PATIENCE_S, TABLE, Cluster, Server, Shard, cluster, part, server
from tests.raw_shard import RawStream

__all__ = ["cluster", "server"]  # fixtures


class Peer(Shard):
    """A client with a connection of its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        limits = [("grpc.max_send_message_length", 2 * MAX_REQUEST_BYTES), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options=limits)


class InProcess:
    """A shard in this process, whose limits a test may lower, and its address in kvemb.yaml."""

    def __init__(self, made: Cluster) -> None:
        path = made.folder / "kvemb.yaml"
        path.write_text(path.read_text().replace("127.0.0.1:1'", f"127.0.0.1:{free_ports(1)[0]}'"))
        self.config = load(path, {})
        self.url = path.as_uri()
        address = self.config.servers.shards[0]
        self.shard = start(self.config, 0, listen=address, start_timeout_s=PATIENCE_S, wait=time.sleep)
        self._made: list[Peer] = []

    def peer(self) -> Peer:
        """Another connection."""
        made = Peer(self.config.servers.shards[0])
        self._made.append(made)
        return made

    def bytes_in_hand(self) -> int:
        return self.shard._handlers._in_hand._n_bytes

    def close(self) -> None:
        for made in self._made:
            made.channel.close()
        self.shard.stop(5.0)


@pytest.fixture
def launch(cluster: Cluster) -> Iterator[Callable[[], InProcess]]:
    with ExitStack() as stack:

        def one() -> InProcess:
            made = InProcess(cluster)
            stack.callback(made.close)
            return made

        yield one


def sees_through(pushes: Callable[[], RawStream], sent: Callable[[], PushPart]) -> PushReply:
    """Send a part, over new streams where the shard has no place for them yet, as kvemb's client does."""
    deadline = Deadline.after(PATIENCE_S)
    while True:
        try:
            return pushes().applied(sent())
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or deadline.expired:
                raise
        time.sleep(0.1)


def test_idle_push_streams_keep_no_new_trainer_out(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    peers = [Peer(shard.address) for _ in range(1 + push_streams.MAX_STREAMS // push_streams.MAX_STREAMS_OF_PEER)]
    idle = [RawStream(peer) for peer in peers for _ in range(push_streams.MAX_STREAMS_OF_PEER)]
    assert len(idle) > push_streams.MAX_STREAMS
    hello = shard.hello("late")
    assert sees_through(lambda: RawStream(shard), lambda: part(hello, 1, [3], trainer="late")).state == "applied"
    deadline, least = Deadline.after(PATIENCE_S), len(idle) + 1 - push_streams.MAX_STREAMS
    while (n_ended := sum(not pushes.is_open for pushes in idle)) < least and not deadline.expired:
        time.sleep(0.02)  # the news of an end may come after the answer
    assert n_ended >= least
    for peer in peers:
        peer.channel.close()


def test_one_connection_may_open_so_many_streams_and_others_are_served_all_the_same(
    launch: Callable[[], InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_streams, "_MAY_LEAVE_AFTER_S", 1e6)
    made = launch()
    greedy, other = made.peer(), made.peer()
    other.create()
    kept = [RawStream(greedy) for _ in range(push_streams.MAX_STREAMS_OF_PEER)]
    hello = greedy.hello()
    for pushes in kept:
        pushes.send(part(hello, 1, [1]))
        assert pushes.next().state in ("accepted", "applied")
    with pytest.raises(grpc.RpcError) as caught:
        RawStream(greedy).next()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f"{push_streams.MAX_STREAMS_OF_PEER} push streams of this connection" in str(caught.value.details())
    assert RawStream(other).applied(part(other.hello("b"), 1, [1], trainer="b")).state == "applied"


def test_a_stream_that_is_idle_is_ended_and_its_trainer_does_not_notice(
    launch: Callable[[], InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_streams, "_LONGEST_IDLE_S", 0.2)
    made = launch()
    with kvemb.connect(made.url) as opened:
        table = opened.create_table("rows", dim=2, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros())
        for n in range(1, 4):
            table.push([7], np.full((1, 2), -1.0, np.float32)).wait_applied(PATIENCE_S)
            until(lambda: readers() == 0)
            assert table.pull([7])[0].tolist() == [n, n]


def test_a_shard_that_stops_ends_its_trainers_streams(launch: Callable[[], InProcess]) -> None:
    made = launch()
    shard = made.peer()
    shard.create()
    pushes = RawStream(shard)
    assert pushes.applied(part(shard.hello(), 1, [1])).state == "applied"
    assert made.shard.stop(5.0) == ""
    assert pushes.stream.code() is grpc.StatusCode.OK, "not cancelled when the time for last replies was over"


def readers() -> int:
    return sum(thread.name == "kvemb-push-reader" for thread in threading.enumerate())


def until(holds: Callable[[], bool]) -> None:
    deadline = Deadline.after(PATIENCE_S)
    while not holds():
        assert not deadline.expired
        time.sleep(0.01)


def test_a_message_longer_than_any_trainer_sends_is_refused_before_it_is_read(launch: Callable[[], InProcess]) -> None:
    made = launch()
    shard = made.peer()
    shard.create()
    pushes = RawStream(shard)
    pushes.send(bytes(MAX_REQUEST_BYTES + 1))
    with pytest.raises(grpc.RpcError) as caught:
        pushes.next()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert RawStream(shard).applied(part(shard.hello(), 1, [1])).state == "applied"


def test_parts_without_room_are_held_up_to_a_limit_and_the_others_are_sent_again(
    launch: Callable[[], InProcess], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.ingest.ingest.Limits", lambda: Limits(total_items=1))
    monkeypatch.setattr(push_streams, "MAX_BYTES_IN_HAND", 1000)
    monkeypatch.setattr(push_streams, "_SEND_AGAIN_AFTER_S", 0.1)
    made = launch()
    shard = made.peer()
    shard.create()
    ids = list(range(50))
    hello = {name: shard.hello(name) for name in "abc"}
    first, second = RawStream(shard), RawStream(shard)
    server.pause()
    first.send(part(hello["a"], 1, ids))
    assert first.next().state == "accepted"
    second.send(part(hello["b"], 1, ids, trainer="b"))  # has pushed nothing yet, and waits for room all the same
    until(lambda: made.bytes_in_hand() > 0)
    third = RawStream(shard)
    third.send(part(hello["c"], 1, ids, trainer="c"))
    with pytest.raises(grpc.RpcError) as caught:
        third.next()
    server.go_on()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "wait for room in this shard, at most 1000 may" in str(caught.value.details())
    assert first.next().state == "applied"
    assert [second.next().state for _ in range(2)] == ["accepted", "applied"]
    last = sees_through(lambda: RawStream(shard), lambda: part(hello["c"], 1, ids, trainer="c"))
    assert last.state == "applied"
    assert shard.call("Status", Empty(), StatusReply).rows_applied == 3 * len(ids)


def test_names_that_never_push_are_forgotten_before_they_keep_a_trainer_out(
    launch: Callable[[], InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 10)
    made = launch()
    shard = made.peer()
    shard.create()
    hello, pushes = shard.hello("old"), RawStream(shard)
    assert pushes.applied(part(hello, 1, [1], trainer="old")).state == "applied"
    for number in range(50):
        shard.hello(f"name-{number}")
    assert shard.call("Status", Empty(), StatusReply).n_trainers == 10
    late = shard.hello("late")
    assert RawStream(shard).applied(part(late, 1, [1], trainer="late")).state == "applied"
    assert pushes.applied(part(hello, 2, [1], trainer="old")).state == "applied", "one that has pushed is known still"


def test_tables_are_bounded_in_number_and_in_what_their_definitions_take(
    launch: Callable[[], InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_registry, "MAX_TABLES", 3)
    made = launch()
    shard = made.peer()
    for name in ("one", "two", "three"):
        shard.create(replace(TABLE, name=name))
    with pytest.raises(InvalidInputError, match="a cluster has at most 3 tables"):
        shard.create(replace(TABLE, name="four"))
    monkeypatch.setattr(table_registry, "MAX_TABLES", 1000)
    monkeypatch.setattr(table_registry, "MAX_REGISTRY_BYTES", 600)
    with pytest.raises(InvalidInputError, match=r"the definitions of 4 tables take \d+ bytes, at most 600"):
        shard.create(replace(TABLE, name="four"))
    reply = shard.call("CreateTable", CreateTableRequest(replace(TABLE, name="one").to_dict(), True), TableReply)
    assert reply.table["name"] == "one", "those that are there stay as they are"


def test_what_a_shard_keeps_on_disk_is_its_own_users_alone(cluster: Cluster) -> None:
    cluster.write(1, ", journal_max_mb: 1")
    folder = cluster.folder / "data"
    before = os.umask(0)
    try:
        shard = cluster.start()
    finally:
        os.umask(before)
    shard.create()
    hello, pushes = shard.hello(), RawStream(shard)
    for sequence in range(1, 4):
        assert pushes.applied(part(hello, sequence, list(range(40_000)))).state == "applied"
    until(lambda: any(folder.rglob("*.run")))
    shard.process.child.terminate()
    assert shard.process.wait() == 0
    kept = [path for path in folder.rglob("*")]
    assert {"epoch", "state", "lock", "tables", "journal", "snapshot"} <= {path.name for path in kept}
    assert {oct(mode_of(path)) for path in [folder, *kept] if path.is_dir()} == {"0o700"}
    assert {oct(mode_of(path)) for path in kept if path.is_file()} == {"0o600"}


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777
