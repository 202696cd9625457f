"""The record's bytes: golden, readable back in every dtype, and refused under any other id, table or definition."""

import numpy as np
import pytest

from kvemb.arrays.rounding import storage_dtype
from kvemb.errors import RecordError
from kvemb.schema.record import HEADER_SIZE, MAX_EPOCH, MAX_K, RecordFormat, make_version, split_version

IDS = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
FOUND = np.ones(4, dtype=bool)

GOLDEN_RECORD = "abb7aa6508070605040302010000803f000000c00000003f"


def layout(*, table: str = "user", dim: int = 2, dtype: str = "float32", state_size: int = 1, schema: int = 0xAB) -> RecordFormat:
    return RecordFormat(table, dim, dtype, state_size, schema)


def encode(form: RecordFormat, ids: np.ndarray = IDS) -> np.ndarray:
    weights = np.ones((len(ids), form.dim), dtype=np.float32)
    stored = (weights.view(np.uint32) >> 16).astype(np.uint16) if form.dtype == "bfloat16" else weights.astype(storage_dtype(form.dtype))
    state = np.full((len(ids), form.state_size), 0.5, dtype=np.float32)
    return form.encode(ids, make_version(3, 70_000), stored.view(storage_dtype(form.dtype)), state)


def test_golden_record() -> None:
    record = layout().encode(
        np.array([1], np.uint64), make_version(0x0102, 0x030405060708), np.array([[1.0, -2.0]], np.float32), np.array([[0.5]], np.float32)
    )
    # schema, then the id check of ("user", 1); k and epoch little-endian; weights; state
    assert record.tobytes().hex() == GOLDEN_RECORD
    assert record.tobytes()[:1] == b"\xab"
    assert record.tobytes()[4:] == bytes.fromhex("0807060504030201") + np.array([1, -2, 0.5], "<f4").tobytes()


@pytest.mark.parametrize("state_size", [0, 1, 5])
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
@pytest.mark.parametrize("dim", [1, 3])
def test_a_record_reads_back_in_every_dtype(dtype: str, itemsize: int, dim: int, state_size: int) -> None:
    form = layout(dtype=dtype, dim=dim, state_size=state_size)
    records = encode(form)
    assert records.shape == (4, HEADER_SIZE + dim * itemsize + 4 * state_size) == (4, form.size_bytes)
    assert records.flags.c_contiguous
    assert form.prefix_bytes == HEADER_SIZE + dim * itemsize
    form.check(records, IDS, FOUND)
    np.testing.assert_array_equal(form.weights(records), np.ones((4, dim), np.float32))
    np.testing.assert_array_equal(form.weights(records[:, : form.prefix_bytes]), np.ones((4, dim), np.float32))
    np.testing.assert_array_equal(form.state(records), np.full((4, state_size), 0.5, np.float32))
    assert form.weights(records).dtype == form.state(records).dtype == np.float32
    assert [split_version(int(version)) for version in form.versions(records)] == [(3, 70_000)] * 4


def test_versions_may_differ_by_row() -> None:
    versions = np.array([1, 2**64 - 1, 0, make_version(7, 9)], dtype=np.uint64)
    records = layout().encode(IDS, versions, np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32))
    np.testing.assert_array_equal(layout().versions(records), versions)


def test_a_row_under_another_id_is_refused_and_named() -> None:
    records = encode(layout())
    with pytest.raises(RecordError, match=r"table 'user', id 1: .* node-7"):
        layout().check(records[[0, 2, 2, 3]], IDS, FOUND, lambda row: f"table 'user', id {IDS[row]}: on node-7")
    with pytest.raises(RecordError, match="4 such rows"):
        layout().check(records[::-1], IDS, FOUND)


def test_a_row_of_another_table_or_definition_is_refused() -> None:
    for other in (layout(table="item"), layout(schema=0xAC)):
        with pytest.raises(RecordError, match="id 0:"):
            layout().check(encode(other), IDS, FOUND)


def test_any_flipped_bit_of_the_first_header_word_is_noticed() -> None:
    form = layout()
    for bit in range(32):
        damaged = encode(form)
        damaged[2, bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(RecordError, match=str(2**63)):
            form.check(damaged, IDS, FOUND)


def test_rows_that_were_not_found_are_not_looked_at() -> None:
    records = encode(layout())
    records[1] = 0xFF
    layout().check(records, IDS, np.array([True, False, True, True]))
    layout().check(records[:0], IDS[:0], FOUND[:0])


def test_the_id_check_spreads_over_24_bits() -> None:
    words = layout().header_words(np.arange(100_000, dtype=np.uint64))
    assert (words & 0xFF == 0xAB).all()
    assert len(np.unique(words)) > 99_000


def test_versions_compare_as_integers_and_have_bounds() -> None:
    ordered = [(0, 0), (0, 1), (0, MAX_K), (1, 0), (MAX_EPOCH, MAX_K)]
    assert sorted(make_version(*pair) for pair in reversed(ordered)) == [make_version(*pair) for pair in ordered]
    assert [split_version(make_version(*pair)) for pair in ordered] == ordered
    for epoch, k in ((-1, 0), (0, -1), (MAX_EPOCH + 1, 0), (0, MAX_K + 1)):
        with pytest.raises(OverflowError):
            make_version(epoch, k)
