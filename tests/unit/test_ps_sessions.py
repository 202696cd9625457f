"""Incarnations fence, sequences have neither gaps nor two meanings."""

import pytest

from kvemb.errors import FencedError, PushRejectedError
from kvemb.messages import PushReply
from paramserver.batch import Part, Ticket
from paramserver.sessions import KEPT_ANSWERS, Session, Sessions


def accept(session: Session, sequence: int, digest: int = 0, *, more: bool = False) -> Ticket:
    assert session.known(sequence, digest) is None
    part = Part((), Ticket(sequence, digest, 0))
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


def test_an_incomplete_push_is_not_kept_over_a_restart() -> None:
    sessions = Sessions(issues=True)
    session = sessions.hello("a", 0)
    accept(session, 1)
    accept(session, 2, more=True)
    assert session.last_sequence == 2
    assert sessions.kept() == [("a", 1, 1)]
    again = Sessions(True, 2, sessions.kept())
    assert again.live == []
    assert again.hello("a", 1).last_sequence == 1


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
