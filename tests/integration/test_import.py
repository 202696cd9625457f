"""Foreign rows come into tables of real clusters: bit for bit where their dtype allows, all or nothing where a file does not fit."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import one_of

import kvemb
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.errors import ForeignRowsError, InvalidInputError, KvembError, ShardUnavailableError
from kvemb.foreign import foreign_rows
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.stores.row_io import ReadPart
from tests.integration.table_clusters import ids_of, new_table, start

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

ROOT = Path(__file__).parents[2]
SPARK = Path(__file__).parent / "golden" / "spark_4_3_0"
N, DIM = 1000, 4


@pytest.fixture(scope="module", params=one_of("memcached", "redis", "redis-cluster"))
def running(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    with start(request.param, require_server) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(running: LocalCluster) -> Iterator[Cluster]:
    with kvemb.connect(running.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def redis(require_server: Callable[[str], str]) -> Iterator[Cluster]:
    """Of what files hold, one storage tells as much as another."""
    with start("redis", require_server) as local, kvemb.connect(local.url) as opened:
        yield opened


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 rows of a table without state, so that a file has many."""
    monkeypatch.setattr(foreign_rows, "BLOCK_BYTES", 64 * (4 * DIM + 8))


def rows_of(n: int = N, dim: int = DIM, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, dim), dtype=np.float32)


def stored_state(cluster: Cluster, table: Table, ids: np.ndarray) -> np.ndarray:
    """The state of rows, as storage has it."""
    definition, record = table.definition, table.definition.record
    keys = definition.keys(ids.astype(np.uint64), pages=cluster.store.capabilities.pages)
    (read,) = cluster.store.rows.read([ReadPart(keys, record.size_bytes, record.size_bytes)], Deadline.after(10))
    got = read.in_key_order()
    assert got.found.all()
    return record.state(got.records)


