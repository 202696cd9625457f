"""Pages: which rows share one, how well they fill an allocator's size classes, and what their keys say."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.schema.keys import RowKeys, coalesce_keys
from kvemb.schema.pages import PagedKeys, PageLayout, page_layout, paged_keys
from kvemb.schema.slots import text_slot

# Rows per page by record size. A released layout must never change: rows would be looked for in other places.
GOLDEN = {44: 92, 76: 53, 108: 47, 140: 29, 204: 20, 268: 15, 524: 19, 780: 9, 1036: 23, 4108: 15, 12300: 5, 100_012: 3}
sizes = st.integers(12, 300_000)


def keys_of(ids: list[int], size: int = 76) -> PagedKeys:
    return PagedKeys(b"tab", np.array(ids, dtype=np.uint64), page_layout(size))


def size_class(n_bytes: int) -> int:
    """What jemalloc hands out for so many bytes, above 4096."""
    step = 1 << (n_bytes - 1).bit_length() - 3
    return -(-n_bytes // step) * step


def test_golden_layouts() -> None:
    assert {size: page_layout(size).rows_per_page for size in GOLDEN} == GOLDEN


@given(sizes)
def test_a_page_wastes_little_of_its_size_class(size: int) -> None:
    layout = page_layout(size)
    assert layout.page_bytes == layout.rows_per_page * size + 1
    allocated = size_class(layout.page_bytes + 6)
    if size <= 16_000:
        assert (allocated + 72) / (layout.rows_per_page * size) <= 1.15
        assert 4096 <= allocated <= 65536
    assert allocated / (layout.rows_per_page * size) <= 1.26


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=30), sizes)
def test_a_page_has_the_key_of_its_number_and_every_row_its_own_place(ids: list[int], size: int) -> None:
    keys, n = keys_of(ids, size), page_layout(size).rows_per_page
    plain = RowKeys(b"tab", np.array([number // n for number in ids], dtype=np.uint64))
    np.testing.assert_array_equal(keys.encode()[:, 8:], plain.encode()[:, 3:])
    np.testing.assert_array_equal(keys.slots(), plain.slots())
    assert keys.slots().tolist() == [text_slot(bytes(key)) for key in keys.encode()]
    assert all(bytes(key[:4] + key[7:8]) == b"tab{}" for key in map(bytes, keys.encode()))
    assert keys.places.tolist() == [number % n for number in ids]


def test_slices_and_takes_keep_ids_layout_and_which_rows_open_their_page() -> None:
    keys = paged_keys(b"tab", np.array([0, 1, 60, 61, 200], dtype=np.uint64), page_layout(76), np.array([0, 1, 1, 1, 0], dtype=bool))
    for some, at in ((keys[1:4], [1, 2, 3]), (keys[np.array([3, 0])], [3, 0])):
        assert isinstance(some, PagedKeys)
        assert (some.layout, some.ids.tolist()) == (keys.layout, keys.ids[at].tolist())
        assert keys.opens is not None
        assert some.opens is not None
        assert some.opens.tolist() == keys.opens[at].tolist()
        np.testing.assert_array_equal(some.encode(), keys.encode()[at])
    assert keys[1:4][np.array([0])].ids.tolist() == [1]
    assert keys_of([5, 6])[:1].opens is None


def test_the_first_new_row_of_every_page_opens_it_and_no_other_does() -> None:
    ids = np.array([54, 0, 1, 53, 2, 106, 107], dtype=np.uint64)
    new = np.array([1, 0, 1, 1, 1, 0, 0], dtype=bool)
    opens = paged_keys(b"tab", ids, page_layout(76), new).opens
    assert opens is not None
    assert opens.tolist() == [True, False, True, False, False, False, False]
    none = paged_keys(b"tab", ids, page_layout(76), np.zeros(7, dtype=bool)).opens
    assert none is not None
    assert not none.any()


def test_rows_of_a_page_are_near_each_other_and_ascending_ids_need_no_order() -> None:
    locality = keys_of([500, 3, 501, 4]).locality()
    assert locality is not None
    assert (locality[0], locality[1]) == (locality[2], locality[3])
    assert locality[0] > locality[1]
    huge = keys_of([2**64 - 1, 0, 2**64 - 2, 2**40]).locality()
    assert huge is not None
    assert huge[0] == huge[2] > huge[1]
    assert keys_of([1, 2, 60]).locality() is None
    assert keys_of([]).locality() is None
    assert RowKeys(b"tab", np.array([5, 1], dtype=np.uint64)).locality() is None


@pytest.mark.parametrize("n", [0, 1])
def test_few_keys_are_fine(n: int) -> None:
    keys = keys_of([7] * n)
    assert keys.encode().shape == (n, 19)
    assert len(keys.places) == len(keys.slots()) == n


def test_a_layout_is_a_value() -> None:
    assert page_layout(76) == PageLayout(76, 53)
    assert page_layout(76) is page_layout(76)


def test_pages_of_several_tables_are_each_table_s_and_their_rows_stay_next_to_each_other() -> None:
    layout, rng = page_layout(76), np.random.default_rng(0)
    each = [
        paged_keys(tag, rng.permutation(20_000)[:n].astype(np.uint64), layout) for tag, n in ((b"one", 400), (b"two", 3), (b"abc", 900))
    ]
    together = coalesce_keys(each)
    assert isinstance(together, PagedKeys)
    np.testing.assert_array_equal(together.encode(), np.concatenate([keys.encode() for keys in each]))
    np.testing.assert_array_equal(together.slots(), np.concatenate([keys.slots() for keys in each]))
    np.testing.assert_array_equal(together.places, np.concatenate([keys.places for keys in each]))
    locality = together.locality()
    assert locality is not None
    in_order = together[np.argsort(locality, kind="stable")]
    pages = [bytes(key) for key in in_order.encode()]
    assert sum(a != b for a, b in pairwise(pages)) == len(set(pages)) - 1
    assert in_order.locality() is None


def test_rows_of_a_page_stay_next_to_each_other_among_more_tables_than_are_told_apart() -> None:
    rows = np.array([1, 153, 2, 154], np.uint64)  # of two pages
    tags = [bytes([first, second, ord("A")]) for first in range(65, 85) for second in range(65, 85)]
    together = coalesce_keys([PagedKeys(tag, rows, page_layout(76)) for tag in tags])
    locality = together.locality()
    assert locality is not None
    pages = [bytes(key) for key in together[np.argsort(locality, kind="stable")].encode()]
    assert sum(a != b for a, b in pairwise(pages)) == len(set(pages)) - 1 == 2 * len(tags) - 1


@pytest.mark.parametrize("given", [(None, None), ([True, False], None), ([False, False], [True, False])])
def test_which_rows_make_their_page_stays_said_of_several_tables(given: tuple[list[bool] | None, ...]) -> None:
    each = [paged_keys(b"tab", np.array([1, 2], np.uint64), page_layout(76), None if new is None else np.array(new)) for new in given]
    together = coalesce_keys(each)
    assert isinstance(together, PagedKeys)
    if all(new is None for new in given):
        assert together.opens is None
        return
    assert together.opens is not None
    assert together.opens.tolist() == [opens for new in given for opens in (new or [True, True])]
