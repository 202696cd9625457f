"""The order of a table's rows: every id has one key, and the rows of a slot lie side by side."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb import init, optim
from kvemb.arrays.hashing import KeyOrder
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef


def table(**options: object) -> TableDef:
    return TableDef("t", 4, optim.sgd(), init.zeros(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ids_per_group", "most"), [(1, 2**64 - 1), (53, 2**50 - 1)])
def test_a_key_tells_its_id(ids_per_group: int, most: int) -> None:
    @given(st.lists(st.integers(0, most), unique=True, max_size=20))
    def check(numbers: list[int]) -> None:
        ids, order = np.array(numbers, np.uint64), KeyOrder(ids_per_group)
        keys = order.keys(ids)
        assert order.ids(keys).tolist() == numbers
        assert len(set(keys.tolist())) == len(numbers)

    check()


def test_keys_do_not_change() -> None:
    """Files on disk are in this order."""
    ids = np.array([0, 1, 2, 1000], np.uint64)
    assert [hex(key) for key in KeyOrder().keys(ids).tolist()] == ["0x0", "0x5692161d100b05e5", "0xdbd238973a2b148a", "0xc1936642eba4ead7"]
    assert [hex(key) for key in KeyOrder(2).keys(ids).tolist()] == ["0x0", "0x1", "0x5690000000000002", "0xe3500000000003e8"]


@pytest.mark.parametrize("options", [{}, {"n_buckets": 64}, {"n_buckets": 1 << 20}, {"num_ids": 100_000}, {"num_ids": 1 << 63}])
@pytest.mark.parametrize("every", [1, 7, 1000])
def test_the_rows_of_slots_are_those_in_their_ranges_of_keys(options: dict[str, int], every: int) -> None:
    definition, ids = table(**options), np.arange(20_000, dtype=np.uint64)
    slots = np.arange(N_SLOTS) // 100 % every == 0
    keys, inside = definition.order.keys(ids), np.zeros(len(ids), bool)
    ranges = definition.key_ranges(slots)
    for low, high in ranges:
        inside |= (keys >= np.uint64(low)) & (keys <= np.uint64(high - 1))
    if options != {"num_ids": 1 << 63}:
        assert inside.tolist() == slots[definition.placement.slots(ids)].tolist()
    assert all(before[1] < after[0] for before, after in pairwise(ranges))
    assert definition.key_ranges(np.zeros(N_SLOTS, bool)) == []


@pytest.mark.parametrize("ids_per_group", [1, 53])
def test_rows_in_an_aligned_range_of_keys_have_their_hashes_in_it(ids_per_group: int) -> None:
    order, ids = KeyOrder(ids_per_group), np.arange(20_000, dtype=np.uint64)
    grain = np.uint64(order.grain)
    assert np.array_equal(order.keys(ids) // grain, order.hashes(ids) // grain)
    assert len(np.unique(order.hashes(ids))) == len(ids)
