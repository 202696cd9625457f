"""A shard takes rows by the cluster map in force only: older ones are refused whole, those of a hand-over wait."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kvemb.errors import DeadlineExceededError, PushRejectedError, ShardUnavailableError, SlotsMovedError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import ABORTING, DRAINING, FLIPPED, MOVING, SERVING, SHARDS, MovePlan
from kvemb.schema.slots import N_SLOTS
from paramserver.ingest.ingest import Ingest
from paramserver.ingest.part_checks import MapGate
from paramserver.ingest.sessions import Sessions
from paramserver.model.batch import ERASE, CheckedRows, RowsWork
from tests.unit.ingest_rig import TABLE, Outcome

ROWS = CheckedRows(TABLE, np.array([1], np.uint64), np.ones((1, 1), np.float32), np.empty(0, np.uint64), TABLE.optimizer.defaults())
ERASED = RowsWork(ERASE, CheckedRows(TABLE, ROWS.ids, np.empty((1, 0), np.float32), ROWS.versions, {}))


BEFORE, AFTER = np.full(N_SLOTS, 3, np.uint16), np.full(N_SLOTS, 0, np.uint16)


def in_phase(phase: str) -> ClusterMap:
    """A map whose plan brings all slots of shard 3 to shard 0."""
    plan, first = MovePlan(SHARDS, phase, AFTER), replace(ClusterMap.first(0, 4), slot_shards=BEFORE)
    return (
        replace(first, serial=2, slot_shards=AFTER, plan=replace(plan, slot_owners=BEFORE)) if plan.flipped else replace(first, plan=plan)
    )


class Gated:
    """An ingest of shard 3 by the map that a test gives it."""

    def __init__(self) -> None:
        self.map = ClusterMap.first(0, 4)
        self.ingest = Ingest(Sessions(issues=True), None, gate=MapGate(3, lambda: self.map))
        self.incarnation = self.ingest.attendance.hello("a", 0)[0]

    @property
    def serial(self) -> int:
        return self.map.serial

    @serial.setter
    def serial(self, serial: int) -> None:
        self.map = replace(self.map, serial=serial, plan=None)

    def push(self, sequence: int, serial: int, *, more: bool = False, cancelled: Callable[[], bool] = lambda: False) -> Outcome:
        part, outcome = PushPart("a", self.incarnation, sequence, sequence, more, [], sequence, map_serial=serial), Outcome()
        if self.ingest.admit(part, outcome, cancelled):
            self.ingest.submit(part, (ROWS,), outcome, cancelled)
        return outcome

    def taken(self) -> int:
        return self.ingest.sessions.find("a", self.incarnation).last_sequence


@pytest.fixture
def gated() -> Gated:
    return Gated()


@pytest.fixture
def other_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_part_of_an_older_map_is_refused_whole_and_leaves_its_sequence_free(gated: Gated) -> None:
    gated.push(1, 1)
    gated.serial = 2
    for sequence in (2, 3, 2):  # those behind it too, not as gaps
        with pytest.raises(SlotsMovedError, match=r"shard 3: rows routed by the cluster map of serial 1 .* serial 2 was in force; nothing"):
            gated.push(sequence, 1)
    gated.push(2, 2)
    assert gated.taken() == 2


def test_a_part_of_before_a_move_of_nodes_is_taken_and_one_of_before_the_last_move_of_shards_is_not(gated: Gated) -> None:
    gated.map = replace(gated.map, serial=4, n_node_moves=2)
    with pytest.raises(SlotsMovedError, match="of serial 1 came in when that of serial 2"):
        gated.push(1, 1)
    gated.push(1, gated.map.shards_serial)
    gated.map = replace(gated.map, serial=5, n_node_moves=3)
    gated.push(2, 2)
    assert gated.taken() == 2


def test_a_part_that_was_taken_before_the_flip_is_answered_after_it(gated: Gated) -> None:
    first = gated.push(1, 1)
    gated.serial = 2
    again = gated.push(1, 1)
    assert gated.taken() == 1
    assert first.states == again.states == []  # both hear when it is in the journal


def test_other_data_under_a_used_sequence_is_no_move(gated: Gated) -> None:
    gated.push(1, 1)
    gated.serial = 2
    with pytest.raises(PushRejectedError, match="other data under sequence 1"):
        gated.ingest.admit(PushPart("a", gated.incarnation, 1, 1, False, [], 99, map_serial=1), Outcome(), lambda: False)


def test_the_first_parts_of_a_push_fail_with_its_last_one(gated: Gated) -> None:
    first = gated.push(1, 1, more=True)
    gated.serial = 2
    part = PushPart("a", gated.incarnation, 2, 1, False, [], 2, map_serial=1)
    with pytest.raises(SlotsMovedError) as refused:
        gated.ingest.admit(part, Outcome(), lambda: False)
    gated.ingest.give_up(part, refused.value)
    assert isinstance(first.error(), SlotsMovedError)
    assert gated.taken() == 0


@pytest.mark.parametrize("serial", [1, 2])
def test_parts_wait_while_slots_are_handed_over_and_are_taken_or_refused_then(
    gated: Gated, other_thread: ThreadPoolExecutor, serial: int
) -> None:
    gated.map = in_phase(DRAINING)
    waiting = other_thread.submit(gated.push, 1, 1)
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    assert gated.taken() == 0
    gated.serial = serial
    gated.ingest.wake()
    if serial == 2:
        with pytest.raises(SlotsMovedError):
            waiting.result(60)
    else:
        waiting.result(60)
    assert gated.taken() == (serial == 1)


def test_a_part_of_a_newer_map_waits_until_this_shard_has_seen_it(gated: Gated, other_thread: ThreadPoolExecutor) -> None:
    waiting = other_thread.submit(gated.push, 1, 2)
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    gated.serial = 2
    gated.ingest.wake()
    waiting.result(60)
    assert gated.taken() == 1


def test_a_part_that_waits_ends_with_its_stream(gated: Gated, other_thread: ThreadPoolExecutor) -> None:
    gated.map = in_phase(DRAINING)
    over = threading.Event()
    waiting = other_thread.submit(gated.push, 1, 1, cancelled=over.is_set)
    over.set()
    gated.ingest.wake()
    with pytest.raises(ShardUnavailableError, match="the stream was closed"):
        waiting.result(60)
    assert gated.taken() == 0


def test_a_part_that_waits_ends_with_the_shard(gated: Gated, other_thread: ThreadPoolExecutor) -> None:
    gated.map = in_phase(DRAINING)
    waiting = other_thread.submit(gated.push, 1, 1)
    gated.ingest.state.stop()
    with pytest.raises(ShardUnavailableError, match="the shard is draining"):
        waiting.result(60)
    assert gated.taken() == 0


def test_an_erase_waits_no_longer_than_it_may_and_is_refused_when_its_rows_have_moved(gated: Gated) -> None:
    gated.map = in_phase(DRAINING)
    with pytest.raises(DeadlineExceededError, match="the end of a move of slots"):
        gated.ingest.submit_rows(ERASED, Deadline.after(0.05), 1)
    gated.serial = 2
    with pytest.raises(SlotsMovedError):
        gated.ingest.submit_rows(ERASED, Deadline.after(60), 1)
    assert gated.ingest.backlog.n_and_age_s()[0] == 0


def test_a_process_that_is_not_the_shard_any_more_takes_nothing_though_its_number_has_slots_again() -> None:
    gated = Gated()
    gated.ingest.gate.leaves()
    gated.serial = 2
    with pytest.raises(ShardUnavailableError, match="another process has its slots"):
        gated.push(1, 2)
    gated.ingest.gate.joins()
    gated.push(1, 2)
    assert gated.taken() == 1


@pytest.mark.parametrize(
    ("phase", "giver_waits", "taker_waits"),
    [(MOVING, False, False), (DRAINING, True, False), (FLIPPED, True, True), (SERVING, False, False), (ABORTING, True, False)],
)
def test_who_hands_slots_over_or_takes_them_waits_while_nobody_may_write_their_rows(
    phase: str, giver_waits: bool, taker_waits: bool
) -> None:
    now = in_phase(phase)
    waits = [MapGate(shard, lambda: now).holds(now.serial) for shard in range(4)]
    assert waits == [taker_waits, False, False, giver_waits]