# --- npy ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_ids", [None, N + 5])
def test_row_i_of_an_npy_is_id_i(cluster: Cluster, tmp_path: Path, num_ids: int | None) -> None:
    table, rows = new_table(cluster, DIM, num_ids=num_ids), rows_of()
    np.save(tmp_path / "rows.npy", rows)
    done = cluster.files.import_rows(table.name, tmp_path / "rows.npy")
    assert (done.n_rows, done.n_found, len(table)) == (N, 0, N)
    assert table.pull(np.arange(N)).tobytes() == rows.tobytes()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("given", ["float64", "float16", "float32", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_of_any_dtype_become_the_table_s(redis: Cluster, tmp_path: Path, given: str, dtype: str) -> None:
    table, rows = new_table(redis, DIM, dtype=dtype), (rows_of() * 20).astype(given)
    np.save(tmp_path / "rows.npy", rows)
    redis.files.import_rows(table.name, str(tmp_path / "rows.npy"))
    expected = to_float32(round_nearest(rows.astype(np.float32), dtype), dtype)
    assert table.pull(np.arange(N)).tobytes() == expected.tobytes()


def test_ids_and_state_of_npy_are_files_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    table = new_table(cluster, DIM, optimizer=kvemb.optim.adam(lr=0.1))
    ids, rows, m, v = ids_of(N), rows_of(), rows_of(seed=2), rows_of(seed=3)
    for name, array in {"ids": ids, "rows": rows, "m": m, "v": v}.items():
        np.save(tmp_path / f"{name}.npy", array)
    at = {name: str(tmp_path / f"{name}.npy") for name in ("ids", "rows", "m", "v")}
    cluster.files.import_rows(table.name, at["rows"], ids=at["ids"], state={"exp_avg_sq": at["v"], "exp_avg": at["m"]})
    assert table.pull(ids).tobytes() == rows.tobytes()
    assert stored_state(cluster, table, ids).tobytes() == np.concatenate([m, v], axis=1).tobytes()
    cluster.files.import_rows(table.name, at["rows"], ids=at["ids"])
    assert not stored_state(cluster, table, ids).any(), "without state it begins anew"


def test_text_ids_are_hashed_as_hash_ids_does(redis: Cluster, tmp_path: Path) -> None:
    rows, words = rows_of(), np.array([f"wörd{i}" for i in range(N)])
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "ids.npy", words)
    for id_dtype in ("int64", "uint64"):
        table = new_table(redis, DIM, id_dtype=id_dtype)
        redis.files.import_rows(table.name, str(tmp_path / "rows.npy"), ids=str(tmp_path / "ids.npy"))
        assert table.pull(kvemb.hash_ids(words).view(id_dtype)).tobytes() == rows.tobytes()


# --- Parquet ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["list", "large_list", "fixed"])
def test_parquet_of_lists_is_read(redis: Cluster, tmp_path: Path, kind: str) -> None:
    table, ids, rows = new_table(redis, DIM), ids_of(N), rows_of()
    of = {"list": pa.list_(pa.float32()), "large_list": pa.large_list(pa.float32()), "fixed": pa.list_(pa.float32(), DIM)}[kind]
    parquet.write_table(pa.table({"user": ids, "e": pa.array(list(rows), of)}), tmp_path / "a.parquet", row_group_size=130)
    redis.files.import_rows(table.name, tmp_path / "a.parquet", ids="user", weights="e")
    assert table.pull(ids).tobytes() == rows.tobytes()


def test_a_folder_of_parquet_is_read_and_text_ids_hashed(redis: Cluster, tmp_path: Path) -> None:
    table, rows, words = new_table(redis, DIM), rows_of(), [f"w{i}" for i in range(N)]
    (tmp_path / "_SUCCESS").touch()
    for name, part in {"part-1": slice(0, 300), "part-2": slice(300, N)}.items():
        id_column = pa.array(words[part]).dictionary_encode()
        parquet.write_table(pa.table({"id": id_column, "weights": list(rows[part])}), tmp_path / f"{name}.parquet")
    assert redis.files.import_rows(table.name, tmp_path).n_rows == N
    assert table.pull(kvemb.hash_ids(words)).tobytes() == rows.tobytes()


def test_a_checkpoint_s_own_files_are_foreign_rows_too_state_included(cluster: Cluster, tmp_path: Path) -> None:
    table = new_table(cluster, DIM, optimizer=kvemb.optim.adam(lr=0.1))
    ids = ids_of(N)
    table.push(ids, rows_of())
    table.flush()
    cluster.save(str(tmp_path / "saved"))
    other = new_table(cluster, DIM, optimizer=kvemb.optim.adam(lr=0.1))
    cluster.files.import_rows(other.name, tmp_path / "saved" / table.name, state="slots")
    assert other.pull(ids).tobytes() == table.pull(ids).tobytes()
    assert stored_state(cluster, other, ids).tobytes() == stored_state(cluster, table, ids).tobytes()


def test_a_folder_of_spark_is_rows_and_a_file_of_ours_is_a_dataframe(redis: Cluster, tmp_path: Path) -> None:
    """What Spark read and wrote stands in golden/spark_4_3_0, whose README tells how it came about."""
    table, ids, rows = new_table(redis, DIM), np.arange(20) * 7 - 9, np.random.default_rng(5).standard_normal((20, DIM)).astype(np.float32)
    assert redis.files.import_rows(table.name, SPARK / "rows").n_rows == len(table) == 20
    np.testing.assert_array_equal(table.pull(ids), rows)

    redis.files.export_rows(table.name, tmp_path / "exported.parquet")
    ours, read_by_spark = (parquet.ParquetFile(path) for path in (tmp_path / "exported.parquet", SPARK / "exported.parquet"))
    assert ours.schema.equals(read_by_spark.schema), "another schema than Spark was tried with: try it again"
    assert ours.read().equals(read_by_spark.read())

    redis.files.import_rows(table.name, SPARK / "doubled")
    np.testing.assert_array_equal(table.pull(ids), 2 * rows)


def test_unsigned_ids_are_decimals_in_spark_and_come_back_as_they_were(redis: Cluster, tmp_path: Path) -> None:
    table = new_table(redis, DIM, id_dtype="uint64")
    assert redis.files.import_rows(table.name, SPARK / "doubled_unsigned").n_rows == 2
    assert (table.pull(np.array([5, 2**64 - 3], np.uint64)) == 2).all()
    for wrong in (Decimal(-1), Decimal(2**64)):
        parquet.write_table(pa.table({"id": pa.array([wrong], pa.decimal128(20, 0)), "weights": [[1.0] * DIM]}), tmp_path / "a.parquet")
        with pytest.raises(ForeignRowsError, match="column 'id'"):
            redis.files.import_rows(table.name, tmp_path / "a.parquet")
    assert len(table) == 2


# --- arrays, and any iterable of them -----------------------------------------------------------------------------------------------


def test_arrays_and_blocks_are_taken_and_of_a_repeated_id_the_later_row_holds(cluster: Cluster) -> None:
    table, ids, rows = new_table(cluster, DIM), ids_of(N), rows_of()
    assert cluster.files.import_rows(table.name, (ids, rows)).n_rows == N
    assert table.pull(ids).tobytes() == rows.tobytes()
    later = rows_of(seed=9)
    cluster.files.import_rows(table.name, ((ids[at : at + 10], block[at : at + 10]) for block in (rows, later) for at in range(0, N, 10)))
    assert table.pull(ids).tobytes() == later.tobytes()
    with pytest.raises(InvalidInputError, match="name what is in a file"):
        cluster.files.import_rows(table.name, (ids, rows), weights="w")


# --- interrupted, and resumed -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
def test_an_import_that_was_broken_off_goes_on_and_ends_with_the_same_rows(cluster: Cluster, tmp_path: Path) -> None:
    table, rows = new_table(cluster, DIM), rows_of()
    np.save(tmp_path / "rows.npy", rows)

    def stop(what: str, done: int, total: int) -> None:
        assert total == N
        if what == "importing" and done >= 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        cluster.files.import_rows(table.name, tmp_path / "rows.npy", progress=stop)
    assert "320 rows of" in raised.value.__notes__[0]
    assert len(table) == 320
    phases: list[str] = []
    done = cluster.files.import_rows(table.name, tmp_path / "rows.npy", resume=True, progress=lambda what, *_: phases.append(what))
    assert (done.n_rows, done.n_found) == (N, 320)
    assert list(dict.fromkeys(phases)) == ["verifying", "comparing", "importing"]
    assert table.pull(np.arange(N)).tobytes() == rows.tobytes()
    assert cluster.files.import_rows(table.name, tmp_path / "rows.npy", resume=True).n_found == N


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", one_of("memcached", "redis"))
def test_a_shard_killed_under_an_import_keeps_what_it_took_and_the_import_done_again_ends_with_all_rows(
    kind: str, require_server: Callable[[str], str], tmp_path: Path
) -> None:
    ids, rows = ids_of(N), rows_of()
    columns = {"id": ids, "weights": list(rows), "sums": list(np.abs(rows))}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with start(kind, require_server) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster, DIM, optimizer=kvemb.optim.adagrad())

        def kill(what: str, done: int, total: int) -> None:
            if what == "importing" and local.shards[1].poll() is None and done > 100:
                local.shards[1].kill()

        with pytest.raises(ShardUnavailableError):
            cluster.files.import_rows(table.name, tmp_path / "rows.parquet", state="sums", timeout_s=3.0, progress=kill)
        local.start_shard(1)
        assert cluster.files.import_rows(table.name, tmp_path / "rows.parquet", state="sums", resume=True).n_found > 100
        assert len(table) == N
        assert table.pull(ids).tobytes() == rows.tobytes()
        assert stored_state(cluster, table, ids).tobytes() == np.abs(rows).tobytes()
        table.push(ids, np.zeros((N, DIM)))  # rows that were journaled with state are applied to, and found as the index has them
        table.flush()
        assert table.pull(ids).tobytes() == rows.tobytes()


