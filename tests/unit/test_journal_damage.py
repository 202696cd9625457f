"""Damaged journals: a torn end is an end, and anything else is refused by file and offset."""

import os
import struct
import tracemalloc
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvemb.errors import JournalDamagedError, ParameterServerError
from paramserver.journal import Journal, Position, segment_files
from paramserver.journal.segment import HEADER_SIZE, SegmentHeader, entries, find_end, frame, unpack_header
from tests.unit.journal_disk import last_file, payloads, put, refuse


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
    """A power failure keeps the blocks of an unfinished group in any order, and no trainer was told that the group was kept."""
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


@pytest.mark.parametrize("entries", [True, False])
def test_a_segment_of_another_release_is_refused_and_left_alone(three: Path, entries: bool) -> None:
    file = last_file(three)
    head = file.read_bytes()[: HEADER_SIZE - 8]
    head = head[:8] + struct.pack("<I", 2) + head[12:]
    spoil(file, 0, head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)))
    data = file.read_bytes() if entries else file.read_bytes()[:HEADER_SIZE]
    file.write_bytes(data)
    with pytest.raises(ParameterServerError, match="a journal's segment has format 2, this release of kvemb reads 1"):
        Journal(three, "fsync")
    assert file.read_bytes() == data


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
