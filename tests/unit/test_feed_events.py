"""The event of a move: written once, in its place, also by a process that did not live when the map flipped."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvemb.errors import JournalDamagedError
from kvemb.schema.cluster_map import ClusterMap
from paramserver.apply.shard_events import TOLD, ShardEvents
from paramserver.journal import START, EventEntry, Journal, Position, decode_entry
from paramserver.journal.write_ahead_log import AppliedMark, FencedLog
from paramserver.shard_process.data_dir import DataDir

FIRST = ClusterMap.first(1, 2)
MOVED = np.where(np.arange(16384) < 100, 1, FIRST.slot_shards).astype(np.uint16)
SECOND = replace(FIRST, serial=2, version=4, slot_shards=MOVED)


class Maps:
    """A map that a test puts in force."""

    def __init__(self) -> None:
        self.cluster_map = FIRST


class Rig:
    """One process of shard 0 after the other, in one folder."""

    def __init__(self, root: Path) -> None:
        self.data, self.maps = DataDir(root, 0), Maps()
        self.journal = Journal(root / "journal", "os")

    def process(self) -> ShardEvents:
        mark = AppliedMark(0, Position(1, 48))
        return ShardEvents(0, FencedLog(self.journal, lambda: None), mark, self.maps, self.data, lambda: None)

    def told(self) -> list[EventEntry]:
        entries = [decode_entry(payload, lambda name, schema: None) for _, payload in self.journal.read(START)]  # type: ignore[arg-type,return-value]
        return [entry for entry in entries if isinstance(entry, EventEntry)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.journal.close()
    made.data.close()


def test_slots_that_have_gone_are_told_once_with_their_shard(rig: Rig) -> None:
    events = rig.process()
    events.look()
    assert rig.told() == []
    rig.maps.cluster_map = SECOND
    events.look()
    events.look()
    assert rig.told() == [EventEntry("moved", "", 2, gone=((1, tuple(range(100))),))]
    serial, owned = events.told
    assert (serial, int(owned.sum())) == (2, int((MOVED == 0).sum()))


def test_a_process_that_begins_behind_the_flip_tells_it(rig: Rig) -> None:
    rig.process()
    rig.maps.cluster_map = SECOND
    rig.process().look()
    rig.process().look()
    assert [entry.serial for entry in rig.told()] == [2]


def test_slots_that_come_back_and_the_last_that_go_are_told_as_such(rig: Rig) -> None:
    events = rig.process()
    rig.maps.cluster_map = SECOND
    events.look()
    rig.maps.cluster_map = replace(FIRST, serial=3, version=8)
    events.look()
    rig.maps.cluster_map = replace(FIRST, serial=4, version=12, slot_shards=np.ones(16384, np.uint16))
    events.look()
    _, back, last = rig.told()
    assert back == EventEntry("moved", "", 3, came=((1, tuple(range(100))),))
    assert (last.left, [(shard, len(slots)) for shard, slots in last.gone]) == (True, [(1, int((FIRST.slot_shards == 0).sum()))])


def test_a_move_between_other_shards_is_no_event_but_its_serial_counts(rig: Rig) -> None:
    first = ClusterMap.first(1, 3)
    rig.maps.cluster_map = first
    events = rig.process()
    rig.maps.cluster_map = replace(first, serial=2, version=3, slot_shards=np.where(first.slot_shards == 2, 1, first.slot_shards))
    events.look()
    assert rig.told() == []
    assert events.told[0] == 2


def test_a_file_that_was_changed_is_refused_by_its_name(rig: Rig) -> None:
    rig.process()
    rig.data.write(TOLD, [b"2\nxyz"])
    with pytest.raises(JournalDamagedError, match=TOLD):
        rig.process()
