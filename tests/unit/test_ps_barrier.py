"""Steps of a sync job: whole, in step, or refused with the names of the missing trainers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvemb.errors import BarrierError
from paramserver.ingest import step_waits
from paramserver.ingest.sync_steps import AT_LAST, ENDED, GOING_ON, UNKNOWN, HeldSteps, Membership, SyncSteps
from paramserver.model.batch import PartTicket, Push, ReceivedPart


class Barrier:
    """The state of the steps, after event upon event, and the facts read from it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.now = SyncSteps.first(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if (read := getattr(step_waits, name, None)) is not None:
            return partial(read, self.now)
        found = getattr(self.now, name)
        return partial(self._event, found) if callable(found) else found

    def _event(self, event: Callable[..., Any], *args: Any) -> Any:
        out = event(*args)
        if isinstance(out, SyncSteps):
            self.now = out
        elif isinstance(out, tuple):
            self.now, pushes = out
            return list(pushes)
        return out


def push(trainer: str, step: int, at_s: float = 0.0) -> Push:
    return Push(trainer, 1, step, (ReceivedPart((), PartTicket(step, 0, 0)),), arrived_s=at_s)


def names(step: list[Push]) -> list[str]:
    return sorted(p.trainer for p in step)


def barrier(*trainers: str, n_trainers: int = 2, timeout_s: float = 10.0) -> Barrier:
    made = Barrier(n_trainers, timeout_s)
    for trainer in trainers:
        made.join(trainer, 1)
    return made


def test_nothing_is_released_before_all_have_joined_and_sent() -> None:
    it = barrier("a")
    it.add(push("a", 1))
    assert it.next_step() == []
    it.join("b", 1)
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


def test_all_places_taken_names_who_sits_there() -> None:
    with pytest.raises(BarrierError, match=r"'c'.*a, b"):
        barrier("a", "b").join("c", 1)


def test_a_restarted_trainer_takes_its_own_place_again() -> None:
    barrier("a", "b").join("a", 1)


def test_after_a_goodbye_the_others_go_on_and_what_was_sent_counts() -> None:
    it = barrier("a", "b")
    it.add(push("a", 1))
    it.leave("a")
    assert it.next_step() == []
    it.add(push("b", 1))
    assert names(it.next_step()) == ["a", "b"]
    it.add(push("b", 2))
    assert names(it.next_step()) == ["b"]
    it.join("c", 1)


def test_the_next_job_waits_for_all_its_trainers_again() -> None:
    it = barrier("a", "b")
    it.leave("a")
    it.leave("b")
    it.join("c", 1)
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


# --- after a restart of the shard -------------------------------------------------------------------------------------------------------


def restarted(before: Barrier, n_trainers: int = 3) -> Barrier:
    """The barrier of the next process, from what the last one knew."""
    return Barrier(n_trainers, 10.0, Membership(n_trainers, before.membership.members, before.membership.complete))


def test_a_job_goes_on_when_exactly_its_members_are_back() -> None:
    before = barrier("a", "b", "c", n_trainers=3)
    before.leave("c")
    it = restarted(before)
    it.join("a", 1)
    it.add(push("a", 5))
    assert it.next_step() == []
    it.join("b", 1)
    it.add(push("b", 5))
    assert names(it.next_step()) == ["a", "b"]  # without waiting for c, who had left


def test_a_job_that_had_not_begun_waits_for_all() -> None:
    it = restarted(barrier("a", "b", n_trainers=3))
    for trainer in ("a", "b"):
        it.join(trainer, 1)
        it.add(push(trainer, 1))
    assert it.next_step() == []
    it.join("c", 1)
    it.add(push("c", 1))
    assert names(it.next_step()) == ["a", "b", "c"]


def test_after_a_restart_the_places_are_free_for_a_new_job() -> None:
    it = restarted(barrier("a", "b", "c", n_trainers=3))
    for trainer in ("x", "y", "z"):
        it.join(trainer, 2)
        assert it.next_step() == []
        it.add(push(trainer, 1))
    assert names(it.next_step()) == ["x", "y", "z"]
    assert it.membership.members == (("x", 2), ("y", 2), ("z", 2))
    it = restarted(it)
    it.join("x", 2)
    it.add(push("x", 2))
    assert it.next_step() == []


def test_a_restarted_trainer_is_not_the_member_that_the_job_had() -> None:
    before = barrier("a", "b", "c", n_trainers=3)
    before.leave("b")
    before.leave("c")
    it = restarted(before)
    it.join("a", 9)  # another incarnation: its steps begin again, and the others' will
    it.add(push("a", 1))
    assert it.next_step() == []


def test_one_newcomer_does_not_complete_a_job_whose_first_member_died() -> None:
    it = restarted(barrier("a", n_trainers=2), n_trainers=2)
    it.join("c", 2)
    it.add(push("c", 1))
    assert it.next_step() == []


def test_a_member_that_says_goodbye_before_it_has_come_back_is_not_waited_for() -> None:
    it = Barrier(2, 10.0, Membership(2, (("a", 1), ("b", 1)), complete=True))
    it.join("a", 1)
    it.add(push("a", 1))
    assert it.next_step() == []
    assert (it.awaits("b", 1), it.awaits("b", 2), it.awaits("a", 1)) == (True, False, False)
    it.leave("b")
    assert names(it.next_step()) == ["a"]


def test_when_all_say_goodbye_and_none_has_come_back_the_next_job_waits_for_all_its_trainers() -> None:
    it = Barrier(2, 10.0, Membership(2, (("a", 1), ("b", 1)), complete=True))
    it.leave("a")
    it.leave("b")
    it.join("c", 1)
    it.add(push("c", 1))
    assert it.next_step() == []


def test_when_all_have_left_nobody_is_awaited() -> None:
    before = barrier("a", "b", n_trainers=2)
    before.leave("a")
    before.leave("b")
    assert (before.membership.members, before.membership.complete) == ((), False)
    it = restarted(before, n_trainers=2)
    it.join("a", 1)
    it.add(push("a", 1))
    assert it.next_step() == []


# --- a member that is silent ------------------------------------------------------------------------------------------------------------


def three(on_lost: str) -> Barrier:
    """A job of three that has done a step, applied at 1 s; a and b have sent the next at 10 s."""
    it = Barrier(3, 10.0, on_lost=on_lost)
    for trainer in ("a", "b", "c"):
        it.join(trainer, 1)
        it.add(push(trainer, 1))
    for done in it.next_step():
        it.settled(done, 1.0)
    for trainer in ("a", "b"):
        it.add(push(trainer, 2, at_s=10.0))
    return it


def test_a_silent_member_is_dropped_when_its_lease_runs_out_and_not_before() -> None:
    it = three("drop")
    assert (it.deadline_s(), it.lost(19.9), it.lost(20.0)) == (20.0, [], ["c"])
    it.check_overdue(20.0)
    it.drop("c")
    assert names(it.next_step()) == ["a", "b"]
    assert it.membership.members == (("a", 1), ("b", 1))


@pytest.mark.parametrize("on_lost", ["abort", "drop"])
def test_a_part_of_a_push_is_a_sign_of_life(on_lost: str) -> None:
    it = three(on_lost)
    it.heard("c", 15.0)
    assert (it.deadline_s(), it.lost(24.9)) == (25.0, [])
    it.check_overdue(24.9)


def test_nobody_is_late_whose_last_push_has_no_outcome_yet() -> None:
    it = Barrier(2, 10.0, on_lost="drop")
    for trainer in ("a", "b"):
        it.join(trainer, 1)
        it.add(push(trainer, 1))
    step = it.next_step()
    it.add(push("a", 2, at_s=1.0))  # a runs ahead, b waits for storage to take step 1
    assert (it.deadline_s(), it.lost(1000.0)) == (None, [])
    it.check_overdue(1000.0)
    for done in step:
        it.settled(done, 1000.0)
    assert (it.lost(1009.9), it.lost(1010.0)) == ([], ["b"])


def test_waiting_is_for_ever_and_says_for_whom() -> None:
    it = three("wait")
    assert (it.deadline_s(), it.lost(1e6), it.waits_for(19.9)) == (None, [], "")
    it.check_overdue(1e6)
    assert it.waits_for(110.0) == "step 2 waited 100 s for c; here are a, b. Start c again under its name"


def test_a_trainer_that_never_joined_cannot_be_dropped() -> None:
    it = Barrier(2, 10.0, on_lost="drop")
    it.join("a", 1)
    it.add(push("a", 1))
    assert it.lost(10.0) == []
    with pytest.raises(BarrierError, match="1 of 2 trainers that never joined"):
        it.check_overdue(10.0)


def test_a_restarted_trainer_begins_with_the_step_that_is_due_and_its_predecessors_push_is_given_up() -> None:
    it = barrier("a", "b")
    for trainer in ("a", "b"):
        it.add(push(trainer, 1))
    assert names(it.next_step()) == ["a", "b"]
    it.add(push("b", 2))
    it.add(push("b", 3))
    assert [p.step for p in it.join("b", 5)] == [2, 3]
    assert it.first_step("b") == 2
    it.add(push("a", 2))
    assert it.next_step() == []
    it.add(Push("b", 5, 2, (ReceivedPart((), PartTicket(1, 0, 0)),)))
    assert [(p.trainer, p.incarnation) for p in it.next_step()] == [("a", 1), ("b", 5)]
    assert it.first_step("b") == 3


def test_where_the_shard_cannot_tell_the_first_step_settles_how_numbers_are_read() -> None:
    before = barrier("a", "b")
    it = Barrier(2, 10.0, Membership(2, before.membership.members, before.membership.complete), "wait")
    it.join("b", 5)
    assert it.first_step("b") == 0
    it.join("a", 1)
    for trainer, incarnation, steps in (("a", 1, (7, 8)), ("b", 5, (1, 2))):
        for step in steps:
            it.add(Push(trainer, incarnation, step, (ReceivedPart((), PartTicket(step, 0, 0)),)))
    assert [names(it.next_step()), names(it.next_step())] == [["a", "b"], ["a", "b"]]
    assert it.first_step("a") == it.first_step("b") == 9
    it.add(push("a", 9))
    it.add(Push("b", 5, 4, (ReceivedPart((), PartTicket(4, 0, 0)),)))
    with pytest.raises(BarrierError, match="b at step 10, a at step 9"):
        it.next_step()


def test_a_dropped_trainer_comes_back_and_takes_part_from_the_next_step_on() -> None:
    it = three("drop")
    it.drop("c")
    it.next_step()
    it.add(push("a", 3))
    assert it.join("c", 4, 30.0) == []
    assert it.first_step("c") == 3
    it.add(push("b", 3))
    assert it.next_step() == []
    it.add(Push("c", 4, 3, (ReceivedPart((), PartTicket(1, 0, 0)),)))
    assert names(it.next_step()) == ["a", "b", "c"]


def test_a_member_that_is_not_back_after_a_restart_of_the_shard_is_dropped_too() -> None:
    before = barrier("a", "b", "c", n_trainers=3)
    it = Barrier(3, 10.0, Membership(3, before.membership.members, before.membership.complete), "drop")
    for trainer in ("a", "b"):
        it.join(trainer, 1)
        it.add(push(trainer, 5, at_s=2.0))
    assert (it.lost(11.9), it.lost(12.0)) == ([], ["c"])
    it.drop("c")
    assert names(it.next_step()) == ["a", "b"]


def test_a_new_job_after_a_restart_of_the_shard_drops_nobody() -> None:
    before = barrier("a", "b", "c", n_trainers=3)
    it = Barrier(3, 10.0, Membership(3, before.membership.members, before.membership.complete), "drop")
    it.join("x", 7)
    it.add(push("x", 1))
    assert it.lost(10.0) == []
    with pytest.raises(BarrierError, match="2 of 3 trainers that never joined"):
        it.check_overdue(10.0)


def step_of(it: Barrier, number: int) -> list[Push]:
    for trainer in it.members:
        it.add(push(trainer, number))
    return it.next_step()


def test_held_steps_go_on_up_to_the_last_one_and_no_further_whoever_comes() -> None:
    it = barrier("a", "b")
    step_of(it, 1)
    it.hold_behind(0)
    assert it.held == HeldSteps(1, AT_LAST)
    assert step_of(it, 2) == []
    it.hold_behind(2)
    assert len(it.next_step()) == 2
    assert it.held == HeldSteps(2, AT_LAST)
    for trainer in ("a", "b"):
        it.leave(trainer)
    for trainer in ("c", "d"):  # the next job has step numbers of its own
        it.join(trainer, 2)
    assert step_of(it, 1) == []
    it.go_on()
    assert len(it.next_step()) == 2


def test_a_job_that_ends_before_the_last_step_never_comes_to_it() -> None:
    it = barrier("a", "b")
    step_of(it, 1)
    it.hold_behind(3)
    for trainer in ("a", "b"):
        it.leave(trainer)
    assert it.held == HeldSteps(1, ENDED)


def test_a_new_process_hands_out_no_held_step_and_says_that_it_does_not_know_which_was_the_last() -> None:
    members = Membership(2, (("a", 1), ("b", 1)), complete=True)
    it = Barrier(2, 30.0, members)
    it.hold_behind(0)
    for trainer in ("a", "b"):
        it.join(trainer, 1)
    it.hold_behind(5)
    assert step_of(it, 5) == []
    assert it.held.phase == UNKNOWN
    it.go_on()
    assert len(it.next_step()) == 2
    assert it.held.phase == GOING_ON


def test_a_shard_that_joins_waits_for_the_members_of_the_job_and_not_for_those_who_have_left() -> None:
    it = Barrier(3, 30.0)
    it.hold_behind(0)
    it.join("c", 3)  # left before the others told of it
    it.leave("c")
    it.expect([("a", 1), ("b", 1)])
    it.go_on()
    it.join("a", 1)
    it.add(push("a", 8))
    assert it.next_step() == []
    it.join("b", 1)
    it.add(push("b", 8))
    assert [one.step for one in it.next_step()] == [8, 8]
    assert it.first_step("a") == 9
