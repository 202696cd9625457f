"""Markers: golden bytes, and which error each difference means."""

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.coordination.markers import Identity, Marker, accept, alike, diagnose, first_identity, why_lost
from kvemb.errors import MapChangedError, NodeLostError, NodeSuspectError, StorageError, WrongNodeError

MARKER = Marker(b"0123456789abcdef", 1, b"lifetime", 2**64 - 1, 1, "run-1")

GOLDEN_MARKER = "98ac6b76656d622d6d61726b657205c4103031323334353637383961626364656601c4086c69666574696d65cfffffffffffffffff01a572756e2d31"


GOLDEN_REPAIRED = (
    "9aac6b76656d622d6d61726b657206c4103031323334353637383961626364656601c4086c69666574696d65cfffffffffffffffff01a572756e2d31"
    "b030313233343536373839616263646566c3"
)


def test_golden_marker_in_repair() -> None:
    marker = replace(MARKER, repair="0123456789abcdef", repairing=True)
    assert marker.encode().hex() == GOLDEN_REPAIRED
    assert Marker.decode(marker.encode(), "n") == marker


def test_golden_marker() -> None:
    assert MARKER.encode().hex() == GOLDEN_MARKER
    assert Marker.decode(MARKER.encode(), "n") == MARKER


@pytest.mark.parametrize(
    ("other", "error", "says"),
    [
        (replace(MARKER, cluster_id=b"fedcba9876543210"), WrongNodeError, "belongs to cluster"),
        (replace(MARKER, node=0), WrongNodeError, "is node 0 of its cluster, expected node 1"),
        (
            replace(MARKER, map_digest=5),
            MapChangedError,
            "cluster map of serial 1 (digest 0000000000000005), this process that of serial 1",
        ),
        (
            replace(MARKER, map_serial=2),
            MapChangedError,
            "cluster map of serial 2 (digest ffffffffffffffff), this process that of serial 1",
        ),
        (replace(MARKER, run_id="run-2"), NodeSuspectError, "run-2"),
        (replace(MARKER, generation=b"another "), NodeLostError, "generation"),
        (replace(MARKER, node=0, run_id="run-2"), WrongNodeError, "node 0"),
    ],
)
def test_each_difference_has_its_error(other: Marker, error: type[StorageError], says: str) -> None:
    found = diagnose("host:1", MARKER, other.encode())
    assert type(found) is error
    assert says in str(found)
    assert "node host:1:" in str(found)


REPAIRED = replace(MARKER, repair="a" * 16)
REPAIRING = replace(REPAIRED, repairing=True)


@pytest.mark.parametrize(
    ("expected", "got", "error", "says"),
    [
        (MARKER, REPAIRED, NodeSuspectError, "brought back meanwhile"),
        (REPAIRED, MARKER, NodeSuspectError, "older than its last repair"),
        (replace(REPAIRED, map_serial=2), REPAIRED, NodeSuspectError, "older than the last move"),
        (MARKER, REPAIRING, NodeLostError, "a" * 16),
        (REPAIRED, REPAIRING, NodeLostError, "Try again later"),
        (REPAIRING, REPAIRED, NodeLostError, "no longer goes on"),
        (REPAIRING, replace(REPAIRING, repair="b" * 16), NodeLostError, "no longer goes on"),
        (REPAIRING, replace(REPAIRING, run_id="run-2"), NodeSuspectError, "run-2"),
        (REPAIRING, None, NodeLostError, "gone"),
        (REPAIRING, replace(REPAIRING, node=0), WrongNodeError, "node 0"),
    ],
)
def test_each_state_of_a_repair_has_its_error(expected: Marker, got: Marker | None, error: type[StorageError], says: str) -> None:
    found = diagnose("host:1", expected, None if got is None else got.encode())
    assert type(found) is error
    assert says in str(found)


def test_only_a_renewal_by_the_process_that_serves_is_accepted() -> None:
    moved = replace(REPAIRED, run_id="run-2")
    assert accept("n", MARKER, MARKER.encode(), "run-1") == MARKER
    assert accept("n", MARKER, REPAIRED.encode(), "run-1") == REPAIRED
    assert accept("n", REPAIRED, moved.encode(), "run-2") == moved
    for got, run_id in (
        (MARKER, "run-2"),  # from a snapshot
        (moved, "run-1"),
        (REPAIRING, "run-1"),
        (replace(REPAIRED, generation=b"another "), "run-1"),
        (replace(REPAIRED, node=0), "run-1"),
        (replace(REPAIRED, cluster_id=b"fedcba9876543210"), "run-1"),
    ):
        with pytest.raises((NodeLostError, NodeSuspectError, WrongNodeError)):
            accept("n", MARKER, got.encode(), run_id)


@pytest.mark.parametrize(
    ("got", "run_id", "why"),
    [
        (MARKER, "run-1", None),
        (REPAIRED, "run-1", None),
        (None, "run-1", ("empty", None)),
        (MARKER, "run-2", ("suspect", None)),
        (REPAIRING, "run-1", ("repairing", "a" * 16)),
        (REPAIRING, "run-2", ("suspect", None)),
        (replace(MARKER, generation=b"another "), "run-1", ("suspect", None)),
    ],
)
def test_why_a_node_is_lost(got: Marker | None, run_id: str, why: object) -> None:
    assert why_lost("n", MARKER, None if got is None else got.encode(), run_id) == why


