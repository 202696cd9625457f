"""A journal on a disk that is full, fails to sync or writes by halves: it stays usable, and nothing is half written."""

import errno
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree

import pytest

from kvemb.errors import JournalFullError
from paramserver.journal import Journal, SessionEntry
from paramserver.journal.segment import HEADER_SIZE, unpack_header
from paramserver.journal.write_ahead_log import FencedLog
from tests.unit.journal_disk import FaultyOs, last_file, payloads, put, refuse, system

__all__ = ["system"]  # the fixture


def test_the_segment_of_a_position_that_a_failed_sync_moved_stays(tmp_path: Path, system: FaultyOs) -> None:
    journal = Journal(tmp_path, "fsync")
    put(journal, b"one")
    applied = journal.append([b"two"])
    system.next_syncs = [True]
    journal.commit()
    assert journal.end.segment > applied.segment
    journal.discard_before(applied)
    assert journal.start.segment == applied.segment
    assert payloads(journal, applied) == [b"two"]  # told twice, never left out
    put(journal, b"three")
    journal.discard_before(journal.end)
    assert payloads(journal) == [b"two", b"three"]
    journal.close()


def test_a_disk_that_is_full_when_a_segment_must_begin_leaves_no_file_behind(tmp_path: Path, system: FaultyOs) -> None:
    journal = Journal(tmp_path, "fsync", segment_bytes=100)
    put(journal, b"x" * 60)
    system.room = 20
    for _ in range(2):
        with pytest.raises(JournalFullError):
            journal.append([b"y" * 60])
    assert len(list(tmp_path.iterdir())) == 1
    system.room = None
    put(journal, b"z" * 60)
    assert payloads(journal) == [b"x" * 60, b"z" * 60]
    journal.close()


def test_a_real_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "fsync")
    put(journal, b"one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(JournalFullError, match="File too large"):
            journal.append([b"x" * 3000, b"y" * 3000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    put(journal, b"two")
    journal.close()
    again = Journal(tmp_path, "fsync")
    assert payloads(again) == [b"one", b"two"]
    again.close()


def test_after_a_failed_sync_the_entries_are_written_again_to_a_new_segment(tmp_path: Path, system: FaultyOs) -> None:
    journal = Journal(tmp_path, "fsync")
    put(journal, b"one")
    before = last_file(tmp_path)
    journal.append([b"two"])
    journal.append([b"three"])
    system.next_syncs = [True]
    journal.commit()
    assert payloads(journal) == [b"one", b"two", b"three"]
    assert last_file(tmp_path) != before
    assert unpack_header(last_file(tmp_path).read_bytes(), "f").previous_end < before.stat().st_size  # its tail is given up
    journal.close()
    # For any part that the disk kept of the tail that was not synced:
    whole = before.read_bytes()
    for tail in (whole, whole[:-2], whole[: HEADER_SIZE + 43], whole[: HEADER_SIZE + 43] + bytes(100)):
        before.write_bytes(tail)
        again = Journal(tmp_path, "fsync")
        assert payloads(again) == [b"one", b"two", b"three"]
        again.close()


@pytest.mark.parametrize(("syncs", "room"), [([True, False], HEADER_SIZE + 10), ([True, False, True], None), ([True, True], None)])
def test_a_segment_that_could_not_take_over_is_removed(tmp_path: Path, system: FaultyOs, syncs: list[bool], room: int | None) -> None:
    journal = Journal(tmp_path, "fsync")
    put(journal, b"one")
    journal.append([b"two"])
    system.next_syncs, system.room = syncs, room
    with pytest.raises(JournalFullError):
        journal.commit()
    assert len(list(tmp_path.iterdir())) == 1
    assert payloads(journal) == [b"one"]
    system.room = None
    journal.commit()
    assert payloads(journal) == [b"one", b"two"]
    journal.close()


def test_a_segment_that_could_not_be_removed_is_removed_before_the_next(
    tmp_path: Path, system: FaultyOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, "fsync")
    journal.append([b"one"])
    system.next_syncs = [True, False, True]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(JournalFullError):
            journal.commit()
        assert len(list(tmp_path.iterdir())) == 2
        with pytest.raises(JournalFullError, match="Permission denied"):
            journal.commit()
    journal.commit()
    assert payloads(journal) == [b"one"]
    journal.close()


def test_writes_that_stop_short_go_on(tmp_path: Path, system: FaultyOs, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwrite(descriptor, b"".join(bytes(buffer) for buffer in buffers)[:7], offset)

    monkeypatch.setattr(system, "pwritev", few)
    journal = Journal(tmp_path, "fsync")
    journal.append([b"abc", b"", b"defghijklmno", b"p" * 20])
    journal.commit()
    journal.close()
    again = Journal(tmp_path, "fsync")
    assert payloads(again) == [b"abcdefghijklmno" + b"p" * 20]
    again.close()


@pytest.mark.parametrize("harm", ["deleted", "in another place", "replaced by a copy"])
@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_nothing_counts_as_committed_while_its_segment_is_not_in_the_folder(harm: str, durability: str, tmp_path: Path) -> None:
    folder, away = tmp_path / "journal", tmp_path / "away"
    journal = Journal(folder, durability)
    put(journal, b"one")
    path = last_file(folder)
    if harm == "in another place":  # of an unmounted volume, or of a folder that was moved
        folder.rename(away)
    else:
        path.rename(away)
    if harm == "replaced by a copy":
        path.write_bytes(away.read_bytes())
    journal.append([b"two"])
    for _ in range(2):
        with pytest.raises(JournalFullError, match=f"{path}: this segment of the journal is gone, or another file is in its place"):
            journal.commit()
    away.rename(folder if harm == "in another place" else path)
    journal.commit()
    put(journal, b"three")
    journal.close()
    again = Journal(folder, durability)
    assert payloads(again) == [b"one", b"two", b"three"]
    again.close()


def test_after_a_failed_sync_no_segment_follows_in_a_folder_that_another_one_has_taken_the_place_of(
    tmp_path: Path, system: FaultyOs
) -> None:
    folder = tmp_path / "journal"
    journal = Journal(folder, "fsync")
    put(journal, b"one")
    older = folder.rename(tmp_path / "older")
    copytree(older, folder)
    journal.append([b"two"])
    system.next_syncs = [True]
    for _ in range(2):
        with pytest.raises(JournalFullError, match="another file is in its place"):
            journal.commit()
    assert len(list(folder.iterdir())) == 1
    journal.close()


def test_a_log_whose_folder_cannot_be_asked_whose_the_shard_is_acknowledges_nothing_and_may_be_asked_again(tmp_path: Path) -> None:
    answers: list[OSError] = [OSError(errno.EIO, "Input/output error", "data/epoch")]
    journal = Journal(tmp_path, "fsync")
    log = FencedLog(journal, lambda: None if not answers else (_ for _ in ()).throw(answers.pop()))
    log.append(SessionEntry("a", 1))
    with pytest.raises(JournalFullError, match="data/epoch: Input/output error; nothing is acknowledged"):
        log.commit()
    log.commit()
    journal.close()
