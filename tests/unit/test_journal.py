"""The journal: what was committed comes back whole and in order, whatever fails in between, and nothing else is ever shown."""

import errno
import os
import resource
import shutil
import struct
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvemb.errors import ClosedError, FencedError, InvalidInputError, JournalDamagedError, JournalFullError, ParameterServerError
from paramserver.journal import START, Journal, Position, segment_files
from paramserver.journal.segment import HEADER_SIZE, SegmentHeader, entries, find_end, frame, unpack_header


class FaultyOs:
    """The system's calls, some of which fail when told to."""

    def __init__(self) -> None:
        self.room: int | None = None  # bytes that may still be written
        self.fail_syncs = False
        self.next_syncs: list[bool] = []  # whether each fails, before the rule above holds again
        self.calls: list[str] = []

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.room is None:
            return os.pwritev(descriptor, buffers, offset)
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        data = b"".join(bytes(buffer) for buffer in buffers)[: self.room]
        self.room -= len(data)
        return os.pwrite(descriptor, data, offset)

    def fdatasync(self, descriptor: int) -> None:
        self.calls.append("fdatasync")
        if self.next_syncs.pop(0) if self.next_syncs else self.fail_syncs:
            raise OSError(errno.EIO, "Input/output error")

    def fsync(self, descriptor: int) -> None:
        self.calls.append("fsync")

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> FaultyOs:
    faulty = FaultyOs()
    monkeypatch.setattr(segment_files, "os", faulty)
    return faulty


def payloads(journal: Journal, start: Position = START) -> list[bytes]:
    return [bytes(payload) for _, payload in journal.read(start)]


def put(journal: Journal, *entries_: bytes) -> list[Position]:
    positions = [journal.append([entry]) for entry in entries_]
    journal.commit()
    return positions


def refuse(self: Path, missing_ok: bool = False) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def last_file(folder: Path) -> Path:
    return max(folder.glob("*.journal"))


