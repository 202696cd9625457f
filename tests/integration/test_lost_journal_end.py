"""A journal that has lost batches which were acknowledged and applied: the shard says so and does not start; no row goes backwards.

SGD with lr 1 on rows that begin at 0: a row says how often a push was applied to it.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matrix import one_of

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.config import load
from kvemb.coordination.shard_notes import ShardNote, newest_note, note_name
from kvemb.errors import FencedError, ShardFailedError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import LocalProcessError
from kvemb.net.deadline import Deadline
from kvemb.stores.storage_kinds import open_store
from paramserver.journal import segment_files
from paramserver.journal.segment import entries, unpack_header

PATIENCE_S = 60.0
IDS = np.arange(20)
PROGRAMS = {"redis": "redis-server", "memcached": "memcached", "valkey": "valkey-server", "redis-cluster": "redis-server"}


def newest(journal: Path) -> Path:
    return segment_files.path_of(journal, segment_files.numbers(journal)[-1])


def cut_in_an_entry(journal: Path) -> None:
    os.truncate(newest(journal), newest(journal).stat().st_size - 3000)


def cut_behind_an_entry(journal: Path) -> None:
    path = newest(journal)
    data = path.read_bytes()
    header = unpack_header(data[:48], str(path))
    ends = [end for end, _ in entries(header, lambda at, size: data[at : at + size], 48, len(data), str(path))]
    os.truncate(path, ends[-9])


def remove_the_last_segment(journal: Path) -> None:
    newest(journal).unlink()


class Lossy:
    """A cluster of one shard whose pushes were all applied, and which was then killed and lost the end of its journal."""

    def __init__(self, local: LocalCluster, *, num_ids: int | None = None) -> None:
        self.local, self.n_pushes = local, 0
        self.cluster = kvemb.connect(local.url, trainer="a")
        optimizer = kvemb.optim.sgd(lr=1.0)
        self.table = self.cluster.create_table("t", dim=4, optimizer=optimizer, initializer=kvemb.init.zeros(), num_ids=num_ids)
        self.folder = local.folder / "shards" / "shard-0"
        self.journal, self.good = self.folder / "journal", local.folder / "good"

    def push(self, n: int, ids: np.ndarray = IDS) -> None:
        for _ in range(n):
            self.table.push(ids, -np.ones((len(ids), 4), np.float32), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)
        self.n_pushes += n

    def lose(self, damage: Callable[[Path], None], *, forget: bool) -> None:
        """Kill the shard and damage its journal.

        Args:
            damage: does it.
            forget: whether the nodes, too, lose what says how far the shard had come, so that only rows can tell.
        """
        if not forget:
            until(lambda: self.told() is not None and self.told().k == self.n_pushes)  # type: ignore[union-attr]
        self.local.shards[0].kill()
        shutil.copytree(self.journal, self.good)
        damage(self.journal)
        if forget:
            with open_store(load(self.local.config_path, {}).storage, role="trainer") as store:
                store.open(Deadline.after(PATIENCE_S))
                store.values.put(note_name(0), ShardNote(1, 0).encode(), Deadline.after(PATIENCE_S))

    def told(self) -> ShardNote | None:
        with open_store(load(self.local.config_path, {}).storage, role="trainer") as store:
            store.open(Deadline.after(PATIENCE_S))
            return newest_note(store.values.get(note_name(0), Deadline.after(PATIENCE_S)))

    def refused(self) -> str:
        """Start the shard, which must not come up; return its last words."""
        self.local.shards[0].kill()  # one that stopped applying still answers questions
        with pytest.raises(LocalProcessError, match="exit code 3"):
            self.local.start_shard(0)
        assert "Traceback" not in self.local.shards[0].log.read_text()
        return self.local.shards[0].log_tail().splitlines()[-1].strip()

    def rows(self, ids: np.ndarray = IDS) -> np.ndarray:
        with kvemb.connect(self.local.url, read_only=True) as cluster:
            rows: np.ndarray = cluster.table("t").pull(ids, timeout_s=PATIENCE_S)[:, 0]
        return rows

    def put_back(self) -> None:
        shutil.rmtree(self.journal)
        shutil.copytree(self.good, self.journal)


def until(ready: Callable[[], bool]) -> None:
    import time

    deadline = Deadline.after(PATIENCE_S)
    while not ready():
        assert not deadline.expired
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("kind", "damage", "forget"),
    [
        ("redis", cut_behind_an_entry, False),
        pytest.param("redis", remove_the_last_segment, False, marks=pytest.mark.full),
        ("memcached", cut_in_an_entry, True),
        pytest.param("redis", cut_in_an_entry, True, marks=pytest.mark.full),
        pytest.param("valkey", cut_in_an_entry, True, marks=pytest.mark.full),
        pytest.param("memcached", cut_in_an_entry, False, marks=pytest.mark.full),
        pytest.param("redis-cluster", cut_in_an_entry, False, marks=pytest.mark.long),
        pytest.param("redis-cluster", cut_in_an_entry, True, marks=pytest.mark.long),
    ],
)
def test_a_journal_that_lost_its_end_is_refused_by_name_and_no_row_goes_backwards(
    kind: str, damage: Callable[[Path], None], forget: bool, require_server: Callable[[str], str]
) -> None:
    if kind != "valkey":
        require_server(PROGRAMS[kind])
    with LocalCluster(kind, 3 if kind == "redis-cluster" else 2) as local:
        lossy = Lossy(local)
        with lossy.cluster:
            lossy.push(20)
            if damage is remove_the_last_segment:  # every process begins one
                local.shards[0].stop(PATIENCE_S)
                local.start_shard(0)
            lossy.push(80)
        lossy.lose(damage, forget=forget)
        said = lossy.refused()
        assert said.startswith("JournalBehindError: shard 0"), said
        assert str(lossy.journal) in said
        assert "--roll-back" in said
        assert (lossy.rows() == 100).all()
        lossy.refused()  # asked again, nothing has changed

        lossy.put_back()
        local.start_shard(0)
        with kvemb.connect(local.url) as cluster:
            cluster.table("t").push(IDS, -np.ones((20, 4), np.float32)).wait_applied(PATIENCE_S)
        assert (lossy.rows() == 101).all()


@pytest.mark.full
@pytest.mark.parametrize("num_ids", [None, 1000])
def test_rows_that_only_the_lost_batches_made_stop_the_shard_and_are_not_made_anew(
    num_ids: int | None, require_server: Callable[[str], str]
) -> None:
    require_server("redis-server")
    with LocalCluster("redis") as local:
        lossy = Lossy(local, num_ids=num_ids)
        with lossy.cluster:
            for at in range(40):
                lossy.push(1, IDS + 20 * at)
        lossy.lose(cut_in_an_entry, forget=True)
        local.start_shard(0)  # no row that it knows of has changed: nothing tells it yet
        last = IDS + 20 * 39
        with kvemb.connect(local.url, trainer="b") as cluster:
            ack = cluster.table("t").push(last, -np.ones((20, 4), np.float32))
            with pytest.raises(ShardFailedError, match=r"JournalBehindError.*id 780.*version \(1, 40\).*--roll-back"):
                ack.wait_applied(PATIENCE_S)
        assert (lossy.rows(last) == 1).all()
        assert lossy.refused().startswith("JournalBehindError: ")
        assert (lossy.rows(last) == 1).all()


@pytest.mark.full
def test_a_shard_that_cannot_tell_at_its_start_stops_at_the_first_row_that_is_ahead(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis") as local:
        lossy = Lossy(local)
        with lossy.cluster:
            lossy.push(20)
            local.shards[0].stop(PATIENCE_S)  # its state holds these rows: they are not looked at when it starts
            local.start_shard(0)
            lossy.push(20)
        lossy.lose(remove_the_last_segment, forget=True)
        local.start_shard(0)
        with kvemb.connect(local.url, trainer="b") as cluster:
            ack = cluster.table("t").push(IDS, -np.ones((20, 4), np.float32))
            with pytest.raises(ShardFailedError, match=r"JournalBehindError.* version \(2, 40\) in storage, expected version \(1, 20\)"):
                ack.wait_applied(PATIENCE_S)
        assert (lossy.rows() == 40).all()
        assert lossy.refused().startswith("JournalBehindError: ")


@pytest.mark.parametrize("kind", one_of("memcached", "redis"))
def test_by_order_a_shard_goes_back_to_where_its_journal_ends_on_every_row(kind: str, require_server: Callable[[str], str]) -> None:
    require_server(PROGRAMS[kind])
    with LocalCluster(kind, 2) as local:
        lossy = Lossy(local)
        with lossy.cluster as cluster:
            lossy.push(100)
            lossy.lose(cut_behind_an_entry, forget=False)
            local.start_shard(0, "--roll-back")
            with pytest.raises(ShardFailedError, match=r"remembers 92 of the 100 parts .* 8 acknowledged parts are missing"):
                lossy.table.push(IDS, -np.ones((20, 4), np.float32)).wait(PATIENCE_S)
            with pytest.raises((ShardFailedError, FencedError)):
                cluster.flush()
            until(lambda: bool((lossy.rows() == 92).all()))
            until(lambda: (note := lossy.told()) is not None and (note.epoch, note.k) == (2, 92))
        local.shards[0].kill()
        local.start_shard(0)  # and from here on as always
        with kvemb.connect(local.url) as again:
            again.table("t").push(IDS, -np.ones((20, 4), np.float32)).wait_applied(PATIENCE_S)
        assert (lossy.rows() == 93).all()


@pytest.mark.full
def test_an_entry_that_a_crash_cut_off_before_it_was_acknowledged_is_no_loss(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis") as local:
        lossy = Lossy(local)
        with lossy.cluster:
            lossy.push(10)
        lossy.lose(lambda journal: None, forget=False)
        with newest(lossy.journal).open("ab") as file:
            file.write(b"kvembent" + bytes(100))
        local.start_shard(0)
        assert (lossy.rows() == 10).all()
