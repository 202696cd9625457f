"""Save and load against real servers and shards, while trainers push; and the commands as a person runs them."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from matrix import one_of
from shard_moves import ShardMoves

import kvemb
from kvemb.api import Cluster
from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_log import CheckpointLog
from kvemb.checkpoint.format.checkpoint_manifest import SAVING, part_path
from kvemb.checkpoint.listing import checkpoint_at, list_checkpoints
from kvemb.checkpoint.verify import verify
from kvemb.errors import CheckpointError, InvalidInputError, TableMismatchError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slots import N_SLOTS
from tests.warm_clusters import warm

ROOT = Path(__file__).parents[2]
N = 60_000
IDS = np.arange(N)
KINDS = ["valkey", "memcached", "redis-cluster"]


def nodes_of(kind: str) -> int:
    return 3 if kind == "redis-cluster" else 2


@pytest.fixture(scope="module", params=one_of("memcached", "valkey", "redis-cluster"))
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with warm(request.param, nodes_of(request.param), shards=2) as running:
        with kvemb.connect(running.url) as client:
            client.create_table("count", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            client.create_table("user", dim=8, optimizer=kvemb.optim.adam(lr=0.1))
        yield running


class Trainer:
    """Pushes the same gradient for all rows, again and again; so within a shard all rows of one batch are equal."""

    def __init__(self, url: str) -> None:
        self.acked = 0
        self.error: BaseException | None = None
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with kvemb.connect(self._url) as client:
                table = client.table("count")
                while not self._stop.is_set():
                    table.push(IDS, np.full((N, 4), -1.0, np.float32), timeout_s=60).wait(60)
                    self.acked += 1
                table.flush()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> "Trainer":
        self._thread.start()
        deadline = Deadline.after(90)
        while self.acked < 2:
            assert not deadline.expired, self.error
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)
        assert self.error is None, self.error


def counts_in(url: str) -> list[set[float]]:
    """The distinct values of the rows of each shard in a checkpoint."""
    chain = open_chain(url)
    saved = chain.newest.table("count")
    assert saved is not None
    return [
        {float(value) for block in chain.rows(saved.definition, shard) for value in np.unique(block.weights)}
        for shard in range(chain.newest.n_shards)
    ]


def test_a_save_under_load_is_one_cut_per_shard_and_holds_all_that_was_acknowledged(cluster: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(cluster.url) as client, Trainer(cluster.url) as trainer:
        seen: list[tuple[int, int, int]] = []
        base = client.table("count").pull(IDS[:1])[0, 0] - 0.0
        for number in range(3):
            acked = trainer.acked
            url = str(tmp_path / str(number))
            done = client.save(
                url, base=str(tmp_path / str(number - 1)) if number else None, progress=lambda *how: seen.append(how), extra={"n": number}
            )
            assert done.manifest.extra == {"n": number}
            verify(url).require_good()
            for values in counts_in(url):
                assert len(values) == 1, "rows of different batches: not a cut"
                assert min(values) >= acked, "a push that was acknowledged is not in the checkpoint"
        assert base >= 0
        assert seen[-1][0] == seen[-1][1] == done.manifest.n_rows
    assert SAVING not in {path.name for path in (tmp_path / "0").iterdir()}


def pulled(client: Cluster, ids: np.ndarray = IDS) -> tuple[np.ndarray, np.ndarray]:
    return client.table("count").pull(ids), client.table("user").pull(ids)


def test_a_load_brings_everything_back_while_trainers_wait(cluster: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(cluster.url) as client:
        user, count = client.table("user"), client.table("count")
        user.push(IDS[:5000], np.ones((5000, 8), np.float32))
        client.flush()
        before = pulled(client)
        n_rows = len(user)
        client.save(str(tmp_path / "a"))
        user.push(IDS[4000:9000], np.ones((5000, 8), np.float32))
        user.erase(IDS[:100])
        client.flush()
        client.load(str(tmp_path / "a"))
        assert len(user) == n_rows
        for got, expected in zip(pulled(client), before, strict=True):
            np.testing.assert_array_equal(got, expected)
        first = float(count.pull(IDS[:1])[0, 0])
        with Trainer(cluster.url) as trainer:
            client.load(str(tmp_path / "a"))
            acked, deadline = trainer.acked, Deadline.after(120)
            while trainer.acked < acked + 3:
                assert not deadline.expired, trainer.error
                time.sleep(0.01)
        after = count.pull(IDS)
        assert set(np.unique(after % 1).tolist()) == {0.0}
        assert float(after.min()) >= first + 2


def test_a_checkpoint_goes_to_another_number_of_shards_and_another_storage(cluster: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(cluster.url) as client:
        client.table("user").push(IDS[:3000], np.ones((3000, 8), np.float32))
        client.flush()
        expected, n_rows = pulled(client), [len(client.table(name)) for name in ("count", "user")]
        client.save(str(tmp_path / "a"))
        client.save(str(tmp_path / "w"), weights_only=True)
    other = KINDS[(KINDS.index(cluster.store) + 1) % len(KINDS)]
    with warm(other, nodes_of(other), shards=1) as running, kvemb.connect(running.url) as client:
        for name in ("a", "w"):
            client.load(str(tmp_path / name))
            assert [len(client.table(table)) for table in ("count", "user")] == n_rows
            for got, wanted in zip(pulled(client), expected, strict=True):
                np.testing.assert_array_equal(got, wanted)
        verify = subprocess.run(
            command("verify", str(tmp_path / "w"), "--against-storage", "--config", str(running.config_path)),
            capture_output=True, text=True, timeout=200, cwd=ROOT, check=False,
        )  # fmt: skip
        assert verify.returncode == 0, verify.stdout + verify.stderr


# --- what goes wrong --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[LocalCluster]:
    """A cluster whose processes may be killed."""
    with warm("valkey", 1, shards=2) as running:
        with kvemb.connect(running.url) as client:
            table = client.create_table("user", dim=32, optimizer=kvemb.optim.adam())
            for _ in range(2):
                table.push(IDS, np.ones((N, 32), np.float32))
            client.flush()
        yield running


def state(cluster: LocalCluster) -> tuple[int, np.ndarray]:
    with kvemb.connect(cluster.url, read_only=True) as client:
        rows = client.table("user").pull(IDS)
    with kvemb.connect(cluster.url) as client:
        return len(client.table("user")), rows


def require_state(cluster: LocalCluster, expected: tuple[int, np.ndarray]) -> None:
    got = state(cluster)
    assert got[0] == expected[0]
    np.testing.assert_array_equal(got[1], expected[1])


def saved(cluster: LocalCluster, url: str) -> None:
    with kvemb.connect(cluster.url) as client:
        client.save(url)


@pytest.mark.parametrize("hurt", ["flipped", "truncated", "missing", "manifest", "path"])
def test_a_bad_checkpoint_is_refused_by_name_and_the_cluster_is_as_it_was(small: LocalCluster, tmp_path: Path, hurt: str) -> None:
    saved(small, str(tmp_path / "a"))
    victim = tmp_path / "a" / (part_path("user", 1, 0) if hurt in ("flipped", "truncated", "missing") else "manifest.json")
    data = bytearray(victim.read_bytes())
    if hurt == "flipped":
        data[len(data) // 2] ^= 1
    elif hurt == "path":
        data = data.replace(b"user/shard-1", b"../../shard-1")
    else:
        data = data[:-3]
    victim.write_bytes(data)
    if hurt == "missing":
        victim.unlink()
    before = state(small)
    with kvemb.connect(small.url) as client, pytest.raises(CheckpointError, match=victim.name.replace(".", r"\.")):
        client.load(str(tmp_path / "a"))
    require_state(small, before)


def test_what_cannot_be_saved_or_loaded_is_refused_before_anything_happens(small: LocalCluster, tmp_path: Path) -> None:
    saved(small, str(tmp_path / "a"))
    with kvemb.connect(small.url) as client:
        with pytest.raises(CheckpointError, match="holds a checkpoint already"):
            client.save(str(tmp_path / "a"))
        with pytest.raises(InvalidInputError, match="beside each other"):
            client.save(str(tmp_path / "deep" / "b"), base=str(tmp_path / "a"))
        with pytest.raises(InvalidInputError, match="weights_only"):
            client.save(str(tmp_path / "b"), base=str(tmp_path / "a"), weights_only=True)
        with pytest.raises(InvalidInputError, match="extra"):
            client.save(str(tmp_path / "b"), extra={"x": object()})
        with pytest.raises(CheckpointError, match=r"nothing to resume: no save was begun here.*Begin again, without resume"):
            client.save(str(tmp_path / "b"), resume=True)
        with pytest.raises(CheckpointError, match="no checkpoint there"):
            client.load(str(tmp_path / "b"))
        with pytest.raises(CheckpointError, match=r"lies in the data folder of a shard .*Save to a folder outside"):
            client.save(str(small.folder / "shards" / "shard-0" / "step-1"))
        with pytest.raises(CheckpointError, match="the URL must mean the same place"):
            client.save("memory://in-every-process-its-own", timeout_s=30)
        for wrong in (0, "30", float("nan")):
            with pytest.raises(InvalidInputError, match="give a number of seconds above 0"):
                client.save(str(tmp_path / "b"), timeout_s=wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidInputError, match="give a number of seconds above 0"):
                client.load(str(tmp_path / "a"), stall_timeout_s=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "b").exists()
    with warm("valkey", 1, shards=1) as other, kvemb.connect(other.url) as client:
        client.create_table("user", dim=32, optimizer=kvemb.optim.sgd())
        with pytest.raises(TableMismatchError, match=r"optimizer(.|\n)*drop the table first"):
            client.load(str(tmp_path / "a"))
        with pytest.raises(CheckpointError, match="not a base for this one"):
            client.save(str(tmp_path / "b"), base=str(tmp_path / "a"))


@pytest.mark.parametrize("noted", [b"", b'{"save_id": "00'])
def test_a_save_that_was_ended_while_it_noted_itself_is_begun_again(small: LocalCluster, tmp_path: Path, noted: bytes) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "saving.json").write_bytes(noted)
    with kvemb.connect(small.url) as client:
        with pytest.raises(CheckpointError, match=r"nothing to resume: what the save noted .* cannot be used .*Begin again"):
            client.save(str(tmp_path / "a"), resume=True)
        client.save(str(tmp_path / "a"))
    verify(str(tmp_path / "a")).require_good()


def test_a_save_whose_shard_was_killed_can_be_resumed(small: LocalCluster, tmp_path: Path) -> None:
    url, killed = str(tmp_path / "a"), threading.Event()

    def kill(*_: object) -> None:
        if not killed.is_set():
            killed.set()
            small.shards[1].signal(signal.SIGKILL)
            small.shards[1].stop(10)
            small.start_shard(1)

    before = state(small)
    with kvemb.connect(small.url) as client:
        with pytest.raises(CheckpointError, match="shard 1 knows nothing of the save"):
            client.save(url, progress=kill)
        with pytest.raises(CheckpointError, match="did not finish"):
            client.load(url)
        done = client.save(url, resume=True)
    verify(url).require_good()
    assert done.manifest.n_rows == before[0]


def test_a_save_is_not_resumed_when_slots_have_moved_between_shards_since(tmp_path: Path) -> None:
    class LookedAway(Exception):  # noqa: N818
        pass

    def look_away(*_: object) -> None:
        raise LookedAway

    url, n = str(tmp_path / "a"), 5_000
    with warm("valkey", 1, shards=2) as local, kvemb.connect(local.url) as client:
        table = client.create_table("count", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push(IDS[:n], np.ones((n, 4), np.float32)).wait_applied(60)
        with pytest.raises(LookedAway):
            client.save(url, progress=look_away)
        moves = ShardMoves(local.url)
        try:
            moves.begin(np.where(np.arange(N_SLOTS) % 2 == 0, 1, equal_runs(2)))
            moves.wait()
        finally:
            moves.close()
        with pytest.raises(CheckpointError, match=r"slots moved between shards since the save .* Begin again, without resume"):
            client.save(url, resume=True)
        done = client.save(url)
    verify(url).require_good()
    assert done.manifest.n_rows == n


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_killed_while_it_loads_goes_on_when_it_is_started(small: LocalCluster, tmp_path: Path, index: int) -> None:
    before = state(small)
    saved(small, str(tmp_path / "a"))
    with kvemb.connect(small.url) as client:
        client.table("user").push(IDS, np.ones((N, 32), np.float32))
        client.flush()
        killed: list[str] = []

        def kill(what: str, done: int, total: int) -> None:
            if what == "loading" and done and not killed:
                killed.append(what)
                small.shards[index].signal(signal.SIGKILL)
                small.shards[index].stop(10)
                small.start_shard(index)

        client.load(str(tmp_path / "a"), progress=kill)
        assert killed
    require_state(small, before)


# --- the command ------------------------------------------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvemb.cli", *words]


def run(*words: str, code: int = 0) -> str:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.full
def test_the_commands_save_list_verify_load_and_prune(small: LocalCluster, tmp_path: Path) -> None:
    config, root = ["--config", str(small.config_path)], tmp_path
    assert "saved 60,000 rows" in run("save", str(root / "1"), *config, "--extra", '{"step": 3}')
    with kvemb.connect(small.url) as client:
        client.table("user").push(IDS[:7], np.ones((7, 32), np.float32))
        client.flush()
    assert "saved 7 rows" in run("save", str(root / "2"), *config, "--base", str(root / "1"))
    listed = run("ls", str(root)).splitlines()
    assert [line.split()[0] for line in listed] == ["NAME", "1", "2"]
    assert "incremental" in listed[2]
    one = run("ls", str(root / "1"))
    assert '{"step": 3}' in one
    assert "user" in one
    assert "good" in run("verify", str(root / "2"))
    table = run("verify", str(root / "2"), "--against-storage", *config).splitlines()[-1].split()
    assert table == ["user", "60000", "60000", "0", "0", "0", "60000", "-"]
    table = run("verify", str(root / "1"), "--against-storage", *config).splitlines()[-1].split()
    assert table == ["user", "60000", "59993", "7", "0", "0", "60000", "-"]
    assert "loaded 60,000 rows" in run("load", str(root / "1"), *config, "--yes")
    assert "saved 60,000 rows" in run("save", str(root / "3"), *config, "--keep", "1", "--weights-only")
    assert "weights only" in run("ls", str(root))
    assert [one.name for one in list_checkpoints(str(root))] == ["1", "2", "3"]  # an export is no backup
    assert "deleted: 2, 1" in run("save", str(root / "4"), *config, "--keep", "1")
    assert "saved 60,000 rows" in run("save", str(root / "5"), *config)
    assert "would be deleted: 4" in run("prune", str(root), "--keep", "1", "--dry-run")
    assert "deleted: 4" in run("prune", str(root), "--keep", "1")
    assert [one.name for one in list_checkpoints(str(root))] == ["3", "5"]


def test_a_load_asks_before_rows_go_and_takes_one_table_alone(small: LocalCluster, tmp_path: Path) -> None:
    config = ["--config", str(small.config_path)]
    with kvemb.connect(small.url) as client:
        other = client.create_table("other", dim=4, optimizer=kvemb.optim.adam(lr=0.1), exist_ok=True)
        other.push(IDS[:100], np.ones((100, 4), np.float32)).wait_applied(30)
        client.save(str(tmp_path / "a"))
        other.push(IDS[:150], np.ones((150, 4), np.float32)).wait_applied(30)
        client.table("user").push(IDS[:9], np.ones((9, 32), np.float32)).wait_applied(30)
        kept = other.pull(IDS[:150])
        assert "nothing was changed: say --yes" in run("load", str(tmp_path / "a"), "--table", "user", *config, code=1)
        assert "holds no table 'users'; it holds other, user" in run("load", str(tmp_path / "a"), "--table", "users", *config, code=1)
        assert "takes no --table" in run("load", str(tmp_path / "a"), "--table", "user", "--offline", *config, code=1)
        assert "loaded 60,000 rows" in run("load", str(tmp_path / "a"), "--table", "user", "--yes", *config)
        np.testing.assert_array_equal(other.pull(IDS[:150]), kept)
        assert len(other) == 150
        client.drop_table("other")
    table = run("verify", str(tmp_path / "a"), "--against-storage", *config, code=1).splitlines()
    assert [line.split()[:3] for line in table[-2:]] == [["other", "100", "0"], ["user", "60000", "60000"]]


def test_of_two_loads_of_tables_at_once_one_is_done_and_the_other_is_done_or_refused(small: LocalCluster, tmp_path: Path) -> None:
    url, both = str(tmp_path / "a"), threading.Barrier(2)
    with kvemb.connect(small.url) as client:
        other = client.create_table("other", dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros(), exist_ok=True)
        other.push(IDS[:100], np.ones((100, 4), np.float32)).wait_applied(30)
        client.save(url)

        def load(table: str) -> str:
            both.wait(30)
            try:
                client.load(url, tables=[table], stall_timeout_s=60)
            except CheckpointError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(2) as threads:
            said = list(threads.map(load, ("user", "other")))
        assert "" in said
        assert all("another load is about to be decided" in one or "is decided and not carried out here" in one for one in said if one)
        client.drop_table("other")


def test_a_load_can_be_decided_while_shards_are_down(small: LocalCluster, tmp_path: Path) -> None:
    config = ["--config", str(small.config_path)]
    before = state(small)
    saved(small, str(tmp_path / "a"))
    with kvemb.connect(small.url) as client:
        client.table("user").push(IDS, np.ones((N, 32), np.float32))
        client.flush()
    for shard in small.shards:
        shard.signal(signal.SIGTERM)
        assert shard.stop(20) == 0
    assert "restart those that run" in run("load", str(tmp_path / "a"), "--offline", "--yes", *config)
    for index in range(2):
        small.start_shard(index)
    require_state(small, before)


@pytest.mark.full
def test_the_commands_say_in_one_line_what_is_wrong(small: LocalCluster, tmp_path: Path) -> None:
    config = ["--config", str(small.config_path)]
    assert "no checkpoint there" in run("load", str(tmp_path / "x"), *config, "--yes", code=1)
    assert "--extra: no JSON" in run("save", str(tmp_path / "x"), *config, "--extra", "{", code=1)
    assert "no checkpoints" in run("ls", str(tmp_path), code=1)
    run("save", str(tmp_path / "x"), *config)
    victim = tmp_path / "x" / part_path("user", 0, 0)
    victim.write_bytes(victim.read_bytes()[:-1])
    said = run("verify", str(tmp_path / "x"), code=1)
    assert "truncated" in said
    assert "1 damaged" in said


# --- S3 ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.full  # the chain of test_checkpoint_s3 once more, written by shards
def test_shards_save_to_s3_and_load_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    from kvemb.local_cluster.processes import free_ports

    port = free_ports(1)[0]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            next(line for line in server.stderr if "Running on" in line)
            where = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
            for name, value in where.items():
                monkeypatch.setenv(name, value)
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().makedirs("kvemb-shards", exist_ok=True)
            with warm("valkey", 1, shards=2) as running, kvemb.connect(running.url) as client:
                table = client.create_table("user", dim=4, optimizer=kvemb.optim.adam())
                table.push(IDS[:1000], np.ones((1000, 4), np.float32))
                client.flush()
                before = table.pull(IDS[:1000])
                client.save("s3://kvemb-shards/run/1")
                table.push(IDS[:1000], np.ones((1000, 4), np.float32))
                client.save("s3://kvemb-shards/run/2", base="s3://kvemb-shards/run/1")
                client.load("s3://kvemb-shards/run/1")
                np.testing.assert_array_equal(table.pull(IDS[:1000]), before)
                for number in range(5):
                    table.push(IDS[:10], np.ones((10, 4), np.float32))
                    logged = CheckpointLog(client.save, "s3://kvemb-shards/log", keep=3).save(extra={"number": number})
                    assert logged.url == f"s3://kvemb-shards/log/{number + 1:09d}"
                names = [one.name[-1] for one in list_checkpoints("s3://kvemb-shards/log")]
                assert names == ["1", "3", "4", "5"]
                last = table.pull(IDS[:10])
                table.push(IDS[:10], np.ones((10, 4), np.float32))
                at = datetime.fromtimestamp(logged.manifest.cut_s or 0)
                client.load(checkpoint_at("s3://kvemb-shards/log", at))
                np.testing.assert_array_equal(table.pull(IDS[:10]), last)
        finally:
            server.kill()
