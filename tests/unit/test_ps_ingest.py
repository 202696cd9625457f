"""Ingest and the apply thread together, on storage in memory: order, backpressure, failure, flush and drain.

No sleeps: a storage gate holds the apply thread exactly as long as a test wants it held.
"""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from memory_store import memory_node

from kvemb.errors import (
    DeadlineExceededError,
    FencedError,
    PushRejectedError,
    ShardFailedError,
    ShardUnavailableError,
    StorageError,
    TableDroppedError,
)
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart
from paramserver.engine.storage_pace import Pause
from paramserver.ingest.work_queue import Limits
from paramserver.model.batch import ASSIGN, DROPPED, ERASE, CheckedRows, RowsWork
from tests.unit.ingest_rig import MEAN, TABLE, Outcome, Rig, make

__all__ = ["make"]  # the fixture


def test_a_push_is_accepted_then_applied(make: Callable[..., Rig]) -> None:
    rig = make()
    outcome = rig.push(rig.hello(), {5: 2.0}, seen=[0])
    reply = outcome.wait()
    assert outcome.states == ["accepted", "applied"]
    assert (reply.k, reply.changed, reply.elapsed) == (1, 0.0, 0)
    assert rig.weights([5]) == [-2.0]


def test_what_is_pending_is_merged_into_one_batch(make: Callable[..., Rig]) -> None:
    rig = make()
    a, b = rig.hello("a"), rig.hello("b")
    rig.hold()
    first = rig.push(a, {1: 1.0})
    assert rig.store.reached.wait(90)
    later = [rig.push(b, {1: 1.0, 2: 1.0}, trainer="b"), rig.push(a, {2: 3.0})]
    rig.store.gate.set()
    assert first.wait().k == 1
    assert [outcome.wait().k for outcome in later] == [2, 2]
    assert rig.weights([1, 2]) == [-2.0, -4.0]


