"""Steps of a sync job: applied once when all parts are in, failed for all, or overdue."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvemb.errors import (
    BarrierError,
    DeadlineExceededError,
    PushRejectedError,
    ShardFailedError,
    SlotsMovedError,
)
from kvemb.net.deadline import Deadline
from kvemb.schema.move_plan import DRAINING, HOLDING, SHARDS, MovePlan
from kvemb.schema.slots import N_SLOTS
from paramserver.ingest.sync_steps import AT_LAST, HeldSteps
from tests.unit.ingest_rig import MEAN, TABLE, Outcome, Rig, make

__all__ = ["make"]  # the fixture


def test_a_step_is_applied_once_when_all_parts_are_in(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    a, b = rig.hello("a"), rig.hello("b")
    first = rig.push(a, {1: 4.0}, table=MEAN)
    assert rig.ingest.backlog.flush(Deadline.after(30)) == "step 1 of a, which waits for b"
    assert first.states == []  # accepted is the whole step, or nothing of it
    second = rig.push(b, {1: 2.0, 2: 2.0}, trainer="b", table=MEAN)
    assert (first.wait().k, second.wait().k) == (1, 1)
    assert rig.weights([1, 2], MEAN) == [-3.0, -1.0]


def test_a_flush_waits_for_whole_steps_and_says_what_needs_another_push(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    a, b = rig.hello("a"), rig.hello("b")
    rig.hold()
    rig.push(a, {1: 1.0})
    rig.push(b, {1: 1.0}, trainer="b")
    ahead = rig.push(b, {1: 1.0}, trainer="b")
    with pytest.raises(DeadlineExceededError):
        rig.ingest.backlog.flush(Deadline.after(0))  # step 1 is whole
    rig.store.gate.set()
    for table in ("", "of no table here"):
        assert rig.ingest.backlog.flush(Deadline.after(30), table=table) == "step 2 of b, which waits for a"
    with pytest.raises(DeadlineExceededError):
        rig.ingest.backlog.flush(Deadline.after(0), table=TABLE.key)  # which is dropped: none of its rows may come after that
    assert rig.weights([1]) == [-2.0]
    rig.push(a, {1: 1.0})
    ahead.wait()
    assert rig.ingest.backlog.flush(Deadline.after(30)) == ""


def test_after_a_goodbye_the_mean_is_over_those_who_stay(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    a, b = rig.hello("a"), rig.hello("b")
    for step in (1, 2):
        rig.push(a, {1: 4.0}, table=MEAN, step=step)
    rig.push(b, {}, trainer="b", table=MEAN, step=1).wait()
    rig.ingest.attendance.bye("b", b)
    rig.ingest.backlog.flush(Deadline.after(30))
    assert rig.weights([1], MEAN) == [-6.0]


def test_two_learning_rates_in_a_step_fail_it_for_all_and_the_job_goes_on(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    a, b = rig.hello("a"), rig.hello("b")
    refused = [rig.push(a, {1: 1.0}, lr=0.5), rig.push(b, {1: 1.0}, trainer="b")]
    assert {type(outcome.error()) for outcome in refused} == {PushRejectedError}
    rig.push(a, {1: 1.0})
    rig.push(b, {1: 1.0}, trainer="b").wait()
    assert rig.weights([1]) == [-2.0]


def test_an_overdue_step_fails_the_shard_and_names_the_missing_trainer(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2, barrier_timeout_s=0.05)
    a, _ = rig.hello("a"), rig.hello("slow")
    error = rig.push(a, {1: 1.0}).error()
    assert isinstance(error, BarrierError)
    assert "slow" in str(error)
    assert rig.failed.wait(30)
    with pytest.raises(ShardFailedError, match=r"BarrierError.*slow"):
        rig.push(a, {1: 1.0})
    assert rig.tables.state(TABLE).n_rows == 0


def test_a_third_trainer_is_refused_and_gets_no_incarnation(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    rig.hello("a")
    rig.hello("b")
    with pytest.raises(BarrierError, match="a, b"):
        rig.hello("c")
    assert rig.ingest.sessions.next_incarnation == 3


def test_steps_are_held_and_go_on_up_to_the_one_that_another_shard_has_come_to(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    a, b = rig.hello("a"), rig.hello("b")

    def step() -> list[Outcome]:
        return [rig.push(a, {1: 1.0}), rig.push(b, {1: 1.0}, trainer="b")]

    for outcome in step():
        outcome.wait()
    plan = MovePlan(SHARDS, HOLDING, np.zeros(N_SLOTS, np.uint16))
    rig.map = replace(rig.map, version=2, plan=plan)
    assert rig.ingest.steps.follow() == HeldSteps(1, AT_LAST)
    second, third = step(), step()
    rig.map = replace(rig.map, version=3, plan=replace(plan, phase=DRAINING, last_step=2))
    assert rig.ingest.steps.follow().last in (1, 2)
    for outcome in second:
        assert outcome.wait().state == "applied"
    assert rig.ingest.steps.follow() == HeldSteps(2, AT_LAST)
    assert [outcome.states for outcome in third] == [[], []]
    assert rig.weights([1]) == [-4.0]


def test_what_waits_for_its_step_is_refused_when_slots_have_moved_and_taken_under_the_same_sequences_anew(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2, barrier_timeout_s=30.0)
    a, b = rig.hello("a"), rig.hello("b")
    for outcome in [rig.push(a, {1: 1.0}), rig.push(b, {1: 1.0}, trainer="b")]:
        outcome.wait()
    plan = MovePlan(SHARDS, DRAINING, np.zeros(N_SLOTS, np.uint16), last_step=1)
    rig.map = replace(rig.map, version=2, plan=plan)
    refused = [rig.push(a, {1: 1.0}), rig.push(a, {1: 1.0}), rig.push(b, {1: 1.0}, trainer="b")]
    begun = rig.push(b, {1: 1.0}, trainer="b", more=True)
    rig.map = replace(rig.map, version=3, serial=2, plan=None)
    rig.ingest.steps.follow()
    assert {type(outcome.error()) for outcome in [*refused, begun]} == {SlotsMovedError}
    assert (rig.ingest.sessions.find("a", a).last_sequence, rig.ingest.sessions.find("b", b).last_sequence) == (1, 1)
    assert rig.ingest.backlog.n_and_age_s()[0] == 0
    rig.sequences.update({a: 1, b: 1})
    rig.open_steps.clear()
    again = [rig.push(a, {1: 2.0}), rig.push(b, {1: 2.0}, trainer="b")]
    for outcome in again:
        assert outcome.wait().state == "applied"
    assert rig.weights([1]) == [-6.0]


def test_a_member_is_still_missed_after_its_push_was_refused_so(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2, barrier_timeout_s=2.0)
    a, b = rig.hello("a"), rig.hello("slow")
    rig.map = replace(rig.map, version=2, plan=MovePlan(SHARDS, DRAINING, np.zeros(N_SLOTS, np.uint16)))
    refused = rig.push(b, {1: 1.0}, trainer="slow")
    rig.map = replace(rig.map, version=3, serial=2, plan=None)
    rig.ingest.steps.follow()
    assert type(refused.error()) is SlotsMovedError
    error = rig.push(a, {1: 1.0}).error()
    assert isinstance(error, BarrierError)
    assert "slow" in str(error)
