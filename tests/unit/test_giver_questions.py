"""What a taker hears from givers, over the wire: all rows once, then what has changed; all each time from an earlier release."""

import time
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest

from kvemb import init, optim
from kvemb.protocol.move_messages import SlotEntriesReply, SlotEntriesRequest
from kvemb.schema.move_plan import DRAINING, MOVING, SHARDS
from kvemb.schema.record import make_version
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef
from paramserver.model.tables import Tables, TableState
from paramserver.moves import slot_giver
from paramserver.moves.giver_questions import GivenEntries, GiverQuestions
from paramserver.moves.slot_giver import SlotOffers

ONE = TableDef("one", 2, optim.sgd(), init.zeros())
TWO = TableDef("two", 2, optim.sgd(), init.zeros())
TAKER = 7
HALVES = np.arange(N_SLOTS) // 64 % 2


class Giver:
    """A shard that has half of the slots, all of which it gives."""

    def __init__(self, number: int, epoch: int) -> None:
        self.number, self.epoch, self.k = number, epoch, 0
        self.slots: np.ndarray = np.equal(HALVES, number)
        self.tables = Tables([TableState(ONE), TableState(TWO)])
        self.plan = SimpleNamespace(kind=SHARDS, phase=MOVING)
        now = SimpleNamespace(version=3, plan=self.plan, gives=lambda _: self.slots, takes=lambda shard: np.full(N_SLOTS, shard == TAKER))
        self.offers = SlotOffers(
            SimpleNamespace(cluster_map=now),
            self.tables,
            number,
            applied=self.applied,
            epoch=lambda: self.epoch,
            members=lambda: (("t", 1),),
        )

    def applied(self) -> int:
        return make_version(self.epoch, self.k)

    def push(self, definition: TableDef, ids: list[int]) -> None:
        self.k += 1
        self.tables.state(definition).applied(self.ours(definition, ids), self.applied())

    def erase(self, definition: TableDef, ids: list[int]) -> None:
        self.k += 1
        self.tables.state(definition).erased(self.ours(definition, ids), self.applied())

    def ours(self, definition: TableDef, ids: list[int]) -> np.ndarray:
        array = np.array(ids, np.uint64)
        return array[self.slots[definition.placement.slots(array)]]


class Wire:
    """Calls givers with messages as they travel."""

    def __init__(self, givers: list[Giver]) -> None:
        self.givers, self.n_rows, self.of_before = givers, 0, False

    def call(self, giver: int, verb: str, request: SlotEntriesRequest, reply: type[SlotEntriesReply], deadline: object) -> SlotEntriesReply:
        data = request.encode()
        if self.of_before:
            data = msgpack.packb(msgpack.unpackb(data)[:-1])
        answer = self.givers[giver].offers.page(SlotEntriesRequest.decode(data))
        self.n_rows += len(answer.ids) // 8
        values = msgpack.unpackb(answer.encode())
        if self.of_before:
            for table in values[5]:
                del table["changes"]
            values = values[:-1]
        return reply.decode(msgpack.packb(values))


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    monkeypatch.setattr(slot_giver, "PAGE_ROWS", 7)
    givers = [Giver(0, 2), Giver(1, 5)]
    for giver in givers:
        giver.push(ONE, list(range(100)))
        giver.push(TWO, list(range(30)))
    return Wire(givers)


def heard(wire: Wire, since: dict[int, int]) -> GivenEntries:
    questions = GiverQuestions(TAKER, wire)  # type: ignore[arg-type]
    questions.ask(3, {giver.number: giver.slots for giver in wire.givers}, since)
    deadline_s = time.monotonic() + 120
    while questions.answer is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    return questions.answer


def rows_of(given: GivenEntries, definition: TableDef) -> dict[int, int]:
    (one,) = (one for one in given.entries if one.definition == definition)
    keys = definition.order.keys(one.ids)
    assert (keys[1:] > keys[:-1]).all()
    return dict(zip(one.ids.tolist(), one.versions.tolist(), strict=True))


def test_givers_tell_all_once_and_then_what_has_changed(wire: Wire) -> None:
    first = heard(wire, {})
    assert (set(rows_of(first, ONE)), set(rows_of(first, TWO))) == (set(range(100)), set(range(30)))
    assert (first.epoch, first.members) == (5, [("t", 1)])
    assert all(one.whole.all() for one in first.entries)
    for giver in wire.givers:
        giver.push(ONE, [3, 4, 200])
        giver.erase(ONE, [5])
    wire.n_rows = 0
    second = heard(wire, first.since)
    changed = rows_of(second, ONE)
    assert (set(changed), changed[5], rows_of(second, TWO), wire.n_rows) == ({3, 4, 5, 200}, 0, {}, 4)
    assert not any(one.whole.any() for one in second.entries)
    assert all(not rows_of(heard(wire, second.since), table) for table in (ONE, TWO))
    assert set(rows_of(heard(wire, first.since), ONE)) == {3, 4, 5, 200}


def test_a_giver_that_has_started_anew_tells_all_of_its_slots(wire: Wire) -> None:
    first, again = heard(wire, {}), Giver(1, 6)
    again.push(ONE, list(range(90)))
    wire.givers[1] = again
    second = heard(wire, first.since)
    assert [one.whole.tolist() for one in second.entries] == [again.slots.tolist()] * 2
    assert sorted(rows_of(second, ONE)) == again.ours(ONE, list(range(90))).tolist()


def test_a_giver_of_the_release_before_tells_all_each_time(wire: Wire) -> None:
    wire.of_before = True
    for _ in range(2):
        given = heard(wire, {0: 0, 1: 0})
        assert (set(rows_of(given, ONE)), given.since) == (set(range(100)), {0: 0, 1: 0})
        assert all(one.whole.all() for one in given.entries)


def test_while_a_giver_drains_it_tells_nothing_until_all_that_it_took_is_applied(wire: Wire) -> None:
    giver, request = wire.givers[0], SlotEntriesRequest(3, TAKER, 0)
    giver.plan.phase = DRAINING
    assert not giver.offers.page(request).ready
    giver.offers.drained(3)
    assert giver.offers.page(request).ready
    assert not giver.offers.page(SlotEntriesRequest(2, TAKER, 0)).ready