def test_what_was_committed_is_read_back_by_this_process_and_the_next(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a" / "b", "fsync")
    put(journal, b"one", b"", b"three")
    journal.append([b"fo", memoryview(b"ur")])
    assert payloads(journal) == [b"one", b"", b"three"]
    journal.commit()
    assert payloads(journal) == [b"one", b"", b"three", b"four"]
    journal.close()
    again = Journal(tmp_path / "a" / "b", "fsync")
    assert payloads(again) == [b"one", b"", b"three", b"four"]
    put(again, b"five")
    assert payloads(again)[-1] == b"five"
    again.close()


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


@pytest.mark.parametrize("room", [0, 1, 39, 40, 45])
def test_a_full_disk_leaves_the_journal_usable_and_nothing_half_written(tmp_path: Path, system: FaultyOs, room: int) -> None:
    journal = Journal(tmp_path, "fsync")
    put(journal, b"one")
    size = last_file(tmp_path).stat().st_size
    system.room = room
    with pytest.raises(JournalFullError, match="No space left on device"):
        journal.append([b"x" * 100])
    assert last_file(tmp_path).stat().st_size == size
    assert payloads(journal) == [b"one"]
    system.room = None
    put(journal, b"two")
    assert payloads(journal) == [b"one", b"two"]
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
    # Whatever the disk kept of the tail that was not synced:
    whole = before.read_bytes()
    for tail in (whole, whole[:-2], whole[: HEADER_SIZE + 43], whole[: HEADER_SIZE + 43] + bytes(100)):
        before.write_bytes(tail)
        again = Journal(tmp_path, "fsync")
        assert payloads(again) == [b"one", b"two", b"three"]
        again.close()


def test_a_commit_that_fails_for_good_can_be_tried_again(tmp_path: Path, system: FaultyOs) -> None:
    journal = Journal(tmp_path, "fsync")
    put(journal, b"one")
    journal.append([b"two"])
    system.fail_syncs = True
    for _ in range(3):
        with pytest.raises(JournalFullError, match="Input/output error"):
            journal.commit()
        assert payloads(journal) == [b"one"]
    with pytest.raises(JournalFullError):
        journal.append([b"three"])
    assert len(list(tmp_path.iterdir())) == 1
    system.fail_syncs = False
    journal.commit()
    put(journal, b"four")
    assert payloads(journal) == [b"one", b"two", b"four"]
    journal.close()


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


def test_many_pieces_are_more_than_one_call(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "os")
    journal.append([bytes([i % 256]) for i in range(3000)])
    journal.commit()
    assert payloads(journal) == [bytes(i % 256 for i in range(3000))]
    journal.close()


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


# --- damage -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A folder with one segment of three entries, each committed before the next was written."""
    journal = Journal(tmp_path, "fsync")
    for entry in (b"a" * 100, b"b" * 100, b"c" * 100):
        put(journal, entry)
    journal.close()
    return tmp_path


def offset_of(n: int) -> int:
    return HEADER_SIZE + 140 * n


def spoil(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("size", [0, 1, 39, 40, 139])
def test_a_truncated_last_entry_ends_the_segment(three: Path, size: int) -> None:
    os.truncate(last_file(three), offset_of(2) + size)
    journal = Journal(three, "fsync")
    assert payloads(journal) == [b"a" * 100, b"b" * 100]
    put(journal, b"d")
    assert payloads(journal) == [b"a" * 100, b"b" * 100, b"d"]
    journal.close()
    again = Journal(three, "fsync")
    assert payloads(again) == [b"a" * 100, b"b" * 100, b"d"]
    again.close()


@pytest.mark.parametrize("at", [offset_of(2), offset_of(2) + 9, offset_of(2) + 30, offset_of(2) + 139])
def test_a_last_entry_written_by_half_ends_the_segment(three: Path, at: int) -> None:
    spoil(last_file(three), at, b"\x77")
    journal = Journal(three, "fsync")
    assert payloads(journal) == [b"a" * 100, b"b" * 100]
    journal.close()


@pytest.mark.parametrize("at", [offset_of(1), offset_of(1) + 9, offset_of(1) + 30, offset_of(1) + 139])
def test_damage_before_a_later_entry_is_refused_with_file_and_offset(three: Path, at: int) -> None:
    spoil(last_file(three), at, b"\x77")
    with pytest.raises(JournalDamagedError, match=rf"{last_file(three).name}: offset {offset_of(1)}: "):
        Journal(three, "fsync")
    assert len(list(three.iterdir())) == 1


def test_a_group_that_was_never_synced_may_be_torn_anywhere(tmp_path: Path) -> None:
    """A power failure keeps the blocks of an unfinished group in any order, and nobody was told that the group was kept."""
    journal = Journal(tmp_path, "fsync")
    put(journal, b"a" * 100)
    journal.append([b"b" * 100])
    journal.append([b"c" * 100])
    journal.close()
    spoil(last_file(tmp_path), offset_of(1) + 60, b"\0" * 30)
    again = Journal(tmp_path, "fsync")
    assert payloads(again) == [b"a" * 100]
    again.close()


def test_an_old_entry_inside_a_payload_is_not_taken_for_a_later_one(three: Path) -> None:
    whole = last_file(three).read_bytes()
    journal = Journal(three, "fsync")
    put(journal, whole[HEADER_SIZE:])
    journal.close()
    torn = last_file(three)
    os.truncate(torn, torn.stat().st_size - 1)
    again = Journal(three, "fsync")
    assert len(payloads(again)) == 3
    again.close()


def test_an_earlier_segment_must_be_whole(three: Path) -> None:
    first = last_file(three)
    journal = Journal(three, "fsync")
    put(journal, b"d")
    journal.close()
    data = first.read_bytes()
    for spoilt in (data[:-1], data[: offset_of(2)], data[:-1] + b"\0", data[:HEADER_SIZE]):
        first.write_bytes(spoilt)
        again = Journal(three, "fsync")
        with pytest.raises(JournalDamagedError, match=first.name):
            payloads(again)
        again.close()
    first.write_bytes(b"")
    with pytest.raises(JournalDamagedError, match=rf"{first.name}: offset 0"):
        Journal(three, "fsync")


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "fsync", segment_bytes=100)
    put(journal, *[b"x" * 60] * 3)
    journal.close()
    segment_files.path_of(tmp_path, 2).unlink()
    with pytest.raises(JournalDamagedError, match=r"2\.journal: .*missing"):
        Journal(tmp_path, "fsync")


def test_a_renamed_segment_is_refused(three: Path) -> None:
    last_file(three).rename(segment_files.path_of(three, 9))
    with pytest.raises(JournalDamagedError, match="segment 1"):
        Journal(three, "fsync")


@pytest.mark.parametrize("size", [0, 5, HEADER_SIZE - 1])
def test_a_segment_that_was_never_finished_being_created_is_removed(three: Path, size: int) -> None:
    segment_files.path_of(three, 2).write_bytes(SegmentHeader(2, 1, offset_of(3)).pack()[:size])
    journal = Journal(three, "fsync")
    assert len(payloads(journal)) == 3
    assert journal.end.segment == 2
    journal.close()


def test_another_format_version_is_refused(three: Path) -> None:
    head = last_file(three).read_bytes()[: HEADER_SIZE - 8]
    head = head[:8] + struct.pack("<I", 2) + head[12:]
    spoil(last_file(three), 0, head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)))
    with pytest.raises(JournalDamagedError, match="format version 2, expected 1"):
        Journal(three, "fsync")


