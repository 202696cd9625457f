"""Rows that trainers of a sync job have prefetched for later steps: the release brings exactly those that changed, as storage has them."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import kvemb
from kvemb.api import Cluster
from kvemb.client import part_numbering, push_session
from kvemb.client.ack import Ack
from kvemb.config import StorageConfig
from kvemb.datapath.prefetched_rows import route_prefetched
from kvemb.errors import ClosedError, InvalidInputError, ShardUnavailableError, UnknownTableError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.protocol.message_format import digest_tables
from kvemb.protocol.shard_routing import split
from tests.integration.shard_processes import Cluster as Shards
from tests.integration.shard_processes import Server, part, redis_command
from tests.raw_shard import RawStream
from tests.warm_clusters import warm

IDS = np.arange(400)
PATIENCE_S = 60.0
Prefetched = dict[str, tuple[NDArray[np.int64], NDArray[np.uint64]]]
Rows = dict[str, NDArray[np.int64]]


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalCluster]:
    with warm("valkey", 2, shards=2, mode="sync", trainers=1) as local:
        yield local


def create(cluster: Cluster, name: str, dtype: str = "float32", **options: object) -> None:
    chosen = {"optimizer": kvemb.optim.adam(lr=0.1), "dtype": dtype, "exist_ok": True} | options
    cluster.create_table(name, dim=6, **chosen)  # type: ignore[arg-type]


def pull(cluster: Cluster, ids: Rows) -> tuple[dict[str, NDArray[np.float32]], Prefetched]:
    pulled = cluster.pull_versions(ids)
    return {name: rows for name, (rows, _) in pulled.items()}, {name: (ids[name], versions) for name, (_, versions) in pulled.items()}


def push(cluster: Cluster, ids: Rows, rng: np.random.Generator, prefetched: Prefetched | None = None) -> Ack:
    return cluster.push({name: (some, rng.normal(size=(len(some), 6))) for name, some in ids.items()}, prefetched=prefetched)


def check_changed(reader: Cluster, prefetched: Prefetched, ack: Ack) -> dict[str, int]:
    """Compare what the release said with what storage holds; return how many rows of each table were changed."""
    assert ack.changed_rows is not None
    assert set(ack.changed_rows) == set(prefetched)
    rows, now = pull(reader, {name: ids for name, (ids, _) in prefetched.items()})
    for name, (ids, seen) in prefetched.items():
        wanted = now[name][1] != seen
        changed = ack.changed_rows[name]
        assert (changed.ids.dtype, changed.rows.dtype, changed.versions.dtype) == (np.uint64, np.float32, np.uint64)
        order = np.argsort(changed.ids)
        at = np.flatnonzero(wanted)[np.argsort(ids[wanted].astype(np.uint64))]
        np.testing.assert_array_equal(changed.ids[order], ids[at].astype(np.uint64))
        np.testing.assert_array_equal(changed.rows[order], rows[name][at])
        np.testing.assert_array_equal(changed.versions[order], now[name][1][at])
    return {name: len(changed.ids) for name, changed in ack.changed_rows.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_release_brings_exactly_the_rows_that_changed(alone: LocalCluster, dtype: str) -> None:
    rng, names = np.random.default_rng(0), (f"user-{dtype}", f"item-{dtype}")
    around_0 = np.setdiff1d(IDS - 9, -1)  # which is taken for padding
    with kvemb.connect(alone.url, trainer="a") as trainer, kvemb.connect(alone.url, read_only=True) as reader:
        for name in names:
            create(trainer, name, dtype)
        n_changed = []
        for _ in range(12):
            ids = {name: rng.choice(IDS, 60, replace=False) for name in names}
            _, prefetched = pull(trainer, {name: rng.choice(around_0, 150, replace=False) for name in names})
            ack = push(trainer, ids, rng, prefetched)
            ack.wait_applied()
            n_changed.append(check_changed(reader, prefetched, ack))
            assert all(got[name] == len(np.intersect1d(ids[name], prefetched[name][0])) for got in n_changed[-1:] for name in names)
        assert all(0 < got[name] < 60 for got in n_changed for name in names)


def test_a_step_is_released_before_storage_has_it_and_pulls_wait_for_that() -> None:
    rng = np.random.default_rng(3)
    with (
        warm("redis", shards=2, mode="sync", trainers=1) as local,
        kvemb.connect(local.url, trainer="a") as trainer,
        kvemb.connect(local.url, read_only=True) as reader,
    ):
        create(trainer, "t")
        push(trainer, {"t": IDS[:100]}, rng).wait_applied()  # from here on the shards have these rows at hand
        before, prefetched = pull(trainer, {"t": IDS[:50]})
        storage = local.servers[0].process
        storage.signal(signal.SIGSTOP)
        try:
            ack = push(trainer, {"t": IDS[:100]}, rng, prefetched)
            ack.wait_released(PATIENCE_S)
            assert (ack.released, ack.applied, trainer.all_stored) == (True, False, False)
            assert ack.staleness is None, "this push said nothing of the versions that it was computed from"
            changed = ack.changed_rows
            assert changed is not None
            assert len(changed["t"].ids) == 50
            with pytest.raises(ShardUnavailableError, match=r"push 2 of trainer 'a': not applied within 0\.2 s by shard 0"):
                trainer.pull({"t": IDS[:50]}, timeout_s=0.2)
        finally:
            storage.signal(signal.SIGCONT)
        rows = trainer.pull({"t": IDS[:50]}, timeout_s=PATIENCE_S)["t"]
        assert ack.applied
        assert trainer.all_stored
        np.testing.assert_array_equal(rows[changed["t"].ids.astype(int)], changed["t"].rows)
        assert (rows != before["t"]).any(axis=1).all()
        assert check_changed(reader, prefetched, ack) == {"t": 50}


def test_every_part_of_a_push_that_holds_rows_is_released_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_numbering, "split", lambda tables: split(tables, 600))
    rng = np.random.default_rng(6)
    with warm("redis", shards=2, mode="sync", trainers=1) as local, kvemb.connect(local.url, trainer="a") as trainer:
        create(trainer, "t")
        push(trainer, {"t": IDS[:100]}, rng).wait_applied()
        _, prefetched = pull(trainer, {"t": IDS[:50]})
        local.servers[0].process.signal(signal.SIGSTOP)
        try:
            ack = push(trainer, {"t": IDS[:100]}, rng, prefetched)
            ack.wait_released(PATIENCE_S)
            assert not ack.applied
            assert ack.changed_rows is not None
            assert len(ack.changed_rows["t"].ids) == 50
            assert len(ack._parts) > 4
        finally:
            local.servers[0].process.signal(signal.SIGCONT)


@pytest.mark.parametrize("verb", ["len", "export", "close"])
def test_what_tells_of_rows_waits_until_storage_has_a_released_step(verb: str) -> None:
    rng = np.random.default_rng(4)
    with warm("redis", shards=2, mode="sync", trainers=1) as local, kvemb.connect(local.url, read_only=True) as reader:
        trainer = kvemb.connect(local.url, trainer="a")
        create(trainer, "t")
        push(trainer, {"t": IDS[:100]}, rng).wait_applied()
        before, prefetched = pull(trainer, {"t": IDS[:50]})
        table = trainer.table("t")
        verbs: dict[str, Callable[[], object]] = {"len": lambda: len(table), "export": table.export, "close": trainer.close}
        waiting = threading.Thread(target=verbs[verb])
        local.servers[0].process.signal(signal.SIGSTOP)
        try:
            push(trainer, {"t": IDS[:100]}, rng, prefetched).wait_released(PATIENCE_S)
            waiting.start()
            waiting.join(0.5)
            assert waiting.is_alive()
        finally:
            local.servers[0].process.signal(signal.SIGCONT)
        waiting.join(PATIENCE_S)
        assert (pull(reader, {"t": IDS[:50]})[0]["t"] != before["t"]).any(axis=1).all()
        trainer.close()
        with pytest.raises(ClosedError):
            table.pull(IDS[:3])


def test_a_connection_that_is_closed_waits_for_nothing() -> None:
    rng = np.random.default_rng(5)
    with warm("redis", shards=1, mode="sync", trainers=1) as local:
        trainer = kvemb.connect(local.url, trainer="a")
        create(trainer, "t")
        push(trainer, {"t": IDS[:100]}, rng).wait_applied()
        _, prefetched = pull(trainer, {"t": IDS[:50]})
        table = trainer.table("t")
        local.servers[0].process.signal(signal.SIGSTOP)
        try:
            push(trainer, {"t": IDS[:100]}, rng, prefetched).wait_released(PATIENCE_S)
            with pytest.raises(InvalidInputError, match="more matters"), trainer:
                raise InvalidInputError("more matters")
            began_s = time.monotonic()
            with pytest.raises(ClosedError):
                table.pull(IDS[:3], timeout_s=PATIENCE_S)
            assert time.monotonic() - began_s < PATIENCE_S / 2
        finally:
            local.servers[0].process.signal(signal.SIGCONT)


def test_rows_prefetched_over_several_steps_need_not_be_of_pushed_tables(alone: LocalCluster) -> None:
    rng = np.random.default_rng(1)
    with kvemb.connect(alone.url, trainer="a") as trainer, kvemb.connect(alone.url, read_only=True) as reader:
        create(trainer, "pushed")
        create(trainer, "prefetched")
        _, prefetched = pull(trainer, {"prefetched": IDS[:50], "pushed": IDS[:0]})
        push(trainer, {"prefetched": IDS[30:70]}, rng).wait_applied()
        ack = push(trainer, {"pushed": IDS[:5]}, rng, {"prefetched": prefetched["prefetched"]})
        ack.wait_applied()
        assert check_changed(reader, {"prefetched": prefetched["prefetched"]}, ack) == {"prefetched": 20}
        empty = trainer.push({}, prefetched={"prefetched": prefetched["prefetched"]})  # a step without gradients tells as well
        empty.wait_applied()
        assert check_changed(reader, {"prefetched": prefetched["prefetched"]}, empty) == {"prefetched": 20}


def test_erased_and_assigned_rows_are_told_by_the_next_release(alone: LocalCluster) -> None:
    rng = np.random.default_rng(2)
    with kvemb.connect(alone.url, trainer="a") as trainer, kvemb.connect(alone.url, read_only=True) as reader:
        create(trainer, "edited", initializer=kvemb.init.normal(std=1.0))
        table = trainer.table("edited")
        push(trainer, {"edited": IDS[:40]}, rng).wait_applied()
        first, prefetched = pull(trainer, {"edited": IDS[:60]})
        table.erase(IDS[:10])
        table.assign(IDS[10:20], np.ones((10, 6)))
        table.assign(IDS[50:55], np.full((5, 6), 2.0))
        ack = push(trainer, {"edited": IDS[100:110]}, rng, prefetched)
        ack.wait_applied()
        assert check_changed(reader, prefetched, ack) == {"edited": 25}
        assert ack.changed_rows is not None
        changed = ack.changed_rows["edited"]
        erased = changed.ids < 10
        assert (changed.versions[erased] == 0).all()
        assert (changed.rows[erased] != first["edited"][changed.ids[erased].astype(int)]).any()  # the initial row again
        np.testing.assert_array_equal(changed.rows[changed.ids >= 50], np.full((5, 6), 2.0))


def test_two_trainers_hear_of_each_others_rows(require_server: Callable[[str], str]) -> None:
    require_server("memcached")
    with (
        warm("memcached", 2, shards=2, mode="sync", trainers=2) as local,
        kvemb.connect(local.url, trainer="a") as a,
        kvemb.connect(local.url, trainer="b") as b,
        kvemb.connect(local.url, read_only=True) as reader,
    ):
        rng = np.random.default_rng(3)
        create(a, "both")
        acks = [push(trainer, {"both": IDS}, rng) for trainer in (a, b)]
        for ack in acks:
            ack.wait_applied()
        for _ in range(5):
            of_each = [pull(trainer, {"both": rng.choice(IDS, 80, replace=False)})[1] for trainer in (a, b)]
            ids = [rng.choice(IDS, 50, replace=False) for _ in (a, b)]
            acks = [push(trainer, {"both": its}, rng, prefetched) for trainer, its, prefetched in zip((a, b), ids, of_each, strict=True)]
            for prefetched, ack in zip(of_each, acks, strict=True):
                ack.wait_applied()
                changed = np.intersect1d(prefetched["both"][0], np.concatenate(ids))
                assert check_changed(reader, prefetched, ack) == {"both": len(changed)}


@pytest.mark.parametrize("cache_mb", [0, 1])
def test_what_the_shard_does_not_keep_comes_from_the_step_or_from_storage(require_server: Callable[[str], str], cache_mb: int) -> None:
    require_server("redis-server")
    rng, many = np.random.default_rng(4), np.arange(20_000)
    with (
        warm("redis", shards=1, mode="sync", trainers=1, cache_mb=cache_mb) as local,
        kvemb.connect(local.url, trainer="a") as trainer,
    ):
        create(trainer, "large")
        trainer.create_table("paged", dim=6, optimizer=kvemb.optim.sgd(), num_ids=len(many))
        _, prefetched = pull(trainer, {"large": many, "paged": many})
        for start in (0, 5000):  # of the rows that change only those of the last step are at hand, or are kept
            ids = many[start : start + 10_000]
            ack = push(trainer, {"large": ids, "paged": ids}, rng, prefetched)
            ack.wait_applied()
            assert check_changed(trainer, prefetched, ack) == {"large": start + 10_000, "paged": start + 10_000}


def test_many_prefetched_rows_travel_in_several_parts(alone: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_session, "route_prefetched", lambda prefetched, n_shards: route_prefetched(prefetched, n_shards, 1 << 11))
    rng = np.random.default_rng(5)
    with kvemb.connect(alone.url, trainer="a") as trainer, kvemb.connect(alone.url, read_only=True) as reader:
        for name in ("one", "two"):
            create(trainer, name)
        _, prefetched = pull(trainer, {"one": IDS, "two": IDS[::-1]})
        for _ in range(3):
            ids = {"one": rng.choice(IDS, 100, replace=False), "two": rng.choice(IDS, 100, replace=False)}
            ack = push(trainer, ids, rng, prefetched)
            ack.wait_applied()
            assert len(ack._parts) > 16
            check_changed(reader, prefetched, ack)


def test_what_cannot_be_prefetched_is_refused_before_anything_is_sent(alone: LocalCluster) -> None:
    with kvemb.connect(alone.url, trainer="a") as trainer:
        create(trainer, "refused")
        versions = np.zeros(2, np.uint64)
        wrong = {
            "id 7 stands twice": ([7, 7], versions),
            r"shape \(2,\), expected \(3,\)": ([1, 2, 3], versions),
            "dtype int64, expected uint64": ([1, 2], [0, 0]),
            "expected integers": ([0.5, 1.0], versions),
        }
        for message, prefetched in wrong.items():
            with pytest.raises(InvalidInputError, match=message):
                trainer.push({}, prefetched={"refused": prefetched})
        with pytest.raises(InvalidInputError, match=r"expected a pair \(ids, versions\)"):
            trainer.push({}, prefetched={"refused": [1]})  # type: ignore[dict-item]
        with pytest.raises(UnknownTableError, match="nobody"):
            trainer.push({}, prefetched={"nobody": ([1], versions[:1])})
        push(trainer, {"refused": IDS[:3]}, np.random.default_rng(0)).wait_applied()  # and nothing of it stands in the way


def test_in_async_mode_prefetched_rows_are_refused(require_server: Callable[[str], str]) -> None:
    with warm("valkey") as local, kvemb.connect(local.url) as trainer:
        create(trainer, "user")
        with pytest.raises(InvalidInputError, match="sync mode only"):
            trainer.push({}, prefetched={"user": ([1], np.zeros(1, np.uint64))})
        ack = push(trainer, {"user": IDS[:3]}, np.random.default_rng(0))
        ack.wait_applied()
        assert ack.changed_rows == {}


def test_a_part_that_is_answered_again_says_nothing_and_storage_has_its_rows(tmp_path: Path, require_server: Callable[[str], str]) -> None:
    port = free_ports(1)[0]
    server = Server(redis_command(require_server("redis-server"), port), port, tmp_path)
    shards = Shards(tmp_path, StorageConfig("redis", (f"127.0.0.1:{port}",)), extra=", mode: sync, trainers: 1")
    try:
        shard = shards.start()
        shard.create()
        hello = shard.hello()
        first = part(hello, 1, [1, 2])
        prefetched = [
            replace(first.tables[0], ids=np.array([2, 3], np.uint64), rows=np.empty((2, 0), np.float32), versions=np.zeros(2, np.uint64))
        ]
        asking = replace(first, prefetched=prefetched, digest=digest_tables(first.tables, prefetched))
        stream = RawStream(shard)
        released = stream.applied(asking)
        (changed,) = released.changed_rows
        assert (released.state, stream.next().state) == ("released", "applied")  # now storage has the rows
        assert (changed.at.tolist(), changed.versions.tolist()) == ([0], [1 << 48 | 1])
        rows = shards.weights([2])
        assert changed.rows == rows.tobytes()
        assert RawStream(shard).applied(asking).changed_rows == []  # over a new connection
        shard.process.child.kill()
        shard.process.wait()
        shard = shards.start()
        assert shard.hello("a", hello.incarnation).last_sequence == 1
        again = RawStream(shard).applied(asking)
        assert (again.state, again.changed_rows) == ("applied", [])
        np.testing.assert_array_equal(shards.weights([2]), rows)
    finally:
        shards.close()
        server.process.end()


def test_a_shard_that_is_killed_around_the_release_says_it_right_or_not_at_all(require_server: Callable[[str], str]) -> None:
    """The shard is killed at any moment between the push and its answer; whatever the trainer then holds is what storage has."""
    require_server("redis-server")
    rng = np.random.default_rng(6)
    with (
        warm("redis", shards=2, mode="sync", trainers=1, barrier_timeout_s=PATIENCE_S) as local,
        kvemb.connect(local.url, trainer="a") as trainer,
        kvemb.connect(local.url, read_only=True) as reader,
    ):
        create(trainer, "user")
        push(trainer, {"user": IDS}, rng).wait_applied()
        for delay_s in (0.0, 0.002, 0.01):
            ids, wanted = rng.choice(IDS, 200, replace=False), rng.choice(IDS, 200, replace=False)
            _, prefetched = pull(trainer, {"user": wanted})
            timer = threading.Timer(delay_s, local.shards[0].kill)
            timer.start()
            ack = push(trainer, {"user": ids}, rng, prefetched)
            timer.join()
            local.start_shard(0)
            ack.wait_applied(PATIENCE_S)
            if ack.changed_rows is not None:
                check_changed(reader, prefetched, ack)
            after = push(trainer, {"user": ids[:0]}, rng, prefetched)  # the next release knows it again
            after.wait_applied(PATIENCE_S)
            check_changed(reader, prefetched, after)
