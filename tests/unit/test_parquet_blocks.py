"""Data files: the same bits come back, and a file that differs from its manifest is refused."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from kvemb import optim
from kvemb.checkpoint.format.checkpoint_manifest import FileEntry, SortKeys
from kvemb.checkpoint.format.parquet_blocks import RowBlock, checksum, decode_ids, decode_rows, encode_ids, encode_rows, new_state
from kvemb.checkpoint.format.plain_parquet import columns_of, read_group
from kvemb.errors import CheckpointError
from kvemb.init import uniform
from kvemb.schema.table_def import TableDef
from paramserver.optim import build_optimizer
from tests.matrix import examples
from tests.unit.checkpoint_files import in_order

TABLES = [
    TableDef("user", 3, optim.adam(), uniform()),
    TableDef("user", 16, optim.sgd(), uniform(), id_dtype="uint64"),
    TableDef("user", 1, optim.rowwise_adagrad(), uniform(), dtype="float16"),
    TableDef("user", 5, optim.adagrad(initial_accumulator_value=0.5), uniform(), dtype="bfloat16"),
    TableDef("user", 4, optim.sgd(), uniform(), num_ids=1 << 40),  # neighbouring ids share a slot: its keys are no mixed ids
]


def records_of(definition: TableDef, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids over the whole range, in the order of their keys, and records of any bits at all (NaN, infinities, -0.0 …)."""
    rng = np.random.default_rng(seed)
    ids = in_order(rng.integers(0, definition.num_ids or 1 << 64, n, dtype=np.uint64), definition)
    return ids, rng.integers(0, 256, (len(ids), definition.record.size_bytes), dtype=np.uint8)


