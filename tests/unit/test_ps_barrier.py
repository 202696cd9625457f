"""Steps of a sync job: whole, in step, or refused with the names of who is missing."""

import pytest

from kvemb.errors import BarrierError
from paramserver.barrier import Barrier
from paramserver.batch import Part, Push, Ticket


def push(trainer: str, step: int, at_s: float = 0.0) -> Push:
    return Push(trainer, 1, step, (Part((), Ticket(step, 0, 0)),), arrived_s=at_s)


def names(step: list[Push]) -> list[str]:
    return sorted(p.trainer for p in step)


def barrier(*trainers: str, seats: int = 2, timeout_s: float = 10.0) -> Barrier:
    made = Barrier(seats, timeout_s)
    for trainer in trainers:
        made.join(trainer)
    return made


def test_nothing_is_released_before_all_have_joined_and_sent() -> None:
    it = barrier("a")
    it.add(push("a", 1))
    assert it.next_step() == []
    it.join("b")
    assert it.next_step() == []
    it.add(push("b", 1))
    assert names(it.next_step()) == ["a", "b"]
    assert it.next_step() == []


def test_a_fast_trainer_waits_step_by_step() -> None:
    it = barrier("a", "b")
    for step in (1, 2):
        it.add(push("a", step))
    it.add(push("b", 1))
    assert [p.step for p in it.next_step()] == [1, 1]
    assert it.next_step() == []


def test_all_seats_taken_names_who_sits_there() -> None:
    with pytest.raises(BarrierError, match=r"'c'.*a, b"):
        barrier("a", "b").join("c")


def test_a_restarted_trainer_takes_its_own_seat_again() -> None:
    barrier("a", "b").join("a")


def test_after_a_goodbye_the_others_go_on_and_what_was_sent_counts() -> None:
    it = barrier("a", "b")
    it.add(push("a", 1))
    it.leave("a")
    assert it.next_step() == []
    it.add(push("b", 1))
    assert names(it.next_step()) == ["a", "b"]
    it.add(push("b", 2))
    assert names(it.next_step()) == ["b"]
    it.join("c")


def test_the_next_job_waits_for_all_its_trainers_again() -> None:
    it = barrier("a", "b")
    it.leave("a")
    it.leave("b")
    it.join("c")
    it.add(push("c", 1))
    assert it.next_step() == []


def test_trainers_at_different_steps_are_told() -> None:
    it = barrier("a", "b")
    it.add(push("a", 7))
    it.add(push("b", 1))
    with pytest.raises(BarrierError, match="a at step 7, b at step 1"):
        it.next_step()


def test_an_overdue_step_names_the_missing_trainer() -> None:
    it = barrier("a", "b")
    it.add(push("a", 3, at_s=100.0))
    assert it.deadline_s() == 110.0
    it.check_overdue(109.9)
    with pytest.raises(BarrierError, match="step 3 waited 10 s for b; here are a"):
        it.check_overdue(110.0)


def test_an_overdue_step_counts_trainers_that_never_joined() -> None:
    it = barrier("a")
    it.add(push("a", 1, at_s=0.0))
    with pytest.raises(BarrierError, match="1 of 2 trainers that never joined"):
        it.check_overdue(10.0)


def test_without_waiting_pushes_there_is_no_deadline() -> None:
    it = barrier("a", "b")
    assert it.deadline_s() is None
    it.check_overdue(1e9)
