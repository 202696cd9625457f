"""Parquet as other programs write it: which rows its files mean, in which order, under which ids; or the message that says why not.

The files are written by pyarrow, in the shapes in which those programs leave them. Their own libraries write them in tests/libraries.
"""

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvemb
from kvemb.arrays.rounding import from_int8, to_int8
from kvemb.errors import ForeignRowsError, InvalidInputError
from kvemb.foreign import foreign_rows
from kvemb.foreign.foreign_rows import ArrayNames, ForeignRows
from kvemb.foreign.formats import open_rows
from kvemb.schema.table_def import TableDef

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

DIM, N = 3, 12
USER = TableDef("user", DIM, kvemb.optim.sgd(), kvemb.init.zeros())
ROWS = np.random.default_rng(5).standard_normal((N, DIM), dtype=np.float32)
LISTS = pa.list_(pa.float32())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_rows, "BLOCK_BYTES", 5 * (4 * DIM + 8))


def read(path: object, file_format: str = "", **names: str) -> dict[int, list[float]]:
    source = open_rows(USER, str(path), ArrayNames(**names), file_format)
    whole = ForeignRows.concatenate(list(source.blocks()))
    assert source.n_rows == len(whole)
    return dict(zip(whole.ids.view(np.int64).tolist(), whole.weights.tolist(), strict=True))


def rows_by(ids: Any, rows: np.ndarray = ROWS) -> dict[int, list[float]]:
    return dict(zip(map(int, ids), rows.tolist(), strict=True))


def write(path: Path, rows: np.ndarray = ROWS, pandas: object = None, **columns: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({**columns, "weights": pa.array(list(rows), LISTS)})
    metadata = None if pandas is None else {"pandas": json.dumps({"index_columns": pandas})}
    parquet.write_table(table.replace_schema_metadata(metadata), path)


def index(start: int, stop: int, step: int = 1, name: str | None = None) -> list[object]:
    """What pandas keeps of a RangeIndex."""
    return [{"kind": "range", "name": name, "start": start, "stop": stop, "step": step}]


def parts(folder: Path, names: list[str], pandas: Callable[[int], object] = lambda i: None) -> None:
    """Write a row into each file."""
    for i, name in enumerate(names):
        write(folder / name, ROWS[i : i + 1], pandas(i))


# --- the order of a folder's files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["part.{}.parquet", "part-{}.parquet", "part-{:05}-1f7a-c000.snappy.parquet", "train-{:05}-of-00012.parquet", "data_{}.pq"]
)
def test_files_of_a_folder_are_in_the_order_of_their_numbers(tmp_path: Path, name: str) -> None:
    parts(tmp_path, [name.format(i) for i in range(N)])
    (tmp_path / "_SUCCESS").touch()
    assert read(tmp_path) == rows_by(range(N))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["head.parquet", "tail.parquet"], "names of its files differ in more than numbers"),
        (["part-0-aa.parquet", "part-0-bb.parquet"], "names of its files differ in more than numbers"),  # Spark has appended
        (["test-0-of-1.parquet", "train-0-of-1.parquet"], "names of its files differ in more than numbers"),
        (["train-0-of-3.parquet", "train-2-of-3.parquet"], "is one of 3 files, and there are 2"),
        (["day=1/part-0.parquet", "day=2/part-0.parquet"], r"its files lie in folders \('day=1'\)"),
        (["2024/part-0.parquet"], r"its files lie in folders \('2024'\)"),
    ],
)
def test_rows_without_ids_are_numbered_only_where_names_say_one_order(tmp_path: Path, names: list[str], why: str) -> None:
    parts(tmp_path / "rows", names)
    with pytest.raises(ForeignRowsError, match=f"no column has the ids, and .*{why}.*Write the ids as a column"):
        read(tmp_path / "rows")


def test_rows_with_ids_may_lie_in_folders_of_another_column(tmp_path: Path) -> None:
    for day in range(2):
        write(tmp_path / f"day={day}" / "part-0.parquet", ROWS[day * 6 : day * 6 + 6], id=range(day * 6 + 50, day * 6 + 56))
    assert read(tmp_path) == rows_by(range(50, 62))


