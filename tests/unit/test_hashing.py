"""The mixer, digests, string ids, shards and the counter generator, against scalar arithmetic in Python's own
integers."""

import hashlib

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvemb.arrays.hashing import GOLDEN, column_words, digest64, hash_ids, mix64, row_blocks
from kvemb.errors import InvalidInputError

WORDS = st.integers(0, 2**64 - 1)
MASK = 2**64 - 1


def scalar_mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def test_mix64_gives_the_published_splitmix64_sequence():
    # The first outputs of splitmix64 seeded with 1234567 (Vigna's reference C code).
    states = (np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * GOLDEN).astype(np.uint64)
    assert mix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.lists(WORDS, max_size=20))
def test_mix64_equals_scalar_arithmetic_modulo_two_to_the_64(words):
    assert mix64(np.array(words, np.uint64)).tolist() == [scalar_mix64(w) for w in words]


@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_mix64_keeps_the_shape_and_leaves_its_argument_alone(shape):
    words = np.full(shape, 2**64 - 1, np.uint64)
    mixed = mix64(words)
    assert mixed.shape == shape
    assert mixed.dtype == np.uint64
    assert (words == 2**64 - 1).all()
    assert (mixed == scalar_mix64(2**64 - 1)).all()


def test_mix64_takes_views_that_are_not_contiguous():
    words = np.arange(12, dtype=np.uint64).reshape(3, 4)
    np.testing.assert_array_equal(mix64(words.T[::-1]), mix64(words).T[::-1])


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float64])
def test_mix64_refuses_words_of_another_dtype(dtype):
    with pytest.raises(InvalidInputError, match=np.dtype(dtype).name):
        mix64(np.zeros(2, dtype))


def test_digest64_is_blake2b_over_type_length_and_bytes_of_each_part():
    text = b"s" + (3).to_bytes(8, "little") + "aé".encode()
    number = b"i" + (2).to_bytes(8, "little") + b"\x80\x00"
    raw = b"b" + (0).to_bytes(8, "little")
    expected = int.from_bytes(hashlib.blake2b(text + number + raw).digest()[:8], "little")
    assert digest64("aé", 128, b"") == expected


def test_digest64_tells_apart_parts_that_join_or_print_alike():
    alike = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("abc", ""),
        (b"abc",),
        ("1",),
        (1,),
        (b"\x01",),
        (-1,),
        (255,),
        (2**64,),
        (),
    ]
    assert len({digest64(*parts) for parts in alike}) == len(alike)


def test_digest64_takes_numpy_integers_as_their_value():
    assert digest64(np.int64(-5)) == digest64(-5)


@pytest.mark.parametrize("part", [1.5, None, "\ud800"])
def test_digest64_refuses_parts_without_a_byte_form(part):
    with pytest.raises(InvalidInputError):
        digest64("fine", part)


def test_string_ids_are_the_published_xxh64_as_signed_integers():
    # From the XXH64 specification: the empty input; and a long input, which takes the four-lane path.
    assert hash_ids([""])[0] == 0xEF46DB3751D8E999 - 2**64
    long = "kvemb" * 20
    assert int(hash_ids([long])[0]) % 2**64 == xxhash.xxh64(long.encode(), seed=0).intdigest()


@given(st.lists(st.text(max_size=8), max_size=20))
def test_string_ids_do_not_depend_on_the_container(strings):
    expected = np.array([xxhash.xxh64_intdigest(s.encode()) for s in strings], np.uint64).view(np.int64)
    np.testing.assert_array_equal(hash_ids(strings), expected)
    np.testing.assert_array_equal(hash_ids(tuple(strings)), expected)
    np.testing.assert_array_equal(hash_ids(np.array(strings, object)), expected)
    np.testing.assert_array_equal(hash_ids(np.array(strings, np.dtypes.StringDType())), expected)


@pytest.mark.parametrize("shape", [(), (4,), (2, 2), (0,), (2, 0)])
def test_string_ids_have_the_shape_of_the_array(shape):
    ids = hash_ids(np.full(shape, "socket"))
    assert ids.shape == shape
    assert ids.dtype == np.int64


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ("socket", "sequence of str"),
        (b"socket", "sequence of str"),
        ([1, 2], "only str, got [12]"),
        ([b"raw"], "only str, got b'raw'"),
        ([["nested"]], "flat sequence"),
        (np.array([1, 2]), "dtype int64"),
        (np.array(["fine", None], object), "only str, got None"),
        (["\ud800"], "UTF-8"),
    ],
)
def test_what_is_not_a_sequence_of_text_is_refused(strings, message):
    with pytest.raises(InvalidInputError, match=message):
        hash_ids(strings)


@given(st.lists(WORDS, max_size=5), st.integers(0, 2**32), st.integers(0, 5))
def test_a_counter_word_is_a_function_of_its_state_and_its_counter(states, first, n_words):
    out = np.empty((len(states), n_words), np.uint64)
    column_words(np.array(states, np.uint64), first, out, np.empty_like(out))
    expected = [[scalar_mix64((s + (first + c + 1) * int(GOLDEN)) & MASK) for c in range(n_words)] for s in states]
    assert out.tolist() == expected


@given(st.integers(0, 5_000), st.integers(0, 100_000))
def test_row_blocks_cover_every_row_once_and_are_bounded(n_rows, n_columns):
    blocks = list(row_blocks(n_rows, n_columns))
    assert [b.start for b in blocks] == [0, *(b.stop for b in blocks)][: len(blocks)]
    assert (blocks[-1].stop if blocks else 0) == n_rows
    assert all(1 <= b.stop - b.start <= max(1, 2**14 // max(1, n_columns)) for b in blocks)
