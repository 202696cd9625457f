"""Views on real targets: whole or not there, switched for all readers at once, never mixed in one look-up, whatever is killed."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
import redis
import yaml
from matrix import one_of

import kvemb
import kvemb.init
import kvemb.optim
import kvemb.serve
from kvemb.errors import ConfigError, StorageError, UnknownTableError, UnknownViewError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.net.deadline import Deadline
from kvemb.projection.projection_target import TargetUrl
from kvemb.projection.views import BUILDING, COMPLETE, DROPPING, TargetViews, ViewList
from kvemb.serve import ServedFrom
from kvemb.serve.row_sources import RowSet
from tests.integration.counting_trainers import PATIENCE_S, wait_for
from tests.integration.tls_storage import TlsNodes, TlsServer
from tests.warm_clusters import warm

DIMS = {"user": 4, "item": 8}
IDS = np.arange(2000)
DENSE = os.urandom(20_000_000)  # three pieces
TAKEN = "kvemb:view-{}:"


class Viewed:
    """A cluster with two tables, and a target.

    Args:
        local: the cluster.
        cluster: connected to it.
        server: the target, empty.
    """

    def __init__(self, local: LocalCluster, cluster: kvemb.Cluster, server: StorageServer) -> None:
        self.local, self.cluster, self.server, self.url = local, cluster, server, f"redis://{server.address}"
        self.views = TargetViews(server.address, TargetUrl.parse(self.url).access({}, "", None))
        self.redis = redis.Redis(port=server.port, protocol=2)
        self.dense = local.folder / "dense.bin"
        self.dense.write_bytes(DENSE)
        for name, dim in DIMS.items():
            cluster.create_table(name, dim=dim, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.normal(std=0.1))

    def fill(self, value: float) -> None:
        """Give every row this value everywhere."""
        for name, dim in DIMS.items():
            self.cluster.table(name).assign(IDS, np.full((len(IDS), dim), value, np.float32))

    def started(self, *words: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "kvemb.cli", "view", *words, "--to", self.url]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.local.folder)

    def creating(self, name: str, *options: str) -> "subprocess.Popen[bytes]":
        return self.started("create", str(self.local.config_path), name, "--tables", "user,item", "--model", str(self.dense), *options)

    def create(self, name: str, value: float, *options: str) -> None:
        """Make a view of rows that all are this value."""
        self.fill(value)
        ended(self.creating(name, *options))

    def keys_of(self, number: int) -> list[bytes]:
        return list(self.redis.keys(TAKEN.format(number) + "*"))

    def state(self, name: str) -> str:
        view = self.views.read().views.get(name)
        return view.state if view else ""


def ended(process: "subprocess.Popen[bytes]", code: int = 0) -> str:
    said = process.communicate(timeout=PATIENCE_S)[0].decode()
    assert process.returncode == code, said
    return said


@contextmanager
def viewed(kind: str) -> Iterator[Viewed]:
    with warm("valkey", shards=2) as local, kvemb.connect(local.url) as cluster:
        (server,) = start_servers(kind, 1, local.folder, 512)
        try:
            yield Viewed(local, cluster, server)
        finally:
            server.process.kill()


@pytest.fixture(params=one_of("redis", "valkey"))
def on(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[Viewed]:
    require_server("redis-server")
    with viewed(request.param) as one:
        yield one


def values_of(found: dict[str, np.ndarray]) -> set[float]:
    return {float(value) for rows in found.values() for value in np.unique(rows)}


# --- what a view is -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_view_keeps_the_rows_and_the_file_of_its_time_and_ids_without_a_row_are_as_pulls_give_them(on: Viewed, dtype: str) -> None:
    rng, user = np.random.default_rng(0), on.cluster.table("user")
    user.assign(IDS + 200, rng.standard_normal((len(IDS), 4), np.float32))
    wanted = user.pull(np.arange(2400))
    ended(on.creating("v1", "--dtype", dtype))
    on.fill(7.0)
    assert "is in use" in ended(on.started("use", "v1"))
    with kvemb.serve.connect(on.url) as client:
        rows, sources = client.lookup("user", np.arange(2400), return_sources=True)
        again = client.lookup("user", np.arange(2400))
        assert client.wait_ready(1.0)
        with pytest.raises(UnknownTableError, match=r"view 'v1' of target .* has no table 'usr'"):
            client.lookup("usr", [1])
    np.testing.assert_allclose(rows, wanted, atol={"float32": 0.0, "float16": 2e-3, "int8": 2e-2}[dtype])
    np.testing.assert_array_equal(rows[sources == ServedFrom.UNKNOWN], wanted[sources == ServedFrom.UNKNOWN])
    assert set(sources[:200]) == {ServedFrom.UNKNOWN}
    assert set(sources[200:-200]) == {ServedFrom.STORAGE}
    np.testing.assert_array_equal(rows, again)
    view = on.views.read().views["v1"]
    assert b"".join(on.redis.mget(view.piece_keys())) == DENSE
    assert "tables user,item" in ended(on.started("list"))


def test_the_same_command_again_is_the_same_view_and_another_content_is_refused(on: Viewed) -> None:
    on.create("v1", 1.0)
    before = on.views.read()
    assert "view v1: tables" in ended(on.creating("v1"))
    assert on.views.read() == before
    assert "already, with other content" in ended(on.creating("v1", "--dtype", "int8"), 2)
    assert "no name of a view" in ended(on.creating("live"), 2)
    assert "--model /nowhere: cannot be read" in ended(on.creating("v2", "--model", "/nowhere"), 2)
    assert "no view 'v2'" in ended(on.started("use", "v2"), 1)
    assert "no projection that `kvemb publish` maintains" in ended(on.started("use", "live"), 1)
    with pytest.raises(UnknownViewError, match="there are: v1"):
        kvemb.serve.connect(f"{on.url}/?view=v2")
    with pytest.raises(ConfigError, match=r"it may have: view, password_env$"):
        kvemb.serve.connect(f"{on.url}/?vew=v2")


def test_a_target_with_a_password_is_read_by_the_name_of_its_variable(on: Viewed, monkeypatch: pytest.MonkeyPatch) -> None:
    on.create("v1", 1.0)
    on.redis.acl_setuser("serving", enabled=True, passwords=["+word"], keys=["kvemb:*"], commands=["+get", "+hmget"])
    monkeypatch.setenv("TARGET_WORD", "word")
    with kvemb.serve.connect(f"redis://serving@{on.server.address}/?view=v1&password_env=TARGET_WORD") as client:
        assert values_of(client.lookup_tables({"user": IDS, "item": IDS})) == {1.0}
    with pytest.raises(ConfigError, match="the environment variable NOWHERE is not set"):
        kvemb.serve.connect(f"{on.url}/?view=v1&password_env=NOWHERE")


def test_a_target_is_written_and_read_over_tls(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    nodes = TlsNodes("redis", 1, tmp_path)
    try:
        (server,) = nodes.servers
        assert isinstance(server, TlsServer)
        with warm("valkey") as local, kvemb.connect(local.url) as cluster:
            on = Viewed(local, cluster, server)
            on.create("v1", 1.0)
            on.views.use("v1")
            files = {"ca": nodes.tls.ca, "cert": nodes.tls.cert, "key": nodes.tls.key}
            url = f"rediss://{server.tls_address}/"
            with kvemb.serve.connect(f"{url}?{urlencode(files)}") as client:
                assert values_of(client.lookup_tables({"user": IDS, "item": IDS})) == {1.0}
            with pytest.raises(StorageError):  # an authority that the system does not trust
                kvemb.serve.connect(url)
            with pytest.raises(ConfigError, match="has the option 'ca'"):
                kvemb.serve.connect(f"{on.url}?ca={nodes.tls.ca}")
            tree = yaml.safe_load(local.config_path.read_text(encoding="utf-8"))
            tree["storage"]["tls"] = files
            local.config_path.write_text(yaml.safe_dump(tree), encoding="utf-8")
            on.url = f"rediss://{server.tls_address}"
            assert "view v1: tables" in ended(on.started("list", "--config", str(local.config_path)))
    finally:
        nodes.close()


# --- readers ------------------------------------------------------------------------------------------------------------------------


def test_no_lookup_mixes_views_while_readers_are_switched_and_back(on: Viewed) -> None:
    for value in (1.0, 2.0):
        on.create(f"v{value:.0f}", value)
    on.views.use("v1")
    end = threading.Event()

    class Reader:
        def __init__(self, **options: float) -> None:
            self.options, self.n_looks, self.seen = options, 0, set[str]()

        def read(self) -> None:
            rng = np.random.default_rng()
            with kvemb.serve.connect(on.url, **self.options) as client:
                while not end.is_set():
                    ids = rng.choice(len(IDS), 64)
                    found, view = client.lookup_tables({"user": ids, "item": ids}, return_view=True)
                    assert values_of(found) == {float(view[1:])}
                    self.n_looks, self.seen = self.n_looks + 1, self.seen | {view}

    readers = [Reader(), Reader(), Reader(cache_mb=0), Reader(cache_mb=0.05)]
    with ThreadPoolExecutor(4) as pool, kvemb.serve.connect(f"{on.url}/?view=v2", cache_mb=0) as second:
        reading, turn, deadline = [pool.submit(reader.read) for reader in readers], 0, Deadline.after(PATIENCE_S)
        try:
            while turn < 12 or not all(reader.seen == {"v1", "v2"} and reader.n_looks > 100 for reader in readers):
                assert not deadline.expired
                assert not any(one.done() for one in reading)
                on.views.use(f"v{turn % 2 + 1}")
                time.sleep(0.15)
                assert values_of(second.lookup_tables({"user": IDS})) == {2.0}  # one that asks for a view by name
                turn += 1
        finally:
            end.set()
            for one in reading:
                one.result(PATIENCE_S)


def test_a_switch_reaches_every_reader_within_a_second(on: Viewed) -> None:
    for value in (1.0, 2.0):
        on.create(f"v{value:.0f}", value)
    on.views.use("v1")
    with kvemb.serve.connect(on.url) as client:
        assert asyncio.run(client.lookup_async("user", [3]))[0, 0] == 1.0
        for view, value in (("v2", 2.0), ("v1", 1.0)):
            on.views.use(view)
            wait_for(lambda value=value: float(client.lookup("user", [3])[0, 0]) == value)  # type: ignore[misc]


def test_what_a_switch_needs_is_made_ready_before_it_and_kept_for_the_way_back(on: Viewed) -> None:
    made = list[str]()

    def load(rows: RowSet) -> None:
        made.append(rows.view)

    def switch(name: str) -> None:
        on.views.use(name)
        wait_for(lambda: client.lookup_tables({"user": [3]}, return_view=True)[1] == name)

    on.create("v1", 1.0)
    on.views.use("v1")
    with kvemb.serve.connect(on.url) as client:
        client.source.before_use.append(load)  # type: ignore[union-attr]
        assert client.lookup_tables({"user": [3]}, return_view=True)[1] == "v1"
        for value in (2.0, 3.0):
            on.create(f"v{value:.0f}", value)
            wait_for(lambda value=value: client.source.is_ready(f"v{value:.0f}"))  # type: ignore[misc, union-attr]
            assert client.lookup_tables({"user": [3]}, return_view=True)[1] == "v1"
        for name in ("v3", "v1", "v3"):
            switch(name)
        assert made == ["v2", "v3", "v1"]
        on.views.drop("v2")
        switch("v1")
        assert values_of(client.lookup_tables({"user": IDS, "item": IDS})) == {1.0}
        assert made == ["v2", "v3", "v1"]


def test_a_newest_view_that_cannot_be_used_is_named_once_and_harms_no_lookup(on: Viewed, caplog: pytest.LogCaptureFixture) -> None:
    tried = list[str]()

    def load(rows: RowSet) -> None:
        tried.append(rows.view)
        if rows.view == "v2":
            raise ConfigError("this is no model")

    on.create("v1", 1.0)
    on.views.use("v1")
    with kvemb.serve.connect(on.url) as client:
        client.source.before_use.append(load)  # type: ignore[union-attr]
        assert values_of(client.lookup_tables({"user": IDS})) == {1.0}
        on.create("v2", 2.0)
        wait_for(lambda: "view 'v2' cannot be used as it is: ConfigError: this is no model" in caplog.text)
        time.sleep(1.0)
        assert tried == ["v2"]
        on.create("v3", 3.0)
        wait_for(lambda: "v3" in tried)
        on.views.use("v3")
        wait_for(lambda: values_of(client.lookup_tables({"user": IDS})) == {3.0})


def test_a_view_in_use_is_not_dropped_and_another_goes_with_all_its_keys(on: Viewed) -> None:
    for value in (1.0, 2.0):
        on.create(f"v{value:.0f}", value)
    on.views.use("v1")
    with kvemb.serve.connect(on.url, cache_mb=0) as following, kvemb.serve.connect(f"{on.url}/?view=v1", cache_mb=0) as named:
        assert values_of(following.lookup_tables({"user": IDS})) == {1.0}
        assert "view 'v1' is in use" in ended(on.started("drop", "v1"), 2)
        assert values_of(named.lookup_tables({"user": IDS})) == {1.0}
        on.views.use("v2")
        on.views.drop("v1")  # before the reader has looked which one is in use
        assert values_of(following.lookup_tables({"user": IDS, "item": IDS})) == {2.0}
        with pytest.raises(UnknownViewError, match="view 'v1' was dropped"):
            named.lookup("user", IDS)
        assert on.keys_of(1) == []
        on.create("v1", 3.0)  # another view of that name
        wait_for(lambda: values_of(named.lookup_tables({"user": IDS})) == {3.0})


def test_a_reader_of_a_view_that_was_dropped_answers_no_id_not_even_one_that_it_has_kept(on: Viewed) -> None:
    for value in (1.0, 2.0):
        on.create(f"v{value:.0f}", value)
    on.views.use("v2")
    with kvemb.serve.connect(f"{on.url}/?view=v1", degraded="default") as named:
        assert values_of(named.lookup_tables({"user": IDS})) == {1.0}
        on.views.drop("v1")

        def refused() -> bool:
            try:
                named.lookup("user", IDS)
            except UnknownViewError:
                return True
            return False

        wait_for(refused)
        assert refused()


def test_the_maintained_projection_is_read_and_a_view_takes_its_place(on: Viewed) -> None:
    on.fill(1.0)
    command = [sys.executable, "-m", "kvemb.cli", "publish", str(on.local.config_path), "--to", on.url, "--tables", "user,item"]
    publisher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: json.loads(on.redis.get("kvemb:projection:1/1") or b"{}").get("until", 0) > 0)
        with kvemb.serve.connect(on.url, max_age_ms=50) as client:
            assert client.lookup_tables({"user": IDS[:5]}, return_view=True)[1] == "live"
            on.fill(2.0)
            wait_for(lambda: values_of(client.lookup_tables({"user": IDS, "item": IDS})) == {2.0})
            ended(on.creating("v1"))
            on.views.use("v1")
            on.fill(3.0)
            wait_for(lambda: client.lookup_tables({"user": [1]}, return_view=True)[1] == "v1")
            assert values_of(client.lookup_tables({"user": IDS})) == {2.0}
            on.views.use("live")
            wait_for(lambda: values_of(client.lookup_tables({"user": IDS})) == {3.0})
            on.cluster.drop_table("item")
            wait_for(lambda: b'"item"' not in on.redis.get("kvemb:projection"))
            wait_for(lambda: "item" not in client.source.now().projected.definitions)  # type: ignore[union-attr]
            assert values_of(client.lookup_tables({"user": IDS})) == {3.0}
    finally:
        publisher.kill()
        publisher.wait(PATIENCE_S)


def test_a_row_that_is_not_there_while_a_target_is_filled_again_is_not_taken_for_none(on: Viewed) -> None:
    many = np.arange(100_000)
    on.cluster.table("user").assign(many, np.full((len(many), DIMS["user"]), 5.0, np.float32))
    command = [sys.executable, "-m", "kvemb.cli", "publish", str(on.local.config_path), "--to", on.url, "--tables", "user"]
    publisher = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def filled() -> bool:
        return bool(json.loads(on.redis.get("kvemb:projection:1/1") or b"{}").get("until", 0) > 0)

    try:
        wait_for(filled)
        with kvemb.serve.connect(on.url, max_age_ms=0, cache_mb=0, degraded="default") as client:
            on.redis.flushall()
            n_degraded = n_looks = 0
            while n_looks == 0 or not filled():
                rows, sources = client.lookup("user", many[:: max(1, 97 - n_looks)], return_sources=True)
                assert ServedFrom.UNKNOWN not in sources
                assert (rows[sources == ServedFrom.STORAGE] == 5.0).all()
                n_looks, n_degraded = n_looks + 1, n_degraded + int((sources == ServedFrom.DEFAULT).any())
            assert n_degraded > 0
            wait_for(lambda: values_of(client.lookup_tables({"user": many})) == {5.0})
            assert set(client.lookup("user", [1_000_000], return_sources=True)[1]) == {ServedFrom.UNKNOWN}
    finally:
        publisher.kill()
        publisher.wait(PATIENCE_S)


def test_a_share_without_a_publisher_or_of_other_tables_is_no_share_without_rows(on: Viewed) -> None:
    on.fill(5.0)
    command = [sys.executable, "-m", "kvemb.cli", "publish", str(on.local.config_path), "--to", on.url]
    publishers: list[subprocess.Popen[bytes]] = []

    def publish(part: str, tables: str) -> None:
        publishers.append(subprocess.Popen([*command, "--part", part, "--tables", tables], stdout=subprocess.DEVNULL))
        wait_for(lambda: json.loads(on.redis.get(f"kvemb:projection:{part}") or b"{}").get("until", 0) > 0)

    def sources(client: kvemb.serve.ServingClient) -> set[int]:
        return set(client.lookup("user", IDS, return_sources=True)[1].tolist())

    try:
        publish("1/2", "user")
        with kvemb.serve.connect(on.url, max_age_ms=0, cache_mb=0, degraded="default") as client:
            assert sources(client) == {ServedFrom.DEFAULT}
            about = on.redis.get("kvemb:projection")
            publish("2/2", "item")
            on.redis.set("kvemb:projection", about)  # as if the first had begun last
            assert sources(client) == {ServedFrom.DEFAULT}
            publishers[-1].kill()
            publish("2/2", "user")
            wait_for(lambda: sources(client) == {ServedFrom.STORAGE})
    finally:
        for one in publishers:
            one.kill()
            one.wait(PATIENCE_S)


def test_a_target_that_goes_away_leaves_what_is_cached_and_is_read_again_when_it_is_back(on: Viewed, tmp_path: Path) -> None:
    on.create("v1", 1.0)
    on.views.use("v1")
    with kvemb.serve.connect(on.url, timeout_ms=500) as client:
        assert values_of(client.lookup_tables({"user": IDS[:100]})) == {1.0}
        on.redis.save()
        snapshot = tmp_path / "saved.rdb"
        snapshot.write_bytes(on.server.snapshot_path.read_bytes())
        on.server.process.kill()
        begun_s = time.monotonic()
        assert values_of(client.lookup_tables({"user": IDS[:100]})) == {1.0}
        with pytest.raises(StorageError, match=on.server.address):
            client.lookup("user", IDS)
        assert time.monotonic() - begun_s < PATIENCE_S
        on.server.restart(snapshot=snapshot)
        wait_for(lambda: answered(client) == {1.0})
        on.server.restart()  # empty
        wait_for(lambda: answered(client, IDS + 10_000) is None)
        assert values_of(client.lookup_tables({"user": IDS[:100]})) == {1.0}


def answered(client: kvemb.serve.ServingClient, ids: np.ndarray = IDS) -> set[float] | None:
    """The values of a look-up; None where it has none."""
    try:
        return values_of(client.lookup_tables({"user": ids}))
    except (StorageError, UnknownViewError):
        return None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_follows_the_view_in_use_too(on: Viewed) -> None:
    for value in (1.0, 2.0):
        on.create(f"v{value:.0f}", value)
    on.views.use("v1")
    with kvemb.serve.connect(on.url) as client:
        assert values_of(client.lookup_tables({"user": IDS})) == {1.0}
        child = os.fork()
        if child == 0:
            try:
                assert values_of(client.lookup_tables({"user": IDS})) == {1.0}
                wait_for(lambda: values_of(client.lookup_tables({"user": IDS})) == {2.0})
                os._exit(0)
            finally:
                os._exit(1)
        time.sleep(0.5)
        on.views.use("v2")
        assert os.waitpid(child, 0)[1] == 0


# --- processes that are killed ------------------------------------------------------------------------------------------------------


def test_a_creation_that_is_killed_at_any_point_leaves_no_view_and_is_made_by_the_same_command(on: Viewed) -> None:
    on.create("v0", 9.0)
    on.views.use("v0")
    prefix = TAKEN.format(2)
    points: list[Callable[[], bool]] = [
        lambda: on.state("v1") == BUILDING,
        lambda: on.redis.exists(f"{prefix}publisher:1/1") == 1,
        lambda: on.redis.exists(f"{prefix}projection") == 1,
        lambda: len(on.keys_of(2)) > 3,  # rows
        lambda: bool(json.loads(on.redis.get(f"{prefix}projection:1/1") or b"{}").get("position")),
        lambda: on.redis.exists(f"{prefix}dense:0") == 1,
        lambda: on.redis.exists(f"{prefix}dense:1") == 1,
    ]
    n_killed = 0
    for number, reached in enumerate(points):
        on.fill(float(number))
        process = on.creating("v1")
        while not reached() and process.poll() is None:
            time.sleep(0.0005)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        if on.state("v1") == COMPLETE:  # it was faster than the look: it is whole then
            break
        n_killed += 1
        assert [view.name for view in on.views.read().complete()] == ["v0"]
        with pytest.raises(UnknownViewError):
            kvemb.serve.connect(f"{on.url}/?view=v1")
    assert n_killed >= 4
    if on.state("v1") != COMPLETE:
        on.create("v1", 5.0)
        on.views.use("v1")
        with kvemb.serve.connect(on.url) as client:
            assert values_of(client.lookup_tables({"user": IDS, "item": IDS})) == {5.0}
    view = on.views.read().views["v1"]
    assert hashlib.sha256(b"".join(on.redis.mget(view.piece_keys()))).hexdigest() == hashlib.sha256(DENSE).hexdigest()


def test_a_half_view_of_other_content_is_replaced(on: Viewed) -> None:
    on.fill(1.0)
    process = on.creating("v1")
    while len(on.keys_of(1)) <= 3:
        time.sleep(0.0005)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    if on.state("v1") == COMPLETE:
        pytest.skip("it was made before it was killed")
    ended(on.creating("v1", "--dtype", "int8"))
    view = on.views.read().views["v1"]
    assert (view.number, view.dtype, on.keys_of(1)) == (2, "int8", [])


def test_a_drop_that_is_killed_is_done_by_doing_it_again_or_by_a_new_view_of_the_name(on: Viewed) -> None:
    for name in ("v1", "v2"):
        on.create(name, 1.0)
    for name in ("v1", "v2"):  # as a drop leaves it that is killed behind its first step, or in the middle of its second
        on.views._change(lambda views, name=name: views.dropping(name))  # type: ignore[misc]
    on.redis.unlink(*[key for key in on.keys_of(2) if on.redis.type(key) == b"hash"][:100])  # what says which there are goes last
    assert {on.state("v1"), on.state("v2")} == {DROPPING}
    with pytest.raises(UnknownViewError):
        on.views.use("v1")
    assert "view v1 is deleted" in ended(on.started("drop", "v1"))
    ended(on.creating("v2"))
    assert on.keys_of(1) == on.keys_of(2) == []
    assert [(view.name, view.number) for view in on.views.read().complete()] == [("v2", 3)]


def test_a_creation_that_was_only_paused_writes_nothing_into_the_view_that_another_has_made(on: Viewed) -> None:
    on.fill(1.0)
    first = on.creating("v1")
    while len(on.keys_of(1)) <= 3 and first.poll() is None:
        time.sleep(0.0005)
    first.send_signal(signal.SIGSTOP)
    if on.state("v1") == COMPLETE:
        first.kill()
        first.communicate(timeout=PATIENCE_S)
        pytest.skip("it was made before it was paused")
    on.create("v1", 2.0)
    on.views.use("v1")
    before = {key: on.redis.hgetall(key) for key in on.keys_of(1) if on.redis.type(key) == b"hash"}
    on.fill(3.0)
    first.send_signal(signal.SIGCONT)
    ended(first, 1)
    assert {key: on.redis.hgetall(key) for key in on.keys_of(1) if on.redis.type(key) == b"hash"} == before
    with kvemb.serve.connect(on.url) as client:
        assert values_of(client.lookup_tables({"user": IDS, "item": IDS})) == {2.0}


def test_a_list_of_views_that_another_program_wrote_is_refused_by_name(on: Viewed) -> None:
    on.redis.set("kvemb:views", b"[1, 2]")
    assert "no list of views" in ended(on.started("list"), 2)
    with pytest.raises(ConfigError, match="no list of views"):
        kvemb.serve.connect(on.url)
    assert ViewList.decode(None) == ViewList()
