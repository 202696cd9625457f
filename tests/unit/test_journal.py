"""The journal: committed entries come back whole and in order after any failure, and no other entry is ever shown."""

from pathlib import Path

import pytest

from kvemb.errors import ClosedError, FencedError, InvalidInputError
from paramserver.journal import Journal
from tests.unit.journal_disk import FaultyOs, payloads, put, system

__all__ = ["system"]  # the fixture


def test_reading_begins_at_any_position_that_was_returned(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "os", segment_bytes=200)
    wanted = [bytes([65 + i]) * 30 for i in range(12)]
    positions = put(journal, *wanted)
    assert positions == sorted(positions)
    assert positions[-1].segment > 2
    for n, position in enumerate(positions):
        assert payloads(journal, position) == wanted[n + 1 :]
    assert [position for position, _ in journal.read()] == positions
    assert journal.end == positions[-1]
    journal.close()


def test_a_reader_sees_what_was_committed_when_it_began(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "os")
    put(journal, b"one")
    reader = journal.read()
    put(journal, b"two")
    assert [bytes(payload) for _, payload in reader] == [b"one"]
    journal.close()


def test_whole_segments_before_a_position_are_deleted(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "fsync", segment_bytes=200)
    wanted = [bytes([65 + i]) * 30 for i in range(12)]
    positions = put(journal, *wanted)
    size = journal.size_bytes
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir())
    journal.discard_before(positions[5])
    left = payloads(journal)
    assert left == wanted[12 - len(left) :]
    assert 6 <= len(left) < 12
    assert journal.size_bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) < size
    assert journal.start.segment == positions[5].segment
    journal.discard_before(journal.end)
    assert len(list(tmp_path.iterdir())) == 1
    journal.close()
    again = Journal(tmp_path, "fsync")
    assert payloads(again) == wanted[-len(payloads(again)) :]
    again.close()


def test_the_segment_of_the_position_stays_even_when_it_ends_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "os", segment_bytes=200)
    (applied,) = put(journal, b"a" * 150)
    put(journal, b"b" * 150)
    assert journal.end.segment > applied.segment
    journal.discard_before(applied)
    assert journal.start.segment == applied.segment
    assert payloads(journal, applied) == [b"b" * 150]
    journal.close()


def test_every_commit_is_one_sync_and_a_new_segment_is_known_to_its_folder(tmp_path: Path, system: FaultyOs) -> None:
    journal = Journal(tmp_path, "fsync")
    assert system.calls == ["fdatasync", "fsync"]
    put(journal, b"one", b"two")
    journal.commit()  # nothing to do
    assert system.calls == ["fdatasync", "fsync", "fdatasync"]
    journal.close()
    system.calls.clear()
    Journal(tmp_path, "fsync").close()  # the predecessor's segment is made durable as well
    assert system.calls == ["fdatasync", "fdatasync", "fsync"]


def test_durability_os_never_syncs(tmp_path: Path, system: FaultyOs) -> None:
    journal = Journal(tmp_path, "os", segment_bytes=100)
    put(journal, b"one" * 30, b"two" * 30)
    journal.discard_before(journal.end)
    journal.close()
    assert system.calls == []


def test_another_durability_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'none'"):
        Journal(tmp_path, "none")


def test_an_older_owner_that_lives_on_can_neither_be_read_nor_begin_a_segment(tmp_path: Path) -> None:
    old = Journal(tmp_path, "fsync", segment_bytes=200)
    put(old, b"old")
    new = Journal(tmp_path, "fsync")
    put(old, b"written too late")
    put(new, b"new")
    assert payloads(new) == [b"old", b"new"]
    with pytest.raises(FencedError, match="another process"):
        put(old, b"x" * 150, b"y" * 150)
    old.close()
    new.close()
    third = Journal(tmp_path, "fsync")
    assert payloads(third) == [b"old", b"new"]
    third.close()


def test_a_closed_journal_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "fsync")
    journal.close()
    journal.close()
    for call in (lambda: journal.append([b"x"]), journal.commit):
        with pytest.raises(ClosedError):
            call()
