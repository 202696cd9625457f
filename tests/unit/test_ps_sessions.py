"""Incarnations fence, sequences have neither gaps nor two meanings."""

import pytest

from kvemb.errors import FencedError, PushRejectedError
from kvemb.protocol.messages import PushReply
from paramserver.ingest.sessions import KEPT_ANSWERS, Session, Sessions
from paramserver.model.batch import PartTicket, Push, ReceivedPart


def accept(session: Session, sequence: int, digest: int = 0, *, more: bool = False) -> PartTicket:
    assert session.known(sequence, digest) is None
    part = ReceivedPart((), PartTicket(sequence, digest, 0))
    session.accept(part, 1)
    if not more:
        session.complete(1)
    return part.ticket


def test_shard_0_issues_rising_incarnations() -> None:
    sessions = Sessions(issues=True)
    assert [sessions.hello(name, 0).incarnation for name in ("a", "b", "a")] == [1, 2, 3]
    assert sessions.next_incarnation == 4


def test_an_older_incarnation_is_fenced() -> None:
    sessions = Sessions(issues=False)
    sessions.hello("a", 4)
    sessions.hello("a", 9)
    with pytest.raises(FencedError, match="incarnation 4 was fenced by the newer incarnation 9"):
        sessions.find("a", 4)
    with pytest.raises(FencedError):
        sessions.check_hello("a", 4)


@pytest.mark.parametrize(("issues", "incarnation"), [(False, 0), (True, 7), (True, -1)])
def test_incarnations_come_from_shard_0_only(issues: bool, incarnation: int) -> None:
    with pytest.raises(PushRejectedError):
        Sessions(issues).check_hello("a", incarnation)


def test_the_same_incarnation_again_is_a_reconnect() -> None:
    sessions = Sessions(issues=True)
    accept(sessions.hello("a", 0), 1)
    sessions.check_hello("a", 1)
    assert sessions.hello("a", 1).last_sequence == 1


def test_who_never_said_hello_is_refused() -> None:
    with pytest.raises(PushRejectedError, match="say hello first"):
        Sessions(issues=True).find("a", 1)


def test_a_gap_is_refused() -> None:
    session = Session("a", 1)
    accept(session, 1)
    with pytest.raises(PushRejectedError, match="part 3 after part 1"):
        session.known(3, 0)


def test_a_duplicate_gets_its_first_answer() -> None:
    session, heard = Session("a", 1), []
    ticket = accept(session, 1, digest=5)
    duplicate = session.known(1, 5)
    assert duplicate is ticket
    duplicate.answer(heard.append)
    assert heard == []  # a duplicate of a part that is not in the journal yet is not accepted, as the original is not
    ticket.accept()
    ticket.finish(PushReply(1, "applied", k=8))
    session.known(1, 5).answer(heard.append)
    assert [(r.state, r.k) for r in heard] == [("accepted", 0), ("applied", 8), ("accepted", 0), ("applied", 8)]


def test_other_data_under_a_used_sequence_is_refused() -> None:
    session = Session("a", 1)
    accept(session, 1, digest=5)
    with pytest.raises(PushRejectedError, match="other data under sequence 1"):
        session.known(1, 6)


def test_old_answers_are_forgotten_but_never_one_that_is_still_to_come() -> None:
    session = Session("a", 1)
    first = accept(session, 1)
    for sequence in range(2, 2 * KEPT_ANSWERS):
        accept(session, sequence).finish(PushReply(sequence, "applied"))
    assert session.known(1, 0) is first
    first.finish(PushReply(1, "applied", k=3))
    accept(session, 2 * KEPT_ANSWERS)
    assert len(session.answers) == KEPT_ANSWERS
    assert session.known(1, 123).final.state == "applied"


