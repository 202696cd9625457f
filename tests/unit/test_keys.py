"""Keys of rows and their slots: golden text, decodable, and hashed as Redis Cluster hashes them."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.schema.keys import KEY_SIZE, N_SLOTS, RowKeys, coalesce_keys, slot_tags, table_tag, text_slot

ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
GOLDEN_TAGS = [b"Pxr", b"IsY", b"Vyi"]
GOLDEN_SLOTS = [11104, 6915, 2542, 11872]
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


def test_golden_tags_and_slots() -> None:
    # A released tag or slot must never change: rows would be looked for elsewhere.
    keys = RowKeys(b"tab", np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64))
    assert keys.slots().tolist() == [text_slot(bytes(key)) for key in keys.encode()]
    assert [table_tag("user"), table_tag("user", 1), table_tag("item")] == GOLDEN_TAGS
    assert keys.slots().tolist() == GOLDEN_SLOTS


@given(tags, ids)
def test_an_id_can_be_read_back_from_its_key(tag: bytes, numbers: list[int]) -> None:
    encoded = RowKeys(tag, np.array(numbers, dtype=np.uint64)).encode()
    assert encoded.shape == (len(numbers), KEY_SIZE)
    for key, number in zip(encoded, numbers, strict=True):
        assert bytes(key[:3]) == tag
        assert set(bytes(key)) <= set(ALPHABET)
        assert decode(bytes(key)) == number


@given(tags, ids)
def test_slots_are_those_of_the_keys_text(tag: bytes, numbers: list[int]) -> None:
    keys = RowKeys(tag, np.array(numbers, dtype=np.uint64))
    assert keys.slots().tolist() == [text_slot(bytes(key)) for key in keys.encode()]


def test_take_keeps_the_tag_and_picks_ids() -> None:
    keys = RowKeys(b"tab", np.array([5, 6, 7], dtype=np.uint64)).take(np.array([2, 0]))
    assert (keys.tag, keys.ids.tolist(), len(keys)) == (b"tab", [7, 5], 2)
    assert RowKeys(b"tab", np.empty(0, dtype=np.uint64)).encode().shape == (0, KEY_SIZE)
    assert len(RowKeys(b"tab", np.empty(0, dtype=np.uint64)).slots()) == 0


@given(st.lists(st.tuples(tags, ids), min_size=1, max_size=6), st.randoms())
def test_keys_of_several_tables_are_each_table_s(tables: list[tuple[bytes, list[int]]], chance: Random) -> None:
    each = [RowKeys(tag, np.array(numbers, dtype=np.uint64)) for tag, numbers in tables]
    together = coalesce_keys(each)
    texts, slots = np.concatenate([keys.encode() for keys in each]), np.concatenate([keys.slots() for keys in each])
    np.testing.assert_array_equal(together.encode(), texts)
    np.testing.assert_array_equal(together.slots(), slots)
    order = np.array(chance.sample(range(len(together)), len(together)))
    some = together.take(order)[1:]
    np.testing.assert_array_equal(some.encode(), texts[order[1:]])
    np.testing.assert_array_equal(some.slots(), slots[order[1:]])


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        (b"", 0),
        (b"123456789", 0x31C3 % N_SLOTS),  # the specification's check value of CRC16-XMODEM
        (b"foo", 12182),
        (b"bar", 5061),
        (b"hello", 866),
        (b"somekey", 11058),
        (b"foo{hash_tag}", 2515),
        (b"bar{hash_tag}", 2515),
    ],
)
def test_slots_of_texts_as_redis_computes_them(key: bytes, slot: int) -> None:
    assert text_slot(key) == slot


def test_hash_tags_follow_the_specification() -> None:
    assert text_slot(b"{user1000}.following") == text_slot(b"{user1000}.followers") == text_slot(b"user1000")
    assert text_slot(b"foo{}{bar}") != text_slot(b"bar")  # an empty first tag counts as none
    assert text_slot(b"foo{{bar}}zap") == text_slot(b"{bar")
    assert text_slot(b"foo{bar}{zap}") == text_slot(b"bar")
    assert text_slot(b"foo{bar") == text_slot(b"foo{bar")


def test_slot_tags_pin_a_key_to_every_slot() -> None:
    pins = slot_tags()
    assert len(pins) == len(set(pins)) == N_SLOTS
    assert [text_slot(b"kvemb:marker:{" + pin + b"}") for pin in pins[::97]] == list(range(0, N_SLOTS, 97))


def test_scattered_ids_fill_the_slots_evenly() -> None:
    slots = RowKeys(b"tab", np.arange(1 << 18, dtype=np.uint64)).slots()
    counts = np.bincount(slots, minlength=N_SLOTS)
    assert counts.min() >= 1
    assert counts.max() <= 64