def test_ids_in_the_names_of_folders_are_refused_by_name(tmp_path: Path) -> None:
    parts(tmp_path, [f"id={i}/part-0.parquet" for i in range(3)])
    for names in ({}, {"ids": "id"}):
        with pytest.raises(ForeignRowsError, match=r"its ids stand in the names of folders \(id=…\)"):
            read(tmp_path, **names)


def test_a_folder_of_several_tables_is_not_one_table(tmp_path: Path) -> None:
    """As ALS of Spark, and a checkpoint of kvemb, leave them."""
    for table in ("itemFactors", "userFactors"):
        write(tmp_path / table / "part-0.parquet", id=range(N))
    with pytest.raises(ForeignRowsError, match="has files in 'itemFactors', 'userFactors': name the folder that is meant"):
        read(tmp_path)


# --- ids in the metadata ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "ids"),
    [
        (index(0, N), range(N)),
        (index(100, 100 + N), range(100, 100 + N)),
        (index(0, 2 * N, 2), range(0, 2 * N, 2)),
        (index(N, 0, -1), range(N, 0, -1)),
        (index(7, 7 + N, name="user"), range(7, 7 + N)),
        ([], range(N)),
        (None, range(N)),
    ],
)
def test_a_range_index_of_pandas_is_the_ids(tmp_path: Path, kept: object, ids: range) -> None:
    write(tmp_path / "a.parquet", pandas=kept)
    assert read(tmp_path / "a.parquet") == rows_by(ids)


