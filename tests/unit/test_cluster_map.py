"""The cluster map: the owner of each slot, as values and as bytes."""

from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.coordination.map_copies import MAP_NAME, decode_map, newest_map
from kvemb.coordination.replicated_values import DamagedCopyError
from kvemb.coordination.shard_notes import MoveReport, newest_report
from kvemb.errors import ConfigError, ProtocolError
from kvemb.schema.cluster_map import BY_COMMAND, GONE, IN_FILE, ClusterMap, NodePlace
from kvemb.schema.keys import RowKeys
from kvemb.schema.move_plan import ABORTING, CLEANING, DRAINING, FLIPPED, MOVING, NODES, SHARDS, MovePlan
from kvemb.schema.slots import N_SLOTS, Placement


def _runs(*pairs: tuple[int, int]) -> bytes:
    return np.array(pairs, dtype="<u2").tobytes()


SECOND = bytes.fromhex("9ba96b76656d622d6d617002010102c408000000000020010001c404000000009292a3613a31a466696c6592a3623a32a466696c6590c0")
GOLDEN = bytes.fromhex("9ca96b76656d622d6d617003010102c408000000000020010001c404000000009292a3613a31a466696c6592a3623a32a466696c6590c000")


def test_golden_bytes_of_a_map() -> None:
    # A map that nodes hold must be read by every later release.
    one = ClusterMap.first(2, 1, ("a:1", "b:2"))
    assert one.encode().hex() == GOLDEN.hex()
    for data in (SECOND, GOLDEN):
        assert ClusterMap.decode(data).digest == one.digest == 10454704785568419357
        assert ClusterMap.decode(data).encode() == GOLDEN


def test_the_shards_half_has_a_serial_of_its_own_which_moves_of_nodes_leave() -> None:
    moved = replace(ClusterMap.first(2, 2), serial=5, n_node_moves=3)
    again = ClusterMap.decode(moved.encode())
    assert (again.serial, again.shards_serial) == (5, 2)
    with pytest.raises(DamagedCopyError):
        decode_map(replace(moved, n_node_moves=5).encode())


@pytest.mark.parametrize(("n_nodes", "n_shards"), [(1, 1), (2, 3), (7, 4), (0, 5), (N_SLOTS, N_SLOTS)])
def test_the_first_map_deals_all_slots_in_equal_runs(n_nodes: int, n_shards: int) -> None:
    one = ClusterMap.first(n_nodes, n_shards)
    for owners, n_owners in ((one.slot_nodes, max(1, n_nodes)), (one.slot_shards, n_shards)):
        counts = np.bincount(owners, minlength=n_owners)
        assert (len(owners), len(counts)) == (N_SLOTS, n_owners)
        assert counts.max() - counts.min() <= 1
        assert (owners[1:] >= owners[:-1]).all()


@pytest.mark.parametrize(("n_nodes", "n_shards"), [(-1, 1), (1, 0), (N_SLOTS + 1, 1), (1, N_SLOTS + 1)])
def test_more_owners_than_slots_or_none_are_refused(n_nodes: int, n_shards: int) -> None:
    with pytest.raises(ValueError, match="each needs one"):
        ClusterMap.first(n_nodes, n_shards)


@given(st.integers(1, 2**63), st.lists(st.integers(0, 4), min_size=1, max_size=50), st.randoms(use_true_random=False))
def test_any_map_can_be_read_back_and_its_digest_tells_it_from_others(serial: int, owners: list[int], chance) -> None:
    cuts = sorted(chance.sample(range(1, N_SLOTS), len(owners) - 1))
    dealt = np.repeat(np.array(owners), np.diff([0, *cuts, N_SLOTS])).astype(np.uint16)
    one = ClusterMap(serial, 5, dealt, 5, dealt[::-1].copy())
    again = ClusterMap.decode(one.encode())
    assert (again.serial, again.n_nodes, again.n_shards) == (serial, 5, 5)
    np.testing.assert_array_equal(again.slot_nodes, one.slot_nodes)
    np.testing.assert_array_equal(again.slot_shards, one.slot_shards)
    assert again.digest == one.digest
    other = dealt.copy()
    other[chance.randrange(N_SLOTS)] ^= 1
    assert (
        len(
            {
                one.digest,
                ClusterMap(serial + 1, 5, dealt, 5, one.slot_shards).digest,
                ClusterMap(serial, 5, other, 5, one.slot_shards).digest,
            }
        )
        == 3
    )


