"""The outbox beside a shard that accepts late (once a push is journaled) and refuses at once: numbers always fit, it never stalls."""

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvemb.client.outbox import Outbox, Sent
from kvemb.protocol.messages import PushPart
from tests.matrix import examples


class Shard:
    """Takes parts in order, as a shard's ingest does; its answers wait until they are told."""

    def __init__(self) -> None:
        self.last = 0
        self.late: deque[int] = deque()  # taken, and not in the journal yet
        self.answers: deque[tuple[str, int]] = deque()

    def take(self, sequence: int, *, good: bool) -> None:
        if sequence == self.last + 1 and good:
            self.last = sequence
            self.late.append(sequence)
        else:
            self.answers.append(("refused", sequence))

    def commit(self) -> None:
        self.answers.extend(("accepted", sequence) for sequence in self.late)
        self.late.clear()


def hear(outbox: Outbox, shard: Shard, again: bool = False) -> None:
    state, sequence = shard.answers.popleft()
    if state == "refused":
        outbox.refused(sequence, again=again and outbox.is_behind(sequence))
    else:
        outbox.answered(sequence, applied=False)
        outbox.answered(sequence, applied=True)


def sent() -> Any:
    return Sent(PushPart("a", 1, 0, 0, False, [], 0).encode(), None, None)  # type: ignore[arg-type]


def test_a_part_refused_behind_one_that_is_accepted_later_stalls_nothing() -> None:
    outbox = Outbox("shard 0")
    for sequence in (1, 2, 3):
        outbox.add(sequence, sent())
    outbox.refused(2)
    assert not outbox.has_room, "the third part was sent behind the refused one"
    outbox.refused(3)
    assert (outbox.has_room, outbox.next_sequence) == (True, 2)
    outbox.answered(1, applied=True)
    outbox.add(2, sent())


def test_the_number_of_a_refused_push_of_several_parts_is_that_of_its_first_part() -> None:
    outbox = Outbox("shard 0")
    for sequence in (1, 2, 3, 4):
        outbox.add(sequence, sent())
    for sequence in (3, 2, 4):
        outbox.refused(sequence)
    assert outbox.next_sequence == 2


def test_what_was_sent_behind_a_refused_part_goes_again_in_its_order_under_the_numbers_that_are_free() -> None:
    outbox, (bad, first, second) = Outbox("shard 0"), (sent(), sent(), sent())
    for sequence, part in enumerate((bad, first, second), 1):
        outbox.add(sequence, part)
        outbox.take()
    assert not outbox.is_behind(1)
    outbox.refused(1)
    assert outbox.is_behind(2)
    outbox.refused(2, again=True)
    assert (outbox.n_unaccepted, len(outbox), outbox.has_next) == (2, 2, False)
    outbox.refused(3, again=True)
    assert [outbox.get(1), outbox.get(2), outbox.get(3)] == [first, second, None]
    assert [PushPart.decode(outbox.take() or b"").sequence for _ in range(2)] == [1, 2]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(["push", "take good", "take bad", "commit", "hear"]), max_size=60), st.booleans())
def test_in_any_order_of_answers_numbers_fit_and_room_comes_back(events: list[str], again: bool) -> None:
    outbox, shard = Outbox("shard 0"), Shard()
    on_the_way: deque[int] = deque()
    for event in [*events, "end"]:
        if event == "push" and outbox.has_room:
            outbox.add(outbox.next_sequence, sent())
        while outbox.has_next:
            sequence = outbox._cursor
            if outbox.take() is not None:
                on_the_way.append(sequence)
        if event.startswith("take") and on_the_way:
            shard.take(on_the_way.popleft(), good=event == "take good")
        elif event == "commit":
            shard.commit()
        elif event == "hear" and shard.answers:
            hear(outbox, shard, again)
    while on_the_way or outbox.has_next or shard.answers or shard.late:
        while outbox.has_next:
            sequence = outbox._cursor
            if outbox.take() is not None:
                on_the_way.append(sequence)
        while on_the_way:
            shard.take(on_the_way.popleft(), good=True)
        shard.commit()
        while shard.answers:
            hear(outbox, shard, again)
    assert outbox.has_room
    assert len(outbox) == 0
    assert outbox.next_sequence == shard.last + 1
