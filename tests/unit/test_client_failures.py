"""Pushes that fail, shards that go away, and what the trainer hears of it."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import pytest

from kvemb.client import part_numbering, push_sender
from kvemb.client.ack import Ack
from kvemb.client.outbox import WINDOW_PARTS
from kvemb.client.push_session import PushSession
from kvemb.client.push_waits import PushWaits
from kvemb.client.shard_channel import SAY_AFTER_S, ShardChannel
from kvemb.errors import ClosedError, FencedError, MessageError, PushRejectedError, ShardFailedError, ShardUnavailableError, to_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import DESCRIBE, Empty, PushPart, PushReply, Reply
from tests.unit.fake_shard import WAIT_S, Connections, FakeShard, accept, apply, owned, refuse_once, rows_of, silent, soon


def test_that_a_shard_is_away_is_said_once_and_that_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    channel = ShardChannel(3, "127.0.0.1:1")
    channel.away("shard 3: a hiccup")
    channel.back()
    channel.away("shard 3 is starting: it replays", SAY_AFTER_S)
    channel.away("shard 3 is starting: it replays still")
    channel.back()
    channel.back()
    channel.close()
    said = [line.split("; pulls")[0] for line in caplog.messages]
    assert said == [f"waiting for {SAY_AFTER_S:.0f} s", f"shard 3 (127.0.0.1:1) goes on after {SAY_AFTER_S:.0f} s"]
    assert "it replays" in caplog.messages[0]


WAITS: dict[str, Callable[[PushSession, Ack], object]] = {
    "for its place in the journal": lambda session, sent: sent.wait(0.2),
    "for all that was sent": lambda session, sent: session.wait_applied(Deadline.after(0.2)),
    "for room": lambda session, sent: session.push(rows_of(2), Deadline.after(0.2)),
}


@pytest.mark.parametrize("waits", list(WAITS))
def test_why_a_shard_does_not_get_on_is_said_whoever_waits_for_it(
    shards: list[FakeShard], connect: Connections, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waits: str
) -> None:
    for module in ("ack", "push_sender"):
        monkeypatch.setattr(f"kvemb.client.{module}.SAY_AFTER_S", 0.01)
    monkeypatch.setattr(ShardChannel, "trouble", lambda channel, deadline: f"{channel}: JournalFullError: no space left")
    monkeypatch.setattr(push_sender.Outbox, "has_room", property(lambda outbox: len(outbox) == 0))
    shards[0].script = silent
    session = connect()
    sent = session.push(rows_of(1), soon())
    with pytest.raises(ShardUnavailableError):
        WAITS[waits](session, sent)
    assert [line for line in caplog.messages if "pulls go on: shard 0" in line and line.endswith("JournalFullError: no space left")]


@pytest.mark.parametrize("verb", ["push", "wait_applied", "close"])
def test_a_failure_nobody_waited_for_raises_later_and_once(shards: list[FakeShard], connect: Connections, verb: str) -> None:
    shards[0].script = refuse_once(1, PushRejectedError("id 7: NaN"))
    session = connect()
    session.push(rows_of(7), soon())
    session._streams[0].wait_applied(soon())  # the refusal has arrived; no call has asked for it
    with pytest.raises(PushRejectedError, match="id 7: NaN"):
        {"push": lambda: session.push(rows_of(8), soon())}.get(verb, lambda: getattr(session, verb)(soon()))()
    if verb != "close":
        session.push(rows_of(8), soon()).wait_applied()
        assert shards[0].sequences == [1, 1]


def test_a_failure_that_was_waited_for_does_not_raise_again(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].script = refuse_once(1, PushRejectedError("no"))
    session = connect()
    ack = session.push(rows_of(7), soon())
    with pytest.raises(PushRejectedError):
        ack.wait()
    session.push(rows_of(8), soon()).wait_applied()
    session.wait_applied(soon())


@pytest.mark.parametrize("sync", [False, True])
def test_what_was_sent_behind_a_refused_part_goes_again_and_fails_in_a_sync_job_whose_step_is_lost(
    shards: list[FakeShard], connect: Connections, sync: bool
) -> None:
    go = threading.Event()
    script = refuse_once(2, PushRejectedError("id 7: NaN"))

    def hold_second(shard: FakeShard, part: PushPart) -> Iterable[PushReply]:
        if part.sequence == 2:
            go.wait(WAIT_S)
        return script(shard, part)

    shards[0].script = hold_second
    session = connect(sync=sync)
    acks = [session.push(rows_of(i), soon()) for i in range(4)]
    go.set()
    acks[0].wait_applied()
    for ack, message in zip(acks[1:], ("NaN", "gap", "gap"), strict=True):
        if sync or ack is acks[1]:
            with pytest.raises(PushRejectedError, match=message):
                ack.wait()
        else:
            ack.wait_applied()
    session.push(rows_of(9), soon()).wait_applied()
    parts = [(part.sequence, part.tables[0].ids.tolist()) for part in shards[0].parts]
    assert parts[4:] == ([(2, [9])] if sync else [(2, [2]), (3, [3]), (4, [9])])


def test_whoever_waits_in_vain_hears_why_within_the_time_that_was_given(
    shards: list[FakeShard], connect: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards[0].script = silent
    asked = list[tuple[int, float]]()
    monkeypatch.setattr(PushWaits, "trouble", lambda self, shard, deadline: asked.append((shard, deadline.timeout_s)) or "it sleeps")
    session = connect()
    ack = session.push(rows_of(7), soon())
    with pytest.raises(ShardUnavailableError, match=r"not accepted within 0.2 s by shard 0 .*\(it sleeps\)"):
        ack.wait(0.2)
    with pytest.raises(ShardUnavailableError, match=r"within 0.3 s it has not applied .* says: it sleeps"):
        session.wait_applied(Deadline.after(0.3))
    assert asked == [(0, 0.2), (0, 0.3)]


def test_a_fenced_trainer_stays_fenced(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].script = refuse_once(1, FencedError("incarnation 41 was fenced"))
    session = connect()
    with pytest.raises(FencedError):
        session.push(rows_of(1), soon()).wait()
    for _ in range(2):
        with pytest.raises(FencedError, match="incarnation 41"):
            session.push(rows_of(2), soon())
    assert len(shards[0].parts) == 1


def test_closing_tells_of_the_push_that_fenced_the_trainer_while_nobody_waited(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].script = refuse_once(1, FencedError("incarnation 41 was fenced"))
    session = connect()
    session.push(rows_of(1), soon())
    with pytest.raises(FencedError, match="incarnation 41"):
        session.close(soon())
    session.close(soon())  # told once


def test_after_a_break_unapplied_parts_are_sent_again_unchanged(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].script = accept
    session = connect()
    acks = [session.push(rows_of(i), soon()) for i in range(2)]
    for ack in acks:
        ack.wait()
    shards[0].stop()
    shards[0].script = apply
    shards[0].start()
    for ack in acks:
        ack.wait_applied()
    assert shards[0].sequences == [1, 2, 1, 2]
    assert [p.digest for p in shards[0].parts[:2]] == [p.digest for p in shards[0].parts[2:]]
    assert [h.incarnation for h in shards[0].hellos] == [0, 41]


def test_a_shard_that_had_stopped_is_asked_again_and_pushes_go_on_once_it_is_mended(shards: list[FakeShard], connect: Connections) -> None:
    def stopped(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
        return iter([PushReply(part.sequence, "failed", error=to_wire(ShardFailedError("no room")))])

    session = connect()
    session.push(rows_of(1), soon()).wait_applied()
    shards[0].script = stopped
    with pytest.raises(ShardFailedError, match="no room"):
        session.push(rows_of(2), soon()).wait()
    session.wait_applied(soon())  # nothing of it is left to be waited for
    deadline = soon()
    while session._streams[0]._failure is None:  # the stream has told the push, and is about to end
        assert not deadline.expired
    shards[0].hello_error = ShardFailedError("still no room")
    with pytest.raises(ShardFailedError, match="still no room"):
        session.push(rows_of(3), soon())
    shards[0].hello_error, shards[0].script = None, apply
    for row in (4, 5):
        session.push(rows_of(row), soon()).wait_applied()
    assert [(part.sequence, int(part.tables[0].ids[0])) for part in shards[0].parts] == [(1, 1), (2, 2), (2, 4), (3, 5)]


def test_a_trainer_of_a_sync_job_does_not_go_on_behind_a_step_that_failed(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].script = refuse_once(1, ShardFailedError("no room"))
    session = connect(2, sync=True)
    with pytest.raises(ShardFailedError):
        session.push(rows_of(1), soon()).wait()
    with pytest.raises(ShardFailedError, match="no room"):
        session.push(rows_of(2), soon())


def test_a_shard_that_forgot_acknowledged_pushes_is_an_error(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].script = accept
    session = connect()
    ack = session.push(rows_of(1), soon())
    ack.wait()
    shards[0].stop()
    shards[0].last = 0
    shards[0].start()
    with pytest.raises(ShardFailedError, match=r"remembers 0 of the 1 parts .* 1 acknowledged parts are missing .* reported 0 of them"):
        ack.wait_applied()
    with pytest.raises(ShardFailedError):
        session.push(rows_of(2), soon())


def test_a_shard_that_refuses_a_known_trainer_is_an_error(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].script = accept
    session = connect()
    ack = session.push(rows_of(1), soon())
    ack.wait()
    shards[0].stop()
    shards[0].hello_error = PushRejectedError("incarnation 41 was not issued by this shard")
    shards[0].start()
    with pytest.raises(ShardFailedError, match="does not know this trainer any more"):
        ack.wait_applied()


def test_parts_of_an_unfinished_push_are_sent_again_to_a_shard_that_dropped_them(
    shards: list[FakeShard], connect: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = part_numbering.split
    monkeypatch.setattr(part_numbering, "split", lambda tables: original(tables, 100))
    first_is_in = threading.Event()

    def hold_the_first(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
        first_is_in.set()
        return iter(())

    shards[0].script = hold_the_first
    ack = connect().push(rows_of(*range(12)), soon())
    assert first_is_in.wait(WAIT_S)
    shards[0].stop()
    shards[0].script = apply
    shards[0].start()
    ack.wait_applied()
    assert shards[0].sequences[-2:] == [1, 2]


def test_a_push_longer_than_the_window_goes_out_whole_before_anything_of_it_is_accepted(
    shards: list[FakeShard], connect: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = part_numbering.split
    monkeypatch.setattr(part_numbering, "split", lambda tables: original(tables, 100))

    def as_a_whole(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
        if not part.more:
            for sequence in range(1, part.sequence + 1):
                yield PushReply(sequence, "accepted")
                yield PushReply(sequence, "applied", k=1)

    shards[0].script = as_a_whole
    session = connect()
    session.push(rows_of(*range(6 * 3 * WINDOW_PARTS)), soon()).wait_applied()
    assert shards[0].sequences == list(range(1, 3 * WINDOW_PARTS + 1))


def test_all_parts_of_a_refused_push_leave_their_sequences_free(
    shards: list[FakeShard], connect: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = part_numbering.split
    monkeypatch.setattr(part_numbering, "split", lambda tables: original(tables, 100))

    def refuse_as_a_whole(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
        if not part.more:
            for sequence in range(1, part.sequence + 1):
                yield PushReply(sequence, "failed", error=to_wire(PushRejectedError("id 7: NaN")))

    shards[0].script = refuse_as_a_whole
    session = connect()
    with pytest.raises(PushRejectedError, match="NaN"):
        session.push(rows_of(*range(13)), soon()).wait()
    shards[0].script = apply
    session.push(rows_of(1), soon()).wait_applied()
    assert shards[0].sequences == [1, 2, 3, 1]


def test_a_shard_that_another_process_took_over_is_asked_again_there(shards: list[FakeShard], connect: Connections) -> None:
    def lose_the_shard(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
        yield from accept(shard, part)
        shard.script = apply
        yield PushReply(part.sequence, "failed", error=to_wire(ShardUnavailableError("this process has lost the shard")))

    shards[0].script = lose_the_shard
    connect().push(rows_of(1), soon()).wait_applied()
    assert shards[0].sequences == [1, 1]


def test_a_full_window_holds_the_next_push_back_and_nothing_of_it_is_sent(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].script = silent
    session = connect(2)
    for i in owned(0, WINDOW_PARTS):
        session.push(rows_of(i), soon())
    with pytest.raises(ShardUnavailableError, match=r"shard 0 .* window of 8 .* nothing was sent"):
        session.push(rows_of(*sorted(owned(0, 1) + owned(1, 1))), Deadline.after(0.01))
    assert shards[1].parts == []


def test_a_shard_that_is_down_is_named_within_the_deadline(shards: list[FakeShard], connect: Connections) -> None:
    shards[1].stop()
    with pytest.raises(ShardUnavailableError, match=rf"shard 1 \(127.0.0.1:{shards[1].port}\): Hello: no answer within 0.2 s"):
        connect(2).push(rows_of(1), Deadline.after(0.2))


def test_a_push_after_the_shard_came_up_succeeds(shards: list[FakeShard], connect: Connections) -> None:
    shards[1].stop()
    session = connect(2)
    with pytest.raises(ShardUnavailableError):
        session.push(rows_of(1), Deadline.after(0.2))
    shards[1].start()
    session.push(rows_of(1), soon()).wait_applied()


@pytest.mark.parametrize("fault", ["broken connection", "draining"])
def test_a_hello_that_meets_a_shard_on_its_way_out_is_said_again(shards: list[FakeShard], connect: Connections, fault: str) -> None:
    answer, tries = shards[0]._hello, []

    def hello(data: bytes, context: Any) -> bytes:
        tries.append(data)
        if len(tries) > 2:
            return answer(data, context)
        if fault == "draining":
            return Reply(to_wire(ShardUnavailableError("the shard is draining")), b"").encode()
        context.abort(grpc.StatusCode.UNAVAILABLE, "Stream removed")
        raise AssertionError

    shards[0].stop()
    shards[0]._hello = hello  # type: ignore[method-assign]
    shards[0].start()
    connect().push(rows_of(1), soon()).wait_applied()
    assert len(tries) == 3


def test_a_hello_to_a_shard_that_stays_on_its_way_out_fails_in_time_with_its_reason(shards: list[FakeShard], connect: Connections) -> None:
    shards[0].hello_error = ShardUnavailableError("the shard is draining")
    with pytest.raises(ShardUnavailableError, match="draining"):
        connect().push(rows_of(1), Deadline.after(1.0))
    assert len(shards[0].hellos) > 1


def test_a_forked_child_is_told_what_to_do(shards: list[FakeShard], connect: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    session = connect()
    session.push(rows_of(1), soon()).wait()
    with monkeypatch.context() as child:
        child.setattr("kvemb.client.all_shards.os.getpid", lambda: -1)
        with pytest.raises(ClosedError, match=r"call kvemb.connect\(\) in this process"):
            session.push(rows_of(2), soon())
        session.close(soon())  # forgets the connection and touches nothing
    session.push(rows_of(3), soon()).wait()


def test_a_call_that_ends_well_and_without_an_answer_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's Python layer gives None for that; a server of another kind may do it."""

    class Ended:
        def future(self, *_: object, **__: object) -> "Ended":
            return self

        def result(self, _: float) -> None:
            return None

    channel = ShardChannel(0, "127.0.0.1:1")
    monkeypatch.setattr(channel, "unary", lambda method: Ended())
    with pytest.raises(MessageError, match=r"shard 0.*without an answer"):
        channel.call(DESCRIBE, Empty(), Deadline.after(1))
    channel.close()
