"""Keys of rows: golden text, and decodable."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.schema.keys import KEY_SIZE, RowKeys, coalesce_keys, table_tag
from kvemb.schema.slots import N_SLOTS, Placement

ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
GOLDEN_TAGS = [b"Pxr", b"IsY", b"Vyi"]
PLACEMENTS = [Placement(N_SLOTS), Placement(4), Placement(1), Placement(N_SLOTS, 53)]
tags = st.lists(st.sampled_from(list(ALPHABET)), min_size=3, max_size=3).map(bytes)
ids = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20)


def decode(key: bytes) -> int:
    value = 0
    for character in key[3:]:
        value = value * 64 + ALPHABET.index(character)
    return value


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, b"tabAAAAAAAAAAA"),
        (1, b"tabAAAAAAAAAAB"),
        (63, b"tabAAAAAAAAAA_"),
        (64, b"tabAAAAAAAAABA"),
        (2**60, b"tabBAAAAAAAAAA"),
        (2**63, b"tabIAAAAAAAAAA"),
        (2**64 - 1, b"tabP__________"),
        (0x0123456789ABCDEF, b"tabAEjRWeJq83v"),
    ],
)
def test_golden_keys(number: int, text: bytes) -> None:
    keys = RowKeys(b"tab", np.array([number], dtype=np.uint64))
    assert bytes(keys.encode()[0]) == text
    assert len(text) == KEY_SIZE


def test_golden_tags() -> None:
    # A released tag must never change: rows would be looked for elsewhere.
    assert [table_tag("user"), table_tag("user", 1), table_tag("item")] == GOLDEN_TAGS


@given(tags, ids)
def test_an_id_can_be_read_back_from_its_key(tag: bytes, numbers: list[int]) -> None:
    encoded = RowKeys(tag, np.array(numbers, dtype=np.uint64)).encode()
    assert encoded.shape == (len(numbers), KEY_SIZE)
    for key, number in zip(encoded, numbers, strict=True):
        assert bytes(key[:3]) == tag
        assert set(bytes(key)) <= set(ALPHABET)
        assert decode(bytes(key)) == number


def test_take_keeps_the_tag_and_picks_ids() -> None:
    keys = RowKeys(b"tab", np.array([5, 6, 7], dtype=np.uint64))[np.array([2, 0])]
    assert (keys.tag, keys.ids.tolist(), len(keys)) == (b"tab", [7, 5], 2)
    assert RowKeys(b"tab", np.empty(0, dtype=np.uint64)).encode().shape == (0, KEY_SIZE)
    assert len(RowKeys(b"tab", np.empty(0, dtype=np.uint64)).slots()) == 0


@given(st.lists(st.tuples(tags, ids, st.sampled_from(PLACEMENTS)), min_size=1, max_size=6), st.randoms())
def test_keys_of_several_tables_are_each_table_s(tables: list[tuple[bytes, list[int], Placement]], chance: Random) -> None:
    each = [RowKeys(tag, np.array(numbers, dtype=np.uint64), placement=placement) for tag, numbers, placement in tables]
    together = coalesce_keys(each)
    texts, slots = np.concatenate([keys.encode() for keys in each]), np.concatenate([keys.slots() for keys in each])
    np.testing.assert_array_equal(together.encode(), texts)
    np.testing.assert_array_equal(together.slots(), slots)
    order = np.array(chance.sample(range(len(together)), len(together)))
    some = together[order][1:]
    np.testing.assert_array_equal(some.encode(), texts[order[1:]])
    np.testing.assert_array_equal(some.slots(), slots[order[1:]])
