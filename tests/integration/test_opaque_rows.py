"""Tables of opaque bytes, and frozen tables: rows come by assign and imports, never by gradients, and are kept as any other row is."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from matrix import one_of
from moving_load import further_node
from shard_moves import ShardMoves

import kvemb
from kvemb.api import Cluster
from kvemb.errors import ForeignRowsError, FrozenTableError, InvalidInputError, ParameterServerError
from kvemb.local_cluster import LocalCluster
from kvemb.protocol.message_format import TableRows
from kvemb.schema.cluster_map import equal_runs
from tests.integration.table_clusters import ids_of, names, start
from tests.integration.test_repair import flush
from tests.warm_clusters import warm

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]
N, WIDE = 3000, 264
KINDS = ("memcached", "redis", "valkey", "redis-cluster")


@pytest.fixture(scope="module", params=one_of(*KINDS))
def running(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    with start(request.param, require_server) as local:
        yield local


@pytest.fixture(scope="module")
def cluster(running: LocalCluster) -> Iterator[Cluster]:
    with kvemb.connect(running.url) as opened:
        yield opened


def rows_of(n: int = N, width: int = WIDE, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, width), dtype=np.uint8)


def opaque(cluster: Cluster, width: int = WIDE, **options: object) -> "kvemb.Table":
    return cluster.create_table(next(names), dtype=f"bytes:{width}", **options)  # type: ignore[arg-type]


# --- rows -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 13, 264, 4096])
@pytest.mark.parametrize("num_ids", [None, N])
def test_bytes_come_back_as_they_were_assigned_and_unknown_ids_are_zeros(cluster: Cluster, width: int, num_ids: int | None) -> None:
    table, rows = opaque(cluster, width, num_ids=num_ids), rows_of(N - 1, width)
    ids = np.arange(N - 1) if num_ids else ids_of(N - 1)
    table.assign(ids, rows)
    asked = np.append(ids, N - 1).reshape(3, 1000)[:, ::-1]
    pulled, versions = table.pull(asked, return_versions=True)
    assert (pulled.dtype, pulled.shape, len(table)) == (np.uint8, (3, 1000, width), N - 1)
    np.testing.assert_array_equal(pulled, np.vstack([rows, np.zeros((1, width), np.uint8)]).reshape(3, 1000, width)[:, ::-1])
    assert (versions == 0).sum() == 1
    out = np.ones((2, 2, width), np.uint8)
    assert table.pull(asked[:2, :2], out=out) is out
    np.testing.assert_array_equal(out, pulled[:2, :2])
    assert table.erase(ids[:10]) == 10
    assert not table.pull(ids[:10]).any()
    found, kept = table.export()
    order = np.argsort(found)
    np.testing.assert_array_equal(kept[order], rows[10:][np.argsort(ids[10:])])


def test_no_bit_pattern_is_taken_for_a_number(cluster: Cluster) -> None:
    table = opaque(cluster, 8)
    rows = np.array([[np.nan, np.inf], [-np.inf, -0.0], [1e-45, 3e38]], "<f4").view(np.uint8)
    table.assign([1, 2, 3], rows)
    np.testing.assert_array_equal(table.pull([1, 2, 3]), rows)


def test_tables_of_bytes_and_of_weights_are_pulled_in_one_call(cluster: Cluster) -> None:
    frozen = cluster.create_table(next(names), dim=66, frozen=True)
    tables, ids = [opaque(cluster), opaque(cluster), frozen], np.arange(50)
    tables[0].assign(ids, rows_of(50))
    tables[1].assign(ids, rows_of(50, seed=2))
    frozen.assign(ids, np.ones((50, 66)))
    got = cluster.pull({table.name: ids for table in tables})
    np.testing.assert_array_equal(got[tables[0].name], rows_of(50))
    np.testing.assert_array_equal(got[tables[1].name], rows_of(50, seed=2))
    np.testing.assert_array_equal(got[frozen.name], np.ones((50, 66), np.float32))


# --- what is refused --------------------------------------------------------------------------------------------------------------------


def test_gradients_are_refused_by_client_and_shard_and_state_is_none(cluster: Cluster) -> None:
    for table in (opaque(cluster), cluster.create_table(next(names), dim=WIDE, frozen=True)):
        assert table.definition.record.size_bytes == 12 + WIDE * table.definition.row_dtype.itemsize
        assert not table.pull([5]).any()
        with pytest.raises(FrozenTableError, match=r"is frozen: it takes no gradients\. Set its rows by assign or import_rows"):
            table.push([1], np.ones((1, WIDE), np.float32))
        with pytest.raises(InvalidInputError, match="frozen has no state beside its rows"):
            table.assign([1], np.ones((1, WIDE), table.definition.row_dtype), state=np.ones((1, 1)))
        sent = TableRows(table.name, table.definition.schema, np.array([1], np.uint64), np.ones((1, WIDE), np.float32))
        with pytest.raises(ParameterServerError, match="is frozen: it takes no gradients"):
            table._connection.push([sent], PATIENCE_S).wait_applied(PATIENCE_S)
        assert len(table) == 0


def test_what_is_no_row_of_bytes_is_refused_before_anything_is_sent(cluster: Cluster) -> None:
    table = opaque(cluster)
    with pytest.raises(InvalidInputError, match="rows have dtype float32, expected uint8"):
        table.assign([1], np.ones((1, WIDE), np.float32))
    with pytest.raises(InvalidInputError, match="rows have dtype int8, expected uint8"):
        table.assign([1], np.ones((1, WIDE), np.int8))
    with pytest.raises(InvalidInputError, match=r"rows have shape \(1, 263\), expected \(1, 264\)"):
        table.assign([1], np.ones((1, 263), np.uint8))
    with pytest.raises(InvalidInputError, match=r"expected a writable uint8 array of shape \(1, 264\)"):
        table.pull([1], out=np.ones((1, WIDE), np.float32))
    with pytest.raises(InvalidInputError, match=r"wire_dtype is 'bytes:264'; give one of"):
        table.set_wire_dtype("bytes:264")
    assert len(table) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": "bytes:264", "optimizer": kvemb.optim.sgd()}, "rows of dtype bytes:264 are not trained; leave the optimizer out"),
        ({"dtype": "bytes:264", "initializer": kvemb.init.zeros()}, "begin as zeros; leave the initializer out"),
        ({"dtype": "bytes:264", "dim": 66}, "whose rows are 264 bytes; leave dim out"),
        ({"dtype": "bytes:0"}, "dtype is 'bytes:0'; give bytes:N"),
        ({"dtype": "bytes:70000"}, "dim is 70000; give an integer in"),
        ({"dim": 4, "frozen": True, "optimizer": kvemb.optim.sgd()}, "a frozen table is not trained; leave the optimizer out"),
        ({"dim": 4, "frozen": 1}, "frozen is 1; give true or false"),
        ({"dim": 4}, "give an optimizer, or frozen=True"),
        ({"frozen": True}, "give dim"),
    ],
)
def test_a_definition_that_does_not_fit_is_refused(cluster: Cluster, given: dict, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        cluster.create_table("odd", **given)
    assert "odd" not in cluster.tables()


# --- files ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["npy", "raw", "safetensors", "parquet", "pt"])
def test_bytes_go_out_and_come_in_bit_for_bit(cluster: Cluster, tmp_path: Path, ending: str) -> None:
    if ending == "pt":
        pytest.importorskip("torch")
    first, second, ids, rows = opaque(cluster, 265), opaque(cluster, 265), ids_of(N), rows_of(N, 265)
    first.assign(ids, rows)
    beside = {"ids": str(tmp_path / f"ids.{ending}")} if ending in ("npy", "raw") else {}
    cluster.files.export_rows(first.name, str(tmp_path / f"rows.{ending}"), **beside)
    done = cluster.files.import_rows(second.name, tmp_path / f"rows.{ending}", **beside)
    assert (done.n_rows, len(second)) == (N, N)
    np.testing.assert_array_equal(second.pull(ids), rows)
    again = cluster.files.import_rows(second.name, tmp_path / f"rows.{ending}", resume=True, **beside)
    assert again.n_found == N


def test_row_i_of_a_file_is_id_i(cluster: Cluster, tmp_path: Path) -> None:
    rows = rows_of()
    np.save(tmp_path / "rows.npy", rows)
    (tmp_path / "rows.raw").write_bytes(rows.tobytes())
    for file in ("rows.npy", "rows.raw"):
        table = opaque(cluster, num_ids=N)
        cluster.files.import_rows(table.name, tmp_path / file)
        np.testing.assert_array_equal(table.pull(np.arange(N)), rows)


def test_files_that_other_programs_wrote_are_read(cluster: Cluster, tmp_path: Path) -> None:
    rows, ids = rows_of(), ids_of(N)
    head = json.dumps({"engram": {"dtype": "U8", "shape": [N, WIDE], "data_offsets": [0, rows.size]}}).encode()
    (tmp_path / "rows.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + rows.tobytes())
    kinds = {"binary": pa.array([row.tobytes() for row in rows], pa.binary(WIDE)), "list": pa.array(list(rows), pa.list_(pa.uint8(), WIDE))}
    for name, column in kinds.items():
        parquet.write_table(pa.table({"n": ids, "row": column}), tmp_path / f"{name}.parquet", row_group_size=700)
    dense = opaque(cluster)
    cluster.files.import_rows(dense.name, tmp_path / "rows.safetensors")
    np.testing.assert_array_equal(dense.pull(np.arange(N)), rows)
    for name in kinds:
        table = opaque(cluster)
        cluster.files.import_rows(table.name, tmp_path / f"{name}.parquet", ids="n", weights="row")
        np.testing.assert_array_equal(table.pull(ids), rows)


def test_a_file_that_does_not_fit_is_refused_whole(cluster: Cluster, tmp_path: Path) -> None:
    table = opaque(cluster)
    np.save(tmp_path / "floats.npy", np.ones((9, WIDE), np.float32))
    np.save(tmp_path / "narrow.npy", rows_of(9, 263))
    (tmp_path / "cut.raw").write_bytes(bytes(9 * WIDE - 1))
    parquet.write_table(pa.table({"id": [1, 2], "weights": pa.array([bytes(WIDE), None], pa.binary(WIDE))}), tmp_path / "null.parquet")
    said = {
        "floats.npy": r"has float32 \(9, 264\), expected uint8 \(n, 264\) for bytes:264",
        "narrow.npy": r"has shape \(9, 263\), expected \(9, 264\)",
        "cut.raw": "no whole number of rows of 264",
        "null.parquet": "values are missing",
    }
    for file, words in said.items():
        with pytest.raises(ForeignRowsError, match=words):
            cluster.files.import_rows(table.name, tmp_path / file)
    with pytest.raises(InvalidInputError, match="raw files have no state"):
        cluster.files.import_rows(table.name, tmp_path / "cut.raw", state="x")
    assert len(table) == 0


def test_raw_files_hold_any_table_in_its_own_dtype(cluster: Cluster, tmp_path: Path) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        first, second = (cluster.create_table(next(names), dim=6, frozen=True, dtype=dtype, num_ids=N) for _ in range(2))
        first.assign(np.arange(N), np.random.default_rng(3).normal(size=(N, 6)))
        cluster.files.export_rows(first.name, str(tmp_path / "rows.raw"))
        assert (tmp_path / "rows.raw").stat().st_size == N * 6 * (4 if dtype == "float32" else 2)
        cluster.files.import_rows(second.name, tmp_path / "rows.raw")
        assert second.pull(np.arange(N)).tobytes() == first.pull(np.arange(N)).tobytes()


# --- kept as any row is -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", one_of("memcached", "redis", "valkey"))
@pytest.mark.parametrize("num_ids", [None, N])
def test_bytes_survive_a_node_that_was_emptied_and_shards_that_were_killed(
    kind: str, num_ids: int | None, require_server: Callable[[str], str]
) -> None:
    with start(kind, require_server) as local, kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
        table, rows = opaque(cluster, num_ids=num_ids), rows_of()
        frozen = cluster.create_table("vectors", dim=16, frozen=True)
        table.assign(np.arange(N - 500), rows[: N - 500])
        frozen.assign(np.arange(N), np.arange(N * 16, dtype=np.float32).reshape(N, 16))
        for shard in range(2):
            local.shards[shard].kill()
            local.start_shard(shard)  # the first rows are in its journal, or its row log; the last come behind
        table.assign(np.arange(N - 500, N), rows[N - 500 :])
        flush(local.servers[0])
        np.testing.assert_array_equal(table.pull(np.arange(N), timeout_s=PATIENCE_S), rows)
        np.testing.assert_array_equal(frozen.pull(np.arange(N), timeout_s=PATIENCE_S)[:, 3], np.arange(N) * 16.0 + 3)
        told = subprocess.run(
            [sys.executable, "-m", "kvemb.cli", "repair", str(local.config_path), "--all"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        assert "0 rows" in told.stdout or "0 of" in told.stdout, told.stdout


@pytest.mark.parametrize("kind", one_of("memcached", "redis", "valkey"))
def test_bytes_move_with_their_slots_between_nodes_and_between_shards(kind: str, require_server: Callable[[str], str]) -> None:
    with start(kind, require_server) as local, further_node(local) as third, kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
        table, ids, rows = opaque(cluster), ids_of(N), rows_of()
        table.assign(ids, rows)
        nodes = cluster.nodes
        plan = nodes.add(third.address)
        assert plan.n_rows > N / 5
        nodes.begin(plan)
        nodes.wait(timeout_s=PATIENCE_S)
        np.testing.assert_array_equal(table.pull(ids), rows)
        moves = ShardMoves(local.url)
        moves.begin(np.zeros_like(equal_runs(2)))
        assert not moves.wait().slot_shards.any()
        moves.close()
        table.assign(ids[:100], rows[100:200])
        rows[:100] = rows[100:200]
        flush(local.servers[1])  # shard 0 alone brings them back, those that it was handed among them
        np.testing.assert_array_equal(table.pull(ids, timeout_s=PATIENCE_S), rows)


@pytest.mark.parametrize("kind", one_of("memcached", "redis", "valkey", "redis-cluster"))
def test_bytes_are_saved_and_loaded_onto_another_cluster(kind: str, require_server: Callable[[str], str], tmp_path: Path) -> None:
    ids, rows, url = ids_of(N), rows_of(), str(tmp_path / "saves")
    with start(kind, require_server) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("ngram", dtype="bytes:264")
        cluster.create_table("vectors", dim=4, frozen=True).assign(ids[:9], np.ones((9, 4)))
        table.assign(ids[:2000], rows[:2000])
        cluster.save(f"{url}/a")
        table.assign(ids[2000:], rows[2000:])
        cluster.save(f"{url}/b")
    files = [parquet.read_table(file) for file in sorted((tmp_path / "saves" / "a").rglob("*.parquet")) if "ngram" in str(file)]
    told = {row["id"]: row["weights"] for file in files for row in file.to_pylist()}
    assert told == {int(i): row.tobytes() for i, row in zip(ids[:2000], rows, strict=False)}, "other programs read them"
    with warm("valkey" if kind != "valkey" else "memcached", 3, shards=1) as local, kvemb.connect(local.url) as cluster:
        cluster.load(f"{url}/b")
        table = cluster.table("ngram")
        np.testing.assert_array_equal(table.pull(ids), rows)
        np.testing.assert_array_equal(cluster.table("vectors").pull(ids[:9]), np.ones((9, 4), np.float32))
        with pytest.raises(FrozenTableError):
            table.push(ids[:1], rows[:1])


def test_a_step_of_a_sync_job_brings_prefetched_rows_of_bytes_that_were_assigned() -> None:
    with (
        warm("valkey", 1, shards=1, mode="sync", trainers=1) as local,
        kvemb.connect(local.url) as trainer,
        kvemb.connect(local.url) as other,
    ):
        table = trainer.create_table("ngram", dtype="bytes:264")
        trained = trainer.create_table("t", dim=2, optimizer=kvemb.optim.sgd())
        table.assign([1, 2], rows_of(2))
        _, versions = table.pull([1, 2, 3], return_versions=True)
        other.table("ngram").assign([2], rows_of(1, seed=5))
        ack = trainer.push({trained.name: ([1], np.ones((1, 2)))}, prefetched={"ngram": ([1, 2, 3], versions)})
        ack.wait_applied(PATIENCE_S)
        changed = ack.changed_rows["ngram"]
        assert (changed.ids.tolist(), changed.rows.dtype) == ([2], np.uint8)
        np.testing.assert_array_equal(changed.rows, rows_of(1, seed=5))


def test_yaml_defines_such_tables_and_commands_show_them(running: LocalCluster, cluster: Cluster) -> None:
    config = kvemb.config.load(running.config_path, {})
    tree = {"ngram": {"dtype": "bytes:264"}, "vectors": {"dim": 3, "frozen": True}}
    (ngram, vectors) = kvemb.config._tables(tree, config.storage.kind)
    assert (ngram.dim, ngram.optimizer.kind, vectors.optimizer.kind, vectors.initializer) == (264, "frozen", "frozen", kvemb.init.zeros())
    table = opaque(cluster)
    table.assign([7], rows_of(1))
    told = subprocess.run(
        [sys.executable, "-m", "kvemb.cli", "show", table.name, "7", "--config", str(running.config_path), "--json"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert str(rows_of(1)[0].tolist()) in told.stdout
