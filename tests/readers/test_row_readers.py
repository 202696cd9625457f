"""Readers in other languages on real clusters: equal to Python's pull, or a typed end."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from moving_load import IDS, N_IDS, MovingLoad, further_node
from reader_programs import LANGUAGES, LOST_NODE, PATIENCE_S, WRONG_RECORD, RunningReader, built, why_not

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.local_cluster import LocalCluster
from tests.real_servers import redis_client

pytestmark = pytest.mark.full  # whole programs, examples and pages

Programs = dict[str, list[str]]
SOME = [int(id_) for id_ in IDS[::50]]


@pytest.fixture(params=LANGUAGES)
def program(request: pytest.FixtureRequest, programs: Programs) -> list[str]:
    """The command of a reader."""
    if request.param not in programs:
        pytest.skip(why_not(request.param))
    return programs[request.param]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The commands of all that can be built here: of every reader, where they are required."""
    missing = [why_not(language) for language in LANGUAGES if why_not(language)]
    if missing and os.environ.get("KVEMB_REQUIRE_READERS") == "1":
        pytest.fail("; ".join(missing), pytrace=False)
    if len(missing) == len(LANGUAGES):
        pytest.skip("; ".join(missing))
    return {language: built(language, tmp_path_factory.mktemp(language)) for language in LANGUAGES if not why_not(language)}


def addresses(local: LocalCluster) -> list[str]:
    return [server.address for server in local.servers]


def hex_of(rows: np.ndarray) -> list[str]:
    return [row.astype("<f4").tobytes().hex() for row in rows]


def rows_of(lines: list[dict[str, Any]]) -> np.ndarray:
    return np.array([np.frombuffer(bytes.fromhex(line["row"]), "<f4") for line in lines])


# --- at rest ---------------------------------------------------------------------------------------------------------------------------