def test_a_position_behind_the_end_means_that_the_journal_was_lost(three: Path) -> None:
    journal = Journal(three, "fsync")
    with pytest.raises(JournalDamagedError, match="ends here"):
        journal.read(Position(7, 0))
    journal.close()


def test_a_file_that_cannot_be_deleted_stays_part_of_the_journal(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(three, "fsync")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(ParameterServerError, match="Permission denied"):
            journal.discard_before(journal.end)
    assert len(payloads(journal)) == 3
    journal.close()


def test_a_size_that_no_file_holds_is_not_allocated(tmp_path: Path) -> None:
    header = SegmentHeader(1, 5, 0)

    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 50

    class Checksum:
        def update(self, piece: bytes) -> None: ...
        def intdigest(self) -> int:
            return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paramserver.journal.segment.xxhash.xxh3_64", Checksum)
        head = frame(header, HEADER_SIZE, HEADER_SIZE, [Huge()])
    data = header.pack() + head + b"rest"

    def read_at(offset: int, size: int) -> bytes:
        assert size <= 2 << 20
        return data[offset : offset + size]

    tracemalloc.start()
    assert find_end(header, read_at, len(data), "f") == HEADER_SIZE
    with pytest.raises(JournalDamagedError, match=f"f: offset {HEADER_SIZE}"):
        list(entries(header, read_at, HEADER_SIZE, len(data), "f"))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@given(st.binary(max_size=400), st.booleans(), st.booleans())
def test_noise_is_an_end_or_damage_and_never_an_entry(noise: bytes, real_header: bool, magic: bool) -> None:
    header = SegmentHeader(1, 5, 0)
    data = header.pack() + (b"kvembent" if magic else b"") + noise
    assert find_end(header, lambda offset, size: data[offset : offset + size], len(data), "f") == HEADER_SIZE
    if not real_header and noise:
        with pytest.raises(JournalDamagedError):
            unpack_header(noise, "f")
        with pytest.raises(JournalDamagedError):
            list(entries(header, lambda offset, size: data[offset : offset + size], HEADER_SIZE, len(data), "f"))


@given(st.data())
def test_flipped_bits_end_the_segment_early_or_are_refused(data: st.DataObject) -> None:
    header, durable, ends, durables = SegmentHeader(1, 5, 0), HEADER_SIZE, [HEADER_SIZE], []
    written = bytearray(header.pack())
    for size in data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=6)):
        payload = bytes(size)
        written += frame(header, len(written), durable, [payload]) + payload
        durables.append(durable)
        ends.append(len(written))
        durable = len(written) if data.draw(st.booleans()) else durable
    bit = data.draw(st.integers(8 * HEADER_SIZE, 8 * len(written) - 1))
    written[bit // 8] ^= 1 << bit % 8

    def read_at(offset: int, size: int) -> bytes:
        return bytes(written[offset : offset + size])

    whole = max(end for end in ends if end <= bit // 8)
    if any(later > whole for later in durables[ends.index(whole) + 1 :]):
        with pytest.raises(JournalDamagedError, match=f"f: offset {whole}:"):
            find_end(header, read_at, len(written), "f")
    else:
        assert find_end(header, read_at, len(written), "f") == whole
    got = []
    with pytest.raises(JournalDamagedError, match=f"f: offset {whole}:"):
        got.extend(entries(header, read_at, HEADER_SIZE, len(written), "f"))
    assert [end for end, _ in got] == ends[1 : ends.index(whole) + 1]


# --- any order of everything --------------------------------------------------------------------------------------------------------


class JournalMachine(RuleBasedStateMachine):
    """Appends, commits, faults, crashes that keep any part of what was not committed, reopenings and discards."""

    @initialize(durability=st.sampled_from(["fsync", "os"]))
    def begin(self, durability: str) -> None:
        self.system = FaultyOs()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(segment_files, "os", self.system)
        self.folder = Path(tempfile.mkdtemp(prefix="kvemb-journal-"))
        self.durability = durability
        self.committed: list[tuple[Position, bytes]] = []
        self.pending: list[tuple[Position, bytes]] = []
        self.discarded = 0
        self.count = 0
        self.open()

    def open(self) -> None:
        self.journal = Journal(self.folder, self.durability, segment_bytes=250)

    @rule(size=st.integers(0, 120), n_pieces=st.integers(1, 3))
    def append(self, size: int, n_pieces: int) -> None:
        self.count += 1
        payload = f"{self.count}:".encode() + bytes(size)
        cut = len(payload) // n_pieces
        pieces = [payload[i * cut : (i + 1) * cut] for i in range(n_pieces - 1)] + [payload[(n_pieces - 1) * cut :]]
        try:
            position = self.journal.append(pieces)
        except JournalFullError:
            if not self.journal._pending:  # before it met the full disk it had committed the others
                self.settle()
            return
        if len(self.journal._pending) == 1:
            self.settle()
        self.pending.append((position, payload))

    @rule()
    def commit(self) -> None:
        try:
            self.journal.commit()
        except JournalFullError:
            assert self.system.fail_syncs or self.system.room is not None
            return
        self.settle()

    def settle(self) -> None:
        self.committed += self.pending
        self.pending = []

    @rule(room=st.one_of(st.none(), st.integers(0, 200)), fail_syncs=st.booleans())
    def change_weather(self, room: int | None, fail_syncs: bool) -> None:
        self.system.room, self.system.fail_syncs = room, fail_syncs and self.durability == "fsync"

    @rule(keep=st.floats(0, 1), noise=st.binary(max_size=60))
    def crash(self, keep: float, noise: bytes) -> None:
        current = self.journal._current
        self.journal.close()
        size = current.path.stat().st_size
        kept = current.end + int(keep * (size - current.end))
        os.truncate(current.path, kept)
        with open(current.path, "ab") as file:
            file.write(noise)
        self.reopen()

    @rule()
    def stop(self) -> None:
        self.journal.close()
        self.reopen()

    def reopen(self) -> None:
        self.system.room, self.system.fail_syncs = None, False
        self.open()
        found = [bytes(payload) for _, payload in self.journal.read()]
        before, maybe = [p for _, p in self.committed[self.discarded :]], [p for _, p in self.pending]
        survived = found[len(before) :]
        assert found[: len(before)] == before
        assert survived == maybe[: len(survived)]  # not acknowledged: any number of the first of them may be there
        self.committed = list(self.committed[: self.discarded]) + [(p, bytes(payload)) for p, payload in self.journal.read()]
        self.pending = []

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.committed)))
        position = self.committed[n - 1][0] if n else START
        self.journal.discard_before(position)
        before, self.discarded = self.discarded, len(self.committed) - len(list(self.journal.read()))
        assert all(p <= position for p, _ in self.committed[before : self.discarded])

    @invariant()
    def shows_what_was_committed(self) -> None:
        if hasattr(self, "journal"):
            assert [bytes(payload) for _, payload in self.journal.read()] == [p for _, p in self.committed[self.discarded :]]

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            self.patch.undo()
            shutil.rmtree(self.folder)


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