def test_a_named_index_is_named_as_a_column_is(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pandas=index(7, 7 + N, name="user"), title=["t"] * N)
    assert read(tmp_path / "a.parquet", ids="user") == rows_by(range(7, 7 + N))
    with pytest.raises(ForeignRowsError, match=r"say which column holds the ids \(ids=\): 'title'"):
        read(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", pandas=index(7, 7 + N, name="id"))
    assert read(tmp_path / "b.parquet") == rows_by(range(7, 7 + N))


def test_a_column_of_ids_goes_before_an_index(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pandas=index(7, 7 + N), id=range(50, 50 + N))
    assert read(tmp_path / "a.parquet") == rows_by(range(50, 50 + N))
    write(tmp_path / "b.parquet", pandas=["__index_level_0__"], __index_level_0__=[f"w{i}" for i in range(N)])
    with pytest.raises(ForeignRowsError, match="'__index_level_0__'"):
        read(tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", ids="__index_level_0__") == rows_by(kvemb.hash_ids([f"w{i}" for i in range(N)]))


def test_each_file_of_a_folder_has_its_own_index(tmp_path: Path) -> None:
    parts(tmp_path / "a", [f"part-{i}.parquet" for i in range(N)], lambda i: index(i + 5, i + 6))
    assert read(tmp_path / "a") == rows_by(range(5, N + 5))
    parts(tmp_path / "b", [f"part-{i}.parquet" for i in range(N)], lambda i: index(0, 1))  # of tables that each begin anew
    assert read(tmp_path / "b") == rows_by(range(N))
    parts(tmp_path / "c", [f"part-{i}.parquet" for i in range(N)], lambda i: index(5, N + 5))  # one table, cut by a program that kept it
    assert read(tmp_path / "c") == rows_by(range(5, N + 5))


@pytest.mark.parametrize("kept", [index(0, 99), index(7, 99), index(0, N - 1)])
def test_an_index_that_does_not_fit_its_rows_is_refused(tmp_path: Path, kept: object) -> None:
    """pyarrow keeps pandas' note when it filters rows."""
    write(tmp_path / "a.parquet", pandas=kept)
    with pytest.raises(ForeignRowsError, match=r"its index is \d+ to \d+ by 1, which does not fit its 12 rows.*reset_index"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("note", [b"", b"[]", b"{}", b'{"index_columns": [{"kind": "range"}]}', b'{"index_columns": [{}, {}]}', b"\xff"])
def test_a_note_that_is_none_of_pandas_says_nothing(tmp_path: Path, note: bytes) -> None:
    parquet.write_table(pa.table({"weights": list(ROWS)}).replace_schema_metadata({b"pandas": note}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows_by(range(N))


# --- folders of a table format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "what"),
    [
        ("_delta_log/00000000000000000000.json", "is a Delta table .*deltalake"),
        ("metadata/00000-1f7a.metadata.json", "is an Iceberg table .*pyiceberg"),
        ("metadata/version-hint.text", "is an Iceberg table"),
        (".hoodie/hoodie.properties", "is a Hudi table"),
        ("_spark_metadata/0", "is the output of a Spark stream"),
    ],
)
@pytest.mark.parametrize("part", ["data/day=1/part-0.parquet", "day=1/part-0.parquet", "part-0.parquet"])
def test_a_table_whose_log_says_which_rows_count_is_refused_by_name(tmp_path: Path, mark: str, what: str, part: str) -> None:
    table = tmp_path / "table"
    write(table / part, id=range(N))
    (table / mark).parent.mkdir(parents=True)
    (table / mark).touch()
    for url in (table / part, *(folder for folder in (table / part).parents if folder.is_relative_to(table))):
        with pytest.raises(ForeignRowsError, match=what):
            read(url)


def test_a_folder_that_is_still_written_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "part-0.parquet", id=range(N))
    write(tmp_path / "_temporary" / "0" / "part-1.parquet", id=range(N))
    with pytest.raises(ForeignRowsError, match="is being written, or its write was broken off"):
        read(tmp_path)


def test_a_folder_that_is_only_called_metadata_says_nothing(tmp_path: Path) -> None:
    write(tmp_path / "rows" / "part-0.parquet", id=range(N))
    (tmp_path / "rows" / "metadata").mkdir()
    (tmp_path / "rows" / "metadata" / "notes.json").touch()
    assert read(tmp_path / "rows") == read(tmp_path / "rows" / "part-0.parquet") == rows_by(range(N))


# --- on a store ---------------------------------------------------------------------------------------------------------------------


def test_a_folder_on_a_store_may_be_named_as_a_file_is(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for i in range(N):
        write(tmp_path / "one.parquet", ROWS[i : i + 1])
        memory.pipe_file(f"/spark/rows.parquet/part-{i}.parquet", (tmp_path / "one.parquet").read_bytes())
    assert read("memory://spark/rows.parquet") == read("memory://spark/rows.parquet/") == rows_by(range(N))
    with pytest.raises(ForeignRowsError, match=r"memory://spark/none\.parquet"):
        read("memory://spark/none.parquet")
    memory.pipe_file("/spark/delta/_delta_log/0.json", b"")
    memory.pipe_file("/spark/delta/part-0.parquet", (tmp_path / "one.parquet").read_bytes())
    for url in ("memory://spark/delta", "memory://spark/delta/part-0.parquet"):
        with pytest.raises(ForeignRowsError, match="memory://spark/delta: is a Delta table"):
            read(url, "parquet")


# --- types --------------------------------------------------------------------------------------------------------------------------

SIGNED = np.arange(N) - 5


@pytest.mark.parametrize(
    "ids",
    [
        *(pa.array(SIGNED, kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
        *(pa.array(map(Decimal, SIGNED.tolist()), kind) for kind in (pa.decimal128(20, 0), pa.decimal128(38, 9), pa.decimal256(76, 3))),
        pa.array(SIGNED).dictionary_encode(),
    ],
)
def test_ids_of_every_type_of_integers_are_read(tmp_path: Path, ids: Any) -> None:
    write(tmp_path / "a.parquet", id=ids)
    assert read(tmp_path / "a.parquet") == rows_by(SIGNED)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.large_string())])
def test_ids_of_every_type_of_text_are_read(tmp_path: Path, kind: Any) -> None:
    words = [f"wörd{i}" for i in range(N)]
    write(tmp_path / "a.parquet", id=pa.array(words).cast(kind))
    assert read(tmp_path / "a.parquet") == rows_by(kvemb.hash_ids(words))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (pa.array([b"a"] * N), r"holds binary, expected integers or text\. Is it text\? Then write it as such"),
        (pa.array([1.0] * N), r"holds double, expected integers or text\. pandas makes such of integers where some are missing"),
        (pa.array([True] * N), "holds bool, expected integers or text"),
        (pa.array([Decimal("1.5")] * N), r"holds decimal128\(2, 1\), expected integers of int64 or text"),
        (pa.array([Decimal(2**63)] * N, pa.decimal128(20, 0)), r"holds decimal128\(20, 0\), expected integers of int64"),
        (pa.array([*range(N - 1), None]), "1 id missing, the first in row 11"),
    ],
)
def test_what_are_no_ids_is_named(tmp_path: Path, ids: Any, message: str) -> None:
    write(tmp_path / "a.parquet", id=ids)
    with pytest.raises(ForeignRowsError, match=f"column 'id': {message}"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("lists", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, DIM)])