TABLES: dict[str, dict[str, Any]] = {
    "uniform": {"optimizer": kvemb.optim.sgd(lr=0.1), "initializer": kvemb.init.uniform()},
    "three states, 16 bits": {
        "optimizer": kvemb.optim.adam(amsgrad=True), "initializer": kvemb.init.normal(), "dtype": "float16", "id_dtype": "uint64",
    },
    "compact ünd long": {
        "optimizer": kvemb.optim.chain(kvemb.optim.l2(0.1), kvemb.optim.clip_by_norm(1.0), kvemb.optim.sgd(momentum=0.9, nesterov=True)),
        "initializer": kvemb.init.xavier_uniform(), "dtype": "bfloat16", "expected_rows": 2_000_000, "layout": "compact", "seed": 77,
    },
    "one bucket": {"optimizer": kvemb.optim.ftrl(), "initializer": kvemb.init.zeros(), "expected_rows": 3},
    "one state a row": {
        "optimizer": kvemb.optim.rowwise_adagrad(),
        "initializer": kvemb.init.columns((3, kvemb.init.constant(1.0)), (5, kvemb.init.uniform())),
    },
    "many states": {
        "optimizer": kvemb.optim.rmsprop(momentum=0.1, centered=True), "initializer": kvemb.init.zeros(), "reduce": "mean",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def resting(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[tuple[LocalCluster, kvemb.Cluster]]:
    if request.param == "redis":
        require_server("redis-server")
    with LocalCluster(request.param, 2, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        cluster.create_table("uniform", dim=2, optimizer=kvemb.optim.adagrad(), initializer=kvemb.init.zeros())
        cluster.drop_table("uniform")  # the next one of this name is of another life
        for at, (name, options) in enumerate(TABLES.items()):
            table = cluster.create_table(name, dim=8, **options)
            ids = ids_of(options)
            table.push(ids, np.random.default_rng(at).normal(size=(len(ids), 8)).astype(np.float32)).wait_applied(PATIENCE_S)
        cluster.create_table("dense", dim=8, optimizer=kvemb.optim.sgd(), initializer=kvemb.init.zeros(), num_ids=10)
        yield local, cluster


def ids_of(options: dict[str, Any]) -> np.ndarray:
    unsigned = np.random.default_rng(0).integers(0, 2**64, 300, dtype=np.uint64)
    return unsigned if options.get("id_dtype") == "uint64" else unsigned.view(np.int64)


@pytest.mark.parametrize("resting", ["redis", "valkey"], indirect=True)
def test_rows_at_rest_are_pulls_rows_bit_for_bit(resting: tuple[LocalCluster, kvemb.Cluster], program: list[str], tmp_path: Path) -> None:
    local, cluster = resting
    for name, options in TABLES.items():
        ids = ids_of(options)
        with RunningReader(program, addresses(local)[:1], name, tmp_path / "log") as reader:  # one address is enough to find the others
            lines = reader.ask([*ids.tolist(), 12345, *ids[:1].tolist()])
            assert (reader.end(), reader.said()) == (0, "")
        assert lines[-2] == {"id": 12345, "missing": True}
        assert [line["id"] for line in lines] == [*ids.tolist(), 12345, *ids[:1].tolist()]
        assert [line["row"] for line in lines[:-2] + lines[-1:]] == hex_of(cluster.table(name).pull([*ids, ids[0]]))
        assert all((line["epoch"], line["k"]) > (0, 0) for line in lines[:-2])


@pytest.mark.parametrize("resting", ["redis"], indirect=True)
def test_a_table_that_is_not_there_or_has_pages_is_refused(
    resting: tuple[LocalCluster, kvemb.Cluster], program: list[str], tmp_path: Path
) -> None:
    for name, why in (("absent", "no table"), ("dense", "num_ids")):
        with RunningReader(program, addresses(resting[0]), name, tmp_path / "log") as reader:
            assert reader.ask([1]) == []
            assert reader.end() == WRONG_RECORD
            assert why in reader.said()


@pytest.mark.parametrize("resting", ["redis"], indirect=True)
def test_a_line_without_ids_is_an_empty_batch_and_an_id_of_more_than_64_bits_is_refused(
    resting: tuple[LocalCluster, kvemb.Cluster], program: list[str], tmp_path: Path
) -> None:
    with RunningReader(program, addresses(resting[0]), "uniform", tmp_path / "log") as reader:
        reader.send([])
        assert [line["id"] for line in reader.ask([12345])] == [12345]
        assert reader.ask([10**20]) == []
        assert reader.end() != 0


@pytest.mark.parametrize("resting", ["redis"], indirect=True)
def test_a_foreign_value_is_refused(resting: tuple[LocalCluster, kvemb.Cluster], program: list[str], tmp_path: Path) -> None:
    local, cluster = resting
    definition = cluster.table("one bucket").definition
    keys = definition.keys(np.array([5, 7], np.uint64), pages=True)
    (key, _), field = ([bytes(some) for some in keys.encode()], bytes(keys.fields()[1]))
    node = int(cluster.store.nodes.cluster_map.slot_nodes[keys.slots()[0]])
    size = definition.record.size_bytes
    one = definition.record.encode(np.array([5], np.uint64), 1 << 48 | 1, np.zeros((1, 8), np.float32), np.zeros((1, 16), np.float32))
    with redis_client(local.servers[node]) as client:
        try:
            for value in (b"x" * (size - 1), one.tobytes()):  # the second is the record of another id
                client.hset(key, field, value)
                with RunningReader(program, addresses(local), "one bucket", tmp_path / "log") as reader:
                    assert reader.ask([7]) == []
                    assert reader.end() == WRONG_RECORD
                    assert "is not this row's record" in reader.said()
        finally:
            client.hdel(key, field)


# --- while things change ---------------------------------------------------------------------------------------------------------------


def test_rows_stay_right_while_slots_move_and_trainers_push(
    programs: Programs, require_server: Callable[[str], str], tmp_path: Path
) -> None:
    require_server("redis-server")
    rng = np.random.default_rng(0)
    with LocalCluster("redis", 2, shards=2, memory_mb=64) as local, further_node(local) as third, ExitStack() as stack:
        load, operator = stack.enter_context(MovingLoad(local)), stack.enter_context(kvemb.connect(local.url))
        readers = [stack.enter_context(RunningReader(programs[one], addresses(local), "t", tmp_path / one)) for one in programs]
        for reader in readers:
            assert len(reader.ask(SOME)) == len(SOME)  # each has the first map
        for plan in (lambda: operator.nodes.add(third.address), lambda: operator.nodes.remove(addresses(local)[0])):
            operator.nodes.begin(plan())
            waiter = threading.Thread(target=operator.nodes.wait, kwargs={"timeout_s": PATIENCE_S})
            waiter.start()
            moving = True
            while moving:
                moving = waiter.is_alive()  # once more when it is done: every reader meets a map of before it
                for reader in readers:
                    ids, least = rng.choice(N_IDS, 300, replace=False), load.confirmed
                    lines = reader.ask(ids.tolist())
                    most = load.counts[ids] + 1  # one push of its may be on its way
                    assert [line["id"] for line in lines] == ids.tolist(), reader.said()
                    rows = -rows_of(lines)
                    assert (rows == rows[:, :1]).all()
                    assert (least[ids] <= rows[:, 0]).all()
                    assert (rows[:, 0] <= most).all()
        load.stop()
        expected = hex_of(load.reader.table("t").pull(IDS[::7], timeout_s=PATIENCE_S))
        for reader in readers:
            assert [line["row"] for line in reader.ask(IDS[::7].tolist())] == expected
            assert reader.end() == 0
            assert reader.said().count("stale map: ") >= 2, reader.said()


@pytest.fixture
def trained(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    """A cluster whose rows are applied, and whose shards are held, so that they mend nothing."""
    require_server("redis-server")
    with LocalCluster("redis", 2, memory_mb=64) as local:
        with kvemb.connect(local.url) as cluster:
            table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            table.push(IDS, np.ones((N_IDS, 4), np.float32)).wait_applied(PATIENCE_S)
        local.shards[0].signal(signal.SIGSTOP)
        yield local
        for process in (local.shards[0], local.servers[1].process):
            process.signal(signal.SIGCONT)


def kill(local: LocalCluster, client: "redis.Redis") -> None:
    local.servers[1].process.kill()


def flush(local: LocalCluster, client: "redis.Redis") -> None:
    client.flushall()


def empty(local: LocalCluster, client: "redis.Redis") -> None:
    local.servers[1].restart()


def forget(local: LocalCluster, client: "redis.Redis") -> None:
    client.delete("kvemb:marker")


def back_from_snapshot(local: LocalCluster, client: "redis.Redis") -> None:
    client.save()
    snapshot = local.servers[1].snapshot_path
    local.servers[1].restart(snapshot=snapshot.rename(snapshot.with_suffix(".kept")))


def hang(local: LocalCluster, client: "redis.Redis") -> None:
    local.servers[1].process.signal(signal.SIGSTOP)


@pytest.mark.parametrize("loss", [kill, flush, empty, forget, back_from_snapshot, hang])
def test_a_lost_node_is_said_and_never_taken_for_one_without_rows(
    trained: LocalCluster, programs: Programs, loss: Callable[[LocalCluster, Any], None], tmp_path: Path
) -> None:
    seeds, patience_s = addresses(trained), 6.0 if loss is hang else PATIENCE_S
    with redis_client(trained.servers[1]) as client, ExitStack() as stack:
        before = [stack.enter_context(RunningReader(programs[one], seeds, "t", tmp_path / one, patience_s)) for one in programs]
        for reader in before:
            assert {line["row"] for line in reader.ask(SOME)} == {np.full(4, -1, "<f4").tobytes().hex()}
        loss(trained, client)
        after = [stack.enter_context(RunningReader(programs[one], seeds, "t", tmp_path / f"{one} after", patience_s)) for one in programs]
        for reader in before + after:
            reader.send(SOME)
        for reader in before + after:
            assert reader.ask(SOME, sent=True) == []
            assert reader.end() == LOST_NODE
            assert reader.said().splitlines()[-1].startswith("lost node: "), reader.said()
            assert seeds[1] in reader.said()
