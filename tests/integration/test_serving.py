"""A serving client on real servers: fresh, within its deadline, degraded and told so, whatever shards, nodes and processes do."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matrix import one_of
from moving_load import further_node
from prometheus_client import CollectorRegistry
from shard_moves import DIM as HASTY_DIM
from shard_moves import N_IDS as N_HASTY
from shard_moves import HastyTrainer, ShardMoves

import kvemb
import kvemb.evict
import kvemb.init
import kvemb.optim
import kvemb.serve
from kvemb.errors import AccessDeniedError, ClosedError, InvalidInputError, NodeUnavailableError, StorageError, UnknownTableError
from kvemb.local_cluster import LocalCluster
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slots import N_SLOTS
from kvemb.serve import ServedFrom, ServingClient
from kvemb.stores.standalone.mapped_nodes import SeenNodes
from tests.integration.counting_trainers import KINDS, PATIENCE_S, wait_for
from tests.integration.tls_clusters import TlsCluster, running
from tests.warm_clusters import warm

IDS, DIM = np.arange(2000), 4
NEVER_MS = 1e9  # an age that nothing reaches
NOBODY = ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.fixture(params=one_of("redis", "memcached"))
def local(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server(KINDS[request.param])
    with warm(request.param, 2, shards=2) as made:
        yield made


@contextmanager
def trained(local: LocalCluster, name: str = "t") -> Iterator["kvemb.Table"]:
    """A table whose rows say how often they were pushed."""
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table(name, dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        push(table, IDS)
        yield table


def push(table: "kvemb.Table", ids: np.ndarray) -> None:
    table.push(ids, np.ones((len(ids), table.dim), np.float32), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)


def without_shards(local: LocalCluster) -> dict[str, Any]:
    """kvemb.yaml of a reader that reaches no shard."""
    tree: dict[str, Any] = yaml.safe_load(local.config_path.read_text(encoding="utf-8"))
    tree["parameter_servers"]["shards"] = NOBODY
    return tree


def sources_of(client: ServingClient, ids: np.ndarray, table: str = "t") -> set[ServedFrom]:
    _, sources = client.lookup(table, ids, return_sources=True)
    return {ServedFrom(one) for one in sources}


class Watcher(threading.Thread):
    """Looks rows up all the while; each says how often it was pushed, and must never go back."""

    def __init__(self, client: ServingClient, table: str, n_ids: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._client, self._table, self._n_ids, self._seed = client, table, n_ids, seed
        self._end, self.n_lookups = threading.Event(), 0
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        rng, seen = np.random.default_rng(self._seed), np.zeros(self._n_ids)
        try:
            while not self._end.is_set():
                ids = rng.choice(self._n_ids, 100, replace=False)
                counts = -self._client.lookup(self._table, ids, timeout_ms=PATIENCE_S * 1e3)[:, 0]
                assert (counts >= seen[ids]).all(), "a row went back"
                seen[ids], self.n_lookups = counts, self.n_lookups + 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._end.set()
        self.join(PATIENCE_S)
        if self.error is not None:
            raise self.error
        assert self.n_lookups > 10


def test_what_is_applied_is_served_though_the_cache_never_ages(local: LocalCluster) -> None:
    with trained(local) as table, kvemb.serve.connect(local.url, max_age_ms=NEVER_MS) as client:
        client.lookup("t", IDS)
        assert client.wait_ready(PATIENCE_S)
        for _ in range(3):
            wait_for(lambda: ServedFrom.STORAGE not in sources_of(client, IDS))
            push(table, IDS[500:])
            table.erase(IDS[:5])
            table.assign(IDS[5:7], np.full((2, DIM), 7.0))
            wait_for(lambda: np.array_equal(client.lookup("t", IDS), table.pull(IDS)))  # soon: benchmarks/serve.py says how soon
        assert sources_of(client, IDS[:5]) == {ServedFrom.UNKNOWN}


def test_without_a_shard_rows_are_served_and_as_old_as_they_may_be(local: LocalCluster) -> None:
    with trained(local) as table:
        with (
            kvemb.serve.connect(without_shards(local), max_age_ms=NEVER_MS) as old,
            kvemb.serve.connect(without_shards(local), max_age_ms=50) as fresh,
        ):
            before = old.lookup("t", IDS)
            np.testing.assert_array_equal(fresh.lookup("t", IDS), before)
            assert not old.wait_ready(0.1)
            push(table, IDS)
            wait_for(lambda: np.array_equal(fresh.lookup("t", IDS), table.pull(IDS)))
            np.testing.assert_array_equal(old.lookup("t", IDS), before)
            assert sources_of(old, IDS) == {ServedFrom.CACHE}
        with kvemb.serve.connect(without_shards(local), cache_mb=0, max_age_ms=NEVER_MS) as without_cache:
            without_cache.lookup("t", IDS)
            push(table, IDS)
            np.testing.assert_array_equal(without_cache.lookup("t", IDS), table.pull(IDS))


def test_shards_that_come_later_are_followed_and_those_that_die_too(local: LocalCluster) -> None:
    with trained(local) as table:
        for process in local.shards:
            process.kill()
        with kvemb.serve.connect(local.url, max_age_ms=100) as client:
            np.testing.assert_array_equal(client.lookup("t", IDS), table.pull(IDS))
            for shard in (0, 1):
                local.start_shard(shard)
            assert client.wait_ready(PATIENCE_S)
            wait_for(lambda: sources_of(client, IDS) == {ServedFrom.CACHE})
            local.shards[1].kill()
            wait_for(lambda: not client.wait_ready(0.01))
            local.start_shard(1)
            push(table, IDS)
            assert client.wait_ready(PATIENCE_S)
            wait_for(lambda: np.array_equal(client.lookup("t", IDS), table.pull(IDS)))


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_nodes_give_a_degraded_answer_and_the_right_one_when_they_are_back(local: LocalCluster, signal_: signal.Signals) -> None:
    with (
        trained(local) as table,
        kvemb.serve.connect(without_shards(local), max_age_ms=0, timeout_ms=300) as cached,
        kvemb.serve.connect(without_shards(local), max_age_ms=0, timeout_ms=300, degraded="default", unknown={"t": [9.0] * DIM}) as default,
        kvemb.serve.connect(local.url, max_age_ms=NEVER_MS, timeout_ms=300) as following,
    ):
        known, expected = IDS[:1000], table.pull(IDS)
        for client in (cached, default, following):
            np.testing.assert_array_equal(client.lookup("t", known), expected[:1000])
        assert following.wait_ready(PATIENCE_S)
        wait_for(lambda: sources_of(following, known) == {ServedFrom.CACHE})
        for server in local.servers:
            server.process.signal(signal_)
        for client in (cached, default):
            rows, sources = client.lookup("t", known, return_sources=True)
            np.testing.assert_array_equal(rows, expected[:1000])
            assert set(sources.tolist()) == {ServedFrom.OLD}
        with pytest.raises(StorageError):
            cached.lookup("t", IDS)
        rows, sources = default.lookup("t", IDS, return_sources=True)
        assert (set(sources[:1000].tolist()), set(sources[1000:].tolist())) == ({ServedFrom.OLD}, {ServedFrom.DEFAULT})
        assert (rows[1000:] == 9.0).all()
        assert sources_of(following, known) == {ServedFrom.CACHE}  # nothing has changed since, and it knows
        for server in local.servers:
            if signal_ == signal.SIGKILL:
                server.restart()
            else:
                server.process.signal(signal.SIGCONT)
        for client in (cached, default):
            wait_for(lambda client=client: right(client, expected))  # type: ignore[misc]
        assert {ServedFrom.STORAGE} == sources_of(cached, IDS)


def test_a_look_up_ends_in_its_time_though_the_map_of_nodes_is_looked_for_longer(
    local: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def for_long(self: SeenNodes, *args: Any) -> Any:
        begun.set()
        released.wait(PATIENCE_S / 10)
        ended.set()
        raise NodeUnavailableError("nobody answers")

    options: dict[str, Any] = {"cache_mb": 0, "timeout_ms": 200, "degraded": "default", "unknown": {"t": "zeros"}}
    with trained(local), kvemb.serve.connect(local.url, **options) as client:  # a file, which is asked for nodes at other addresses, too
        assert sources_of(client, IDS) == {ServedFrom.STORAGE}
        monkeypatch.setattr(SeenNodes, "places", for_long)
        for server in local.servers:
            server.process.signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                assert sources_of(client, IDS) == {ServedFrom.DEFAULT}
            assert not ended.is_set()
            assert begun.wait(PATIENCE_S), "they are looked for all the same"
        finally:
            released.set()
            monkeypatch.undo()
            for server in local.servers:
                server.process.signal(signal.SIGCONT)
        wait_for(lambda: sources_of(client, IDS) == {ServedFrom.STORAGE})


def right(client: ServingClient, expected: np.ndarray) -> bool:
    try:
        return bool(np.array_equal(client.lookup("t", IDS), expected))
    except StorageError:
        return False


def test_no_row_goes_back_while_slots_move_between_nodes_and_between_shards(local: LocalCluster) -> None:
    tree = yaml.safe_load(local.config_path.read_text(encoding="utf-8"))
    tree["storage"]["timeout_s"] = PATIENCE_S
    with kvemb.serve.connect(tree, max_age_ms=200) as client, further_node(local) as third:
        hasty, moves = HastyTrainer(local.url, "h", 1), ShardMoves(local.url)
        watchers = [Watcher(client, "h", N_HASTY, seed) for seed in (1, 2)]
        try:
            assert client.wait_ready(PATIENCE_S)
            nodes = hasty.cluster.nodes
            nodes.begin(nodes.add(third.address))
            nodes.wait(timeout_s=PATIENCE_S)
            for owners in (np.zeros(N_SLOTS), equal_runs(2)):
                moves.begin(owners)
                moves.wait()
            nodes.begin(nodes.remove(local.servers[0].address))
            nodes.wait(timeout_s=PATIENCE_S)
        finally:
            moves.close()
            counts = hasty.stop()
            for watcher in watchers:
                watcher.stop()
        expected = -np.repeat(counts[:, None], HASTY_DIM, axis=1)
        wait_for(lambda: np.array_equal(client.lookup("h", np.arange(N_HASTY)), expected))


def test_a_load_and_a_drop_in_the_middle_are_served(local: LocalCluster, tmp_path: Path) -> None:
    with trained(local) as table, kvemb.serve.connect(local.url, max_age_ms=NEVER_MS) as client:
        table.cluster.save(str(tmp_path / "saved"))
        push(table, np.arange(1000, 3000))
        assert client.wait_ready(PATIENCE_S)
        client.lookup("t", np.arange(3000))
        table.cluster.load(str(tmp_path / "saved"))
        assert client.wait_ready(PATIENCE_S)
        wait_for(lambda: np.array_equal(client.lookup("t", np.arange(3000)), table.pull(np.arange(3000))))
        assert (client.lookup("t", IDS) == -1.0).all()
        table.cluster.drop_table("t")
        wait_for(lambda: raises(UnknownTableError, lambda: client.lookup("t", IDS)))
        wider = table.cluster.create_table("t", dim=DIM + 1, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        push(wider, IDS)
        np.testing.assert_array_equal(client.lookup("t", IDS), np.full((len(IDS), DIM + 1), -1.0))


@pytest.mark.parametrize("shards", ["shards", "no shards"])
def test_a_table_that_is_altered_or_made_anew_is_served_as_it_is_now_though_no_feed_tells_of_it(local: LocalCluster, shards: str) -> None:
    with trained(local) as table, kvemb.serve.connect(local.url if shards == "shards" else without_shards(local)) as client:
        client.lookup("t", IDS)
        assert shards == "no shards" or client.wait_ready(PATIENCE_S)
        wider = table.cluster.alter_table("t", dim=DIM + 2)
        wait_for(lambda: np.array_equal(client.lookup("t", IDS), wider.pull(IDS)))
        table.cluster.drop_table("t")
        again = table.cluster.create_table("t", dim=1, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        push(again, IDS)
        wait_for(lambda: np.array_equal(client.lookup("t", IDS), np.full((len(IDS), 1), -1.0)))


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def test_ids_that_have_no_row_are_not_asked_for_and_new_ones_are_seen(local: LocalCluster) -> None:
    with trained(local) as table, kvemb.serve.connect(local.url, timeout_ms=100) as client:
        client.lookup("t", IDS[:1])
        assert client.wait_ready(PATIENCE_S)
        unseen = np.arange(1_000_000, 1_020_000)
        for server in local.servers:
            server.process.signal(signal.SIGSTOP)  # so that whatever is asked for fails
        n_asked = sum(raises(StorageError, lambda ids=ids: client.lookup("t", ids)) for ids in unseen.reshape(-1, 8))  # type: ignore[misc]
        for server in local.servers:
            server.process.signal(signal.SIGCONT)
        assert n_asked < 0.02 * len(unseen)
        with kvemb.serve.connect(local.url, filter_mb=0) as unfiltered:
            assert sources_of(unfiltered, unseen) == {ServedFrom.UNKNOWN}
        push(table, unseen[:1000])
        wait_for(lambda: bool((client.lookup("t", unseen[:1000], timeout_ms=PATIENCE_S * 1e3) == -1.0).all()))


def test_a_filter_that_has_become_too_small_is_built_anew(local: LocalCluster) -> None:
    with trained(local) as table, kvemb.serve.connect(local.url, max_age_ms=NEVER_MS) as client:
        registry = CollectorRegistry()
        registry.register(client)

        def size_bytes() -> float:
            return registry.get_sample_value("kvemb_serve_filter_bytes", {"cluster": table.cluster.config.cluster, "table": "t"}) or 0.0

        client.lookup("t", IDS[:1])
        assert client.wait_ready(PATIENCE_S)
        first, many = size_bytes(), np.arange(200_000)
        push(table, many)
        wait_for(lambda: size_bytes() > first > 0)
        wait_for(lambda: np.array_equal(client.lookup("t", many), table.pull(many)))


def test_each_table_has_a_rule_for_ids_without_a_row(local: LocalCluster) -> None:
    normal = kvemb.init.normal()
    with kvemb.connect(local.url) as cluster:
        for name in "abcd":
            table = cluster.create_table(name, dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=normal)
            table.assign([1, 2], [[1.0, 2.0], [3.0, 6.0]])
        rules: dict[str, Any] = {"b": "zeros", "c": [5.0, 6.0], "d": kvemb.serve.MeanOf([1, 2])}
        with kvemb.serve.connect(local.url, unknown=rules) as client:
            assert repr(client) == f"<ServingClient of {client.source.name!r}: open>"
            for _ in range(2):  # from storage, and then by the filter
                got = client.lookup_tables({name: [[1, 99]] for name in "abcd"})
                assert {name: rows[0, 0].tolist() for name, rows in got.items()} == {name: [1.0, 2.0] for name in "abcd"}
                np.testing.assert_array_equal(got["a"][0, 1], cluster.table("a").pull([99])[0])
                assert [got[name][0, 1].tolist() for name in "bcd"] == [[0.0, 0.0], [5.0, 6.0], [2.0, 4.0]]
                assert client.wait_ready(PATIENCE_S)
        with pytest.raises(InvalidInputError, match="rule for unknown ids"):
            kvemb.serve.connect(local.url, unknown={"a": [1.0]})
        with pytest.raises(UnknownTableError, match=r"no table 'typo'.* it has: "):
            kvemb.serve.connect(local.url, unknown={"a": "zeros", "typo": "zeros"})
    for wrong in ({"degraded": "perhaps"}, {"cache_mb": -1}, {"max_age_ms": float("nan")}, {"timeout_ms": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            kvemb.serve.connect(local.url, **wrong)
    with pytest.raises(InvalidInputError, match="no id"):
        kvemb.serve.MeanOf([])


def test_the_mean_of_rows_is_that_of_the_table_of_now_and_one_that_storage_did_not_give_is_not_kept(local: LocalCluster) -> None:
    rule = {"t": kvemb.serve.MeanOf(IDS[:2])}
    with (
        trained(local) as table,
        kvemb.serve.connect(local.url, max_age_ms=NEVER_MS, timeout_ms=300, degraded="default", unknown=rule) as client,
    ):
        client.lookup("t", IDS[2:4])
        for server in local.servers:
            server.process.signal(signal.SIGSTOP)
        assert sources_of(client, np.array([5000])) == {ServedFrom.DEFAULT}
        for server in local.servers:
            server.process.signal(signal.SIGCONT)
        wait_for(lambda: (client.lookup("t", [5000]) == -1.0).all())
        table.cluster.drop_table("t")
        wider = table.cluster.create_table("t", dim=DIM + 1, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        wider.assign(IDS[:2], np.full((2, DIM + 1), 7.0))
        wait_for(lambda: (client.lookup("t", [5000]) == np.full((1, DIM + 1), 7.0)).all())


def test_a_closed_client_answers_nothing_not_even_from_its_cache(local: LocalCluster) -> None:
    with trained(local):
        client = kvemb.serve.connect(local.url, max_age_ms=NEVER_MS)
        client.lookup("t", IDS)
        client.close()
        client.close()
        for look_up in (lambda: client.lookup("t", IDS), lambda: asyncio.run(client.lookup_async("t", IDS))):
            with pytest.raises(ClosedError, match=r"kvemb\.serve\.connect"):
                look_up()


def test_any_number_of_threads_and_tasks_look_up(local: LocalCluster) -> None:
    async def all_of(client: ServingClient, asked: list[np.ndarray]) -> list[np.ndarray]:
        return list(await asyncio.gather(*(client.lookup_async("t", ids) for ids in asked)))

    with trained(local) as table, kvemb.serve.connect(local.url, max_age_ms=0) as client, ThreadPoolExecutor(8) as pool:
        table.push(IDS, np.random.default_rng(0).normal(size=(len(IDS), DIM))).wait_applied(PATIENCE_S)
        expected, rng = table.pull(IDS), np.random.default_rng(1)
        asked = [rng.integers(0, len(IDS), (3, 50)) for _ in range(200)]
        answers = [*pool.map(lambda ids: client.lookup("t", ids), asked), *asyncio.run(all_of(client, asked))]
        for ids, rows in zip([*asked, *asked], answers, strict=True):
            np.testing.assert_array_equal(rows, expected[ids])


def test_what_was_served_is_counted(local: LocalCluster) -> None:
    with trained(local) as table, kvemb.serve.connect(local.url) as client:
        registry = CollectorRegistry()
        registry.register(client)
        client.lookup("t", np.append(IDS[:10], 5000))
        assert client.wait_ready(PATIENCE_S)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, {"cluster": table.cluster.config.cluster, **labels})

        assert value("kvemb_serve_ids_total", table="t", source="storage") == 10
        assert value("kvemb_serve_ids_total", table="t", source="unknown") == 1
        assert value("kvemb_serve_ids_total", table="t", source="old") == 0
        assert value("kvemb_serve_lookup_seconds_count") == 1
        assert value("kvemb_serve_age_seconds_count") == 1
        assert value("kvemb_serve_following") == 1


FORK = """
import os, sys, numpy as np, kvemb, kvemb.serve
ids = np.arange(2000)
client = kvemb.serve.connect(sys.argv[1])
if sys.argv[2] == "trainer":
    trainer = kvemb.connect(sys.argv[1])
    len(trainer.table("t"))
