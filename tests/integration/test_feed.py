"""The feed on real shards: every acknowledged batch is told in order, without gaps, over kills, cut journals, moves, loads and drops."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest
from matrix import one_of
from shard_moves import HastyTrainer, ShardMoves

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.errors import AccessDeniedError, ClosedError, FeedBehindError, InvalidInputError, StorageError
from kvemb.feed.feed_messages import FeedReply, FeedRequest
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import SERVICE
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slots import N_SLOTS
from paramserver.capability import MAX_SUBSCRIBERS
from tests.integration.counting_trainers import PATIENCE_S, Trainer, wait_for
from tests.integration.feed_log import FeedLog, ids_of
from tests.integration.tls_clusters import TlsCluster, running
from tests.raw_shard import RawShard

KINDS = {"valkey": 1, "memcached": 2, "redis-cluster": 3}  # with so many nodes
REASONS = ("", "evicted", "dropped")


@pytest.fixture(params=one_of(*KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def local(kind: str) -> Iterator[LocalCluster]:
    with LocalCluster(kind, KINDS[kind], shards=2, memory_mb=64) as made:
        yield made


@pytest.fixture
def small_journal(kind: str) -> Iterator[LocalCluster]:
    with LocalCluster(kind, KINDS[kind], memory_mb=64, journal_max_mb=1) as made:
        yield made


@pytest.fixture
def on_valkey(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    """For what no storage has a part in."""
    with LocalCluster("valkey", shards=2, memory_mb=64) as made:
        yield made


def ledger(cluster: kvemb.Cluster, name: str = "ledger") -> kvemb.Table:
    return cluster.create_table(name, dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), exist_ok=True)


def push(table: kvemb.Table, ids: np.ndarray) -> None:
    table.push(ids, np.ones((len(ids), 4), np.float32), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)


def cut_journal(table: kvemb.Table, n: int = 12) -> None:
    """Push until a shard with a journal of a megabyte has cut it."""
    for start in range(n):
        push(table, np.arange(10_000) + 100_000 + 10_000 * (start % 2))


def run(*words: str) -> int:
    command = [sys.executable, "-m", "kvemb.cli", *words]
    return subprocess.run(command, capture_output=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL).returncode


def test_every_batch_is_told_in_order_while_shards_are_killed_under_load(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        ledger(cluster)
        log, stop = FeedLog(cluster.feed.open()), threading.Event()
        trainers = [Trainer(local.url, number, stop) for number in range(2)]
        for trainer in trainers:
            trainer.start()
        n_before = 0
        for victim in (0, 1, 0):
            wait_for(lambda n=n_before: all(t.n_pushes > n + 20 or t.error for t in trainers))  # type: ignore[misc]
            local.shards[victim].kill()
            local.start_shard(victim)
            n_before = max(trainer.n_pushes for trainer in trainers)
        stop.set()
        for trainer in trainers:
            trainer.join(PATIENCE_S)
        assert [trainer.error for trainer in trainers] == [None, None]
        log.reach(cluster)
        log.stop()
        _, versions = cluster.table("ledger").pull(np.arange(64, dtype=np.uint64), return_versions=True)
        progress = cluster.progress()
    assert [versions[row] for row in range(64)] == [log.versions["ledger", row] for row in range(64)]
    for shard, (_, k) in enumerate(progress):
        assert [number for _, number in log.batches[shard]] == list(range(1, k + 1))
    assert log.kinds().count("epoch") == 3


def test_what_is_pushed_behind_the_call_is_told_and_nothing_before(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table, other = ledger(cluster), ledger(cluster, "other")
        push(table, np.arange(50))
        with cluster.feed.open(["ledger"], weights=True) as feed:
            push(other, np.arange(3))
            push(table, np.arange(100, 120))
            table.assign(np.array([5]), np.full((1, 4), 7.0))
            table.erase(np.array([100]))
            log = FeedLog(feed)
            log.reach(cluster)
            log.stop()
    assert sorted(ids_of(log.events, "apply")) == list(range(100, 120))
    assert ids_of(log.events, "assign").tolist() == [5]
    assert ids_of(log.events, "erase").tolist() == [100]
    assert {event.table for event in log.events} == {"ledger"}
    (assigned,) = [event for event in log.events if event.kind == "assign"]
    assert assigned.weights is not None
    assert assigned.weights.tolist() == [[7.0] * 4]


def test_another_process_goes_on_from_a_position_without_gap_or_double(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = ledger(cluster)
        with cluster.feed.open() as feed:
            push(table, np.arange(64))
            events = [feed.take(PATIENCE_S)]
            position = json.loads(json.dumps(feed.position))
        for shard in (0, 1):
            local.shards[shard].kill()
            local.start_shard(shard)
        push(table, np.arange(64))
        log = FeedLog(cluster.feed.open(from_=position))
        log.reach(cluster)
        log.stop()
    told = [(event.shard, event.k) for event in [*events, *log.events] if event is not None and event.kind == "apply"]
    assert sorted(told) == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_a_position_of_epoch_and_k_alone_is_found_in_the_journal(on_valkey: LocalCluster) -> None:
    with kvemb.connect(on_valkey.url) as cluster:
        table = ledger(cluster)
        for _ in range(5):
            push(table, np.arange(64))
        with cluster.feed.open(from_={0: (1, 3), 1: (1, 1)}) as feed:
            told = [feed.take(PATIENCE_S) for _ in range(6)]
            assert feed.take(0.2) is None
        with cluster.feed.open(from_={0: (1, 9)}) as feed, pytest.raises(FeedBehindError, match=r"applied 5 batches.*from_=\"start\""):
            feed.take(PATIENCE_S)
    assert [event.k for event in told if event is not None and event.shard == 0] == [4, 5]
    assert [event.k for event in told if event is not None and event.shard == 1] == [2, 3, 4, 5]


def test_the_start_tells_every_row_and_what_changes_behind(small_journal: LocalCluster) -> None:
    with kvemb.connect(small_journal.url) as cluster:
        table = ledger(cluster)
        push(table, np.arange(1000))
        cut_journal(table)
        with cluster.feed.open(from_="start") as feed:
            log = FeedLog(feed)
            push(table, np.arange(500, 1500))
            log.reach(cluster)
            log.stop()
        ids, _ = table.export()
    assert len(ids_of(log.events, "row")) > 1000
    assert {row for _, row in log.versions} == set(ids.tolist())


def test_a_subscriber_behind_the_journal_is_told_the_rows_that_changed_and_the_erased(small_journal: LocalCluster) -> None:
    with kvemb.connect(small_journal.url) as cluster:
        table = ledger(cluster)
        push(table, np.arange(1000))
        with cluster.feed.open() as feed:
            position = feed.position
        push(table, np.arange(10))
        table.erase(np.arange(10, 20))
        cut_journal(table)
        log = FeedLog(cluster.feed.open(from_=position))
        log.reach(cluster)
        log.stop()
        _, versions = table.pull(np.arange(1000, dtype=np.uint64), return_versions=True)
    kinds = log.kinds()
    assert "caught-up" in kinds
    assert kinds.index("row") < kinds.index("caught-up")
    told = {row: log.versions["ledger", row] for _, row in log.versions if row < 1000}
    assert sorted(told) == list(range(20))
    assert [told[row] for row in range(10)] == versions[:10].tolist()
    assert set(range(10, 20)) <= set(ids_of(log.events, "erase").tolist())


def test_erased_rows_that_the_log_has_forgotten_send_the_subscriber_back_to_the_start(small_journal: LocalCluster) -> None:
    with kvemb.connect(small_journal.url) as cluster:
        table = ledger(cluster)
        push(table, np.arange(1000))
        with cluster.feed.open() as feed:
            position = feed.position
        table.erase(np.arange(10))
        cut_journal(table, 120)  # runs are merged
        with cluster.feed.open(from_=position) as feed, pytest.raises(FeedBehindError, match=r'erased since is not known.*from_="start"'):
            feed.take(PATIENCE_S)


def test_a_slot_that_moves_is_told_by_both_shards_and_no_version_goes_back(kind: str) -> None:
    with LocalCluster(kind, KINDS[kind], shards=3, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        ledger(cluster)
        hasty = [HastyTrainer(local.url, "h", seed) for seed in (1, 2)]
        log, moves = FeedLog(cluster.feed.open(from_="start")), ShardMoves(local.url)
        late = FeedLog(cluster.feed.open())
        try:
            thirds = equal_runs(3)
            for owners in (np.where(thirds == 2, equal_runs(32) % 2, thirds), np.full(N_SLOTS, 1), thirds):
                moves.begin(owners)
                moves.wait()
        finally:
            moves.close()
            counts = sum(trainer.stop() for trainer in hasty)
        cluster.flush(PATIENCE_S)
        for one in (log, late):
            one.reach(cluster)
            one.stop()
        _, versions = cluster.table("h").pull(np.arange(len(counts), dtype=np.uint64), return_versions=True)
    pushed = np.flatnonzero(counts)
    assert [log.versions["h", row] for row in pushed.tolist()] == versions[pushed].tolist()
    moved = [event for event in log.events if event.kind == "moved"]
    assert {event.shard for event in moved} == {0, 1, 2}
    assert sum(len(slots) for event in moved for slots in event.gone.values()) == sum(
        len(slots) for event in moved for slots in event.came.values()
    )
    # Every batch of every shard, whichever had the row: a row is told as often as it was pushed, unless pushes were merged.
    for batches in log.batches.values():
        assert all(k == before + 1 for (_, before), (_, k) in pairwise(batches))


def test_a_feed_from_the_start_is_not_told_the_moves_of_before_and_follows_a_shard_that_had_given_all_away(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table, moves = ledger(cluster), ShardMoves(local.url)
        push(table, np.arange(1000))
        for owners in (np.full(N_SLOTS, 1), equal_runs(2)):  # the journals keep these
            moves.begin(owners)
            moves.wait()
        moves.close()
        log = FeedLog(cluster.feed.open(from_="start"))
        for _ in range(3):
            push(table, np.arange(2000))
        log.reach(cluster)
        log.stop()
        _, versions = table.pull(np.arange(2000, dtype=np.uint64), return_versions=True)
    assert [log.versions["ledger", row] for row in range(2000)] == versions.tolist()
    assert not [event for event in log.events if event.kind == "moved"]


def test_a_shard_that_joins_and_leaves_again_is_told_from_its_first_batch_to_its_last(kind: str) -> None:
    with LocalCluster(kind, KINDS[kind], shards=1, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        hasty, address = HastyTrainer(local.url, "h", 1), f"127.0.0.1:{free_ports(1)[0]}"
        log = FeedLog(cluster.feed.open())
        try:
            local.start_shard(1, "--listen", address)
            assert run("shards", "add", str(local.config_path), address, "--yes") == 0
            n_before = hasty.n_pushed
            wait_for(lambda: hasty.n_pushed > n_before + 20)
            position = log.feed.position
            assert run("shards", "remove", str(local.config_path), address, "--yes") == 0
        finally:
            counts = hasty.stop()
        cluster.flush(PATIENCE_S)
        log.reach(cluster)
        log.stop()
        _, versions = cluster.table("h").pull(np.arange(len(counts), dtype=np.uint64), return_versions=True)
    pushed = np.flatnonzero(counts)
    assert set(position) == {0, 1}
    assert set(log.feed.position) == {0}  # all of the shard that has left was told
    assert [log.versions["h", row] for row in pushed.tolist()] == versions[pushed].tolist()
    assert len(log.batches[1]) > 0


def test_a_load_tells_all_rows_again_and_a_drop_its_erased_rows(local: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(local.url) as cluster:
        table = ledger(cluster)
        push(table, np.arange(20))
        cluster.save(str(tmp_path / "saved"))
        push(table, np.arange(10, 40))
        log = FeedLog(cluster.feed.open())
        cluster.load(str(tmp_path / "saved"))
        push(cluster.table("ledger"), np.array([0]))
        cluster.drop_table("ledger")
        wait_for(lambda: log.kinds().count("drop") == 2 or log.error is not None)
        log.stop()
    kinds = log.kinds()
    assert kinds.count("load") == 2
    assert sorted(ids_of(log.events, "row").tolist()) == list(range(20))
    loaded = [event for event in log.events if event.epoch < 3 or event.kind != "apply"]
    erased = ids_of(loaded, "erase").tolist()
    assert set(range(20, 40)) <= set(erased)  # not in the checkpoint
    assert set(range(20)) <= set(erased)  # dropped
    assert [event.table for event in log.events if event.kind == "drop"] == ["ledger", "ledger"]


def test_an_erase_says_whether_a_policy_or_a_drop_was_its_reason_also_from_a_journal_that_is_read_again(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = ledger(cluster)
        push(table, np.arange(300))
        with cluster.feed.open() as feed:
            position = feed.position
        log = FeedLog(cluster.feed.open(from_=position))
        table.erase(np.arange(10))
        table.set_policies(eviction=kvemb.evict.keep(100))
        wait_for(lambda: len(table) <= 110)
        for shard in (0, 1):
            local.shards[shard].kill()
            local.start_shard(shard)
        cluster.drop_table("ledger")
        wait_for(lambda: log.kinds().count("drop") == 2 or log.error is not None)
        log.stop()
        with cluster.feed.open(from_=position) as feed:
            again = FeedLog(feed)
            wait_for(lambda: again.kinds().count("drop") == 2 or again.error is not None)
            again.stop()
    for one in (log, again):
        why = {reason: sorted(ids_of([e for e in one.events if e.reason == reason], "erase").tolist()) for reason in REASONS}
        assert why[""] == list(range(10))
        assert len(why["evicted"]) >= 180
        assert sorted(why["evicted"] + why["dropped"]) == list(range(10, 300))
        assert {e.reason for e in one.events if e.kind != "erase"} == {""}


def test_a_feed_is_iterated_in_asyncio(on_valkey: LocalCluster) -> None:
    async def first(feed: kvemb.feed.cluster_feed.ClusterFeed, n: int) -> list[list[int]]:
        got = []
        async for event in feed:
            got.append(event.ids.tolist())
            if len(got) == n:
                feed.close()
        return got

    with kvemb.connect(on_valkey.url) as cluster:
        table = ledger(cluster)
        feed = cluster.feed.open()
        push(table, np.array([3]))
        push(table, np.array([3]))
        assert asyncio.run(first(feed, 2)) == [[3], [3]]


def test_an_event_whose_weights_cannot_be_read_is_handed_out_once_they_can(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, cluster.feed.open(weights=True) as feed:
        table, node = ledger(cluster), local.servers[0].process.pid
        for row in range(4):
            push(table, np.array([row]))
        os.kill(node, signal.SIGSTOP)
        try:
            with pytest.raises(StorageError):
                feed.take(1.0)
        finally:
            os.kill(node, signal.SIGCONT)
        position = feed.position
        told = [event for event in (feed.take(PATIENCE_S) for _ in range(4)) if event is not None]
    assert sorted(event.ids[0] for event in told) == [0, 1, 2, 3]
    assert all(event.weights is not None and (event.weights == -1).all() for event in told)
    assert {at.k for at in position.values()} == {0}


def test_two_tasks_that_iterate_one_feed_share_its_events(on_valkey: LocalCluster) -> None:
    async def read(feed: kvemb.feed.cluster_feed.ClusterFeed) -> None:
        async for event in feed:
            told.extend(event.ids.tolist())
            assert event.weights is not None
            if len(told) == 40:
                feed.close()

    async def both(feed: kvemb.feed.cluster_feed.ClusterFeed) -> None:
        await asyncio.gather(read(feed), read(feed))

    told: list[int] = []
    with kvemb.connect(on_valkey.url) as cluster, cluster.feed.open(["ledger"], weights=True) as feed:
        table = ledger(cluster)
        for row in range(40):
            push(table, np.array([row]))
        asyncio.run(asyncio.wait_for(both(feed), PATIENCE_S))
    assert sorted(told) == list(range(40))


def test_a_reader_that_is_cancelled_in_asyncio_leaves_the_next_event_to_the_one_behind_it(local: LocalCluster) -> None:
    async def later(feed: kvemb.feed.cluster_feed.ClusterFeed, table: kvemb.Table) -> list[int]:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(aiter(feed)), 0.2)  # its thread goes on waiting for a moment
        push(table, np.array([1]))
        await asyncio.sleep(1)
        push(table, np.array([2]))
        async for event in feed:
            if len(got := [*event.ids.tolist()]) and (told.extend(got) or len(told) == 2):
                feed.close()
        return told

    told: list[int] = []
    with kvemb.connect(local.url) as cluster:
        table = ledger(cluster)
        assert sorted(asyncio.run(asyncio.wait_for(later(cluster.feed.open(), table), PATIENCE_S))) == [1, 2]


def test_weights_are_those_of_the_table_that_another_process_has_made_anew(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, cluster.feed.open(weights=True) as feed:
        push(ledger(cluster), np.array([1, 2]))
        with kvemb.connect(local.url) as other:
            again = other.create_table("ledger", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), start_over=True)
            again.push(np.arange(6), np.full((6, 2), -1.0, np.float32)).wait_applied(PATIENCE_S)
        rows: dict[int, list[float]] = {}
        while len(rows) < 6 or any(len(row) != 2 for row in rows.values()):
            event = feed.take(PATIENCE_S)
            assert event is not None
            if event.kind == "apply":
                assert event.weights is not None or not rows.keys() - {1, 2}  # None: the table was dropped since
                rows |= dict(zip(event.ids.tolist(), [] if event.weights is None else event.weights.tolist(), strict=False))
    assert rows == {row: [1.0, 1.0] for row in range(6)}


def test_a_forked_process_that_goes_on_with_a_feed_is_told_so(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, cluster.feed.open() as feed:
        push(ledger(cluster), np.array([1]))
        pid = os.fork()
        if not pid:
            try:
                feed.take(PATIENCE_S)
            except ClosedError:
                feed.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert feed.take(PATIENCE_S) is not None


def test_a_shard_has_places_for_so_many_subscribers_and_those_of_the_ended_are_free(on_valkey: LocalCluster) -> None:
    with kvemb.connect(on_valkey.url) as cluster:
        table = ledger(cluster)
        for _ in range(MAX_SUBSCRIBERS + 8):
            cluster.feed.open().close()
        feeds = [cluster.feed.open() for _ in range(MAX_SUBSCRIBERS)]
        push(table, np.array([3]))
        assert [event.ids.tolist() for feed in feeds if (event := feed.take(PATIENCE_S)) is not None] == [[3]] * MAX_SUBSCRIBERS


def test_the_end_of_the_cluster_ends_its_feeds(on_valkey: LocalCluster) -> None:
    with kvemb.connect(on_valkey.url) as cluster:
        log = FeedLog(cluster.feed.open())
    log.join(PATIENCE_S)
    assert (log.is_alive(), log.error) == (False, None)


@pytest.mark.parametrize("from_", ["later", {}, {0: (1,)}, {0: (1, -1)}, None, {"user": (1, 2)}, {0: 7}])
def test_a_start_that_is_none_is_refused(on_valkey: LocalCluster, from_: object) -> None:
    with kvemb.connect(on_valkey.url) as cluster, pytest.raises(InvalidInputError, match="from_"):
        cluster.feed.open(from_=from_)  # type: ignore[arg-type]


def test_the_name_of_a_table_is_no_list_of_names(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, pytest.raises(InvalidInputError, match=r"\['ledger'\]"):
        cluster.feed.open("ledger")


def test_a_reader_may_subscribe_and_a_certificate_without_a_role_may_not(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    with running(TlsCluster(tmp_path)) as secured:
        trainer, reader, nobody = (
            secured.as_seen_by(secured.issue(name, name=name.replace("/", "-"))) for name in ("trainer/t", "reader/r", "shard/9")
        )
        with kvemb.connect(trainer) as cluster, kvemb.connect(reader) as serving, serving.feed.open() as feed:
            push(ledger(cluster), np.array([1, 2]))
            event = feed.take(PATIENCE_S)
        assert event is not None
        assert event.ids.tolist() == [1, 2]
        with pytest.raises(AccessDeniedError), kvemb.connect(nobody) as cluster, cluster.feed.open() as feed:
            feed.take(PATIENCE_S)


def test_the_command_prints_a_line_of_json_for_every_event(on_valkey: LocalCluster) -> None:
    with kvemb.connect(on_valkey.url) as cluster:
        push(ledger(cluster), np.arange(4))
        command = [sys.executable, "-m", "kvemb.cli", "feed", str(on_valkey.config_path), "--json", "--from", "start", "--weights"]
        command += ["--tables", "ledger,ledgr"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stderr.readline().startswith("there is no table 'ledgr' now; tables: ")
            events = [json.loads(process.stdout.readline()) for _ in range(4)]
            process.terminate()
    assert sorted(event["kind"] for event in events) == ["apply", "apply", "caught-up", "caught-up"]
    assert sorted(row for event in events for row in event.get("ids", [])) == [0, 1, 2, 3]
    assert all(event["weights"] == [[-1.0] * 4] * len(event["ids"]) for event in events if event["kind"] == "apply")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_subscriber_that_reads_nothing_is_cut_off_and_costs_the_shard_no_memory(require_server: Callable[[str], str]) -> None:
    with LocalCluster("valkey", memory_mb=256, cache_mb=8) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("wide", dim=1, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        ids, grads = np.arange(200_000), np.ones((200_000, 1), np.float32)
        for _ in range(6):  # buffers have their size
            table.push(ids, grads).wait_applied(PATIENCE_S)
        with closing(RawShard(cluster.config.servers.shards[0])) as shard:
            stalled = shard.channel.unary_stream(f"/{SERVICE}/Feed")(FeedRequest("now", []).encode())
            begun, told = FeedReply.decode(next(stalled)), list[int]()
            before, n_batches, deadline = resident_mb(local.shards[0].pid), 0, Deadline.after(PATIENCE_S)
            while stalled.is_active() and not deadline.expired:
                table.push(ids, grads).wait_applied(PATIENCE_S)
                n_batches += 1
            assert resident_mb(local.shards[0].pid) - before < n_batches * 1.6 / 2  # megabytes of events that were not read
            with pytest.raises(grpc.RpcError) as ended:
                told.extend(FeedReply.decode(data).k for data in stalled)
            assert ended.value.code() is grpc.StatusCode.CANCELLED
        assert n_batches > 30
        assert told == list(range(begun.k + 1, begun.k + 1 + len(told)))
        assert len(told) < n_batches
        with cluster.feed.open(from_={0: begun.position}) as feed:
            for k in range(begun.k + 1, begun.k + n_batches + 1):
                event = feed.take(PATIENCE_S)
                assert event is not None
                assert (event.k, len(event.ids)) == (k, 200_000)


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)
