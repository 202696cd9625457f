"""Followers of a ledger are judged: every way in which feed, projection or serving client may be wrong is seen, and being right is not."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis
from chaos.followers import CopiesVerdict
from chaos.heard import HeardJudge, HeardVerdict
from chaos.ledger import ACKED, DIM, ROWS_PER_GENERATION, SENT, TABLE, LedgerFile, Plan, Record
from chaos.serving_reader import ProjectionReader, SeenRows
from chaos.subscriber import BEGUN, QUIET, ROW, HeardEvent, HeardFile, entries, heard

from kvemb.local_cluster.storage_servers import start_servers
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.record import make_version
from tests.owners import shard_of

PLAN = Plan(seed=5, n_trainers=3)
N = 60  # pushes of each trainer: two generations and a half
Events = list[HeardEvent]


class ToldTable:
    """The ledger's table, and what a feed tells of it: batches of two shards, of one push of each trainer.

    Args:
        lag: how many batches late rows are read; those read then are newer than their event.
    """

    def __init__(self, lag: int = 0) -> None:
        self.rows: dict[int, np.ndarray] = {}
        self.versions: dict[int, int] = {}
        self.events: Events = []
        waiting: Events = []
        for n in range(N):
            for shard in (0, 1):
                waiting.append(self._apply(n, shard))
                self.events += [self.read(event) for event in waiting[: len(waiting) - lag]]
                del waiting[: len(waiting) - lag]
        self.events += map(self.read, waiting)

    def _apply(self, n: int, shard: int) -> HeardEvent:
        told = set[int]()
        for trainer in range(3):
            ids, grads = PLAN.push(trainer, n)
            here = shard_of(ids.view(np.uint64), 2) == shard
            for row, grad in zip(ids[here].tolist(), grads[here], strict=True):
                self.rows[row] = self.rows.get(row, np.zeros(DIM, np.float32)) - grad
                self.versions[row] = make_version(1, n + 1)
                told.add(row)
        return HeardEvent("apply", shard, 1, n + 1, np.array(sorted(told)))

    def read(self, event: HeardEvent) -> HeardEvent:
        ids = event.ids.tolist()
        versions, rows = np.array([self.versions[row] for row in ids], np.uint64), np.array([self.rows[row] for row in ids])
        return replace(event, versions=versions, rows=rows)

    def all_rows(self, shard: int, kind: str = ROW) -> HeardEvent:
        ids = np.array(sorted(self.rows))
        return self.read(HeardEvent(kind, shard, 1, N, ids[shard_of(ids.view(np.uint64), 2) == shard]))

    def final(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([*self.versions]), np.array([*self.versions.values()], np.uint64)


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    for trainer in range(3):
        file = LedgerFile(tmp_path / str(trainer))
        for n in range(N):
            file.note(SENT, n)
            file.note(ACKED, n)
        file.close()
    return [Record.read(tmp_path / str(trainer)) for trainer in range(3)]


def judge(table: ToldTable, records: list[Record], events: Events) -> HeardVerdict:
    return HeardJudge(PLAN, records, [equal_runs(2)], events).run(table.final())


@pytest.mark.parametrize("lag", [0, 1, 7, 2 * N])
def test_a_feed_that_tells_every_batch_once_is_kept_however_late_its_rows_are_read(records: list[Record], lag: int) -> None:
    table = ToldTable(lag)
    verdict = judge(table, records, table.events)
    assert verdict.kept, verdict
    assert (verdict.batches, verdict.parts_told, verdict.parts_told_as_rows) == (2 * N, 3 * 2 * N, 0)


def test_where_the_journal_was_cut_rows_take_the_place_of_batches(records: list[Record]) -> None:
    table = ToldTable()
    before = [event for event in table.events if event.k <= 50]
    behind = [replace(event, kind=ROW) for event in table.events if 50 < event.k <= 55]
    verdict = judge(table, records, [*before, *behind, HeardEvent(QUIET), *(event for event in table.events if event.k > 55)])
    assert verdict.kept, verdict
    assert (verdict.parts_told, verdict.parts_told_as_rows) == (3 * 2 * (N - 5), 3 * 2 * 5)


def test_a_feed_that_begins_again_tells_all_rows_and_may_repeat_batches(records: list[Record]) -> None:
    table = ToldTable()
    again = [HeardEvent(BEGUN), table.all_rows(0), table.all_rows(1), table.read(table.events[-1])]
    verdict = judge(table, records, [*table.events[:80], *again])
    assert verdict.kept, verdict
    assert (verdict.begun_again, verdict.parts_told_as_rows) == (1, 3 * (2 * N - 80) - 3)


def without_a_row(events: Events) -> Events:
    event, keep = events[40], np.arange(len(events[40].ids)) != 3
    less = replace(event, ids=event.ids[keep], versions=event.versions[keep], rows=event.rows[keep])
    return [*events[:40], less, *events[41:]]


def changed(events: Events, at: int, **arrays: np.ndarray) -> Events:
    return [*events[:at], replace(events[at], **arrays), *events[at + 1 :]]


@pytest.mark.parametrize(
    ("harm", "seen"),
    [
        pytest.param(lambda events: events[:40] + events[41:], "lost", id="a batch is missing"),
        pytest.param(without_a_row, "lost", id="a row of a batch is missing"),
        pytest.param(lambda events: events[:-1], "lost", id="the last batch is missing"),
        pytest.param(lambda events: events[:-1], "behind", id="rows at the end are missing"),
        pytest.param(lambda events: [*events[:41], events[40], *events[41:]], "doubled", id="a batch twice"),
        pytest.param(lambda events: [*events[:40], events[42], events[40], *events[43:]], "out_of_order", id="batches in another order"),
        pytest.param(lambda events: [*events, replace(events[40], kind=ROW)], "out_of_order", id="rows that go back"),
        pytest.param(lambda events: changed(events, 40, rows=events[40].rows * (np.arange(DIM) < 8)), "torn", id="rows that are torn"),
    ],
)
def test_every_breach_of_the_feed_is_seen(records: list[Record], harm: Callable[[Events], Events], seen: str) -> None:
    table = ToldTable()
    verdict = judge(table, records, harm(table.events))
    assert not verdict.kept
    assert getattr(verdict, seen) > 0, verdict
    assert verdict.examples or seen == "torn"


def test_a_batch_that_was_left_out_stays_lost_when_all_rows_are_told_again_later(records: list[Record]) -> None:
    table = ToldTable()
    told = [*table.events[:40], *table.events[41:], HeardEvent(BEGUN), table.all_rows(0), table.all_rows(1)]
    assert judge(table, records, told).lost == 3


def test_a_subscriber_that_heard_nothing_does_not_pass(records: list[Record]) -> None:
    verdict = judge(ToldTable(), records, [])
    assert not verdict.kept
    assert (verdict.lost, verdict.behind > 0) == (3 * 2 * N, True)


def test_a_subscriber_that_was_killed_while_it_wrote_goes_on_behind_its_last_whole_entry(tmp_path: Path) -> None:
    path, (first, second) = tmp_path / "heard", ToldTable().events[:2]
    file = HeardFile(path)
    assert file.position == {}
    file.note(first, {0: (1, 1)})
    whole = path.stat().st_size
    file.note(second, {0: (1, 1), 1: (1, 1)})
    file.close()
    path.write_bytes(path.read_bytes()[:-1])
    again = HeardFile(path)
    assert (again.position, path.stat().st_size) == ({0: [1, 1]}, whole)
    again.note(second, {0: (1, 1), 1: (1, 1)})
    again.close()
    read = [heard(entry) for entry, _ in entries(path)]
    assert [(one.shard, one.k) for one in read] == [(0, 1), (1, 1)]
    np.testing.assert_array_equal(read[1].rows, second.rows)


COPY = {1: b"one", 2: b"two"}
SERVED = {"looked_up": 2, "different": 0, "from_cache": 1, "ready": True}


def test_copies_that_are_equal_are_kept() -> None:
    verdict = CopiesVerdict()
    verdict.project("t", COPY, dict(COPY))
    verdict.serve([SERVED])
    assert verdict.kept, verdict
    assert (verdict.rows_projected, verdict.rows_served, verdict.from_cache) == (2, 2, 1)


@pytest.mark.parametrize(
    ("found", "notes", "seen"),
    [
        ({1: b"one"}, [SERVED], "missing"),
        (COPY | {3: b"three"}, [SERVED], "extra"),
        (COPY | {2: b"too"}, [SERVED], "other"),
        (COPY, [SERVED | {"different": 1}], "served_other"),
        (COPY, [{"went_back": 1, "generation": 0}, SERVED], "went_back"),
        (COPY, [SERVED | {"ready": False}], "not_following"),
    ],
)
def test_every_difference_of_a_copy_is_seen(found: dict[int, bytes], notes: list[dict[str, object]], seen: str) -> None:
    verdict = CopiesVerdict()
    verdict.project("t", COPY, found)
    verdict.serve(notes)
    assert (verdict.kept, getattr(verdict, seen), len(verdict.examples)) == (False, 1, 1)


@pytest.mark.parametrize(("projected", "notes"), [({}, [SERVED]), (COPY, [])])
def test_a_copy_of_nothing_does_not_pass(projected: dict[int, bytes], notes: list[dict[str, object]]) -> None:
    verdict = CopiesVerdict()
    verdict.project("t", projected, projected)
    verdict.serve(notes)
    assert not verdict.kept


def test_a_row_that_goes_back_is_seen_also_by_the_process_that_follows(tmp_path: Path) -> None:
    rows = np.zeros((ROWS_PER_GENERATION, DIM), np.float32)
    seen = SeenRows(tmp_path / "seen.npy")
    assert seen.look(2, rows + 1) == 0
    rows[7] = 1
    assert seen.look(2, rows) == ROWS_PER_GENERATION - 1
    seen.keep()
    assert SeenRows(tmp_path / "seen.npy").look(2, rows) == ROWS_PER_GENERATION - 1
    rows[:, DIM // 2 :] += 1
    assert seen.look(2, rows + 3) == ROWS_PER_GENERATION  # torn


def test_a_row_of_the_target_that_goes_back_is_seen(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    (server,) = start_servers("redis", 1, tmp_path, 64)
    try:
        reader, chance = ProjectionReader(server.port), random.Random(1)
        assert reader.look(chance) == 0  # nothing is there yet
        with redis.Redis(port=server.port, protocol=2) as client:
            client.set("kvemb:projection", json.dumps({"tables": {TABLE: {"keys": ["h"]}}}))
            counts = []
            for value in (1.0, 2.0, 1.0):
                client.hset(
                    "h", mapping={"-": "", "12345678": np.full(DIM, value, np.float32).tobytes(), "x": np.ones(DIM, "<f4").tobytes()}
                )
                counts.append(reader.look(chance))
        assert counts == [0, 0, 1]
    finally:
        server.process.kill()
