"""A shard's data folder that vanishes, fails, or is another one: nothing is acknowledged that is not in it, and a replica goes on."""

import re
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import redis
import yaml
from chaos import processes
from chaos.cluster import FaultyCluster
from chaos.run import LedgerRun
from jobs import PATIENCE_S, add, counting_table, eventually
from volumes import Volume, volume

import kvemb
from kvemb.config import load
from kvemb.coordination.shard_notes import ShardNote, newest_note, note_name
from kvemb.local_cluster.processes import LocalProcessError
from kvemb.net.deadline import Deadline
from kvemb.operate.cluster_status import survey
from kvemb.stores.storage_kinds import open_store
from paramserver.recovery.claim_shard import EPOCH


class Ledger:
    """Trainers at work on one shard.

    Args:
        run: theirs.
        root: the shard's data_dir.
    """

    def __init__(self, run: LedgerRun, root: Path) -> None:
        self.run, self.cluster, self.root = run, run.cluster, root
        self.goes_on()

    @property
    def folder(self) -> Path:
        return self.root / "shard-0"

    def goes_on(self, n_pushes: int = 20) -> None:
        self.run.wait_for_acks(n_pushes, Deadline.after(2 * PATIENCE_S))

    def says(self, text: str) -> None:
        """The shard says so in `kvemb status`, acknowledges nothing, and lives."""
        config = load(self.cluster.config_path, {})
        eventually(lambda: text in str(survey(config).shards[0].reply), f"the shard does not say {text!r}")
        assert self.cluster.shards[0].poll() is None

    @property
    def k(self) -> int:
        """The last batch that the shard has applied."""
        reply = survey(load(self.cluster.config_path, {})).shards[0].reply
        assert reply is not None
        return reply.k

    def refused(self, *options: str) -> str:
        """Start the shard, which must not come up; return its last words."""
        with pytest.raises(LocalProcessError, match="exit code 3"):
            self.cluster.start_shard(0, *options)
        text = self.cluster.shards[0].log_tail()
        assert "Traceback" not in text
        return text.splitlines()[-1].strip()

    def is_kept(self) -> None:
        self.goes_on()
        verdict = self.run.finish()
        assert verdict.kept, f"{verdict}\n{self.run.last_words()}"


@pytest.fixture
def cluster(require_server: Callable[[str], str]) -> Callable[..., FaultyCluster]:
    require_server("redis-server")
    return lambda root, **servers: FaultyCluster("redis", 2, shards=1, storage={"timeout_s": 1}, servers={"data_dir": str(root), **servers})


def at(local: FaultyCluster, replica: Volume) -> None:
    """Have shards find their folders on this volume from now on."""
    tree = yaml.safe_load(local.config_path.read_text(encoding="utf-8"))
    tree["parameter_servers"]["data_dir"] = str(replica.path)
    local.config_path.write_text(yaml.safe_dump(tree), encoding="utf-8")


def told(local: FaultyCluster) -> int:
    """The last batch of which the shard has told the nodes."""
    with open_store(load(local.config_path, {}).storage, role="trainer") as store:
        store.open(Deadline.after(PATIENCE_S))
        note = newest_note(store.values.get(note_name(0), Deadline.after(PATIENCE_S)))
    return 0 if note is None else note.k


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        pytest.param(Volume.fail, "Input/output error", id="I/O errors"),
        pytest.param(Volume.become_read_only, "Read-only file system", id="read-only", marks=pytest.mark.full),
        pytest.param(Volume.detach, "is gone, or another file is in its place", id="unmounted", marks=pytest.mark.full),
    ],
)
def test_a_shard_whose_volume_fails_is_taken_over_from_the_replica(
    failure: Callable[[Volume], None], says: str, tmp_path: Path, cluster: Callable[..., FaultyCluster]
) -> None:
    with volume(tmp_path) as lost, cluster(lost.path) as local, LedgerRun(local, n_trainers=2) as run:
        ledger = Ledger(run, lost.path)
        failure(lost)
        ledger.says(says)
        at(local, lost.replica())
        local.move_shard(0)  # the process on the lost volume lives on
        local.start_shard(0, "--take-over")
        local.shard_proxies[0].reset_all()
        ledger.is_kept()


