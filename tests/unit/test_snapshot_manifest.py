"""The manifest of a snapshot is read back, or refused."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvemb.errors import JournalDamagedError
from kvemb.schema.record import make_version
from paramserver.snapshot import run_manifest
from paramserver.snapshot.run_manifest import RunEntry, SnapshotManifest, TableRuns

MANIFEST = SnapshotManifest(make_version(3, 9), {"t": TableRuns(7, 20, (RunEntry(1, 900), RunEntry(4, 2**40))), "u": TableRuns(0, 99)})
MANIFEST_DATA = run_manifest.encode_snapshot_manifest(MANIFEST)


def test_a_manifest_is_read_back() -> None:
    assert run_manifest.decode_snapshot_manifest(MANIFEST_DATA, "f") == MANIFEST


@given(st.integers(0, 8 * len(MANIFEST_DATA) - 1))
def test_a_flipped_bit_in_the_manifest_is_refused(bit: int) -> None:
    data = bytearray(MANIFEST_DATA)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(JournalDamagedError, match="the/file"):
        run_manifest.decode_snapshot_manifest(bytes(data), "the/file")


@given(st.integers(0, len(MANIFEST_DATA) - 1), st.binary(max_size=100))
def test_a_manifest_cut_off_or_prolonged_is_refused(size: int, more: bytes) -> None:
    for data in (MANIFEST_DATA[:size], MANIFEST_DATA + more + b"x", more):
        with pytest.raises(JournalDamagedError, match="the/file"):
            run_manifest.decode_snapshot_manifest(data, "the/file")


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\xc0",
        b"\x80",
        b"\x82\xa3cut\xffb",
        b"\x82\xa3cut\x01\xa6tables\x81\xa1t\x92\x01\x01",
        b"\x82\xa3cut\x01\xa6tables\x81\xa1t\x93\x01\x01\x91\x92\xff\x01",
    ],
)
def test_a_manifest_with_a_right_checksum_may_still_be_wrong(body: bytes) -> None:
    data = struct.pack("<8sII", b"kvembsnp", 1, len(body)) + body
    with pytest.raises(JournalDamagedError, match="the/file"):
        run_manifest.decode_snapshot_manifest(data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data)), "the/file")
