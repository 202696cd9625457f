"""What pulls did not find, as the client asks about it: seldom, a few rows, never twice at once, and told once."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvemb.init
import kvemb.optim
from kvemb.client.missing_rows import IDS_AT_ONCE, PAUSE_S, MissingRows
from kvemb.errors import LostRowError, RowsRestoredWarning, ShardUnavailableError, TableDroppedError
from kvemb.protocol.messages import COMPARE, CompareRequest, CountReply
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef
from tests.owners import shard_of

USER = TableDef("user", 4, kvemb.optim.sgd(0.5), kvemb.init.zeros())
ITEM = TableDef("item", 4, kvemb.optim.sgd(0.5), kvemb.init.zeros())
MANY = np.arange(100_000, dtype=np.uint64)


class TwoShards:
    """Answers as told, on the asking thread."""

    def __init__(self, answer: Callable[[CompareRequest], Any]) -> None:
        self.answer, self.forked = answer, False
        self.asked: list[tuple[str, list[int]]] = []

        self.cluster_map = self.newest = ClusterMap.first(0, 2)

    def look(self, deadline: Any) -> None:
        self.cluster_map = self.newest

    def try_each(self, verb: object, requests: dict[int, CompareRequest], deadline: Any) -> dict[int, Any]:
        assert verb is COMPARE
        for shard, request in requests.items():
            ids = np.frombuffer(request.ids, "<u8")
            assert (shard_of(ids.astype(np.uint64), self.cluster_map.n_shards) == shard).all()
            self.asked.append((request.table, ids.tolist()))
        return {shard: self.answer(request) for shard, request in requests.items()}


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def asking(answer: Callable[[CompareRequest], Any]) -> tuple[MissingRows, TwoShards, Clock]:
    servers, clock = TwoShards(answer), Clock()
    return MissingRows(servers, clock), servers, clock  # type: ignore[arg-type]


def settle(missing: MissingRows) -> None:
    assert missing._thread is not None
    missing._thread.join(10)


def test_the_shards_of_now_are_asked_by_who_has_not_heard_that_slots_moved() -> None:
    missing, servers, _ = asking(lambda request: CountReply(0))
    servers.newest = ClusterMap.first(0, 3)
    missing.note([(USER, MANY)])
    settle(missing)
    assert len(servers.asked) == 3


def test_some_rows_are_asked_about_once_a_second_however_many_are_missing() -> None:
    missing, servers, clock = asking(lambda request: CountReply(0))
    for _ in range(5):
        missing.note([(USER, MANY), (ITEM, MANY[:3])])
        settle(missing)
    by_table = {table: [i for name, ids in servers.asked if name == table for i in ids] for table in ("user", "item")}
    assert 0 < len(by_table["user"]) <= IDS_AT_ONCE // 2
    assert sorted(by_table["item"]) == [0, 1, 2]
    before = len(servers.asked)
    clock.now_s += PAUSE_S
    missing.note([(USER, MANY)])
    settle(missing)
    assert len(servers.asked) == before + 2
    missing.tell()  # nothing was restored: nothing is said


def test_a_pull_never_waits_and_no_second_question_is_asked_meanwhile() -> None:
    go_on = threading.Event()

    def slowly(request: CompareRequest) -> CountReply:
        assert go_on.wait(10)
        return CountReply(1)

    missing, servers, clock = asking(slowly)
    missing.note([(USER, MANY[:1])])
    clock.now_s += 10 * PAUSE_S
    missing.note([(USER, MANY[:1])])
    missing.tell()
    go_on.set()
    settle(missing)
    assert servers.asked == [("user", [0])]
    with pytest.warns(RowsRestoredWarning, match="table 'user': 1 row "):
        missing.tell()
    missing.tell()  # said once


def test_rows_that_are_gone_for_good_raise_and_a_shard_that_does_not_answer_is_asked_another_time() -> None:
    answers: list[Any] = [ShardUnavailableError("shard 0"), LostRowError("row 0 cannot be restored"), CountReply(0)]
    missing, servers, clock = asking(lambda request: answers.pop(0))
    for n_asked in (1, 2):
        missing.note([(USER, MANY[:1])])
        settle(missing)
        assert len(servers.asked) == n_asked
        if n_asked == 1:
            missing.tell()
        clock.now_s += PAUSE_S
    with pytest.raises(LostRowError, match="row 0 cannot be restored"):
        missing.tell()
    missing.tell()


def test_a_table_that_was_dropped_is_told_to_each_pull_that_misses_rows_of_it_and_to_no_other() -> None:
    missing, _, _ = asking(lambda request: TableDroppedError("was dropped") if request.table == "user" else CountReply(0))
    missing.note([(USER, MANY[:1]), (ITEM, MANY[:1])])
    settle(missing)
    missing.tell()
    missing.note([(ITEM, MANY[:1])])
    missing.note([(replace(USER, life=1), MANY[:1])])  # of the name, and not dropped
    for _ in range(2):
        with pytest.raises(TableDroppedError, match="was dropped"):
            missing.note([(ITEM, MANY[:1]), (USER, MANY[:1])])


def test_nothing_is_asked_in_a_forked_child_or_after_the_end() -> None:
    missing, servers, clock = asking(lambda request: CountReply(1))
    servers.forked = True
    missing.note([(USER, MANY[:1])])
    servers.forked = False
    missing.close()
    clock.now_s += PAUSE_S
    missing.note([(USER, MANY[:1])])
    assert servers.asked == []