@pytest.mark.full
def test_a_replica_lacks_what_was_acknowledged_before_it_was_synced_and_is_refused(
    tmp_path: Path, cluster: Callable[..., FaultyCluster]
) -> None:
    with volume(tmp_path) as lost, cluster(lost.path, durability="os") as local, LedgerRun(local, n_trainers=2) as run:
        ledger = Ledger(run, lost.path)
        eventually(lambda: told(local) > 0, "the nodes are not told of a batch")
        lost.fail()
        local.shards[0].kill()
        at(local, lost.replica())
        assert ledger.refused("--take-over").startswith("JournalBehindError: shard 0")


@pytest.mark.full
def test_a_shard_whose_volume_is_mounted_again_goes_on_by_itself(tmp_path: Path, cluster: Callable[..., FaultyCluster]) -> None:
    with volume(tmp_path) as away, cluster(away.path) as local, LedgerRun(local, n_trainers=2) as run:
        ledger = Ledger(run, away.path)
        away.detach()
        ledger.says("is gone, or another file is in its place")
        away.attach()
        ledger.is_kept()


def copied(folder: Path, to: Path) -> Path:
    """A copy made file by file, as rsync makes it: files that vanish meanwhile are left out."""

    def copy(source: str, target: str) -> str:
        with suppress(FileNotFoundError):
            shutil.copy2(source, target)
        return target

    return Path(shutil.copytree(folder, to, copy_function=copy))


def deleted(folder: Path, older: Path) -> None:
    shutil.rmtree(folder)


def journal_deleted(folder: Path, older: Path) -> None:
    shutil.rmtree(folder / "journal")


def older_copy_in_its_place(folder: Path, older: Path) -> None:
    folder.rename(folder.with_name("away"))
    older.rename(folder)


def older_copy_over_it(folder: Path, older: Path) -> None:
    """As rsync does: a new file takes the place of each that has changed."""
    for path in (one for one in older.rglob("*") if one.is_file()):
        path.rename(folder / path.relative_to(older))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(deleted, marks=pytest.mark.full),
        pytest.param(journal_deleted, marks=pytest.mark.full),
        pytest.param(older_copy_in_its_place, marks=pytest.mark.full),
        older_copy_over_it,
    ],
)
def test_a_running_shard_acknowledges_nothing_that_no_start_would_find(
    damage: Callable[[Path, Path], None], tmp_path: Path, cluster: Callable[..., FaultyCluster]
) -> None:
    with cluster(tmp_path / "data") as local, LedgerRun(local, n_trainers=2) as run:
        ledger = Ledger(run, tmp_path / "data")
        older = copied(ledger.folder, tmp_path / "data" / "older")
        ledger.goes_on()
        with processes.paused(local.shards[0]):
            good = copied(ledger.folder, tmp_path / "good")
            damage(ledger.folder, older)
        ledger.says("is gone, or another file is in its place")
        assert processes.terminate(local.shards[0], PATIENCE_S) == 4  # and leaves what was put there alone
        shutil.rmtree(ledger.folder, ignore_errors=True)
        good.rename(ledger.folder)
        local.start_shard(0)
        ledger.is_kept()