if sys.argv[2] == "used":
    client.lookup("t", ids)
    assert client.wait_ready(60)
child = os.fork()
if child == 0:
    code = 1
    try:
        assert (client.lookup("t", ids) == -1.0).all()
        assert client.wait_ready(60 if sys.argv[2] == "new" else 0.2) == (sys.argv[2] == "new")
        code = 0
    finally:
        os._exit(code)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert (client.lookup("t", ids) == -1.0).all()
client.close()
sys.exit(status)
"""


@pytest.mark.parametrize("parent", ["new", "used", "trainer"])
def test_a_forked_child_serves_and_follows_the_feed_if_its_parent_asked_no_shard(local: LocalCluster, parent: str) -> None:
    with trained(local):
        command = [sys.executable, "-c", FORK, local.url, parent]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert ("is a fork of one that followed the feed" in done.stderr) == (parent != "new")


def test_a_reader_is_served_and_can_neither_push_nor_drop_nor_move(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    with running(TlsCluster(tmp_path)) as secured:
        trainer, reader = (secured.as_seen_by(secured.issue(name, name=name.replace("/", "-"))) for name in ("trainer/t", "reader/r"))
        with kvemb.connect(trainer) as cluster, kvemb.serve.connect(reader, max_age_ms=NEVER_MS) as client:
            table = cluster.create_table("t", dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            client.lookup("t", IDS)
            assert client.wait_ready(PATIENCE_S)
            push(table, IDS)
            wait_for(lambda: bool((client.lookup("t", IDS) == -1.0).all()))
            with kvemb.connect(reader) as other:
                one, ones, saved = other.table("t"), np.ones((1, DIM), np.float32), str(tmp_path / "saved")
                cluster.save(saved)
                for write in (
                    lambda: one.push([1], ones).wait(PATIENCE_S),
                    lambda: one.assign([1], ones),
                    lambda: one.erase([1]),
                    lambda: one.set_policies(eviction=kvemb.evict.keep(1)),
                    lambda: other.alter_table("t", optimizer=kvemb.optim.adam()),
                    lambda: other.alter_table("t", dim=DIM + 1),
                    lambda: other.drop_table("t"),
                    lambda: other.create_table("other", dim=1, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros()),
                    lambda: other.files.import_rows("t", iter([(np.ones(1, np.int64), ones)])),
                    lambda: other.flush(),
                    lambda: other.save(str(tmp_path / "other")),
                    lambda: other.load(saved),
                    lambda: other.load(saved, tables=["t"]),
                    lambda: other.nodes.begin(other.nodes.add("127.0.0.1:1")),
                    lambda: other.nodes.replace_dead(secured.tree["storage"]["nodes"][0], "127.0.0.1:1"),
                    lambda: other.nodes.abort(),
                    lambda: other.shards.begin(other.shards.rebalance()),
                ):
                    with pytest.raises(AccessDeniedError):
                        write()
            assert cluster.tables() == ["t"]
            assert sorted(table.export()[0]) == IDS.tolist()
            assert (table.pull(IDS) == -1.0).all()