def test_what_is_not_in_the_journal_is_not_kept_over_a_restart() -> None:
    sessions = Sessions(issues=True)
    session = sessions.hello("a", 0)
    accept(session, 1)
    accept(session, 2)
    accept(session, 3, more=True)
    assert (session.last_sequence, sessions.to_save()) == (3, [("a", 1, 0)])
    ticket = PartTicket(1, 0, 0)
    sessions.journaled(Push("a", 1, 1, (ReceivedPart((), ticket),)))
    sessions.journaled(Push("a", 99, 1, (ReceivedPart((), PartTicket(7, 0, 0)),)))  # of an incarnation that is no longer in force
    assert sessions.to_save() == [("a", 1, 1)]
    again = Sessions(True, 2, sessions.to_save())
    assert again.live == []
    assert again.hello("a", 1).last_sequence == 1


def test_the_journal_brings_sessions_back() -> None:
    sessions = Sessions(True, 3, [("a", 2, 5)])
    for trainer, incarnation, sequence in (("a", 2, 7), ("b", 4, 0), ("b", 4, 3), ("a", 2, 6), ("b", 1, 9)):
        sessions.restore(trainer, incarnation, sequence)
    assert sessions.to_save() == [("a", 2, 7), ("b", 4, 3)]
    assert (sessions.next_incarnation, sessions.live) == (5, [])
    sessions.restore("a", 6)
    assert sessions.to_save()[0] == ("a", 6, 0)
    with pytest.raises(FencedError):
        sessions.check_hello("a", 2)


def test_a_part_of_a_refused_step_stays_refused_over_a_restart() -> None:
    sessions = Sessions(True)
    sessions.restore("a", 1, 1)
    sessions.restore("a", 1, 2, refused=True)
    session, heard = sessions.hello("a", 1), []
    for sequence in (1, 2):
        session.known(sequence, 0).answer(heard.append)
    assert [reply.state for reply in heard] == ["accepted", "applied", "accepted", "failed"]


def test_a_trainer_that_was_idle_since_the_shards_restart_says_goodbye_as_it_is() -> None:
    sessions = Sessions(issues=True, restored=[("a", 3, 7)])
    with pytest.raises(FencedError):
        sessions.bye("a", 2)
    sessions.bye("a", 3)
    with pytest.raises(PushRejectedError, match="say hello first"):
        sessions.find("a", 3)


def test_goodbye_gives_up_an_incomplete_push_and_frees_its_numbers() -> None:
    sessions = Sessions(issues=True)
    session = sessions.hello("a", 0)
    ticket = accept(session, 1, more=True)
    sessions.bye("a", 1)
    assert ticket.final.state == "failed"
    assert sessions.live == []
    with pytest.raises(PushRejectedError):
        sessions.find("a", 1)
    assert sessions.hello("a", 1).known(1, 99) is None


def test_a_new_incarnation_gives_up_the_old_ones_incomplete_push() -> None:
    sessions = Sessions(issues=True)
    ticket = accept(sessions.hello("a", 0), 1, more=True)
    assert sessions.hello("a", 0).last_sequence == 0
    assert ticket.final.error["type"] == "FencedError"


@pytest.mark.parametrize("issues", [True, False])
def test_a_dropped_incarnation_is_fenced_and_told_why_also_after_a_restart(issues: bool) -> None:
    sessions = Sessions(issues)
    sessions.hello("a", 0 if issues else 1)
    ticket = accept(sessions.find("a", 1), 1, more=True)
    fence = sessions.fence("a", "step 7 waited 60 s for a")
    assert ticket.final is not None
    assert ticket.final.error["type"] == "FencedError"
    for call in (sessions.find, sessions.check_hello):
        with pytest.raises(FencedError, match="incarnation 1 was dropped from the sync job: step 7 waited 60 s for a"):
            call("a", 1)
    again = Sessions(issues, sessions.next_incarnation)
    again.restore("a", 1, 1)
    again.restore("a", fence)
    for call in (again.find, again.check_hello):
        with pytest.raises(FencedError, match="or dropped"):
            call("a", 1)
    for restored in (sessions, again):
        back = restored.hello("a", 0 if issues else 9)
        assert back.incarnation > 1
        assert restored.find("a", back.incarnation).last_sequence == 0
