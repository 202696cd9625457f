"""Slots: of ids by one mix, of texts as Redis Cluster computes them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.arrays.hashing import mix64
from kvemb.schema.slots import N_SLOTS, Placement, slot_tags, text_slot

IDS = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
powers = st.integers(0, 32).map(lambda bits: 1 << bits)


@pytest.mark.parametrize(
    ("placement", "slots"),
    [
        (Placement(N_SLOTS), [0, 5540, 2416, 11572]),
        (Placement(1), [0, 0, 0, 0]),
        (Placement(256), [0, 5504, 2368, 11520]),
        (Placement(1 << 32), [0, 5540, 2416, 11572]),
        (Placement(N_SLOTS, 53), [0, 0, 8755, 1126]),
    ],
)
def test_golden_slots(placement: Placement, slots: list[int]) -> None:
    # A released slot must never change: rows would be looked for elsewhere.
    assert placement.slots(IDS).tolist() == slots


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30), powers, st.integers(1, 100))
def test_the_upper_bits_of_the_mix_are_the_group_and_of_the_group_the_slot(numbers: list[int], n_groups: int, together: int) -> None:
    ids = np.array(numbers, dtype=np.uint64)
    mixed = [int(word) for word in mix64(np.array([number // together for number in numbers], dtype=np.uint64))]
    placement = Placement(n_groups, together)
    assert placement.groups(ids).tolist() == [word * n_groups >> 64 for word in mixed]
    assert placement.slots(ids).tolist() == [(word * n_groups >> 64) * N_SLOTS // n_groups for word in mixed]


def test_scattered_ids_fill_the_slots_evenly() -> None:
    counts = np.bincount(Placement(N_SLOTS).slots(np.arange(1 << 18, dtype=np.uint64)), minlength=N_SLOTS)
    assert counts.min() >= 1
    assert counts.max() <= 64


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
