"""A push, or a step of a sync job, that meets a table which is altered or dropped is taken whole or refused whole, over all shards."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import one_of

import kvemb
from kvemb.alter.altered_table import AlteredTable, TableChanges
from kvemb.alter.table_alteration import begin_alter
from kvemb.api import Cluster
from kvemb.checkpoint.load import Decision, _decide
from kvemb.client.ack import Ack
from kvemb.client.shard_client import ShardClient
from kvemb.errors import KvembError, TableAlteredError, TableDroppedError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import DROP_TABLE, TableRequest
from kvemb.schema.table_def import TableDef
from tests.integration.table_clusters import new_table, start

N = 200
IDS = np.arange(N) * 7919  # on both shards
ONES = np.ones((N, 4), np.float32)


def shards_of(cluster: Cluster) -> ShardClient:
    return cluster._connection.require_shards("test")


def change_of(cluster: Cluster, name: str, **changes: Any) -> AlteredTable:
    return AlteredTable.of(cluster.table(name).definition, TableChanges(**changes))


def counts(cluster: Cluster, name: str) -> set[float]:
    """How often ones were pushed to the rows of a table, by sgd of lr 1, in its first columns."""
    return set((-cluster.table(name).pull(IDS)[:, :2]).round().ravel().tolist())


def by_half(ack: Ack) -> bool:
    """Whether one shard has accepted its part of a push, and another has not."""
    return {part.accepted for part in ack._parts} == {True, False}


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = Deadline.after(60)
    while not happened():
        assert not deadline.expired
        threading.Event().wait(0.01)


CHANGES = [
    {"dim": 6, "new_columns": "zeros"},
    {"dim": 2},
    {"expected_rows": 100_000_000},
    {"optimizer": kvemb.optim.sgd(lr=1.0, momentum=1e-9)},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_a_push_of_which_one_shard_has_taken_its_part_is_taken_by_all_when_a_table_is_altered(
    local: LocalCluster, cluster: Cluster, changes: dict[str, Any]
) -> None:
    table, beside = new_table(cluster), new_table(cluster)
    cluster.push({table.name: (IDS, 0 * ONES)}).wait_applied(60)
    with kvemb.connect(local.url) as other:
        change = change_of(other, table.name, **changes)
        begin_alter(shards_of(other), change.old, change.new, None)  # shard 0 knows of it, shard 1 does not yet
        acks = [cluster.push({table.name: (IDS, ONES), beside.name: (IDS, ONES)}) for _ in range(3)]
        wait_for(lambda: all(by_half(ack) for ack in acks))
        other.alter_table(table.name, **changes)
        for ack in acks:
            ack.wait_applied(60)
        assert counts(other, table.name) == counts(other, beside.name) == {3.0}
        with pytest.raises(TableAlteredError):
            cluster.push({table.name: (IDS, ONES), beside.name: (IDS, ONES)}).wait(60)
        assert counts(other, table.name) == counts(other, beside.name) == {3.0}  # nothing of it was accepted


def test_a_push_of_which_one_shard_has_taken_its_part_is_taken_by_all_when_a_table_is_dropped(
    local: LocalCluster, cluster: Cluster
) -> None:
    table, beside = new_table(cluster), new_table(cluster)
    cluster.push({table.name: (IDS, 0 * ONES)}).wait_applied(60)
    with kvemb.connect(local.url) as other:
        gone = shards_of(other).servers.call(0, DROP_TABLE, TableRequest(table.name), Deadline.after(30))
        acks = [cluster.push({table.name: (IDS, ONES), beside.name: (IDS, ONES)}) for _ in range(2)]
        alone = cluster.push({table.name: (IDS, ONES)})
        for ack in (*acks, alone):
            ack.wait_applied(60)
        assert counts(other, beside.name) == {2.0}
        other.drop_table(table.name)
        assert TableDef.from_dict(gone.table).name not in other.tables()
        again = other.create_table(table.name, dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        with pytest.raises(TableDroppedError):
            cluster.push({table.name: (IDS, ONES), beside.name: (IDS, ONES)}).wait(60)
        assert counts(other, beside.name) == {2.0}
        assert not again.pull(IDS).any()


class StepTrainer(threading.Thread):
    """A trainer of a sync job: pushes ones to both tables, two steps ahead, until one is refused; then waits for those before."""

    def __init__(self, url: str, number: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self._url, self._number, self._names = url, number, names
        self.acked, self.outcomes, self.over = 0, list[str](), threading.Event()

    def run(self) -> None:
        with kvemb.connect(self._url, trainer=f"{self._number}") as cluster:
            rows = {name: (IDS, ONES) for name in self._names}
            waiting = [cluster.push(rows), cluster.push(rows)]
            while waiting:
                with self._noted():
                    waiting.pop(0).wait(90)
                    self.acked += 1
                with self._noted():
                    waiting += [] if self.outcomes or self.over.is_set() else [cluster.push(rows)]

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except KvembError as error:
            self.outcomes.append(type(error).__name__)


def start_with_one_shard_behind(local: LocalCluster, cluster: Cluster, *tables: str) -> list[StepTrainer]:
    """Two trainers of a sync job; shard 1 has been killed, and shard 0 has gone on with the steps that were on their way."""
    trainers = [StepTrainer(local.url, number, tables) for number in range(2)]
    for trainer in trainers:
        trainer.start()
    wait_for(lambda: all(trainer.acked > 3 for trainer in trainers))
    local.shards[1].kill()
    n_acked = max(trainer.acked for trainer in trainers)
    wait_for(lambda: max(counts(cluster, tables[-1])) > 2 * n_acked)
    return trainers


@pytest.mark.parametrize("verb", one_of("alter", "drop"))
def test_a_step_that_a_restarted_shard_has_not_had_is_taken_by_it_without_what_is_gone(
    verb: str, require_server: Callable[[str], str]
) -> None:
    with start("valkey", require_server, mode="sync", trainers=2) as local, kvemb.connect(local.url) as cluster:
        table, beside = new_table(cluster), new_table(cluster)
        trainers = start_with_one_shard_behind(local, cluster, table.name, beside.name)
        change = change_of(cluster, table.name, optimizer=kvemb.optim.sgd(lr=1.0, momentum=1e-9))
        if verb == "alter":
            begin_alter(shards_of(cluster), change.old, change.new, None)
        else:
            shards_of(cluster).servers.call(0, DROP_TABLE, TableRequest(table.name), Deadline.after(30))
        local.start_shard(1)
        if verb == "alter":
            cluster.alter_table(table.name, optimizer=change.new.optimizer)
        else:
            cluster.drop_table(table.name)
        for trainer in trainers:
            trainer.join(120)
        said = "TableAlteredError" if verb == "alter" else "TableDroppedError"
        assert {one for trainer in trainers for one in trainer.outcomes} == {said}
        assert {2.0 * trainer.acked for trainer in trainers} == counts(cluster, beside.name)
        if verb == "alter":
            assert counts(cluster, table.name) == counts(cluster, beside.name)


@pytest.mark.parametrize("some", one_of(True, False), ids=["one table", "all tables"])
def test_a_push_of_which_one_shard_had_its_part_before_a_load_is_gone_on_all_with_the_tables_that_are_loaded(
    some: bool, require_server: Callable[[str], str], tmp_path: Path
) -> None:
    with start("valkey", require_server) as local, kvemb.connect(local.url) as cluster:
        table, beside = new_table(cluster), new_table(cluster)
        rows = {table.name: (IDS, ONES), beside.name: (IDS, ONES)}
        cluster.push(rows).wait_applied(60)
        saved = cluster.save(str(tmp_path / "before"))
        cluster.push(rows).wait_applied(60)
        local.shards[0].kill()
        before = cluster.push(rows)
        wait_for(lambda: by_half(before))
        local.shards[1].kill()
        behind = cluster.push(rows)  # of which no shard hears before the load
        names = (table.name,) if some else ()
        _decide(cluster.store, Decision(1, "0" * 32, str(tmp_path / "before"), saved.manifest.save_id, names), 30.0)
        for shard in (1, 0):
            local.start_shard(shard)
        before.wait_applied(60)
        behind.wait_applied(60)
        assert counts(cluster, table.name) == {2.0}
        assert counts(cluster, beside.name) == ({4.0} if some else {2.0})


@pytest.mark.full
def test_a_step_that_one_shard_had_before_a_load_is_gone_on_all_and_the_job_goes_on(
    require_server: Callable[[str], str], tmp_path: Path
) -> None:
    with start("valkey", require_server, mode="sync", trainers=2) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        saved = cluster.save(str(tmp_path / "before"))
        trainers = start_with_one_shard_behind(local, cluster, table.name)
        local.shards[0].kill()
        _decide(cluster.store, Decision(1, "0" * 32, str(tmp_path / "before"), saved.manifest.save_id), 30.0)
        for shard in (1, 0):
            local.start_shard(shard)
        n_acked = max(trainer.acked for trainer in trainers)
        wait_for(lambda: all(trainer.acked > n_acked + 3 for trainer in trainers))
        for trainer in trainers:
            trainer.over.set()
        for trainer in trainers:
            trainer.join(120)
        assert [trainer.outcomes for trainer in trainers] == [[], []]
        assert len(counts(cluster, table.name)) == 1
        assert 3 < max(counts(cluster, table.name)) < sum(trainer.acked for trainer in trainers)