@pytest.mark.parametrize(
    "got",
    [
        MARKER,
        replace(REPAIRED, repair="9" * 16),
        replace(REPAIRING, repair="9" * 16),
        REPAIRING,  # of the repair that has ended
        replace(REPAIRED, map_serial=1, map_digest=5),
        replace(REPAIRING, repair="b" * 16, map_serial=1, map_digest=5),
    ],
)
def test_a_marker_from_before_the_last_repair_or_map_that_is_known_is_of_a_node_with_old_rows(got: Marker) -> None:
    expected = replace(REPAIRED, map_serial=2)
    got = replace(got, map_serial=2) if got.map_digest == expected.map_digest else got
    assert why_lost("n", expected, got.encode(), "run-1") == ("suspect", None)
    with pytest.raises((NodeSuspectError, NodeLostError)):
        accept("n", expected, got.encode(), "run-1")


def test_a_map_before_the_one_in_force_is_no_older_state_while_markers_are_renewed() -> None:
    expected, got = replace(REPAIRED, map_serial=2, map_digest=6), replace(REPAIRED, map_digest=5)
    assert why_lost("n", expected, got.encode(), "run-1", [(6, 2), (5, 1)]) is None
    assert accept("n", expected, got.encode(), "run-1", [(6, 2), (5, 1)]) == got


@pytest.mark.parametrize(
    "other", [replace(REPAIRING, node=0), replace(MARKER, cluster_id=b"fedcba9876543210"), replace(MARKER, map_digest=5)]
)
def test_another_node_is_no_case_for_repair(other: Marker) -> None:
    with pytest.raises(WrongNodeError):
        why_lost("n", MARKER, other.encode(), "run-1")


def test_no_marker_means_the_rows_are_lost() -> None:
    assert type(diagnose("host:1", MARKER, None)) is NodeLostError


def foreign(*body: object, magic: object = "kvemb-marker", version: object = 5) -> bytes:
    return msgpack.packb([magic, version, *body])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a marker",
        MARKER.encode()[:-1],
        MARKER.encode() + b"\0",
        foreign(b"0123456789abcdef", 1, b"lifetime", 0, 1, "", magic="other"),
        foreign(b"0123456789abcdef", 1, b"lifetime", 0, 1, "", version=6),
        foreign(b"0123456789abcdef", 1, b"lifetime", 0, 1, "", "nonce", 1, version=6),
        foreign(b"0123456789abcdef", 1, b"lifetime", 0, 1, "", "nonce", True),
        foreign(b"0123456789abcdef", 1, b"lifetime", 0, 1, "", "", True, version=6),
        foreign(b"0123456789abcdef", 1, b"lifetime", 0, 1),
        foreign("text for bytes", 1, b"lifetime", 0, 1, ""),
        foreign(None, 1, b"lifetime", 0, 1, ""),
        foreign(b"0123456789abcdef", 1, 7, 0, 1, ""),
        foreign(b"0123456789abcdef", 1, b"lifetime", "x", 1, ""),
        foreign(b"0123456789abcdef", "1", b"lifetime", 0, 1, ""),
        foreign(b"0123456789abcdef", 1, b"lifetime", 0, 1, 5),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
    ],
)
def test_a_node_whose_marker_is_none_is_suspect_and_never_another_exception(data: bytes) -> None:
    with pytest.raises(WrongNodeError, match="node host:1:"):
        Marker.decode(data, "host:1")
    assert type(diagnose("host:1", MARKER, data)) is NodeSuspectError
    with pytest.raises(NodeSuspectError, match=r"node host:1: .*kvemb:marker"):
        accept("host:1", MARKER, data, "run-1")
    assert why_lost("host:1", MARKER, data, "run-1") == ("suspect", None)
    with pytest.raises(NodeSuspectError):
        first_identity(["host:1", "host:2"], [data, None])  # nothing good is no first start
    assert first_identity(["host:1", "host:2"], [data, MARKER.encode()]) == Identity(MARKER.cluster_id, MARKER.generation)


@pytest.mark.parametrize("version", [1, 2, 3, 4, 7])  # 1 and 2: without buckets; 3 and 4: without a cluster map
def test_a_marker_of_another_release_is_a_wrong_node_and_left_alone(version: int) -> None:
    newer = foreign(b"0123456789abcdef", 1, b"lifetime", 0, 1, "", version=version)
    assert type(diagnose("host:1", MARKER, newer)) is WrongNodeError
    with pytest.raises(WrongNodeError, match=f"node host:1: its marker has format {version}, this release of kvemb reads 5 and 6"):
        why_lost("host:1", MARKER, newer, "run-1")


@given(st.integers(0, 60), st.binary(max_size=4), st.integers(0, 4))
def test_damaged_markers_always_diagnose(at: int, patch: bytes, cut: int) -> None:
    damaged = bytearray(MARKER.encode())
    damaged[at : at + cut] = patch
    if bytes(damaged) != MARKER.encode():
        assert isinstance(diagnose("host:1", MARKER, bytes(damaged)), StorageError)


def test_values_that_differ_in_their_place_alone_are_of_one_group_and_no_others() -> None:
    one, other = replace(MARKER, node=0), replace(MARKER, node=0, repair="0123456789abcdef", repairing=True)
    values: list[bytes | bool | None] = [*one.of_nodes(range(300)), *other.of_nodes(range(300, 400))]
    assert alike(range(400), values) == [[*range(300)], [*range(300, 400)]]
    values[3] = values[4]  # it names another place
    values[5], values[6], values[7], values[8] = None, False, b"", None
    values[200] = replace(one, node=200, generation=bytes(8)).encode()
    groups = alike(range(400), values)
    assert [group for group in groups if len(group) < 90] == [[3], [5, 8], [6], [7], [200]]
    assert sorted(at for group in groups for at in group) == [*range(400)]
