"""Steps of a sync job: applied once when all parts are in, failed for all, or overdue."""

from collections.abc import Callable

import pytest

from kvemb.errors import (
    BarrierError,
    DeadlineExceededError,
    PushRejectedError,
    ShardFailedError,
)
from kvemb.net.deadline import Deadline
from tests.unit.ingest_rig import MEAN, TABLE, Rig, make

__all__ = ["make"]  # the fixture


def test_a_step_is_applied_once_when_all_parts_are_in(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    a, b = rig.hello("a"), rig.hello("b")
    first = rig.push(a, {1: 4.0}, table=MEAN)
    with pytest.raises(DeadlineExceededError):
        rig.ingest.backlog.flush(Deadline.after(0.05))
    assert first.states == []  # accepted is the whole step, or nothing of it
    second = rig.push(b, {1: 2.0, 2: 2.0}, trainer="b", table=MEAN)
    assert (first.wait().k, second.wait().k) == (1, 1)
    assert rig.weights([1, 2], MEAN) == [-3.0, -1.0]


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