def test_staleness_is_measured_against_the_versions_that_the_pull_saw(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    for _ in range(3):
        rig.push(a, {1: 1.0, 2: 1.0}).wait()
    reply = rig.push(a, {1: 1.0, 2: 1.0}, seen=[(1 << 48) + 1, 0]).wait()
    assert (reply.changed, reply.elapsed) == (1.0, 2)


def test_assign_and_erase_keep_their_place_among_pushes(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.push(a, {1: 1.0})
    assert rig.change(ASSIGN, {1: 10.0, 2: 20.0}) == 1
    rig.push(a, {1: 1.0, 2: 1.0}).wait()
    assert rig.weights([1, 2]) == [9.0, 19.0]
    assert rig.change(ERASE, {1: 0.0, 7: 0.0}) == 1
    assert rig.tables.state(TABLE).n_rows == 1


def test_rows_of_a_dropped_table_are_refused_although_they_were_checked_before_and_what_was_taken_is_answered(
    make: Callable[..., Rig],
) -> None:
    rig = make()
    a, b = rig.hello("a"), rig.hello("b")
    rig.push(a, {1: 1.0}).wait()
    rig.push(b, {2: 1.0}, trainer="b", more=True)

    def require_open(key: str, *, waits: bool) -> None:
        if key == TABLE.key:
            raise TableDroppedError("table 't' was dropped")

    rig.ingest._require_open = require_open
    for refused in (
        lambda: rig.push(a, {3: 1.0}),
        lambda: rig.push(b, {3: 1.0}, trainer="b", table=MEAN),  # would complete a push whose first part is of the table
        lambda: rig.change(ASSIGN, {4: 1.0}),
    ):
        with pytest.raises(TableDroppedError, match="'t'"):
            refused()
    again, new = Outcome(), Outcome()
    assert not rig.ingest.admit(PushPart("a", a, 1, 1, False, [], 1), again, lambda: False)
    assert again.wait().k == 1
    assert rig.ingest.admit(PushPart("a", a, 2, 2, False, [], 2), new, lambda: False)
    assert rig.push(a, {3: 1.0}, table=MEAN).wait().state == "applied"
    assert rig.change(ERASE, {1: 0.0, 2: 0.0, 3: 0.0}, DROPPED) == 1  # which is how its rows go


def test_pushes_are_never_merged_across_an_assign(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.hold()
    rig.push(a, {9: 1.0})
    assert rig.store.reached.wait(90)
    rig.push(a, {1: 1.0})
    values = CheckedRows(TABLE, np.array([1], np.uint64), np.full((1, 1), 10, np.float32), np.empty(0, np.uint64), {})
    with rig.ingest.state.changed:  # what submit_rows does before it waits
        rig.ingest._enqueue(RowsWork(ASSIGN, values))
    last = rig.push(a, {1: 1.0})
    rig.store.gate.set()
    assert last.wait().k == 4
    assert rig.weights([1]) == [9.0]


def test_parts_of_one_push_are_applied_as_one(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    first = rig.push(a, {1: 1.0}, more=True)
    rig.ingest.backlog.flush(Deadline.after(30))  # does not wait for an incomplete push
    assert first.states == []  # nor is a part of it accepted
    last = rig.push(a, {2: 1.0, 1: 1.0})
    assert (first.wait().k, last.wait().k) == (1, 1)
    assert first.states == last.states == ["accepted", "applied"]
    assert rig.weights([1, 2]) == [-2.0, -1.0]


def test_a_push_that_was_never_completed_is_not_mixed_into_the_next(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    half = rig.push(a, {1: 1.0}, step=1, more=True)
    rig.push(a, {2: 1.0}, step=2).wait()
    assert isinstance(half.error(), PushRejectedError)
    assert rig.weights([2]) == [-1.0]
    assert rig.tables.state(TABLE).n_rows == 1


def test_a_push_with_two_learning_rates_is_refused_and_can_be_corrected(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.push(a, {1: 1.0}, step=1, more=True)
    with pytest.raises(PushRejectedError, match="run-time values"):
        rig.push(a, {2: 1.0}, step=1, lr=0.5)
    rig.push(a, {2: 1.0}, step=1).wait()
    assert rig.weights([1, 2]) == [-1.0, -1.0]


def test_without_room_a_part_waits_and_nothing_is_lost(make: Callable[..., Rig]) -> None:
    rig = make(limits=Limits(trainer_bytes=0))
    a = rig.hello()
    rig.hold()
    rig.push(a, {1: 1.0})
    assert rig.store.reached.wait(90)
    with pytest.raises(ShardUnavailableError, match="nothing of the part was taken"):
        rig.push(a, {1: 1.0}, cancelled=lambda: True)
    rig.store.gate.set()
    rig.push(a, {1: 1.0}).wait()
    assert rig.weights([1]) == [-2.0]


def test_a_trainer_with_nothing_waiting_is_let_in_even_when_the_queue_is_full(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2, limits=Limits(total_items=1))
    a, b = rig.hello("a"), rig.hello("b")
    first = rig.push(a, {1: 1.0})
    rig.push(b, {1: 1.0}, trainer="b", cancelled=lambda: True)  # otherwise the step could never be completed
    assert first.wait().state == "applied"


def test_flush_says_which_storage_error_is_in_the_way(make: Callable[..., Rig]) -> None:
    rig = make()
    node = memory_node(rig.store.nodes.addresses[0])
    node.down = True
    outcome = rig.push(rig.hello(), {1: 1.0})
    rig.store.reached.wait(90)
    with pytest.raises(DeadlineExceededError, match=r"1 push to be applied.*NodeUnavailableError"):
        rig.ingest.backlog.flush(Deadline.after(0.3))
    node.down = False
    rig.ingest.backlog.flush(Deadline.after(30))
    assert outcome.wait().state == "applied"
    assert rig.ingest.state.trouble.storage == ""


def test_what_was_tried_again_between_batches_is_no_failure_once_it_is_done(make: Callable[..., Rig]) -> None:
    errors, done = [], threading.Event()

    class OneRetry:
        def __init__(self, rig: Rig) -> None:
            self.rig = rig

        def step(self, pause: Pause) -> bool:
            errors.append(self.rig.ingest.state.trouble.storage)
            if len(errors) == 1:
                pause(StorageError("a node is away"), 0.0)
                errors.append(self.rig.ingest.state.trouble.storage)
                return True
            done.set()
            return False

        def due_in_s(self) -> None:
            return None

    make(background=OneRetry).handover.wake()
    assert done.wait(90)
    assert errors == ["", "StorageError: a node is away", ""]


def test_a_failed_shard_refuses_everything_with_the_cause(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.push(a, {1: 1.0}).wait()
    held = rig.push(rig.hello("b"), {4: 1.0}, trainer="b", more=True)
    memory_node(rig.store.nodes.addresses[0]).flush()
    assert isinstance(rig.push(a, {1: 1.0}).error(), ShardFailedError)
    assert rig.failed.wait(90)
    assert isinstance(held.error(), ShardFailedError)
    for refused in (
        lambda: rig.push(a, {1: 1.0}),
        lambda: rig.ingest.backlog.flush(Deadline.after(60)),
        lambda: rig.change(ERASE, {1: 0.0}),
        rig.hello,
    ):
        with pytest.raises(ShardFailedError, match="NodeLostError"):
            refused()
    assert rig.ingest.backlog.n_and_age_s() == (0, 0.0)
    assert not rig.ingest.backlog.drain(Deadline.after(60))


def test_draining_finishes_what_was_accepted_and_takes_nothing_new(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.hold()
    outcome = rig.push(a, {1: 1.0})
    assert rig.store.reached.wait(90)
    assert not rig.ingest.backlog.drain(Deadline.after(0))
    with pytest.raises(ShardUnavailableError, match="draining"):
        rig.push(a, {1: 1.0})
    assert "a (to step 1)" in rig.ingest.backlog.describe()
    rig.store.gate.set()
    assert rig.ingest.backlog.drain(Deadline.after(30))
    assert outcome.wait().state == "applied"


def test_a_stopped_shard_gives_up_the_batch_that_waits_for_storage(make: Callable[..., Rig]) -> None:
    rig = make()
    memory_node(rig.store.nodes.addresses[0]).down = True
    rig.push(rig.hello(), {1: 1.0})
    assert rig.store.reached.wait(90)
    assert not rig.ingest.backlog.drain(Deadline.after(0))
    assert rig.applier.thread.stop(30)
    assert rig.ingest.backlog.n_and_age_s()[0] == 1


def test_an_older_incarnation_is_fenced_but_what_it_completed_counts(make: Callable[..., Rig]) -> None:
    rig = make()
    old = rig.hello()
    rig.hold()
    rig.push(old, {1: 1.0})
    waiting = rig.push(old, {1: 1.0})
    rig.hello()
    with pytest.raises(FencedError):
        rig.push(old, {1: 1.0})
    rig.store.gate.set()
    assert waiting.wait().state == "applied"
    assert rig.weights([1]) == [-2.0]
