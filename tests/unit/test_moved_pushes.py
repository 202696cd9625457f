"""Pushes of a trainer whose slots move to another shard: a refused push is split by the new map, and each row is taken once."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvemb.client.all_shards import AllShards
from kvemb.client.push_session import PushSession
from kvemb.errors import PushRejectedError, ShardUnavailableError, SlotsMovedError, to_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart, PushReply
from kvemb.schema.cluster_map import BY_COMMAND, GONE, ClusterMap, NodePlace
from tests.unit.fake_shard import CLUSTER, FakeShard, apply, rows_of, soon

FIRST = ClusterMap.first(0, 2)
MOVED = replace(FIRST, serial=2, slot_shards=np.where(np.arange(16384) % 3 == 0, 1 - FIRST.slot_shards, FIRST.slot_shards))
IDS = list(range(40))


class Maps:
    """What the nodes say: `now`; the trainer has what it has read."""

    def __init__(self) -> None:
        self.now = self.cluster_map = FIRST

    def refresh_map(self, deadline: Deadline) -> bool:
        changed = self.cluster_map is not self.now
        self.cluster_map = self.now
        return changed


class OwningShard(FakeShard):
    """Takes parts of the map in force, applies them at once, and answers a duplicate as it did first."""

    def __init__(self, shard: int, maps: Maps) -> None:
        self.shard, self._maps = shard, maps
        self.lock = threading.Lock()
        self.held: dict[int, PushPart] = {}
        self.taken: list[PushPart] = []
        self.refused: list[PushPart] = []
        super().__init__(OwningShard.answer)  # type: ignore[arg-type]

    def answer(self, part: PushPart) -> Iterator[PushReply]:
        with self.lock:
            if part.sequence > self.last and part.map_serial < self._maps.now.shards_serial:
                self.refused.append(part)
                return iter([PushReply(part.sequence, "failed", error=to_wire(SlotsMovedError("moved")))])
            if part.sequence == self.last + 1:
                for rows in part.tables:
                    assert (self._maps.now.shards_of(rows.slots()) == self.shard).all()
                self.taken.append(part)
            return iter(list(apply(self, part)))


@pytest.fixture
def maps() -> Maps:
    return Maps()


@pytest.fixture
def shards(maps: Maps) -> Iterator[list[OwningShard]]:
    made = [OwningShard(shard, maps) for shard in range(2)]
    yield made
    for shard in made:
        shard.stop()


@pytest.fixture
def connect(shards: list[OwningShard], maps: Maps) -> Iterator[Callable[..., PushSession]]:
    opened: list[tuple[PushSession, AllShards]] = []

    def connect(*, sync: bool = False) -> PushSession:
        servers = AllShards([f"127.0.0.1:{shard.port}" for shard in shards], maps=maps)
        opened.append((PushSession(servers, CLUSTER, "trainer-a", sync=sync), servers))
        return opened[-1][0]

    yield connect
    for session, servers in opened:
        session.close(None)
        servers.close()


def until(ready: Callable[[], bool]) -> None:
    deadline = soon()
    while not ready():
        assert not deadline.expired
        time.sleep(0.005)


def joined(maps: Maps, shards: list[OwningShard]) -> tuple[OwningShard, ClusterMap]:
    """A third shard, and the map in which it has a third of all slots."""
    third = OwningShard(2, maps)
    shards.append(third)
    places = tuple(NodePlace(f"127.0.0.1:{shard.port}", BY_COMMAND) for shard in shards)
    slot_shards = np.where(np.arange(16384) % 3 == 0, 2, FIRST.slot_shards).astype(np.uint16)
    return third, replace(FIRST, serial=2, version=2, n_shards=3, slot_shards=slot_shards, shards=places)


def taken(shards: list[OwningShard]) -> Counter[tuple[int, int]]:
    """(step, id) -> how often."""
    found: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        for part in shard.taken:
            for rows in part.tables:
                found.update((part.step, int(row_id)) for row_id in rows.ids)
    return found


def each_once(steps: int) -> Counter[tuple[int, int]]:
    return Counter((step, row_id) for step in range(1, steps + 1) for row_id in IDS)


def test_a_refused_part_is_split_by_the_new_map_and_its_ack_waits_for_all_of_it(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    session = connect()
    session.push(rows_of(*IDS), soon()).wait_applied()
    maps.now = MOVED
    ack = session.push(rows_of(*IDS), soon())
    ack.wait_applied(20)
    assert all(shard.refused for shard in shards)
    assert taken(shards) == each_once(2)
    assert [[part.sequence for part in shard.taken] for shard in shards] == [[1, 2], [1, 2]]
    assert ack.n_rows == len(IDS)


def test_what_was_on_its_way_is_sent_again_in_its_order(shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]) -> None:
    session = connect()
    session.push(rows_of(*IDS), soon()).wait_applied()
    for shard in shards:
        shard.lock.acquire()
    acks = [session.push(rows_of(*IDS), soon()) for _ in range(4)]
    maps.now = MOVED
    for shard in shards:
        shard.lock.release()
    acks.append(session.push(rows_of(*IDS), soon()))
    for ack in acks:
        ack.wait_applied(20)
    assert taken(shards) == each_once(6)
    assert all(steps == sorted(steps) for steps in ([part.step for part in shard.taken] for shard in shards))


def test_all_parts_of_a_push_name_one_serial_of_the_tables_also_those_that_are_sent_again(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    """By it the shards of a sync job change policies at the same step."""
    session = connect()
    session.push(rows_of(*IDS), soon()).wait_applied()
    session._servers.heard(3)
    for shard in shards:
        shard.lock.acquire()
    acks = [session.push(rows_of(*IDS), soon())]
    session._servers.heard(9)
    maps.now = MOVED
    for shard in shards:
        shard.lock.release()
    acks.append(session.push(rows_of(*IDS), soon()))
    for ack in acks:
        ack.wait_applied(20)
    assert taken(shards) == each_once(3)
    assert {(part.step, part.tables_serial) for shard in shards for part in shard.taken} == {(1, 0), (2, 3), (3, 9)}


def test_in_sync_mode_every_shard_gets_one_part_of_the_step_that_is_sent_again(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    session = connect(sync=True)
    session.push(rows_of(0), soon()).wait_applied()
    maps.now = MOVED
    session.push(rows_of(0), soon()).wait_applied(20)
    assert [[part.step for part in shard.taken] for shard in shards] == [[1, 2], [1, 2]]


def test_in_sync_mode_a_shard_that_has_its_part_of_the_step_gets_no_second_one(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    """The map has another serial, and each shard the slots that it had."""
    session = connect(sync=True)
    session.push(rows_of(*IDS), soon()).wait_applied()
    with shards[1].lock:
        ack = session.push(rows_of(*IDS), soon())
        until(lambda: shards[0].last == 2)
        maps.now = replace(FIRST, serial=2)
    ack.wait_applied(20)
    assert [[part.step for part in shard.taken] for shard in shards] == [[1, 2], [1, 2]]
    assert taken(shards) == each_once(2)


def test_slots_that_move_between_nodes_make_no_push_wait_for_those_before_it(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    session = connect(sync=True)
    session.push(rows_of(*IDS), soon()).wait_applied()
    with shards[1].lock:  # as one that waits for another trainer's part of the step: that trainer may wait for our next one
        acks = [session.push(rows_of(*IDS), soon())]
        maps.now = maps.cluster_map = replace(FIRST, serial=2, n_node_moves=1)
        acks.append(session.push(rows_of(*IDS), Deadline.after(60)))
    for ack in acks:
        ack.wait_applied(20)
    assert [shard.refused for shard in shards] == [[], []]
    assert taken(shards) == each_once(3)


def test_a_restarted_sync_trainer_takes_no_part_in_steps_of_a_shard_without_slots(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    shards[0].first_step, shards[1].first_step = 3, 9  # shard 0 has had no step since its slots went
    maps.now = maps.cluster_map = replace(FIRST, serial=2, slot_shards=np.ones_like(FIRST.slot_shards))
    session = connect(sync=True)
    session.push(rows_of(*IDS), soon()).wait_applied(20)
    assert [[part.step for part in shard.taken] for shard in shards] == [[], [9]]


def test_steps_that_a_restarted_sync_trainer_makes_up_for_go_to_no_other_shard_when_slots_have_moved(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    shards[0].first_step, shards[1].first_step = 9, 7
    maps.now = MOVED
    session = connect(sync=True)
    session.push(rows_of(*IDS), soon()).wait_applied(20)
    assert [[part.step for part in shard.taken] for shard in shards] == [[9], [7, 8, 9]]


def test_a_flush_waits_for_what_is_sent_again(shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]) -> None:
    session = connect()
    session.push(rows_of(*IDS), soon()).wait_applied()
    for _ in range(10):
        maps.now = replace(maps.now, serial=maps.now.serial + 1, slot_shards=1 - maps.now.slot_shards)
        for _ in range(3):
            session.push(rows_of(*IDS), soon())
        session.wait_applied(soon())
        assert not session.undelivered()
    assert taken(shards) == each_once(31)


def test_maps_that_change_all_the_time_lose_and_double_nothing(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    session, random = connect(), np.random.default_rng(7)
    over = threading.Event()

    def move() -> None:
        while not over.wait(float(random.uniform(0.001, 0.03))):
            with shards[0].lock, shards[1].lock:
                maps.now = replace(maps.now, serial=maps.now.serial + 1, slot_shards=random.integers(0, 2, 16384).astype(np.uint16))

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(60):
            session.push(rows_of(*IDS), soon())
    finally:
        over.set()
        mover.join()
    session.wait_applied(soon())
    assert taken(shards) == each_once(60)


def test_while_nodes_have_no_newer_map_the_push_waits_and_says_so(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = connect()
    session.push(rows_of(*IDS), soon()).wait_applied()
    newer, maps.now = MOVED, MOVED
    monkeypatch.setattr(maps, "refresh_map", lambda deadline: False)
    ack = session.push(rows_of(*IDS), soon())
    with pytest.raises(ShardUnavailableError, match="not applied within"):
        ack.wait_applied(0.5)
    assert session.undelivered() == [ack]
    maps.cluster_map = newer
    ack.wait_applied(20)
    assert taken(shards) == each_once(2)


def test_another_refusal_is_told_as_before(shards: list[OwningShard], connect: Callable[..., PushSession]) -> None:
    session = connect()
    shards[0].script = lambda shard, part: iter([PushReply(part.sequence, "failed", error=to_wire(PushRejectedError("bad")))])
    with pytest.raises(PushRejectedError, match="bad"):
        session.push(rows_of(*IDS), soon()).wait(20)


def test_the_thread_that_sends_again_ends_with_the_session(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = connect()
    session.push(rows_of(*IDS), soon()).wait_applied()
    maps.now = MOVED
    monkeypatch.setattr(maps, "refresh_map", lambda deadline: False)
    ack = session.push(rows_of(*IDS), soon())
    until(lambda: any(thread.name == "kvemb-reroute" for thread in threading.enumerate()))
    session.close(None)
    assert not any(thread.name == "kvemb-reroute" for thread in threading.enumerate())
    assert not ack.accepted


def test_a_refused_part_goes_to_a_shard_that_has_joined_once(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    session = connect()
    session.push(rows_of(*IDS), soon()).wait_applied()
    third, maps.now = joined(maps, shards)
    acks = [session.push(rows_of(*IDS), soon()) for _ in range(2)]
    for ack in acks:
        ack.wait_applied(20)
    assert taken(shards) == each_once(3)
    assert len(third.hellos) == 1
    assert {part.incarnation for part in third.taken} == {part.incarnation for part in shards[0].taken}


def test_every_shard_of_the_new_map_hears_of_a_sync_jobs_step_and_none_that_has_left(
    shards: list[OwningShard], maps: Maps, connect: Callable[..., PushSession]
) -> None:
    session = connect(sync=True)
    session.push(rows_of(*IDS), soon()).wait_applied()
    third, maps.now = joined(maps, shards)
    third.mode = "sync"
    session.push(rows_of(*IDS), soon()).wait_applied(20)
    assert [part.step for part in third.taken] == [2]
    without = tuple(NodePlace("", GONE) if shard == 1 else place for shard, place in enumerate(maps.now.shards))
    rest = np.where(maps.now.slot_shards == 1, 2, maps.now.slot_shards)
    maps.now = replace(maps.now, serial=3, version=3, slot_shards=rest, shards=without)
    for _ in range(2):
        session.push(rows_of(*IDS), soon()).wait_applied(20)
    assert taken(shards) == each_once(4)
    assert [[part.step for part in shard.taken] for shard in shards] == [[1, 2, 3, 4], [1, 2], [2, 3, 4]]
