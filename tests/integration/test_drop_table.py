"""Dropping tables on real servers: every row is gone before the name is free, and nothing of the old table is taken for the new one's."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import yaml
from matrix import one_of

import kvemb
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.cli import main
from kvemb.errors import CheckpointError, InvalidInputError, ShardUnavailableError, TableDroppedError, UnknownTableError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import DROP_TABLE, ERASE_TABLE, EraseTableRequest, TableRequest
from kvemb.schema.table_def import TableDef
from tests.integration.table_clusters import names, start
from tests.real_servers import redis_client

N = 500
IDS = np.arange(N)


def old_table(cluster: Cluster, name: str, num_ids: int | None = None) -> Table:
    """A table with N rows of -1."""
    table = cluster.create_table(name, dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), num_ids=num_ids)
    table.push(IDS, np.ones((N, 4))).wait_applied()
    return table


def restart(local: LocalCluster) -> None:
    for shard in (0, 1):
        local.shards[shard].kill()
        local.start_shard(shard)


def n_keys(cluster: Cluster) -> int:
    return sum(node.n_keys for node in cluster.status().nodes)


@pytest.mark.parametrize("num_ids", [None, N])
def test_a_name_is_given_to_a_table_of_another_definition_once_all_rows_are_gone(
    local: LocalCluster, cluster: Cluster, num_ids: int | None
) -> None:
    name, before = next(names), n_keys(cluster)
    old_table(cluster, name, num_ids)
    with kvemb.connect(local.url) as other, kvemb.connect(local.url, read_only=True) as reader:
        held = other.table(name)
        assert reader.table(name).pull([3])[0, 0] == -1
        assert cluster.drop_table(name) == N
        assert n_keys(cluster) < before + 10  # a few are the shards' notes of how far they are
        assert name not in cluster.tables() + reader.tables()
        for verb in (lambda: cluster.table(name), lambda: cluster.drop_table(name)):
            with pytest.raises(TableDroppedError, match="was dropped"):
                verb()
        with pytest.raises(TableDroppedError, match="was dropped"):
            held.push(IDS, np.ones((N, 4))).wait_applied()
        with pytest.raises(TableDroppedError, match="was dropped"):
            held.assign([1], np.ones((1, 4)))
        np.testing.assert_array_equal(held.pull([1]), np.zeros((1, 4)))

        initializer = kvemb.init.uniform(-0.5, 0.5)
        new = cluster.create_table(name, dim=6, optimizer=kvemb.optim.adam(lr=0.1), initializer=initializer, num_ids=num_ids)
        rows, versions = new.pull(IDS, return_versions=True)
        assert not versions.any()
        assert len(new) == 0
        np.testing.assert_array_equal(rows, initializer.rows(IDS.astype(np.uint64), 6, table=name, seed=0))
        with pytest.raises(TableDroppedError, match="created again"):
            held.push(IDS, np.ones((N, 4))).wait_applied()
        new.push(IDS, np.ones((N, 6))).wait_applied()
        np.testing.assert_allclose(new.pull(IDS), rows - 0.1, atol=1e-5)
        with kvemb.connect(local.url, read_only=True) as later:
            np.testing.assert_array_equal(later.table(name).pull(IDS), new.pull(IDS))

    trained = new.pull(IDS)
    restart(local)  # their journals name both
    new.push(IDS[:1], np.zeros((1, 6))).wait_applied(60)
    np.testing.assert_array_equal(new.pull(IDS[1:]), trained[1:])
    assert len(new) == N


@pytest.mark.parametrize("layout", one_of("fast", "compact"))
def test_a_table_in_buckets_goes_bucket_by_bucket_and_not_row_by_row(require_server: Callable[[str], str], layout: str) -> None:
    ids = np.arange(20_000)
    with start("redis", require_server) as local, kvemb.connect(local.url) as cluster:
        before = n_keys(cluster)
        table = cluster.create_table(
            "wide", dim=16, optimizer=kvemb.optim.sgd(), initializer=kvemb.init.zeros(), expected_rows=len(ids), layout=layout
        )
        table.push(ids, np.ones((len(ids), 16)))
        table.flush()
        assert table.erase(ids[:10]) == 10
        with ExitStack() as stack:
            clients = [stack.enter_context(redis_client(server)) for server in local.servers]
            for client in clients:
                client.config_resetstat()
            assert cluster.drop_table("wide") == len(ids) - 10
            calls = [client.info("commandstats") for client in clients]
        assert not any("cmdstat_hdel" in one for one in calls)
        assert sum(one["cmdstat_unlink"]["calls"] for one in calls) == table.definition.n_buckets
        assert n_keys(cluster) < before + 10
        restart(local)  # their journals name its rows
        table = cluster.create_table("wide", dim=16, optimizer=kvemb.optim.sgd(), initializer=kvemb.init.zeros())
        np.testing.assert_array_equal(table.pull(ids[:3], timeout_s=60), np.zeros((3, 16)))
        table.push(ids[:3], np.zeros((3, 16))).wait_applied(60)
        assert n_keys(cluster) < before + 15


def told_that_it_was_dropped(pull: Callable[[], object]) -> str:
    """Pull until that is refused; return what is said."""
    deadline = Deadline.after(90)
    while not deadline.expired:
        try:
            pull()
        except TableDroppedError as error:
            return str(error)
        time.sleep(0.05)
    pytest.fail("initial rows for 30 s, without a word")


@pytest.mark.parametrize("again", [False, True])
def test_who_only_pulls_hears_of_a_drop_and_other_tables_are_not_disturbed(local: LocalCluster, cluster: Cluster, again: bool) -> None:
    name, kept = next(names), old_table(cluster, next(names))
    old_table(cluster, name)
    with kvemb.connect(local.url) as other:
        held, others = other.table(name), other.table(kept.name)
        held.pull(IDS)
        cluster.drop_table(name)
        if again:
            new = old_table(cluster, name)  # of the same definition; it has other rows
            new.erase(IDS)
        said = told_that_it_was_dropped(lambda: held.pull(IDS))
        assert "was dropped, and created again" in said if again else f"table {name!r} was dropped" in said
        with pytest.raises(TableDroppedError):
            held.pull(IDS[:1])
        assert set(np.unique(others.pull(np.arange(2 * N)))) == {-1, 0}
        others.push(IDS[:1], np.zeros((1, 4))).wait_applied()


def test_a_model_over_a_dropped_table_says_what_to_do_when_it_trains_and_when_it_only_predicts(
    local: LocalCluster, cluster: Cluster
) -> None:
    torch = pytest.importorskip("torch")
    from kvemb.torch import distribute

    name, ids = next(names), torch.arange(20)
    with kvemb.connect(local.url) as other:
        model = torch.nn.Embedding(20, 4), torch.nn.Linear(4, 1)
        model = torch.nn.Sequential(*model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribute(model, other, optimizer=optimizer, min_rows=10, names={"0": name}, quiet=True)
        cluster.drop_table(name)
        said = told_that_it_was_dropped(lambda: model.eval()(ids))
        assert "build the model again and call distribute" in said

        def step() -> None:
            model(ids).sum().backward()
            optimizer.step()

        model.train()
        assert "build the model again and call distribute" in told_that_it_was_dropped(step)


def test_a_drop_that_was_broken_off_refuses_and_is_completed_by_the_next_call(local: LocalCluster, cluster: Cluster) -> None:
    name = next(names)
    table = old_table(cluster, name)
    servers = cluster._connection.require_shards("drop").servers
    asked = servers.call(0, DROP_TABLE, TableRequest(name), Deadline.after(10))
    key = TableDef.from_dict(asked.table).key
    erased = servers.call(0, ERASE_TABLE, EraseTableRequest(key, 10.0), Deadline.after(10))
    assert (0 < erased.n_erased < N, erased.n_left) == (True, 0)
    restart(local)
    with pytest.raises(TableDroppedError, match="is being dropped"):
        table.push(IDS, np.ones((N, 4))).wait_applied(60)
    failures = [shard.reply.failure for shard in cluster.status().shards if shard.reply is not None]
    assert f"table {name!r} is being dropped" in failures[0]
    with pytest.raises(TableDroppedError, match="is being dropped"):
        cluster.create_table(name, dim=4, optimizer=kvemb.optim.sgd(lr=1.0), exist_ok=True)
    local.shards[1].kill()
    with pytest.raises(ShardUnavailableError):
        cluster.drop_table(name, timeout_s=2)
    local.start_shard(1)
    assert cluster.drop_table(name) == N - erased.n_erased
    assert not any(shard.reply.failure for shard in cluster.status().shards if shard.reply is not None)
    restart(local)
    assert len(old_table(cluster, name)) == N


def test_start_over_drops_what_there_is_and_creates_anew(cluster: Cluster) -> None:
    name, sgd = next(names), kvemb.optim.sgd(lr=1.0)
    for dim in (4, 4, 7):
        table = cluster.create_table(name, dim=dim, optimizer=sgd, initializer=kvemb.init.zeros(), start_over=True)
        assert (table.dim, len(table)) == (dim, 0)
        assert cluster.table(name) is table
        table.push(IDS, np.ones((N, dim))).wait_applied()
        np.testing.assert_array_equal(table.pull(IDS), -np.ones((N, dim)))
    with pytest.raises(InvalidInputError, match="one of exist_ok=True"):
        cluster.create_table(name, dim=4, optimizer=sgd, start_over=True, exist_ok=True)
    with pytest.raises(UnknownTableError):
        cluster.drop_table("never there")


def test_trainers_that_push_on_are_refused_and_leave_nothing_in_the_next_table(local: LocalCluster, cluster: Cluster) -> None:
    name, errors = next(names), []
    old_table(cluster, name)

    def push_on(number: int) -> None:
        with kvemb.connect(local.url, trainer=f"{name}-{number}") as other:
            table, rng = other.table(name), np.random.default_rng(number)
            try:
                while True:
                    table.push(rng.integers(0, 1 << 40, 200), np.ones((200, 4))).wait()
            except TableDroppedError as error:
                errors.append(error)

    trainers = [threading.Thread(target=push_on, args=(number,)) for number in range(2)]
    for trainer in trainers:
        trainer.start()
    while len(cluster.table(name)) < 4 * N:
        time.sleep(0.01)
    assert cluster.drop_table(name) >= 4 * N
    new = cluster.create_table(name, dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
    for trainer in trainers:
        trainer.join(60)
    assert len(errors) == 2
    assert len(new) == 0
    restart(local)
    new.push(IDS, np.ones((N, 4))).wait_applied(60)
    assert len(new) == N
    ids, rows = new.export()
    np.testing.assert_array_equal(rows, -np.ones((N, 4)))
    np.testing.assert_array_equal(np.sort(ids), IDS)


def test_the_command_drops_only_when_told_so_and_not_what_the_file_declares(
    local: LocalCluster, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, config = next(names), str(local.config_path)
    old_table(cluster, name)
    assert main(["drop", name, "--config", config]) == 1
    assert f"{N} rows" in capsys.readouterr().out
    assert len(cluster.table(name)) == N
    assert main(["drop", name, "--config", config, "--yes"]) == 0
    assert name not in cluster.tables()
    assert main(["drop", name, "--config", config, "--yes"]) == 1
    assert "was dropped" in capsys.readouterr().err

    declared = next(names)
    before = local.config_path.read_text()
    tables = {declared: {"dim": 4, "optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}}
    try:
        local.config_path.write_text(yaml.safe_dump(yaml.safe_load(before) | {"tables": tables}))
        restart(local)
        with pytest.raises(InvalidInputError, match="Take it out of `tables`"):
            cluster.drop_table(declared, timeout_s=60)
    finally:
        local.config_path.write_text(before)
        restart(local)
    assert cluster.drop_table(declared) == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["valkey"])
def test_row_logs_and_checkpoints_tell_a_dropped_table_from_the_next_of_its_name(
    kind: str, require_server: Callable[[str], str], tmp_path: Path
) -> None:
    with start(kind, require_server, journal_max_mb=1) as local, kvemb.connect(local.url) as cluster:
        old_table(cluster, "t")
        other = cluster.create_table("other", dim=16, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())

        def fill_the_journals() -> None:
            for _ in range(12):
                other.push(np.arange(5000), np.ones((5000, 16))).wait_applied()

        fill_the_journals()  # so that the row logs have the old table
        assert all(list(local.config_path.parent.rglob(f"*{shard}/snapshot/*.run")) for shard in (0, 1))
        cluster.save(str(tmp_path / "full"))
        cluster.drop_table("t")
        new = cluster.create_table("t", dim=8, optimizer=kvemb.optim.adam(lr=0.1))
        new.push(IDS, np.ones((N, 8))).wait_applied()
        with pytest.raises(CheckpointError, match="dropped since"):
            cluster.save(str(tmp_path / "more"), base=str(tmp_path / "full"))
        rows = new.pull(IDS)
        restart(local)
        other.push([0], np.zeros((1, 16))).wait_applied(60)
        np.testing.assert_array_equal(new.pull(IDS), rows)
        fill_the_journals()
        restart(local)
        other.push([0], np.zeros((1, 16))).wait_applied(60)
        np.testing.assert_array_equal(new.pull(IDS), rows)

        cluster.drop_table("t")
        cluster.load(str(tmp_path / "full"))
        np.testing.assert_array_equal(cluster.table("t").pull(IDS), -np.ones((N, 4)))
        cluster.table("t").push(IDS, np.ones((N, 4))).wait_applied(60)
        np.testing.assert_array_equal(cluster.table("t").pull(IDS), -2 * np.ones((N, 4)))
