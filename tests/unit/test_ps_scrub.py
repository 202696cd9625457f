"""Rows that no push touches are compared with storage now and then: the rows found, the rounds, and the rate."""

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from memory_store import memory_node

import kvemb.init
import kvemb.optim
from kvemb.errors import JournalBehindError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import WritePart
from paramserver.repair.scrub import Scrub
from tests.unit.repairing_shard import ADAM, SGD, Shard, provision

N = 30_000
_NUMBERS = count()
MANY = np.arange(N, dtype=np.uint64)
EMPTY = TableDef("empty", 2, kvemb.optim.sgd(0.5), kvemb.init.zeros())


class Clock:
    """Seconds as the test says; every look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


@pytest.fixture
def shard() -> Shard:
    number = next(_NUMBERS)
    nodes = tuple(f"scrub-{number}-{name}:1" for name in "ab")
    provision(nodes)
    made = Shard(nodes).open()
    made.apply(ADAM, MANY)
    made.apply(SGD, MANY[:100])
    made.tables.state(EMPTY)
    return made


def scrub_of(shard: Shard, clock: Clock, n_shards: int = 1) -> Scrub:
    maps = SimpleNamespace(cluster_map=ClusterMap.first(1, n_shards))
    return Scrub(shard.repairer, shard.tables, maps, timeout_s=5, clock=clock)


def a_round(scrub: Scrub, clock: Clock) -> int:
    """Let time pass until every row was compared; return the number of slices."""
    n_rounds, n_steps = scrub._n_rounds, 0
    while scrub._n_rounds == n_rounds:
        clock.now_s = max(clock.now_s, scrub.due_s) + 0.001
        scrub.step(print)
        n_steps += 1
        assert n_steps < 1000
    return n_steps


def delete(shard: Shard, table: TableDef, ids: np.ndarray) -> None:
    shard.store.rows.erase([WritePart(table.keys(ids, pages=False), np.empty((0, 0), np.uint8))], Deadline.after(60))


def test_a_round_finds_every_deleted_row_of_every_table_and_brings_back_its_bytes(shard: Shard) -> None:
    before = [shard.read(ADAM, MANY)[1], shard.read(SGD, MANY[:100])[1]]
    clock = Clock()
    scrub = scrub_of(shard, clock)
    a_round(scrub, clock)
    assert (shard.reconstructed, scrub._n_restored) == (0, 0)
    delete(shard, ADAM, MANY[::500])
    delete(shard, SGD, MANY[7:9])
    assert not shard.read(ADAM, MANY)[0].all()
    a_round(scrub, clock)
    assert scrub._n_restored == len(MANY[::500]) + 2
    for table, ids, records in ((ADAM, MANY, before[0]), (SGD, MANY[:100], before[1])):
        found, now = shard.read(table, ids)
        assert found.all()
        assert now.tobytes() == records.tobytes()
    assert scrub.describe().startswith("30,100 of 30,100 rows compared in this round, the last full round took ")
    assert scrub.describe().endswith("; 62 rows restored")


def test_all_shards_together_take_a_fiftieth_of_the_time_and_a_round_begins_once_a_minute(shard: Shard) -> None:
    clock = Clock()
    scrub = scrub_of(shard, clock, n_shards=4)
    began_s = clock.now_s
    assert 59 < scrub.due_s - clock.now_s <= 60
    clock.now_s += 60
    before_s = clock.now_s
    scrub.step(print)
    took_s = clock.now_s - before_s
    assert scrub.due_s - clock.now_s > 49 * 4 * 0.001
    scrub.step(print)  # not due: nothing happens
    assert scrub._n_compared < 2 * 4096
    assert took_s < 0.1
    n_steps = a_round(scrub, clock)
    assert n_steps >= (N - 4096) // 4096
    small = scrub_of(Shard(shard.store.nodes.addresses).open(), clock)  # nothing to compare
    clock.now_s += 60
    small.step(print)
    assert small.due_s - clock.now_s > 59
    assert clock.now_s - began_s > 60


def test_storage_that_does_not_answer_is_asked_again_later_for_the_same_rows(shard: Shard) -> None:
    clock = Clock()
    scrub = scrub_of(shard, clock)
    clock.now_s += 100
    node = memory_node(shard.store.nodes.addresses[0])
    node.down = True
    with pytest.raises(NodeUnavailableError):
        scrub.step(print)
    assert scrub.due_s - clock.now_s > 4
    node.down = False
    delete(shard, ADAM, MANY[::100])
    a_round(scrub, clock)
    assert scrub._n_restored == 300


def test_a_row_of_a_batch_that_the_journal_lacks_is_not_set_back(shard: Shard) -> None:
    clock = Clock()
    scrub = scrub_of(shard, clock)
    version = make_version(1, shard.k + 5)
    delete(shard, ADAM, MANY[40:41])
    records = ADAM.record.encode(MANY[40:41], version, np.ones((1, 2), np.float32), np.ones((1, ADAM.record.state_size), np.float32))
    shard.store.rows.write([WritePart(ADAM.keys(MANY[40:41], pages=False), records)], Deadline.after(60))
    with pytest.raises(JournalBehindError, match=r"table 'adam', id 40 has version \(1, 7\) in storage"):
        a_round(scrub, clock)
    assert shard.read(ADAM, MANY[40:41])[1].tobytes() == records.tobytes()