def by_id(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sort keys of an earlier release."""
    return ids


def file_of(
    definition: TableDef, n: int = 50, *, weights_only: bool = False, order: SortKeys | None = None
) -> tuple[bytes, FileEntry, list[RowBlock]]:
    """Two row groups; in the order of their keys unless another one is given."""
    ids, records = records_of(definition, n)
    if order is not None:
        at = np.argsort(order(ids))
        ids, records = ids[at], records[at]
    half = n // 2
    blocks = [RowBlock.of_records(definition, ids[rows], records[rows], weights_only) for rows in (slice(half), slice(half, n))]
    data = b"".join(encode_rows(definition, blocks, weights_only))
    return data, FileEntry(definition.name, 0, 0, "rows", len(ids), len(data), checksum(data)), blocks


def read(definition: TableDef, data: bytes, entry: FileEntry, *, weights_only: bool = False, order: SortKeys | None = None) -> RowBlock:
    return RowBlock.concatenate(list(decode_rows(definition, data, entry, weights_only, "part", order or definition.order.keys)))


def named(definition: TableDef) -> str:
    return f"{definition.dtype}-{definition.optimizer.kind}" + ("-dense" if definition.num_ids else "")


@pytest.mark.parametrize("definition", TABLES, ids=named)
def test_rows_come_back_bit_for_bit(definition: TableDef) -> None:
    data, entry, blocks = file_of(definition)
    ids, records = records_of(definition, 50)
    got = read(definition, data, entry)
    assert (ids[1:] < ids[:-1]).any(), "the order of keys is that of ids"
    assert len(blocks) == pq.ParquetFile(pa.BufferReader(data)).num_row_groups == 2
    assert_array_equal(got.ids, ids)
    assert_array_equal(got.versions, definition.record.versions(records))
    assert_array_equal(got.records(definition, got.versions)[:, 4:], records[:, 4:])
    definition.record.check(got.records(definition, 5), ids, np.ones(len(ids), bool))


@pytest.mark.parametrize("definition", TABLES, ids=named)
def test_weights_only_comes_back_with_the_slots_of_a_new_row(definition: TableDef) -> None:
    data, entry, _ = file_of(definition, weights_only=True)
    got = read(definition, data, entry, weights_only=True)
    assert got.state is None
    state = definition.record.state(got.records(definition, 1))
    assert_array_equal(state, build_optimizer(definition.optimizer).initial_state(len(got), definition.dim))
    assert_array_equal(state, new_state(definition, len(got)))


def test_other_programs_read_ids_and_weights_as_numbers() -> None:
    for definition in TABLES:
        data, _, blocks = file_of(definition)
        table = pq.read_table(io.BytesIO(data))
        first = table.slice(0, 1).to_pydict()
        assert table.column("id").type == (pa.int64() if definition.id_dtype == "int64" else pa.uint64())
        assert first["id"][0] == int(blocks[0].ids[:1].view(definition.id_dtype)[0])
        weights = definition.record.weights(blocks[0].records(definition, 1))
        assert_array_equal(np.array(first["weights"][0], np.float32), weights[0])


def ids_file(definition: TableDef, ids: NDArray[np.uint64]) -> tuple[bytes, FileEntry]:
    data = b"".join(encode_ids(definition, ids))
    return data, FileEntry("user", 0, 0, "ids", len(ids), len(data), checksum(data))


@pytest.mark.parametrize("definition", [TABLES[0], TABLES[-1]], ids=named)
@pytest.mark.parametrize("earlier", [False, True], ids=["by key", "by id"])
def test_ids_alone_come_back(definition: TableDef, earlier: bool) -> None:
    negative = np.arange(1 << 63, (1 << 63) + 70, 7, dtype=np.uint64)[: None if definition.num_ids is None else 0]
    ids = in_order(np.concatenate([np.arange(270_000, dtype=np.uint64), negative]), definition)  # two row groups
    order = by_id if earlier else definition.order.keys
    for some in (np.sort(ids) if earlier else ids, ids[:0]):
        data, entry = ids_file(definition, some)
        groups = list(decode_ids(definition, data, entry, "p", order))
        assert len(groups) == (2 if len(some) else 0)
        assert_array_equal(np.concatenate([*groups, some[:0]]), some)


@pytest.mark.parametrize("definition", TABLES, ids=named)
def test_rows_in_the_order_of_an_earlier_release_come_back_bit_for_bit(definition: TableDef) -> None:
    data, entry, blocks = file_of(definition, order=by_id)
    got, expected = read(definition, data, entry, order=by_id), RowBlock.concatenate(blocks)
    assert_array_equal(got.ids, np.sort(records_of(definition, 50)[0]))
    assert_array_equal(got.records(definition, got.versions), expected.records(definition, expected.versions))


@pytest.mark.parametrize("definition", TABLES, ids=named)
def test_rows_and_ids_in_another_order_than_expected_are_refused(definition: TableDef) -> None:
    keys = definition.order.keys
    for written, expected in ((by_id, keys), (keys, by_id)):
        data, entry, blocks = file_of(definition, order=written)
        with pytest.raises(CheckpointError, match="part: ids are not in order, or one stands twice"):
            read(definition, data, entry, order=expected)
        with pytest.raises(CheckpointError, match="part: ids are not in order, or one stands twice"):
            list(decode_ids(definition, *ids_file(definition, RowBlock.concatenate(blocks).ids), "part", expected))


@pytest.mark.parametrize("order", [None, by_id], ids=["by key", "by id"])
def test_row_groups_that_changed_places_or_stand_twice_are_refused(order: SortKeys | None) -> None:
    first, second = file_of(TABLES[0], order=order)[2]
    for blocks in ([second, first], [first, first], [first, first.take(slice(24, None))]):
        data = b"".join(encode_rows(TABLES[0], blocks, False))
        entry = FileEntry("user", 0, 0, "rows", sum(map(len, blocks)), len(data), checksum(data))
        with pytest.raises(CheckpointError, match="part: ids are not in order, or one stands twice"):
            read(TABLES[0], data, entry, order=order)


@pytest.mark.parametrize("change", [[0, 2, 1, 3], [0, 1, 1, 2], [3, 0, 1, 2], [0, 0, 1, 2], [0, 1, 3, 2]], ids=str)
def test_ids_alone_that_are_not_in_order_are_refused(change: list[int]) -> None:
    for order in (TABLES[0].order.keys, by_id):
        ids = np.array([3, 9, 1 << 63, 2**64 - 5], np.uint64)
        ids = ids[np.argsort(order(ids))]
        assert_array_equal(np.concatenate(list(decode_ids(TABLES[0], *ids_file(TABLES[0], ids), "part", order))), ids)
        with pytest.raises(CheckpointError, match="part: ids are not in order, or one stands twice"):
            list(decode_ids(TABLES[0], *ids_file(TABLES[0], ids[change]), "part", order))


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_a_flipped_or_cut_file_is_refused(data: st.DataObject) -> None:
    whole, entry, _ = file_of(TABLES[0])
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(flipped), whole[:at], whole + b"x"):
        with pytest.raises(CheckpointError, match="part: "):
            read(TABLES[0], bad, entry)


# The same examples each time: pyarrow ends the process for some of such files (8 of 2,339), where a column's metadata is read (it has
# no exception to raise there), and a whole test run must not end by chance. docs/checkpoints.md says what that means for users.
@settings(deadline=None, max_examples=examples(150), derandomize=True)
@given(st.data())
def test_bytes_that_match_their_checksum_and_are_still_wrong_are_refused_or_keep_their_shape(data: st.DataObject) -> None:
    whole, entry, _ = file_of(TABLES[0])
    bad = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        footer = data.draw(st.booleans())
        at = data.draw(st.integers(max(0, len(bad) - 900) if footer else 0, len(bad) - 1))
        bad[at] = data.draw(st.integers(0, 255))
    try:
        got = read(TABLES[0], bytes(bad), replace(entry, checksum=checksum(bytes(bad))))
    except CheckpointError:
        return
    assert len(got) == entry.rows  # values differ, the shape does not


def by_pyarrow(definition: TableDef) -> tuple[bytes, FileEntry]:
    """The same rows as pyarrow writes them, in pages of its own, and so release 0.1.0."""
    data, entry, _ = file_of(definition)
    file, sink = pq.ParquetFile(io.BytesIO(data)), io.BytesIO()
    with pq.ParquetWriter(sink, file.schema_arrow, compression="none", use_dictionary=False, write_statistics=["id"]) as writer:
        for group in range(file.num_row_groups):
            writer.write_table(file.read_row_group(group))
    data = sink.getvalue()
    return data, replace(entry, size_bytes=len(data), checksum=checksum(data))


@pytest.mark.parametrize("definition", TABLES, ids=named)
def test_files_that_pyarrow_wrote_are_read_too(definition: TableDef) -> None:
    ours, theirs = read(definition, *file_of(definition)[:2]), read(definition, *by_pyarrow(definition))
    assert_array_equal(ours.records(definition, ours.versions), theirs.records(definition, theirs.versions))


@pytest.mark.parametrize("definition", TABLES, ids=named)
def test_our_pages_are_read_where_they_lie_and_no_others(definition: TableDef) -> None:
    for data, ours in ((file_of(definition)[0], True), (by_pyarrow(definition)[0], False)):
        file = pq.ParquetFile(io.BytesIO(data))
        found = [read_group(columns_of(file.schema_arrow), file.metadata.row_group(group), data) for group in range(2)]
        assert [columns is not None for columns in found] == [ours, ours]
        assert all(array.flags.aligned for columns in found for array in (columns or {}).values())


def test_a_file_tells_the_range_of_its_ids_as_the_caller_sees_them() -> None:
    for definition, expected in ((TABLES[0], (-5, 9)), (TABLES[1], (3, 2**64 - 5))):
        ids = in_order([3, 5, 7, 9, 2**64 - 5], definition)
        assert not {int(ids[0]), int(ids[-1])} & {3, 9, 2**64 - 5}  # an end of the range is nowhere at an end of the file
        told = pq.ParquetFile(io.BytesIO(ids_file(definition, ids)[0])).metadata.row_group(0).column(0).statistics
        assert (told.min, told.max) == expected


def test_row_groups_with_fewer_rows_than_the_footer_says_are_refused() -> None:
    whole, entry = by_pyarrow(TABLES[0])
    bad = bytearray(whole)
    bad[3653] = 2  # found by a test as above: Parquet's reader then knows of fewer row groups, without an error
    with pytest.raises(CheckpointError, match="rows, its footer says 50"):
        read(TABLES[0], bytes(bad), replace(entry, checksum=checksum(bytes(bad))))


def rewritten(change: Callable[[Any], Any], **options: Any) -> tuple[bytes, FileEntry]:
    """A file whose table was changed, with a matching checksum."""
    data, entry, _ = file_of(TABLES[0])
    sink = io.BytesIO()
    pq.write_table(change(pq.read_table(io.BytesIO(data))), sink, **({"compression": "none", "use_dictionary": False} | options))
    return sink.getvalue(), replace(entry, size_bytes=len(sink.getvalue()), checksum=checksum(sink.getvalue()))


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        (lambda table: table, {"compression": "gzip"}, "GZIP"),
        (lambda table: table, {"compression": "zstd"}, "ZSTD"),
        (lambda table: table, {"use_dictionary": True}, "expected plain"),
        (lambda table: table.slice(1), {}, "49 rows, expected 50"),
        (lambda table: table.take(pa.array([*range(49), 0])), {}, "ids are not in order, or one stands twice"),
        (lambda table: table.take(pa.array([*range(49), 48])), {}, "ids are not in order, or one stands twice"),
        (lambda table: table.take(pa.array([*range(48), 49, 48])), {}, "ids are not in order, or one stands twice"),
        (lambda table: table.take(pa.array([*range(49), 0])), {"row_group_size": 49}, "ids are not in order, or one stands twice"),
        (lambda table: table.take(pa.array([*range(49), 48])), {"row_group_size": 49}, "ids are not in order, or one stands twice"),
        (lambda table: table.sort_by("id"), {}, "ids are not in order, or one stands twice"),
        (lambda table: table.drop_columns(["slots"]), {}, "its columns are"),
        (lambda table: table.append_column("more", table.column("id")), {}, "its columns are"),
        (lambda table: table.rename_columns(["id", "version", "slots", "weights"]), {}, "its columns are"),
    ],
)
def test_another_file_with_a_right_checksum_is_refused(change: Callable[[Any], Any], options: dict[str, Any], says: str) -> None:
    data, entry = rewritten(change, **options)
    with pytest.raises(CheckpointError) as caught:
        read(TABLES[0], data, entry)
    assert says in str(caught.value)


def test_rows_that_do_not_fit_the_bytes_of_their_file_are_refused_before_they_are_unfolded() -> None:
    constant = pa.table({"id": pa.array(np.arange(1 << 22, dtype=np.int64))})
    sink = io.BytesIO()
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    pq.write_table(constant.cast(schema), sink, compression="none", column_encoding={"id": "DELTA_BINARY_PACKED"}, use_dictionary=False)
    data = sink.getvalue()
    assert len(data) < 1 << 20  # 32 MB of ids
    entry = FileEntry("user", 0, 0, "ids", 1 << 22, len(data), checksum(data))
    with pytest.raises(CheckpointError, match="do not fit"):
        list(decode_ids(TABLES[0], data, entry, "part", TABLES[0].order.keys))


def test_weights_that_are_no_bfloat16_are_refused() -> None:
    as_float = replace(TABLES[3], dtype="float32")
    data, entry, _ = file_of(as_float)
    with pytest.raises(CheckpointError, match="no bfloat16"):
        read(TABLES[3], data, entry)
