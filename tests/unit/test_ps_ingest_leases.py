"""Leases of a sync job's trainers, without threads: the test is the committer, and the clock is its own."""

from collections.abc import Callable

import pytest

from kvemb.errors import (
    BarrierError,
    FencedError,
    JournalFullError,
)
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart, PushReply
from paramserver.ingest.ingest import Ingest
from paramserver.ingest.sessions import Sessions
from paramserver.ingest.sync_steps import SyncSteps
from tests.unit.ingest_rig import Outcome


class SyncRig:
    """An ingest with a clock that stands still."""

    def __init__(self, on_lost: str, trainers: int = 3) -> None:
        self.now_s = 100.0
        self.recorded: list[tuple[str, int]] = []
        self.on_record: Callable[[], None] = lambda: None
        steps = SyncSteps.first(trainers, 10.0, on_lost=on_lost)
        self.ingest = Ingest(Sessions(issues=True), steps, record=self.record, clock=lambda: self.now_s)
        self.of = {name: self.ingest.attendance.hello(name, 0)[0] for name in "abc"[:trainers]}
        self.sequences: dict[int, int] = {}

    def record(self, trainer: str, incarnation: int) -> None:
        self.on_record()
        self.recorded.append((trainer, incarnation))

    def push(self, trainer: str, step: int, *, more: bool = False, incarnation: int = 0) -> Outcome:
        incarnation, outcome = incarnation or self.of[trainer], Outcome()
        sequence = self.sequences.get(incarnation, 0) + 1
        self.ingest.submit(PushPart(trainer, incarnation, sequence, step, more, [], sequence), (), outcome, lambda: False)
        self.sequences[incarnation] = sequence
        return outcome

    def take(self) -> list[str]:
        """The trainers of the next step, which is applied at once."""
        (step,) = self.ingest.take()
        assert isinstance(step, list)
        tickets = [part.ticket for push in step for part in push.parts]
        self.ingest.outcomes.settle(step, {id(ticket): PushReply(ticket.sequence, "applied") for ticket in tickets})
        return sorted(push.trainer for push in step)


def begun(on_lost: str) -> SyncRig:
    """A job of three that has done a step, and in which all but c have sent the next."""
    rig = SyncRig(on_lost)
    for trainer in "abc":
        rig.push(trainer, 1)
    assert rig.take() == ["a", "b", "c"]
    for trainer in "ab":
        rig.push(trainer, 2)
    return rig


def test_a_dropped_trainer_is_journaled_as_gone_before_a_step_goes_on_without_it() -> None:
    rig = begun("drop")
    seen: list[str] = []
    rig.on_record = lambda: seen.append(rig.ingest.backlog.describe())  # at that time the step still waits
    rig.recorded.clear()
    rig.now_s += 10
    assert rig.take() == ["a", "b"]
    assert rig.recorded == [("c", 4), ("c", 0)]
    assert all("2 accepted changes" in text for text in seen)
    assert rig.ingest.attendance.to_save()[1:] == ((("a", 1), ("b", 2)), True)


def test_what_a_dropped_trainer_sends_is_refused_and_says_why() -> None:
    rig = begun("drop")
    rig.now_s += 10
    rig.take()
    for call in (
        lambda: rig.push("c", 2),
        lambda: rig.ingest.attendance.hello("c", rig.of["c"]),
        lambda: rig.ingest.attendance.bye("c", rig.of["c"]),
    ):
        with pytest.raises(FencedError, match="dropped from the sync job: step 2 waited 10 s for c"):
            call()


def test_a_dropped_trainer_says_hello_again_and_is_waited_for() -> None:
    rig = begun("drop")
    half = rig.push("c", 2, more=True)
    rig.now_s += 10
    assert rig.take() == ["a", "b"]
    assert isinstance(half.error(), FencedError)
    incarnation, last = rig.ingest.attendance.hello("c", 0)
    assert (incarnation, last, rig.ingest.attendance.first_step("c")) == (5, 0, 3)
    for trainer in "ab":
        rig.push(trainer, 3)
    rig.push("c", 3, incarnation=incarnation)
    assert rig.take() == ["a", "b", "c"]


def test_a_slow_trainer_that_still_sends_parts_is_not_dropped() -> None:
    rig = begun("drop")
    for _ in range(5):
        rig.now_s += 9
        rig.push("c", 2, more=True)
    rig.now_s += 9
    rig.push("c", 2)
    assert rig.take() == ["a", "b", "c"]


@pytest.mark.parametrize("on_lost", ["drop", "abort"])
def test_a_trainer_that_may_be_waiting_for_storage_is_not_late(on_lost: str) -> None:
    rig = begun(on_lost)
    for _ in range(5):
        rig.now_s += 9
        rig.ingest.attendance.excuse()
    rig.now_s += 9
    rig.push("c", 2)
    assert rig.take() == ["a", "b", "c"]


def test_a_full_disk_holds_up_a_drop_until_there_is_room() -> None:
    rig = begun("drop")
    full = [JournalFullError("/j", "no space"), JournalFullError("/j", "no space")]
    said: list[str] = []

    def once_full() -> None:
        said.append(rig.ingest.state.waits_for)
        if full:
            rig.ingest.wake()
            raise full.pop()

    rig.on_record = once_full
    rig.ingest.state.wait_stopped = lambda timeout_s: False  # type: ignore[method-assign]  # the disk has room at once
    rig.now_s += 10
    assert rig.take() == ["a", "b"]
    assert "no space" in said[1]
    assert rig.ingest.state.trouble.journal == ""


def test_a_lost_trainer_is_waited_for_and_everybody_who_asks_is_told() -> None:
    rig = begun("wait")
    assert rig.ingest.state.waits_for == ""
    rig.now_s += 3600
    assert rig.ingest.state.waits_for == "step 2 waited 3600 s for c; here are a, b. Start c again under its name"
    assert rig.ingest.backlog.flush(Deadline.after(0)) == "step 2 of a, b, which waits for c"
    incarnation = rig.ingest.attendance.hello("c", 0)[0]
    assert rig.ingest.attendance.first_step("c") == 2
    rig.push("c", 2, incarnation=incarnation)
    assert rig.take() == ["a", "b", "c"]
    assert rig.ingest.state.waits_for == ""


def test_a_restarted_trainer_s_predecessor_is_told_that_its_push_was_given_up() -> None:
    rig = SyncRig("wait", trainers=2)
    outcome = rig.push("b", 1)
    incarnation = rig.ingest.attendance.hello("b", 0)[0]
    assert isinstance(outcome.error(), FencedError)
    rig.push("a", 1)
    rig.push("b", 1, incarnation=incarnation)
    assert rig.take() == ["a", "b"]
    assert rig.ingest.backlog.n_and_age_s()[0] == 0


def test_a_lost_trainer_stops_the_job_where_that_is_the_rule() -> None:
    rig = begun("abort")
    rig.now_s += 10
    told = r"step 2 waited 10 s for c; here are a, b\. Start c again under its name\. Nothing of it was applied"
    with pytest.raises(BarrierError, match=told):
        rig.ingest.take()