@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.int64(), pa.decimal128(20, 4)])
def test_weights_of_every_type_of_numbers_are_read(tmp_path: Path, lists: Callable[[Any], Any], kind: Any) -> None:
    given = (ROWS * 20).astype(np.int8).astype(np.float32)
    column = pa.array(given.tolist(), pa.list_(pa.float64())).cast(lists(kind))
    parquet.write_table(pa.table({"id": range(N), "w": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows_by(range(N), given)


def test_tensors_of_one_shape_are_lists(tmp_path: Path) -> None:
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(ROWS)
    parquet.write_table(pa.table({"id": range(N), "w": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows_by(range(N))


VECTOR = pa.struct([("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))])


@pytest.mark.parametrize(
    ("columns", "names", "message"),
    [
        ({"w": pa.array([None] * N, VECTOR)}, {"weights": "w"}, "values are missing in row 0"),
        ({"w": pa.array([(1, None, None, [1.0] * DIM)] * N, VECTOR)}, {"weights": "w"}, r"Write vector_to_array\(column\)"),
        ({"w": pa.array(["[1, 2, 3]"] * N)}, {"weights": "w"}, r"holds string, expected lists of numbers\. Dask writes lists as text"),
        ({"e0": pa.array(ROWS[:, 0]), "e1": pa.array(ROWS[:, 1])}, {}, r"no array of rows.*lists of numbers.*list\(frame.*'e0' \[n\]"),
        ({"w": pa.array([[1.0] * DIM] * 7 + [[1.0]] * 5)}, {}, "a list of 1 values in row 7, expected 3"),
        ({"w": pa.array([[1.0] * DIM] * 7 + [[1.0, None, 1.0]] * 5)}, {}, "values are missing in row 7"),
        ({"w": pa.array([[1.0] * DIM] * 7 + [None] * 5)}, {}, "values are missing in row 7"),
        ({"w": pa.array([[True] * DIM] * N)}, {}, "holds list<.*bool>, expected lists of numbers"),
    ],
)
def test_what_are_no_weights_is_named_with_the_way_on(tmp_path: Path, columns: dict[str, Any], names: dict[str, str], message: str) -> None:
    parquet.write_table(pa.table({"id": range(N), **columns}), tmp_path / "a.parquet")
    with pytest.raises(ForeignRowsError, match=message):
        read(tmp_path / "a.parquet", **names)


@pytest.mark.parametrize("name", ["id", "weights"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    columns = {"id": pa.array(range(N)), "weights": pa.array(list(ROWS), LISTS)}
    parquet.write_table(pa.table([*columns.values(), columns[name]], names=[*columns, name]), tmp_path / "a.parquet")
    with pytest.raises(ForeignRowsError, match=f"two columns are named '{name}'"):
        read(tmp_path / "a.parquet")


def test_int8_beside_a_scale_is_multiplied_and_beside_anything_else_refused(tmp_path: Path) -> None:
    values, scale = to_int8(ROWS)
    column = pa.array(values.tolist(), pa.list_(pa.int8()))
    parquet.write_table(pa.table({"id": range(N), "w": column, "scale": scale, "title": ["t"] * N}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows_by(range(N), from_int8(values, scale))
    for more in ({"row_scale": scale}, {"scale": scale, "zero": values[:, 0]}, {"scales": pa.array(ROWS.tolist())}):
        parquet.write_table(pa.table({"id": range(N), "w": column, **more}), tmp_path / "b.parquet")
        with pytest.raises(ForeignRowsError, match=r"holds int8 beside .*may have to be multiplied"):
            read(tmp_path / "b.parquet", weights="w")


def test_a_name_that_is_not_there_is_said(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", id=range(N))
    with pytest.raises(ForeignRowsError, match="has no array 'user'"):
        read(tmp_path / "a.parquet", ids="user")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "data-00000-of-00001.arrow").touch()
    with pytest.raises(ForeignRowsError, match=r"has no files that end in \.parquet or \.pq; there are \.arrow\..*dataset\.to_parquet"):
        read(tmp_path / "disk")
    with pytest.raises(InvalidInputError, match="which format"):
        read(tmp_path / "none.data")
