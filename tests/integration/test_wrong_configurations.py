"""A kvemb.yaml that leads to another cluster's nodes or folders: nothing is changed there, and no advice comes before whose they are."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.commands.status_command import render
from kvemb.config import load
from kvemb.coordination.shard_notes import newest_note, note_name
from kvemb.errors import InvalidInputError, KvembError, WrongNodeError
from kvemb.local_cluster.launcher import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.operate.cluster_status import healthy, survey
from kvemb.operate.examination import examine
from kvemb.protocol.message_format import installed_version
from kvemb.stores.storage_kinds import open_store
from paramserver.lifecycle.start import start
from tests.real_servers import ServerNodes

PATIENCE_S = 60.0
IDS = np.arange(50)
DANGEROUS = re.compile(r"empt(y|ied)|delet|remov|flush|roll-back|take-over|new cluster", re.IGNORECASE)
HARMLESS = re.compile(r"a new cluster begins on empty nodes|has to be empty: give|give a new cluster a data_dir", re.IGNORECASE)


@dataclass
class Trial:
    """A new cluster to be set up beside one that lives, and its kvemb.yaml with a mistake."""

    prod: LocalCluster
    folder: Path

    def config(self, name: str, nodes: list[str], data_dir: Path, shards: Sequence[str] = ("127.0.0.1:1", "127.0.0.1:2")) -> Path:
        tree = yaml.safe_load(self.prod.config_path.read_text())
        tree["cluster"], tree["storage"]["nodes"] = name, nodes
        tree["parameter_servers"]["data_dir"] = str(data_dir)
        tree["parameter_servers"]["shards"] = list(shards)
        tree["tables"] = {"mine": {"dim": 2, "optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}}
        path = self.folder / "kvemb.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    @property
    def nodes(self) -> list[str]:
        return [server.address for server in self.prod.servers]

    @property
    def name(self) -> str:
        return self.prod.folder.name

    def copied(self, shard: int, to: int) -> Path:
        root = self.folder / "copied"
        shutil.copytree(self.prod.folder / "shards" / f"shard-{shard}", root / f"shard-{to}")
        return root

    def own(self, spare: ServerNodes) -> Path:
        """The data folder of a cluster of one's own."""
        root = self.folder / "own"
        self.started(self.config("trial", list(spare.config.nodes), root), 0)
        return root

    def started(self, path: Path, shard: int, **options: bool) -> None:
        def wait(pause_s: float) -> None:
            pass

        start(load(path, {}), shard, listen="127.0.0.1:0", start_timeout_s=2.0, wait=wait, **options).stop(PATIENCE_S)