@given(st.integers(0, len(GOLDEN)), st.binary(max_size=6), st.integers(0, 6))
def test_damaged_bytes_are_a_map_that_encodes_alike_or_a_typed_error(at: int, patch: bytes, cut: int) -> None:
    damaged = GOLDEN[:at] + patch + GOLDEN[at + cut :]
    try:
        found = decode_map(damaged)
    except (DamagedCopyError, ProtocolError):
        return
    assert len(found.slot_nodes) == len(found.slot_shards) == N_SLOTS
    assert found.slot_nodes.max() < max(1, found.n_nodes)
    assert found.slot_shards.max() < found.n_shards


@pytest.mark.parametrize(
    "runs",
    [b"", b"123", [[0, 0]], _runs((1, 0)), _runs((0, 2)), _runs((0, 0), (0, 1)), _runs((0, 0), (N_SLOTS, 1))],
)
def test_runs_that_leave_out_or_overlap_or_name_nobody_are_refused(runs: object) -> None:
    with pytest.raises(DamagedCopyError, match="expected a cluster map"):
        decode_map(msgpack.packb(["kvemb-map", 2, 1, 1, 2, runs, 1, _runs((0, 0)), [], [], None]))


def test_nodes_and_shards_of_rows_follow_from_their_slots() -> None:
    one, ids = ClusterMap.first(3, 2), np.arange(1000, dtype=np.uint64)
    keys = RowKeys(b"tab", ids, placement=Placement(64))
    nodes = one.nodes_of(keys)
    assert nodes is not None
    np.testing.assert_array_equal(nodes, one.slot_nodes[keys.slots()])
    np.testing.assert_array_equal(one.shards_of(keys.slots()), (keys.slots() >= N_SLOTS // 2))
    assert ClusterMap.first(1, 2).nodes_of(keys) is None


def test_what_is_changing_is_read_back_and_changes_no_digest() -> None:
    one = ClusterMap.first(3, 2, ("a:1", "b:2", "c:3"))
    other = np.where(one.slot_nodes == 0, 1, one.slot_nodes).astype(np.uint16)
    places = (NodePlace("", GONE), NodePlace("b:2", IN_FILE), NodePlace("d:4", BY_COMMAND))
    plan = MovePlan(NODES, MOVING, other, (0,), (2,), 1 << 20)
    addresses = (NodePlace("x:1", IN_FILE), NodePlace("", GONE))
    moving = replace(one, version=7, places=places, shards=addresses, plan=plan)
    again = decode_map(moving.encode())
    assert again.plan is not None
    np.testing.assert_array_equal(again.plan.slot_owners, other)
    assert (again.version, again.places, again.shards) == (7, places, addresses)
    assert (again.plan.kind, again.plan.phase, again.plan.leaving, again.plan.joining) == (NODES, MOVING, (0,), (2,))
    assert again.plan.max_bytes_per_s == 1 << 20
    assert again.digest == one.digest
    assert again.encode() == moving.encode()


def test_the_last_step_of_the_old_map_is_read_back() -> None:
    one = ClusterMap.first(3, 2)
    plan = MovePlan(SHARDS, DRAINING, one.slot_shards, last_step=1 << 40)
    again = decode_map(replace(one, plan=plan).encode())
    assert again.plan is not None
    assert (again.plan.phase, again.plan.last_step) == (DRAINING, 1 << 40)
    report = MoveReport(3, 9, True, step=1 << 40)
    assert newest_report([report.encode()]) == report


@pytest.mark.parametrize(
    ("in_file", "found"),
    [
        (["a:1", "b:1", "c:1", "d:1"], ("a:1", "", "c:1", "e:1")),  # of when the cluster had four
        (["a:1", "c:1"], ("a:1", "", "c:1", "e:1")),  # an edit of the file leaves no holes
        (["a:1", "c:1", "e:1"], ("a:1", "", "c:1", "e:1")),
        (["a:1"], ("a:1", "", "c:1", "e:1")),
        (["a:1", "b:1", "c:2"], ("a:1", "", "c:2", "e:1")),  # has moved
        (["z:1", "b:1", "c:1"], ("z:1", "", "c:1", "e:1")),
    ],
)
def test_a_shard_is_where_a_command_or_the_file_says(in_file: list[str], found: tuple[str, ...]) -> None:
    noted = NodePlace("a:1", IN_FILE), NodePlace("", GONE), NodePlace("c:1", IN_FILE), NodePlace("e:1", BY_COMMAND)
    assert replace(ClusterMap.first(1, 4), shards=noted).shard_places(in_file) == found


def test_a_shard_of_which_nobody_says_where_it_is_is_named() -> None:
    assert ClusterMap.first(1, 2).shard_places(["a:1", "b:1", "waits:1"]) == ("a:1", "b:1")
    with pytest.raises(ConfigError, match=r"1 given, the cluster map \(serial 1\) has 2, and no address is known for shard 1"):
        ClusterMap.first(1, 2).shard_places(["a:1"])


def test_rows_are_written_to_two_nodes_until_the_new_one_alone_is_named() -> None:
    one = ClusterMap.first(2, 1)
    other = one.slot_nodes[::-1].copy()
    for phase, both, former in ((MOVING, True, False), (FLIPPED, True, True), (CLEANING, False, False), (ABORTING, False, False)):
        now = replace(one, serial=2, slot_nodes=other, plan=MovePlan(NODES, phase, one.slot_nodes))
        assert (now.second_nodes is not None) == both
        assert (now.former is not None) == former
        assert now.former is None or now.former.digest == one.digest
        assert replace(one, plan=MovePlan(SHARDS, phase, one.slot_shards)).second_nodes is None


@pytest.mark.parametrize(
    "plan",
    [[], 3, ["nodes"], ["both", "moving", _runs((0, 0)), [], [], 0, ""], ["nodes", "done", _runs((0, 0)), [], [], 0, ""],
     ["nodes", "moving", _runs((0, 2)), [], [], 0, ""], ["nodes", "moving", _runs((0, 0)), [2], [], 0, ""],
     ["nodes", "moving", _runs((0, 0)), [], [], -1, ""], ["shards", "moving", _runs((0, 1)), [], [], 0, ""]],
)  # fmt: skip
def test_a_plan_of_owners_or_phases_that_there_are_not_is_refused(plan: object) -> None:
    with pytest.raises(DamagedCopyError, match="expected a cluster map"):
        decode_map(msgpack.packb(["kvemb-map", 2, 1, 1, 2, _runs((0, 0)), 1, _runs((0, 0)), [], [], plan]))


def test_the_newest_copy_counts_and_damaged_ones_are_passed_over() -> None:
    first = ClusterMap.first(2, 1)
    second = ClusterMap(2, 2, first.slot_nodes, 1, first.slot_shards, version=2)
    assert newest_map([None, None]) is None
    found = newest_map([first.encode(), b"junk", second.encode()])
    assert found is not None
    assert found.serial == 2
    found = newest_map([first.encode()], known=second)
    assert found is second
    assert newest_map([b"junk"], known=first) is first
    with pytest.raises(DamagedCopyError, match=MAP_NAME):
        newest_map([b"junk", None])