def test_each_block_has_the_time_that_the_caller_gives(redis: Cluster) -> None:
    table = new_table(redis, DIM)
    with pytest.raises(KvembError) as raised:
        redis.files.import_rows(table.name, (ids_of(N), rows_of()), timeout_s=1e-6)
    assert "import with resume goes on" in raised.value.__notes__[0]


@pytest.mark.usefixtures("small_blocks")
def test_a_row_that_was_trained_since_is_not_taken_for_an_imported_one(cluster: Cluster, tmp_path: Path) -> None:
    table, rows = new_table(cluster, DIM), rows_of()
    np.save(tmp_path / "rows.npy", rows)
    cluster.files.import_rows(table.name, tmp_path / "rows.npy")
    table.push([70], np.ones((1, DIM)))
    table.flush()
    assert cluster.files.import_rows(table.name, tmp_path / "rows.npy", resume=True).n_found == 64
    assert table.pull(np.arange(N)).tobytes() == rows.tobytes()


# --- what does not fit changes nothing ----------------------------------------------------------------------------------------------


def with_nan(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows[777, 1] = np.nan
    return rows


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of(dim=5), r"shape \(1000, 5\), expected \(1000, 4\)"),
        (rows_of().reshape(-1), "expected"),
        (with_nan(rows_of()), "row 777 holds NaN"),
        (rows_of(n=N + 1), "1001 rows without ids"),
        (np.asfortranarray(rows_of()), "Fortran"),
        (np.array([[None] * DIM] * 3), "not unpickled"),
        (rows_of().astype(complex), "expected numbers"),
    ],
)
def test_a_wrong_npy_is_refused_before_anything_is_written(redis: Cluster, tmp_path: Path, rows: np.ndarray, message: str) -> None:
    table = new_table(redis, DIM, num_ids=N)
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(ForeignRowsError, match=message):
        redis.files.import_rows(table.name, tmp_path / "rows.npy")
    assert len(table) == 0


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:40], lambda data: b""])
@pytest.mark.parametrize("name", ["rows.npy", "rows.parquet"])
def test_a_damaged_file_is_refused_before_anything_is_written(
    redis: Cluster, tmp_path: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    table = new_table(redis, DIM)
    path = tmp_path / name
    if name == "rows.npy":
        np.save(path, rows_of())
    else:
        parquet.write_table(pa.table({"id": ids_of(N), "weights": list(rows_of())}), path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ForeignRowsError, match=name):
        redis.files.import_rows(table.name, path)
    assert len(table) == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"weights": [[1.0] * DIM, [1.0] * 3]}, "a list of 3 values in row 1, expected 4"),
        ({"weights": [[1.0] * DIM, None]}, "missing"),
        ({"weights": [[1.0] * DIM, [1.0, 2.0, None, 4.0]]}, "missing"),
        ({"weights": [["a"] * DIM] * 2}, "lists of numbers"),
        ({"id": [1, None], "weights": [[1.0] * DIM] * 2}, "column 'id': 1 id missing"),
        ({"id": [1.5, 2.0], "weights": [[1.0] * DIM] * 2}, "expected integers or text"),
        ({"id": [Decimal("1.5"), Decimal(2)], "weights": [[1.0] * DIM] * 2}, "expected integers of int64 or text"),
        ({"id": [7, 8, 7], "weights": [[1.0] * DIM] * 3}, r"id 7 stands twice, in rows 0 and 2 \(1 such row in all\)"),
        ({"id": ["a", "b", "b"], "weights": [[1.0] * DIM] * 3}, r"'b' \(id -?\d+\) stands twice, in rows 1 and 2"),
        ({"user_id": ["a", "b"], "w": [[1.0] * DIM] * 2}, "say which column holds the ids .*'user_id'"),
        ({"user": [b"a", b"b"], "w": [[1.0] * DIM] * 2}, "say which column holds the ids .*'user'"),
        ({"user": [1.0, 2.0], "w": [[1.0] * DIM] * 2}, "say which column holds the ids .*'user'"),
        ({"user": [Decimal(1), Decimal(2)], "w": [[1.0] * DIM] * 2}, "say which column holds the ids .*'user'"),
        ({"user": pa.array(["a", "b"]).cast(pa.string_view()), "w": [[1.0] * DIM] * 2}, "say which column holds the ids .*'user'"),
        ({"id": [7, 8], "w": [[1.0] * DIM] * 2, "x": [[1.0] * DIM] * 2}, "which array holds the weights"),
    ],
)
def test_wrong_columns_are_refused_before_anything_is_written(
    redis: Cluster, tmp_path: Path, columns: dict[str, list[object]], message: str
) -> None:
    table = new_table(redis, DIM)
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ForeignRowsError, match=message):
        redis.files.import_rows(table.name, tmp_path / "a.parquet")
    assert len(table) == 0


