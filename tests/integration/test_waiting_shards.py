"""A shard whose number the cluster map does not have: it starts, says its number, takes nothing, and disturbs no other part."""

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from matrix import one_of
from shard_moves import N_IDS, HastyTrainer, ShardMoves

import kvemb
import kvemb.config
from kvemb.client.shard_channel import ShardChannel
from kvemb.errors import MoveRefusedError, SlotsMovedError, from_wire
from kvemb.local_cluster.launcher import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import TableRows, digest_tables
from kvemb.protocol.messages import (
    DESCRIBE,
    GET_STATUS,
    HELLO,
    Empty,
    HelloRequest,
    PushPart,
    PushReply,
)
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.storage_kinds import open_store

pytestmark = pytest.mark.full  # starts and ends of processes, of which each test needs several

PATIENCE_S = 60.0
IDS = np.arange(200)


def until(ready: Callable[[], bool], timeout_s: float) -> None:
    deadline = Deadline.after(timeout_s)
    while not ready():
        assert not deadline.expired
        time.sleep(0.02)


@pytest.fixture
def local() -> Iterator[LocalCluster]:
    with LocalCluster("redis", 1, shards=2, memory_mb=64) as local:
        yield local


@pytest.fixture
def waiting(local: LocalCluster) -> Iterator[ShardChannel]:
    """The channel to a third shard, which kvemb.yaml does not name."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    local.start_shard(2, "--listen", address)
    channel = ShardChannel(2, address)
    yield channel
    channel.close()


def test_it_says_who_it_is_and_takes_no_row(local: LocalCluster, waiting: ShardChannel) -> None:
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        cluster_id, definition = cluster.cluster_id, table.definition
    described = waiting.call(DESCRIBE, Empty(), Deadline.after(PATIENCE_S))
    assert (described.shard, described.n_shards, described.cluster_id) == (2, 2, cluster_id)
    status = waiting.call(GET_STATUS, Empty(), Deadline.after(PATIENCE_S))
    assert (status.n_rows, status.failure) == (0, "")
    hello = waiting.call(HELLO, HelloRequest("a", 7, cluster_id, 1), Deadline.after(PATIENCE_S))
    rows = [TableRows("t", definition.schema, IDS.astype(np.uint64), np.ones((len(IDS), 2), np.float32))]
    part = PushPart("a", hello.incarnation, 1, 1, False, rows, digest_tables(rows), map_serial=1)
    (answer,) = [PushReply.decode(data) for data in waiting.push_stream(iter([part.encode()]))]
    assert isinstance(error := from_wire(answer.error), SlotsMovedError)
    assert "this is shard 2 of 2" in str(error)


def test_it_is_scraped_behind_the_ports_of_the_shards_that_the_file_names(local: LocalCluster) -> None:
    listens, scraped = free_ports(2)
    named = local.config_path.read_text(encoding="utf-8").replace("  data_dir:", f"  metrics_port: {scraped - 2}\n  data_dir:")
    local.config_path.write_text(named, encoding="utf-8")
    local.start_shard(2, "--listen", f"127.0.0.1:{listens}")
    with urlopen(f"http://127.0.0.1:{scraped}/metrics", timeout=PATIENCE_S) as answer:
        assert b"kvemb_shard_ready" in answer.read()


def test_trainers_saves_and_status_know_the_shards_of_the_map(local: LocalCluster, waiting: ShardChannel, tmp_path: Path) -> None:
    named = local.config_path.read_text(encoding="utf-8").replace("  data_dir:", f"  - {waiting.address}\n  data_dir:")
    local.config_path.write_text(named, encoding="utf-8")
    assert len(kvemb.config.load(local.config_path, {}).servers.shards) == 3
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push(IDS, np.ones((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)
        np.testing.assert_array_equal(table.pull(IDS), -1)
        assert [shard.shard for shard in cluster.status().shards] == [0, 1]
        assert cluster.save(str(tmp_path / "a")).manifest.n_shards == 2


def test_a_waiting_shard_that_starts_again_in_an_empty_folder_joins(local: LocalCluster, waiting: ShardChannel) -> None:
    moves, owners = ShardMoves(local.url), np.where(np.arange(N_SLOTS) % 3 == 0, 2, equal_runs(2))
    local.shards[2].kill()
    shutil.rmtree(local.folder / "shards" / "shard-2")
    local.start_shard(2, "--listen", waiting.address)
    local.shards[1].signal(signal.SIGSTOP)  # so that the move does not come to its end before it is taken back
    moves.begin(owners, join_shards=[waiting.address])
    moves.abort()
    local.shards[1].signal(signal.SIGCONT)
    assert moves.wait().shard_numbers == (0, 1)
    with kvemb.connect(local.url) as cluster:
        assert cluster.shards.state().troubles == ("a test",)
    moves.begin(owners, join_shards=[waiting.address])  # the number that was taken back is the next one again
    assert moves.wait().shard_numbers == (0, 1, 2)
    moves.close()


@pytest.mark.parametrize("folder", one_of("an empty folder", "its folder"))
def test_a_number_that_left_comes_back_and_every_push_is_applied_once(local: LocalCluster, waiting: ShardChannel, folder: str) -> None:
    thirds = np.where(np.arange(N_SLOTS) % 3 == 0, 2, equal_runs(2))
    hasty, moves = [HastyTrainer(local.url, "h", seed) for seed in (1, 2)], ShardMoves(local.url)
    asleep = kvemb.connect(local.url, trainer="asleep", timeout_s=PATIENCE_S)
    try:
        moves.begin(thirds, join_shards=[waiting.address])
        moves.wait()
        table = asleep.create_table("s", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push(IDS, np.ones((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)
        epochs = [owner_epoch(local)]
        for n_times in (1, 2):
            moves.begin(equal_runs(2), leave_shards=[2])
            assert moves.wait().shard_numbers == (0, 1)
            local.shards[2].stop(PATIENCE_S)
            if folder == "an empty folder":
                shutil.rmtree(local.folder / "shards" / "shard-2")
            address = f"127.0.0.1:{free_ports(1)[0]}" if n_times == 1 else waiting.address
            local.start_shard(2, "--listen", address)
            moves.begin(thirds, join_shards=[address])
            assert moves.wait().shard_numbers == (0, 1, 2)
            pushed = [trainer.n_pushed for trainer in hasty]
            until(lambda: all(trainer.n_pushed > before for trainer, before in zip(hasty, pushed, strict=True)), PATIENCE_S)  # noqa: B023
            epochs.append(owner_epoch(local))
        assert epochs == sorted(set(epochs))
        table.push(IDS, np.ones((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)  # slept through all of it
        np.testing.assert_array_equal(table.pull(IDS), -2)
    finally:
        moves.close()
        asleep.close()
        counts = [trainer.stop() for trainer in hasty]
    with kvemb.connect(local.url) as cluster:
        np.testing.assert_array_equal(-cluster.table("h").pull(np.arange(N_IDS), timeout_s=PATIENCE_S)[:, 0], sum(counts))


def test_a_process_that_left_and_still_runs_is_not_taken_in_again_and_is_shut_out_by_the_next(
    local: LocalCluster, waiting: ShardChannel, tmp_path: Path
) -> None:
    thirds, moves, hasty = np.where(np.arange(N_SLOTS) % 3 == 0, 2, equal_runs(2)), ShardMoves(local.url), HastyTrainer(local.url, "h", 1)
    try:
        with kvemb.connect(local.url) as cluster:
            moves.begin(thirds, join_shards=[waiting.address])
            moves.wait()
            moves.begin(equal_runs(2), leave_shards=[2])
            moves.wait()
            moves.begin(thirds, join_shards=[waiting.address])
            with pytest.raises(MoveRefusedError, match="has had slots and has left: start it again"):
                cluster.shards.wait(timeout_s=PATIENCE_S)
            left, text = local.shards[2], local.config_path.read_text(encoding="utf-8")  # the next one is on a machine with other disks
            local.config_path.write_text(text.replace(str(local.folder / "shards"), str(tmp_path / "shards")), encoding="utf-8")
            address = f"127.0.0.1:{free_ports(1)[0]}"
            local.start_shard(2, "--listen", address)
            until(lambda: left.poll() is not None, PATIENCE_S)
            assert left.poll() == 5
            moves.begin(thirds, join_shards=[address])
            assert moves.wait().shard_numbers == (0, 1, 2)
            pushed = hasty.n_pushed
            until(lambda: hasty.n_pushed > pushed + 5, PATIENCE_S)
    finally:
        moves.close()
        counts = hasty.stop()
    with kvemb.connect(local.url) as cluster:
        np.testing.assert_array_equal(-cluster.table("h").pull(np.arange(N_IDS), timeout_s=PATIENCE_S)[:, 0], counts)


def test_the_next_owner_of_a_number_knows_what_the_last_one_had_taken(local: LocalCluster, waiting: ShardChannel) -> None:
    thirds, moves = np.where(np.arange(N_SLOTS) % 3 == 0, 2, equal_runs(2)), ShardMoves(local.url)
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        cluster_id, definition = cluster.cluster_id, table.definition
        moves.begin(thirds, join_shards=[waiting.address])
        serial = moves.wait().shards_serial
        ids = IDS[thirds[definition.placement.slots(IDS.astype(np.uint64))] == 2].astype(np.uint64)
        hello = waiting.call(HELLO, HelloRequest("a", 7, cluster_id, serial), Deadline.after(PATIENCE_S))
        rows = [TableRows("t", definition.schema, ids, np.ones((len(ids), 2), np.float32))]
        part = PushPart("a", hello.incarnation, 1, 1, False, rows, digest_tables(rows), map_serial=serial)
        stream = waiting.push_stream(iter([part.encode()]))
        assert [PushReply.decode(data).state for data in stream] == ["accepted", "applied"]
        moves.begin(equal_runs(2), leave_shards=[2])
        moves.wait()
        local.shards[2].stop(PATIENCE_S)
        shutil.rmtree(local.folder / "shards" / "shard-2")
        local.start_shard(2, "--listen", waiting.address)
        moves.begin(thirds, join_shards=[waiting.address])
        moves.wait()
        moves.close()
        again = waiting.call(HELLO, HelloRequest("a", 7, cluster_id, serial), Deadline.after(PATIENCE_S))
        assert again.last_sequence == 1
        assert [PushReply.decode(data).state for data in waiting.push_stream(iter([part.encode()]))][-1] == "applied"  # its first answer
        np.testing.assert_array_equal(table.pull(ids), -1)


def owner_epoch(local: LocalCluster) -> int:
    with open_store(kvemb.config.load(local.config_path, {}).storage, role="trainer") as store:
        store.open(Deadline.after(PATIENCE_S))
        return store.values.owner_epoch(2, Deadline.after(PATIENCE_S))


@pytest.mark.parametrize("started", one_of("before the load", "when the checkpoint is gone"))
def test_it_joins_after_a_load_whose_checkpoint_is_gone_and_keeps_its_rows_at_a_new_start(
    local: LocalCluster, tmp_path: Path, started: str
) -> None:
    address, moves = f"127.0.0.1:{free_ports(1)[0]}", ShardMoves(local.url)
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push(IDS, np.ones((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)
        if started == "before the load":
            local.start_shard(2, "--listen", address)
        cluster.load(cluster.save(str(tmp_path / "gone")).url)
        shutil.rmtree(tmp_path / "gone")
        if started != "before the load":
            local.start_shard(2, "--listen", address)
        moves.begin(np.where(np.arange(N_SLOTS) % 3 == 0, 2, equal_runs(2)), join_shards=[address])
        assert moves.wait().shard_numbers == (0, 1, 2)
        moves.close()
        table.push(IDS, np.ones((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)
        local.shards[2].stop(PATIENCE_S)
        local.start_shard(2, "--listen", address)
        table.push(IDS, np.ones((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)
        np.testing.assert_array_equal(table.pull(IDS), -3)


def test_it_joins_and_another_one_leaves_while_rows_are_pushed(local: LocalCluster, waiting: ShardChannel) -> None:
    hasty, moves = [HastyTrainer(local.url, "h", seed) for seed in (1, 2)], ShardMoves(local.url)
    try:
        moves.begin(np.where(np.arange(N_SLOTS) % 3 == 0, 2, equal_runs(2)), join_shards=[waiting.address])
        now = moves.wait()
        assert (now.shard_numbers, now.shards[2].address) == ((0, 1, 2), waiting.address)
        pushed = [trainer.n_pushed for trainer in hasty]
        until(lambda: all(trainer.n_pushed > before for trainer, before in zip(hasty, pushed, strict=True)), PATIENCE_S)
        moves.begin(np.where(now.slot_shards == 1, 0, now.slot_shards), leave_shards=[1])
        assert moves.wait().shard_numbers == (0, 2)
        pushed = [trainer.n_pushed for trainer in hasty]
        until(lambda: all(trainer.n_pushed > before for trainer, before in zip(hasty, pushed, strict=True)), PATIENCE_S)
    finally:
        moves.close()
        counts = [trainer.stop() for trainer in hasty]
    with kvemb.connect(local.url) as cluster:
        assert [shard.shard for shard in cluster.status().shards] == [0, 2]
        np.testing.assert_array_equal(-cluster.table("h").pull(np.arange(N_IDS), timeout_s=PATIENCE_S)[:, 0], sum(counts))
    local.shards[1].stop(PATIENCE_S)
    with kvemb.connect(local.url) as cluster:
        cluster.table("h").push(IDS, np.ones((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)
    local.start_shard(1)  # a caller that still waits for an answer gets it
    assert "this shard has left the cluster" in local.shards[1].log.read_text(encoding="utf-8")