@pytest.fixture(scope="module")
def prod(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2, memory_mb=64) as local:
        with kvemb.connect(local.url) as cluster:
            table = cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            table.push(IDS, np.ones((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)
        with open_store(load(local.config_path, {}).storage, role="trainer") as store:
            store.open(Deadline.after(PATIENCE_S))
            deadline = Deadline.after(PATIENCE_S)
            while any(newest_note(store.values.get(note_name(shard), deadline)) is None for shard in (0, 1)):
                assert not deadline.expired
        yield local


@pytest.fixture
def trial(prod: LocalCluster, tmp_path: Path) -> Trial:
    return Trial(prod, tmp_path)


@pytest.fixture
def spare(prod: LocalCluster, tmp_path: Path) -> Iterator[ServerNodes]:
    (tmp_path / "nodes").mkdir()
    made = ServerNodes("redis", 2, tmp_path / "nodes", 64)
    yield made
    made.close()


def contents(trial: Trial) -> list[dict[str, bytes | None]]:
    """Every small value of the living cluster but what its shards renew themselves."""
    names = ["kvemb:map", "kvemb:tables", "kvemb:owner:0", "kvemb:owner:1", "kvemb:owner:2"]
    with open_store(load(trial.prod.config_path, {}).storage, role="trainer") as store:
        store.open(Deadline.after(PATIENCE_S))
        copies = {name: store.values.get(name, Deadline.after(PATIENCE_S)) for name in names}
    return [{name: found[node] for name, found in copies.items()} for node in range(2)]


def empty(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config("trial", trial.nodes, trial.folder / "none"), 0


def empty_of_the_same_name(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config(trial.name, trial.nodes, trial.folder / "none"), 0


def empty_of_shard_1(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config(trial.name, trial.nodes, trial.folder / "none"), 1


def a_joining_one(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config("trial", trial.nodes, trial.folder / "none"), 2


def own_folder(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config("trial", trial.nodes, trial.own(spare)), 0


def own_folder_and_one_foreign_node(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config("trial", [spare.config.nodes[0], trial.nodes[1]], trial.own(spare)), 0


def one_foreign_node(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config("trial", [spare.config.nodes[0], trial.nodes[1]], trial.folder / "none"), 0


def the_living_folder(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config("trial", trial.nodes, trial.prod.folder / "shards"), 0


def the_living_folder_of_the_same_name(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config(trial.name, trial.nodes, trial.prod.folder / "shards"), 0


def another_shards_folder(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    return trial.config(trial.name, trial.nodes, trial.copied(1, 0)), 0


def a_folder_without_its_state(trial: Trial, spare: ServerNodes) -> tuple[Path, int]:
    root = trial.copied(0, 0)
    (root / "shard-0" / "state").unlink()
    return trial.config(trial.name, trial.nodes, root), 0


CASES = {
    "another name, an empty folder": (empty, "which lives"),
    "the same name, an empty folder": (empty_of_the_same_name, "which lives"),
    "the same name, an empty folder, shard 1": (empty_of_shard_1, "which lives"),
    "another name, a shard that is to join": (a_joining_one, "which lives"),
    "another cluster's folder": (own_folder, "which lives"),
    "another cluster's folder, one node of each": (own_folder_and_one_foreign_node, "belongs to cluster"),
    "an empty folder, one node of each": (one_foreign_node, "that of cluster"),
    "the folder that lives, another name": (the_living_folder, "is of cluster"),
    "the folder that lives, the same name": (the_living_folder_of_the_same_name, "another process runs shard 0 from this folder"),
    "two shards' folders swapped": (another_shards_folder, "which lives"),
    "a folder without its state": (a_folder_without_its_state, "which lives"),
}


def assert_named_first(trial: Trial, text: str) -> None:
    """An error names the cluster of the data before any advice that might cost the data."""
    told = HARMLESS.sub("", text)
    if advice := DANGEROUS.search(told):
        named = re.search(rf"{trial.name}|cluster [0-9a-f]{{32}}", told)
        assert named is not None, text
        assert named.start() < advice.start(), text


@pytest.mark.parametrize(("make", "says"), CASES.values(), ids=CASES)
def test_a_start_by_mistake_is_told_whose_nodes_these_are_and_changes_nothing(
    trial: Trial, spare: ServerNodes, make: Callable[[Trial, ServerNodes], tuple[Path, int]], says: str
) -> None:
    path, shard = make(trial, spare)
    before = contents(trial)
    with pytest.raises(KvembError) as refused:
        trial.started(path, shard)
    text = str(refused.value)
    assert says in text
    assert contents(trial) == before
    assert_named_first(trial, text)
    with kvemb.connect(trial.prod.url) as cluster:  # and no process of it was shut out
        cluster.table("t").push(IDS, np.zeros((len(IDS), 2), np.float32)).wait_applied(PATIENCE_S)
        np.testing.assert_array_equal(cluster.table("t").pull(IDS), -1)


def test_after_the_mistake_is_corrected_the_same_folder_begins_a_cluster(trial: Trial, spare: ServerNodes) -> None:
    with pytest.raises(WrongNodeError):
        trial.started(empty(trial, spare)[0], 0)
    trial.started(trial.config("trial", list(spare.config.nodes), trial.folder / "none"), 0)


def test_a_node_of_another_cluster_does_not_join_and_is_said_to_be_its(trial: Trial, spare: ServerNodes) -> None:
    path = trial.config("trial", list(spare.config.nodes), trial.folder / "own", ["127.0.0.1:1"])
    made = start(load(path, {}), 0, listen="127.0.0.1:0", start_timeout_s=PATIENCE_S, wait=lambda pause_s: None)
    trial.config("trial", list(spare.config.nodes), trial.folder / "own", [made.address])
    try:
        with kvemb.nodes(str(path)) as nodes:
            with pytest.raises(WrongNodeError, match=rf"cluster '{trial.name}' \(\w+\), which lives.*[Nn]othing was changed") as refused:
                nodes.begin(nodes.add(trial.nodes[0]))
            assert not DANGEROUS.search(HARMLESS.sub("", str(refused.value)))
            with pytest.raises(InvalidInputError):
                nodes.add(spare.config.nodes[0])
    finally:
        made.stop(PATIENCE_S)


def assert_told_by_doctor_and_status(trial: Trial, path: Path, *says: str) -> None:
    """Both say first whose nodes these are, and change nothing."""
    before, config = contents(trial), load(path, {})
    first, *others = examine(config, installed_version()).findings
    assert (first.name, first.level) == ("node-marker", "error")
    assert "node-marker" not in {one.name for one in others}
    status = survey(config)
    assert not healthy(status)
    line = render(status).splitlines()[0]
    for text in (f"{first.what} {first.mend}", line):
        assert all(
            part in text for part in (f"cluster '{trial.name}' (", "which lives", "Nothing was changed", "Correct storage.nodes", *says)
        )
    assert contents(trial) == before


def test_doctor_and_status_say_whose_nodes_these_are_where_no_shard_answers(trial: Trial) -> None:
    assert_told_by_doctor_and_status(trial, trial.config("b", trial.nodes, trial.folder / "none"), "This kvemb.yaml is of cluster 'b'")


def test_doctor_and_status_say_that_the_nodes_are_not_those_of_the_shards_that_answer(trial: Trial, spare: ServerNodes) -> None:
    path = trial.config("sy", list(spare.config.nodes), trial.folder / "own", ["127.0.0.1:1"])
    made = start(load(path, {}), 0, listen="127.0.0.1:0", start_timeout_s=PATIENCE_S, wait=lambda pause_s: None)
    try:
        with open_store(load(path, {}).storage, role="trainer") as store:
            own = store.open(Deadline.after(PATIENCE_S))[0].cluster_id.hex()
        path = trial.config("sy", trial.nodes, trial.folder / "own", [made.address])
        assert_told_by_doctor_and_status(trial, path, f"shards that answer are of cluster {own}")
    finally:
        made.stop(PATIENCE_S)