def test_a_word_that_stands_twice_is_named(redis: Cluster, tmp_path: Path) -> None:
    table = new_table(redis, DIM)
    (tmp_path / "w.vec").write_text("the 1 2 3 4\ncafé 1 2 3 4\nend 1 2 3 4\ncafé 5 6 7 8\n", encoding="utf-8")
    with pytest.raises(ForeignRowsError, match=r"w\.vec: 'café' \(id -?\d+\) stands twice, in rows 1 and 3 .*Nothing was written"):
        redis.files.import_rows(table.name, tmp_path / "w.vec")
    assert len(table) == 0


def test_files_of_a_folder_have_the_same_columns(redis: Cluster, tmp_path: Path) -> None:
    table, rows = new_table(redis, DIM), [[1.0] * DIM] * 2
    parquet.write_table(pa.table({"id": [7, 8], "weights": rows}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"weights": rows}), tmp_path / "b.parquet")
    with pytest.raises(ForeignRowsError, match=r"b.parquet: .*other columns"):
        redis.files.import_rows(table.name, tmp_path)
    assert len(table) == 0


class Refusing:
    """A tensor that needs a gradient, or has a dtype that NumPy has not."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise RuntimeError("call detach() first")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (([7, 8], np.ma.masked_greater(np.ones((2, DIM)), 0)), "weights: 8 elements of a numpy.ma array are masked"),
        ((np.ma.masked_greater(np.arange(2), 0), np.ones((2, DIM))), "ids: 1 elements of a numpy.ma array are masked"),
        (([7, 8], Refusing()), "weights cannot be read as an array: call detach"),
        (([7, 8], [[1.0] * DIM, [1.0]]), "weights cannot be read as an array"),
        ((7, [1.0] * DIM), "ids"),
        ((), r"expected \(ids, weights\)"),
        (None, "got NoneType, expected a path"),
    ],
)
def test_arrays_that_are_none_are_refused(redis: Cluster, source: Any, message: str) -> None:
    table = new_table(redis, DIM)
    with pytest.raises((InvalidInputError, ForeignRowsError), match=message):
        redis.files.import_rows(table.name, source)
    assert len(table) == 0


def test_names_of_files_may_be_paths(redis: Cluster, tmp_path: Path) -> None:
    table, other = new_table(redis, DIM), new_table(redis, DIM)
    table.assign(ids_of(N), rows_of())
    redis.files.export_rows(table.name, tmp_path / "rows.npy", ids=tmp_path / "ids.npy")
    assert redis.files.import_rows(other.name, tmp_path / "rows.npy", ids=tmp_path / "ids.npy").n_rows == N
    assert other.pull(ids_of(N)).tobytes() == table.pull(ids_of(N)).tobytes()


def test_what_is_not_there_is_said(redis: Cluster, tmp_path: Path) -> None:
    table = new_table(redis, DIM)
    for url, error, message in (
        (tmp_path / "none.npy", ForeignRowsError, "none.npy"),
        (tmp_path / "rows.xyz", InvalidInputError, "which format"),
        (tmp_path, ForeignRowsError, "has no files"),
    ):
        with pytest.raises(error, match=message):
            redis.files.import_rows(table.name, url)
    with pytest.raises(InvalidInputError, match="format is 'odd'"):
        redis.files.import_rows(table.name, "a.npy", format="odd")
    np.save(tmp_path / "rows.npy", rows_of())
    with pytest.raises(InvalidInputError, match="has no state"):
        redis.files.import_rows(table.name, tmp_path / "rows.npy", state=str(tmp_path / "rows.npy"))


# --- exported, and imported again ---------------------------------------------------------------------------------------------------

FORMATS_BACK = ["safetensors", "parquet", "pt", "npy"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("ending", FORMATS_BACK)
@pytest.mark.parametrize(("dtype", "id_dtype"), [("float32", "int64"), ("float16", "uint64"), ("bfloat16", "int64")])
def test_an_exported_table_comes_back_bit_for_bit(redis: Cluster, tmp_path: Path, ending: str, dtype: str, id_dtype: str) -> None:
    if ending == "pt":
        pytest.importorskip("torch")
    table, other = (new_table(redis, DIM, dtype=dtype, id_dtype=id_dtype) for _ in range(2))
    ids = ids_of(N).view(id_dtype)
    ids[0] = -1 if id_dtype == "int64" else 2**64 - 1  # of a hash it is an id like any other
    for one in (table, other):
        one.allow_minus_one()
    table.assign(ids, rows_of())
    more = {"ids": str(tmp_path / "ids.npy")} if ending == "npy" else {}
    shown: list[tuple[int, int]] = []
    done = redis.files.export_rows(table.name, tmp_path / f"t.{ending}", progress=lambda what, n, total: shown.append((n, total)), **more)
    assert (done.n_rows, shown[-1], len(shown) > 1) == (N, (N, N), True)
    assert redis.files.import_rows(other.name, tmp_path / f"t.{ending}", **more).n_rows == N
    assert redis.files.import_rows(other.name, tmp_path / f"t.{ending}", resume=True, **more).n_found == N
    assert other.pull(ids).tobytes() == table.pull(ids).tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"t.{ending}", *(["ids.npy"] if more else [])])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("ending", "dtype"), [*((ending, "float16") for ending in FORMATS_BACK), ("safetensors", "int8"), ("pt", "int8")])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
def test_weights_written_in_fewer_bits_come_back_within_the_stated_error(
    redis: Cluster, tmp_path: Path, ending: str, dtype: str, scale: float
) -> None:
    if ending == "pt":
        pytest.importorskip("torch")
    table, other = new_table(redis, DIM), new_table(redis, DIM)
    rows = (np.random.default_rng(5).standard_normal((N, DIM)) * scale).astype(np.float32)
    rows[3], rows[4, 1:] = 0, 0
    table.assign(np.arange(N), rows)
    more = {"ids": str(tmp_path / "ids.npy")} if ending == "npy" else {}
    whole = tmp_path / f"whole.{ending}"
    redis.files.export_rows(table.name, whole, **more)
    redis.files.export_rows(table.name, tmp_path / f"t.{ending}", dtype=dtype, **more)
    assert redis.files.import_rows(other.name, tmp_path / f"t.{ending}", **more).n_rows == N
    off = np.abs(other.pull(np.arange(N)).astype(np.float64) - rows)
    largest = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64)
    bound = largest / 254 * (1 + 1e-5) if dtype == "int8" else np.maximum(np.abs(rows) * 2.0**-11, 2.0**-25)
    assert (off <= bound).all()
    assert off.any()
    weights_bytes = N * DIM * 4
    saved = weights_bytes // 2 if dtype == "float16" else weights_bytes * 3 // 4 - 4 * N
    assert abs(whole.stat().st_size - (tmp_path / f"t.{ending}").stat().st_size - saved) < 1000


def test_fewer_bits_are_refused_where_a_file_cannot_hold_them(redis: Cluster, tmp_path: Path) -> None:
    table = new_table(redis, DIM)
    table.assign(np.arange(3), np.full((3, DIM), 7e4, np.float32))
    for ending, dtype, message in (
        ("parquet", "int8", "no room for the scales"),
        ("npy", "int8", "no room for the scales"),
        ("pt", "int4", "'int4'; rows are written as"),
    ):
        more = {"ids": str(tmp_path / "ids.npy")} if ending == "npy" else {}
        with pytest.raises(InvalidInputError, match=message):
            redis.files.export_rows(table.name, tmp_path / f"t.{ending}", dtype=dtype, **more)
    with pytest.raises(ForeignRowsError, match=r"7e\+04 is beyond float16's 65504: write int8"):
        redis.files.export_rows(table.name, tmp_path / "t.safetensors", dtype="float16")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_blocks")
def test_a_dense_table_is_one_npy_and_rows_that_do_not_exist_are_as_pulls_give_them(cluster: Cluster, tmp_path: Path) -> None:
    table = new_table(cluster, DIM, num_ids=N, initializer=kvemb.init.uniform())
    table.assign(np.arange(0, N, 2), rows_of()[::2])
    cluster.files.export_rows(table.name, str(tmp_path / "t.data"), format="npy")
    assert np.load(tmp_path / "t.data").tobytes() == table.pull(np.arange(N)).tobytes()


def test_other_programs_read_what_was_exported(redis: Cluster, tmp_path: Path) -> None:
    table = new_table(redis, DIM)
    table.assign(np.arange(N), rows_of())
    redis.files.export_rows(table.name, tmp_path / "t.parquet")
    columns = parquet.read_table(tmp_path / "t.parquet")
    assert columns["id"].to_pylist() == list(range(N))
    assert np.array(columns["weights"].to_pylist(), np.float32).tobytes() == rows_of().tobytes()
    torch = pytest.importorskip("torch")
    redis.files.export_rows(table.name, tmp_path / "t.pt")
    held = torch.load(tmp_path / "t.pt", weights_only=True)
    assert (held["id"].tolist(), held["weights"].numpy().tobytes()) == (list(range(N)), rows_of().tobytes())


def test_what_cannot_be_exported_is_refused_and_leaves_the_older_file(redis: Cluster, tmp_path: Path) -> None:
    table = new_table(redis, DIM)
    table.assign(np.arange(3), rows_of(3))
    for url, more, message in (
        ("t.vec", {}, "word vectors are words"),
        ("t.npy", {}, "give ids, a file for them"),
        ("t.parquet", {"ids": "x"}, "only npy and raw need"),
        ("t.xyz", {}, "which format"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            redis.files.export_rows(table.name, tmp_path / url, **more)
    (tmp_path / "t.parquet").write_text("older")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        redis.files.export_rows(table.name, tmp_path / "t.parquet", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]
    assert (tmp_path / "t.parquet").read_text() == "older"
    with pytest.raises(ForeignRowsError, match="cannot be written"):
        redis.files.export_rows(table.name, tmp_path / "t.parquet" / "below.parquet")


# --- the command --------------------------------------------------------------------------------------------------------------------


def command(running: LocalCluster, *words: object) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "kvemb.cli", *map(str, words)]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_command_imports_and_resumes(running: LocalCluster, cluster: Cluster, tmp_path: Path) -> None:
    table, rows = new_table(cluster, DIM, optimizer=kvemb.optim.adam(lr=0.1)), rows_of()
    columns = {"user": ids_of(N), "e": list(rows), "m": list(rows), "v": list(rows)}
    parquet.write_table(pa.table(columns), tmp_path / "rows.data")
    words = ("import", running.url, table.name, tmp_path / "rows.data", "--format", "parquet", "--ids", "user", "--weights", "e")
    out = command(running, *words, "--state", "exp_avg=m", "--state", "exp_avg_sq=v")
    assert out.stdout.startswith(f"imported 1,000 rows into table '{table.name}', in "), out
    assert table.pull(ids_of(N)).tobytes() == rows.tobytes()
    assert stored_state(cluster, table, ids_of(N)).tobytes() == np.concatenate([rows, rows], axis=1).tobytes()
    assert "1,000 of them there already" in command(running, *words, "--resume").stdout
    out = command(running, "export", running.url, table.name, tmp_path / "w.npy", "--ids", tmp_path / "i.npy")
    assert out.stdout.startswith(f"exported 1,000 rows of table '{table.name}' in "), out
    assert table.pull(np.load(tmp_path / "i.npy")).tobytes() == np.load(tmp_path / "w.npy").tobytes()
    refused = command(running, "import", running.url, table.name, tmp_path / "none.npy")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "ForeignRowsError" in refused.stderr
    assert "none.npy" in refused.stderr
