"""Shards that die, hang, or cannot write their journal: every push that was accepted is applied exactly once, and nothing else is.

The ledger: SGD with lr 1 on rows that begin at 0, so that a row says how often each push was applied to it.
"""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from matrix import one_of

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.client import part_numbering
from kvemb.config import StorageConfig, load
from kvemb.errors import KvembError, ShardUnavailableError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import Empty, FlushReply, FlushRequest, StatusReply
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.storage_kinds import open_store
from tests.integration.counting_trainers import KINDS, N_IDS, PATIENCE_S, Trainer, wait_for
from tests.integration.shard_processes import Cluster, Server, first_rows, part, until
from tests.raw_shard import RawStream


@pytest.fixture(params=one_of("memcached", "redis"))
def kind(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> str:
    require_server(KINDS[request.param])
    return str(request.param)


def test_every_push_is_applied_exactly_once_while_shards_are_killed_under_load(kind: str) -> None:
    with LocalCluster(kind, nodes=2, shards=2) as local:
        with kvemb.connect(local.url) as cluster:
            cluster.create_table("ledger", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        stop = threading.Event()
        trainers = [Trainer(local.url, number, stop) for number in range(2)]
        for trainer in trainers:
            trainer.start()
        n_before = 0
        for victim in (0, 1, 0):
            wait_for(lambda n=n_before: all(t.n_pushes > n + 20 or t.error for t in trainers))  # type: ignore[misc]
            local.shards[victim].kill()
            local.start_shard(victim)
            n_before = max(trainer.n_pushes for trainer in trainers)
        wait_for(lambda: all(t.n_pushes > n_before + 20 or t.error for t in trainers))
        stop.set()
        for trainer in trainers:
            trainer.join(PATIENCE_S)
        assert [trainer.error for trainer in trainers] == [None, None]
        with kvemb.connect(local.url, read_only=True) as cluster:
            rows = cluster.table("ledger").pull(np.arange(N_IDS))
        np.testing.assert_array_equal(rows, sum(trainer.counts for trainer in trainers))


@pytest.mark.full
def test_a_push_in_many_parts_survives_a_kill_as_a_whole(require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    require_server("redis-server")
    original = part_numbering.split
    monkeypatch.setattr(part_numbering, "split", lambda tables: original(tables, 1 << 12))
    with LocalCluster("redis") as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("ledger", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        ids, grads = np.arange(8000), -np.ones((8000, 4), np.float32)  # 47 parts, where 8 make a full window
        acks = [table.push(ids, grads, timeout_s=PATIENCE_S)]
        acks[0].wait(PATIENCE_S)
        local.shards[0].kill()
        local.start_shard(0)
        acks.append(table.push(ids, grads, timeout_s=PATIENCE_S))
        for ack in acks:
            ack.wait_applied(PATIENCE_S)
        np.testing.assert_array_equal(table.pull(ids), np.full((8000, 4), 2.0))


@pytest.fixture
def cluster(kind: str, tmp_path: Path, require_server: Callable[[str], str]) -> Iterator[tuple[Cluster, Server]]:
    """One shard on one storage server that a test may stop."""
    port = free_ports(1)[0]
    command = [require_server(KINDS[kind])]
    if kind == "memcached":
        command += ["-l", "127.0.0.1", "-p", str(port), "-U", "0", "-M", "-o", "no_slab_reassign"] + ["-u", "root"] * (os.geteuid() == 0)
    else:
        command += ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = Server(command, port, tmp_path)
    made = Cluster(tmp_path, StorageConfig(kind, (f"127.0.0.1:{port}",)))
    yield made, server
    made.close()
    server.go_on()
    server.process.end()


def test_a_shard_that_hung_in_a_batch_and_was_taken_over_neither_answers_nor_writes(cluster: tuple[Cluster, Server]) -> None:
    shards, server = cluster
    old = shards.start()
    old.create()
    hello, pushes = old.hello(), RawStream(old)
    assert pushes.applied(part(hello, 1, [1, 2])).k == 1
    server.pause()
    pushes.send(part(hello, 2, [1, 3]))
    assert pushes.next().state == "accepted"  # and the batch is on its way to storage now
    os.kill(old.process.child.pid, signal.SIGSTOP)
    server.go_on()
    code, text = shards.refused()
    assert (code, "another process runs shard 0" in text) == (3, True)

    new = shards.start(0, "--take-over")
    status = new.call("Status", Empty(), StatusReply)
    assert (status.epoch, status.k, status.n_rows) == (2, 2, 3)
    assert new.hello("a", hello.incarnation).last_sequence == 2
    of_new = RawStream(new)
    assert of_new.applied(part(hello, 3, [1, 2, 3])).k == 3
    before = shards.weights([1, 2, 3])
    expected = first_rows([1, 2, 3])
    for times in ((1, 1, 1), (1, 0, 1), (1, 1, 0)):
        expected = expected - np.float32(0.5) * np.float32(times)[:, None]
    np.testing.assert_allclose(before, expected, rtol=1e-6)

    os.kill(old.process.child.pid, signal.SIGCONT)
    of_old = RawStream(old)
    of_old.send(part(hello, 3, [1, 4]))  # what it would have taken as the next part
    with pytest.raises((grpc.RpcError, KvembError, StopIteration)) as caught:  # the last: it ended the stream without a word
        raise of_old.error()
    assert isinstance(caught.value, (grpc.RpcError, ShardUnavailableError, StopIteration)), caught.value
    assert old.process.wait() == 5
    last = old.process.text().splitlines()[-1]
    assert "has taken" in last or "owns this shard" in last  # said by the folder, by a node, or by a row of a later epoch
    assert "Traceback" not in old.process.text()
    np.testing.assert_array_equal(shards.weights([1, 2, 3]), before)
    assert of_new.applied(part(hello, 4, [1])).k == 4
    code, _ = shards.refused()
    assert code == 3  # the successor holds the folder
    new.process.child.send_signal(signal.SIGTERM)
    assert new.process.wait() == 0, new.process.text()
    assert shards.start().count() == 3


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mount a disk of 4 MB, where that is allowed."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("kind", ["redis"], indirect=True)
def test_a_full_disk_stops_acknowledgements_says_so_and_recovers(cluster: tuple[Cluster, Server]) -> None:
    shards, _ = cluster
    with small_disk(shards.folder / "data"), ExitStack() as ended:
        shard = shards.start()
        ended.callback(shard.process.end)
        shard.create()
        hello, pushes = shard.hello(), RawStream(shard)
        assert pushes.applied(part(hello, 1, [1])).k == 1
        filler = shards.folder / "data" / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 12)):
                pass
        pushes.send(part(hello, 2, list(range(1, 2000))))
        until(lambda: "No space left" in shard.call("Status", Empty(), StatusReply).failure, shard.process)
        with pytest.raises(KvembError, match=r"JournalFullError.*No space left"):
            shard.call("Flush", FlushRequest(0.5), FlushReply)
        assert shard.count() == 1
        filler.unlink()
        assert [pushes.next().state for _ in range(2)] == ["accepted", "applied"]
        assert (shard.count(), shard.call("Status", Empty(), StatusReply).failure) == (1999, "")
        shard.process.end()
        again = shards.start()
        ended.callback(again.process.end)
        assert again.count() == 1999
        again.process.child.send_signal(signal.SIGTERM)
        assert again.process.wait() == 0, again.process.text()


def fill(disk: Path, leave: int) -> Path:
    """Fill a disk up to so many bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    os.truncate(filler, max(0, filler.stat().st_size - leave))
    return filler


@pytest.mark.full
@pytest.mark.parametrize("kind", ["redis"], indirect=True)
@pytest.mark.parametrize("served_before", [False, True])
def test_a_shard_that_starts_on_a_full_disk_names_its_folder_and_starts_when_there_is_room(
    cluster: tuple[Cluster, Server], served_before: bool
) -> None:
    shards, _ = cluster
    disk = shards.folder / "data"
    with small_disk(disk), ExitStack() as ended:
        disk.joinpath("shard-0").mkdir()
        if served_before:
            shard = shards.start()
            ended.callback(shard.process.end)
            shard.create()
            assert RawStream(shard).applied(part(shard.hello(), 1, list(range(1, 2000)))).k == 1
            shard.process.end()
        for n_pages in (0, 1, 1) if served_before else (0, 1, 1, 1, 1):  # it ends at another of its files each time
            filler = fill(disk, n_pages << 12)
            code, text = shards.refused()
            last = text.strip().splitlines()[-1]
            assert (code, "Traceback" in text) == (3, False), text
            assert last.startswith(("ParameterServerError: ", "JournalFullError: ")), last
            assert str(disk) in last
            assert "No space left on device" in last
            assert "free some space on that disk" in last
            filler.unlink()
        again = shards.start()
        ended.callback(again.process.end)
        assert again.call("Status", Empty(), StatusReply).n_rows == (1999 if served_before else 0)
        again.process.end()


@pytest.mark.parametrize("kind", ["redis"], indirect=True)
def test_a_shard_whose_folder_cannot_be_written_says_so_in_one_line(cluster: tuple[Cluster, Server]) -> None:
    shards, _ = cluster
    folder = shards.folder / "data" / "shard-0"
    (shards.folder / "data").write_text("a file in the way")
    require_refused(shards, f"{folder}: Not a directory; a file stands where a folder should")
    (shards.folder / "data").unlink()
    folder.joinpath("epoch").mkdir(parents=True)
    require_refused(shards, f"{folder}/epoch: Is a directory; a folder stands where a file should")
    shutil.rmtree(shards.folder / "data")
    with small_disk(shards.folder / "data"):
        subprocess.run(["mount", "-o", "remount,ro", str(shards.folder / "data")], check=True)
        require_refused(shards, f"{folder}: Read-only file system; mount that disk writable")


def require_refused(shards: Cluster, because: str) -> None:
    code, text = shards.refused()
    last = text.strip().splitlines()[-1]
    assert (code, last.startswith("ParameterServerError: shard 0: its data folder"), "Traceback" in text) == (3, True, False), text
    assert because in last


# --- a sync job -------------------------------------------------------------------------------------------------------------------------

STEPS, LEAVES_AFTER = 24, 18


def sync_job(local: LocalCluster, trouble: Callable[[int], None]) -> dict[int, tuple[bytes, bytes]]:
    """Train with two trainers, of which one leaves early; return weights and state of every row, bit for bit."""
    with kvemb.connect(local.url, trainer="a") as first, kvemb.connect(local.url, trainer="b") as second:
        definition = first.create_table("t", dim=3, optimizer=kvemb.optim.adam(lr=0.1), initializer=kvemb.init.normal(std=1.0)).definition
        errors: list[BaseException] = []

        def train(cluster: kvemb.Cluster, number: int, n_steps: int) -> None:
            try:
                random, table = np.random.default_rng(number), cluster.table("t")
                for step in range(n_steps):
                    ids = random.choice(40, 10, replace=False)
                    ack = table.push(ids, random.standard_normal((10, 3)).astype(np.float32), timeout_s=PATIENCE_S)
                    if number == 0:
                        trouble(step)
                    ack.wait_applied(PATIENCE_S)
            except BaseException as error:
                errors.append(error)

        table = first.table("t")
        table.push([0], np.zeros((1, 3), np.float32))  # the first one gets the lower incarnation
        second.table("t").push([0], np.zeros((1, 3), np.float32)).wait_applied(PATIENCE_S)
        other = threading.Thread(target=lambda: (train(second, 1, LEAVES_AFTER), second.close()), daemon=True)
        other.start()
        train(first, 0, STEPS)
        other.join(PATIENCE_S)
        assert errors == []
    return records(local, definition)


def records(local: LocalCluster, definition: TableDef) -> dict[int, tuple[bytes, bytes]]:
    ids = np.arange(40, dtype=np.uint64)
    with open_store(load(local.config_path, {}).storage, role="trainer") as store:
        store.open(Deadline.after(PATIENCE_S))
        size = definition.record.size_bytes
        keys = definition.keys(ids, pages=store.capabilities.pages)
        got = store.rows.read([ReadPart(keys, size, size)], Deadline.after(PATIENCE_S))[0].in_key_order()
    weights, state = definition.record.weights(got.records), definition.record.state(got.records)
    return {int(i): (weights[i].tobytes(), state[i].tobytes()) for i in ids if got.found[i]}


def test_a_sync_job_survives_killed_shards_and_ends_with_the_same_bits(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    results = []
    for disturbed in (False, True):
        with LocalCluster("redis", shards=2, mode="sync", trainers=2, barrier_timeout_s=PATIENCE_S) as local:

            def trouble(step: int, local: LocalCluster = local, disturbed: bool = disturbed) -> None:
                if disturbed and step in (3, 9, LEAVES_AFTER + 2):  # the last one without the trainer that has left
                    local.shards[step % 2].kill()
                    local.start_shard(step % 2)

            results.append(sync_job(local, trouble))
    undisturbed, disturbed = results
    assert len(undisturbed) == 40
    assert disturbed == undisturbed
