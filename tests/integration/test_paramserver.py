"""The real shard process on loopback, over real gRPC, on a real storage server: what a trainer, an operator and a supervisor see."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import kvemb.init
import kvemb.optim
from kvemb.config import StorageConfig
from kvemb.errors import (
    FencedError,
    KvembError,
    PushRejectedError,
    SlotsMovedError,
    TableMismatchError,
    UnknownTableError,
    WrongNodeError,
)
from kvemb.local_cluster.processes import free_ports
from kvemb.protocol.message_format import TableRows, digest_tables
from kvemb.protocol.messages import (
    ByeRequest,
    CountReply,
    CreateTableRequest,
    DescribeReply,
    Empty,
    HelloReply,
    HelloRequest,
    IdsReply,
    IdsRequest,
    PushPart,
    RowsRequest,
    StatusReply,
    TableReply,
    TableRequest,
)
from kvemb.schema.table_def import TableDef
from tests.integration.shard_processes import TABLE, Cluster, Server, Shard, cluster, first_rows, part, server, until
from tests.owners import shard_of
from tests.raw_shard import RawStream

__all__ = ["cluster", "server"]  # fixtures


def test_a_push_becomes_rows_in_storage(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    hello, pushes = shard.hello(), RawStream(shard)
    assert (hello.incarnation, hello.last_sequence, hello.mode) == (1, 0, "async")
    reply = pushes.applied(part(hello, 1, [3, 8]))
    assert (reply.state, reply.k) == ("applied", 1)
    np.testing.assert_array_equal(cluster.weights([3, 8]), first_rows([3, 8]) - np.float32(0.5))
    pushes.send(part(hello, 2, [8, 9]))
    assert pushes.next().state == "accepted"
    shard.flush()
    assert shard.count() == shard.count("") == 3
    ids = shard.call("Ids", IdsRequest("user", True, 0, 10), IdsReply).ids
    assert sorted(np.frombuffer(ids, "<u8").tolist()) == [3, 8, 9]
    status = shard.call("Status", Empty(), StatusReply)
    assert (status.epoch, status.k, status.rows_applied, status.n_rows, status.n_trainers, status.failure) == (1, 2, 4, 3, 1, "")
    assert [reply.state for reply in pushes.rest()] == ["applied"]
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
            assert RawStream(shard).applied(part(hello, 1, mine)).state == "applied"
            with_foreign = part(hello, 2, ids.tolist())
            pushes = RawStream(shard)
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


def test_a_nan_refuses_the_whole_part_names_the_first_id_and_the_sequence_may_be_used_again(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    hello, pushes = shard.hello(), RawStream(shard)
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
    pushes = RawStream(shard)
    pushes.send(part(old, 1, [1]))
    assert isinstance(pushes.error(), FencedError)
    with pytest.raises(WrongNodeError, match="cluster"):
        shard.call("Hello", HelloRequest("b", 0, b"x" * 16, 1), HelloReply)


def test_a_part_that_was_routed_by_an_older_map_is_refused_and_the_same_by_the_map_in_force_taken(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    hello = shard.hello()
    pushes = RawStream(shard)
    pushes.send(replace(part(hello, 1, [1]), map_serial=0))
    error = pushes.error()
    assert isinstance(error, SlotsMovedError)
    assert "routed by the cluster map of serial 0 came in when that of serial 1 was in force; nothing of them was taken" in str(error)
    assert shard.count() == 0
    assert pushes.applied(part(hello, 1, [1])).state == "applied"


def test_sigterm_drains_saves_and_a_restart_goes_on(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    assert shard.health() == health_pb2.HealthCheckResponse.SERVING
    hello, pushes = shard.hello(), RawStream(shard)
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
    pushes = RawStream(again)
    assert pushes.applied(part(hello, 5, [5, 100])).state == "applied"  # a duplicate: nothing changes
    assert pushes.applied(part(hello, 6, [100])).k == status.k + 1
    np.testing.assert_allclose(cluster.weights([100]), first_rows([100]) - np.float32(3.0), rtol=1e-6)  # six pushes, however merged
    assert again.hello("b").incarnation == 2


def test_sigterm_again_and_again_until_the_end_does_not_change_the_exit_code(cluster: Cluster) -> None:
    shard = cluster.start()
    until = time.monotonic() + 30
    while shard.process.child.poll() is None and time.monotonic() < until:
        shard.process.child.send_signal(signal.SIGTERM)
        time.sleep(0.0005)
    assert shard.process.wait() == 0, shard.process.text()


def refused(shard: Shard) -> str:
    """Why the shard takes no other trainer; "" where it does."""
    try:
        shard.hello("b")
    except KvembError as error:
        return str(error)
    return ""


def test_what_was_accepted_before_a_sigterm_is_applied(cluster: Cluster, server: Server) -> None:
    shard = cluster.start()
    shard.create()
    hello, pushes = shard.hello(), RawStream(shard)
    server.pause()
    pushes.send(part(hello, 1, [1]))
    assert pushes.next().state == "accepted"
    shard.process.child.send_signal(signal.SIGTERM)
    until(lambda: "draining" in shard.process.text(), shard.process)
    until(lambda: "draining" in refused(shard), shard.process)  # it says so in its log a little before
    server.go_on()
    assert pushes.next().state == "applied"
    assert shard.process.wait() == 0, shard.process.text()
    np.testing.assert_array_equal(cluster.weights([1]), first_rows([1]) - np.float32(0.5))


def test_a_shard_that_cannot_drain_says_what_is_not_applied_and_exits_4(cluster: Cluster, server: Server) -> None:
    shard = cluster.start(0, "--drain-timeout", "0.2")
    shard.create()
    hello, pushes = shard.hello(), RawStream(shard)
    server.process.end()
    pushes.send(part(hello, 1, [1]))
    assert pushes.next().state == "accepted"
    until(lambda: "retrying because" in shard.process.text(), shard.process)
    assert f"127.0.0.1:{server.port}" in shard.call("Status", Empty(), StatusReply).failure
    shard.process.child.send_signal(signal.SIGTERM)
    assert shard.process.wait() == 4
    assert "not drained: 1 accepted changes are not applied: pushes of a (to step 1)" in shard.process.text()
    assert "in the journal: the next start applies them" in shard.process.text()
    assert "Traceback" not in shard.process.text()


def test_after_kill_9_a_restart_goes_on_from_the_journal(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    hello, pushes = shard.hello(), RawStream(shard)
    for sequence in range(1, 4):
        assert pushes.applied(part(hello, sequence, [sequence, 100])).k == sequence
    shard.process.end()
    again = cluster.start()
    status = again.call("Status", Empty(), StatusReply)
    assert (status.epoch, status.k, status.rows_applied, status.n_rows, status.recovered_rows) == (2, 3, 6, 4, 6)
    assert status.journal_bytes > 0
    back = again.hello("a", hello.incarnation)
    assert (back.incarnation, back.last_sequence) == (1, 3)
    pushes = RawStream(again)
    assert pushes.applied(part(hello, 3, [3, 100])).state == "applied"  # a duplicate: nothing changes
    assert pushes.applied(part(hello, 4, [100])).k == 4
    np.testing.assert_allclose(cluster.weights([100]), first_rows([100]) - np.float32(2.0), rtol=1e-6)
    assert again.hello("b").incarnation == 2
    again.process.end()
    third = cluster.start()
    assert third.call("Status", Empty(), StatusReply).recovered_rows == 1  # what the second start recovered need not be again
    assert third.hello("b").incarnation == 3


@pytest.mark.full
def test_a_changed_name_of_the_cluster_is_refused_and_the_old_one_goes_on(cluster: Cluster) -> None:
    shard = cluster.start()
    shard.create()
    assert RawStream(shard).applied(part(shard.hello(), 1, [1])).state == "applied"
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
    [(["--shard", "-1"], 2, "ConfigError: --shard -1"), (["--start-timeout", "0.1"], 3, "NodeUnavailableError")],
)
def test_a_start_that_cannot_be_is_one_line(tmp_path: Path, options: list[str], code: int, says: str) -> None:
    cluster = Cluster(tmp_path, StorageConfig("redis", (f"127.0.0.1:{free_ports(1)[0]}",)))
    got, text = cluster.refused(0, *options)
    assert (got, says in text.strip().splitlines()[-1], "Traceback" in text) == (code, True, False)


@pytest.mark.full
def test_a_start_that_finds_its_port_taken_does_not_use_up_the_saved_state(cluster: Cluster, server: Server) -> None:
    shard = cluster.start()
    shard.create()
    assert RawStream(shard).applied(part(shard.hello(), 1, [1])).state == "applied"
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
    of_a, of_b = RawStream(shard), RawStream(shard)
    for sequence in (1, 2):
        of_a.send(part(a, sequence, [1], 4.0, table=table))
        assert of_b.applied(part(b, sequence, [1, 2], 2.0, trainer="b", table=table)).k == sequence
        assert [of_a.next().state, of_a.next().k] == ["accepted", sequence]
    assert cluster.weights([1, 2], table).tolist() == [[-6.0], [-2.0]]


def test_the_same_on_memcached(tmp_path: Path, require_server: Callable[[str], str]) -> None:
    port = free_ports(1)[0]
    command = [require_server("memcached"), "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-M", "-o", "no_slab_reassign"]
    if os.geteuid() == 0:
        command += ["-u", "root"]
    server = Server(command, port, tmp_path)
    cluster = Cluster(tmp_path, StorageConfig("memcached", (f"127.0.0.1:{port}",)))
    try:
        shard = cluster.start()
        shard.create()
        hello, pushes = shard.hello(), RawStream(shard)
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