def test_a_shard_that_ends_leaves_a_folder_that_was_put_in_the_place_of_its_own_as_it_is(
    tmp_path: Path, cluster: Callable[..., FaultyCluster]
) -> None:
    with cluster(tmp_path / "data") as local:
        with kvemb.connect(local.url, timeout_s=PATIENCE_S) as connected:
            table = counting_table(connected, "t")
            add(table, np.arange(100)).wait_applied(timeout_s=PATIENCE_S)
            folder = tmp_path / "data" / "shard-0"
            older = copied(folder, tmp_path / "older")
            add(table, np.arange(100)).wait_applied(timeout_s=PATIENCE_S)
        older_copy_over_it(folder, older)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert processes.terminate(local.shards[0], PATIENCE_S) == 4
        assert "everything is applied, but the state was not saved" in local.shards[0].log_tail()
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_node_lost_while_the_shards_folder_is_away_is_repaired_when_that_is_back(
    tmp_path: Path, cluster: Callable[..., FaultyCluster]
) -> None:
    with cluster(tmp_path / "data") as local, kvemb.connect(local.url, timeout_s=PATIENCE_S) as connected:
        table, ids, config = counting_table(connected, "t"), np.arange(100), load(local.config_path, {})
        add(table, ids).wait_applied(timeout_s=PATIENCE_S)
        before, folder = table.pull(ids, timeout_s=PATIENCE_S), tmp_path / "data" / "shard-0"
        away = folder.rename(folder.with_name("away"))
        with closing(redis.Redis(*config.storage.nodes[0].rsplit(":", 1))) as client:
            client.flushall()
        eventually(lambda: "the shard's own folder" in local.shards[0].log_tail(), "the shard does not say what it waits for")
        assert local.shards[0].poll() is None
        away.rename(folder)
        assert np.array_equal(table.pull(ids, timeout_s=PATIENCE_S), before)


def test_a_start_on_another_folder_than_the_last_is_refused_until_that_one_is_back(
    tmp_path: Path, cluster: Callable[..., FaultyCluster]
) -> None:
    with cluster(tmp_path / "data", journal_max_mb=1) as local, LedgerRun(local, n_trainers=2) as run:
        ledger = Ledger(run, tmp_path / "data")
        copies = [copied(ledger.folder, tmp_path / "of an earlier epoch")]
        assert processes.terminate(local.shards[0], PATIENCE_S) == 0
        local.start_shard(0)
        for number in range(4):
            ledger.goes_on()
            copies.append(copied(ledger.folder, tmp_path / f"while it ran {number}"))
        k = ledger.k
        eventually(lambda: told(local) > k, "the nodes are not told of later batches")
        local.shards[0].kill()
        last = ledger.folder.rename(tmp_path / "last")

        for number, options in enumerate(((), ("--take-over",), ("--roll-back",))):
            if number:  # without a folder at first, then in the empty one that the start before has made
                assert [path.name for path in ledger.folder.iterdir()] == ["lock"]
            said = ledger.refused(*options)
            assert f"{ledger.folder} has never been its data folder" in said
            assert "put that folder back" in said
        for copy in copies:
            shutil.rmtree(ledger.folder)
            copy.rename(ledger.folder)
            said = ledger.refused()
            assert str(ledger.folder) in said
            assert re.match(r"(ParameterServerError|JournalBehindError|JournalDamagedError): ", said)
            assert re.search("put .*back", said, re.IGNORECASE)
        shutil.rmtree(ledger.folder)
        last.rename(ledger.folder)
        local.start_shard(0)
        ledger.is_kept()


def test_the_last_folder_goes_on_although_an_older_copy_got_so_far_as_to_claim_the_shard(
    tmp_path: Path, cluster: Callable[..., FaultyCluster]
) -> None:
    with cluster(tmp_path / "data") as local, LedgerRun(local, n_trainers=2) as run:
        ledger = Ledger(run, tmp_path / "data")
        k, older = ledger.k, copied(ledger.folder, tmp_path / "older")  # in this order: the copy has that batch
        for _ in range(5):  # rows that the copy's journal has are among those that are pushed
            ledger.goes_on()
        local.shards[0].kill()
        last = ledger.folder.rename(tmp_path / "last")
        with open_store(load(local.config_path, {}).storage, role="trainer") as store:  # as if it had not come to tell more
            store.open(Deadline.after(PATIENCE_S))
            store.values.put(note_name(0), ShardNote(1, min(k, told(local))).encode(), Deadline.after(PATIENCE_S))
        older.rename(ledger.folder)
        assert "JournalBehindError: " in ledger.refused()  # said by a row
        shutil.rmtree(ledger.folder)
        last.rename(ledger.folder)
        assert f"write 2 to {ledger.folder / EPOCH}." in ledger.refused()
        (ledger.folder / EPOCH).write_text("2\n")
        local.start_shard(0)
        ledger.is_kept()
