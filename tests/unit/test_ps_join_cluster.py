"""Start-up: which shard provisions, the owner of a shard, and when a start is refused. And the registry of tables in storage."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgpack
import pytest
from memory_store import MemoryStore, memory_node

import kvemb.init
import kvemb.optim
from kvemb import admit
from kvemb.config import StorageConfig
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker
from kvemb.coordination.registry_format import META_NAME
from kvemb.errors import (
    DeadlineExceededError,
    InvalidInputError,
    KvembError,
    NodeUnavailableError,
    NotProvisionedError,
    ParameterServerError,
    ShardUnavailableError,
    TableMismatchError,
    UnknownTableError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import BY_COMMAND, GONE, IN_FILE, ClusterMap, NodePlace
from kvemb.schema.keys import table_tag
from kvemb.schema.policies import KEPT_CHANGES
from kvemb.schema.table_def import TableDef
from paramserver.model.table_registry import Registry
from paramserver.recovery.join_cluster import CLUSTER, INTENT, StorageWait, join_cluster, keep_identity, kept_place
from paramserver.recovery.start_report import StartReport
from paramserver.shard_process.data_dir import DataDir

_NUMBERS = count()
Folder = Callable[[Path, int], DataDir]
TABLE = TableDef("user", 4, kvemb.optim.adam(), kvemb.init.normal())


def addresses() -> tuple[str, ...]:
    number = next(_NUMBERS)
    return f"owner-{number}-a:1", f"owner-{number}-b:1"


def waiting(timeout_s: float, wait: Callable[[float], None]) -> StorageWait:
    return StorageWait(Deadline.after(timeout_s), wait, StartReport())


def make_store(nodes: tuple[str, ...]) -> MemoryStore:
    return MemoryStore(StorageConfig("memory", nodes), role="shard:0")


def join(
    nodes: tuple[str, ...], data: DataDir, shard: int = 0, *, wait: Callable[[float], None] | None = None, timeout_s: float = 0.0
) -> bytes:
    def no_wait(pause_s: float) -> None:
        raise AssertionError("waited")

    found = join_cluster(make_store(nodes), data, shard, 1, name="test", timeout_s=5, again=waiting(timeout_s, wait or no_wait))
    keep_identity(data, found)
    return found.cluster_id


def test_shard_0_provisions_once_and_the_others_join(folder: Folder, tmp_path: Path) -> None:
    nodes = addresses()
    first = join(nodes, folder(tmp_path, 0))
    assert join(nodes, folder(tmp_path, 1), 1) == first
    assert len(first) == 16


def test_nodes_that_take_long_to_answer_get_more_time_from_try_to_try(folder: Folder, tmp_path: Path) -> None:
    given: list[float] = []

    class Slow(MemoryStore):
        def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
            given.append(deadline.timeout_s)
            if deadline.timeout_s < 30:
                raise DeadlineExceededError("thousands of markers")
            return super().open(deadline, known)

    store = Slow(StorageConfig("memory", addresses()), role="shard:0")
    join_cluster(store, folder(tmp_path, 0), 0, 1, name="test", timeout_s=8, again=waiting(1000, lambda pause_s: None))
    assert given[:3] == [8, 16, 32]


def test_another_shard_waits_for_shard_0_and_gives_up_at_its_deadline(folder: Folder, tmp_path: Path) -> None:
    nodes = addresses()
    with pytest.raises(NotProvisionedError):
        join(nodes, folder(tmp_path, 1), 1)
    provisioned = lambda pause_s: join(nodes, folder(tmp_path, 0))  # noqa: E731
    data = folder(tmp_path / "other", 1)
    assert join(nodes, data, 1, wait=provisioned, timeout_s=30) == join(nodes, data, 1)


def test_nodes_that_come_up_late_are_waited_for(folder: Folder, tmp_path: Path) -> None:
    nodes = addresses()
    node = memory_node(nodes[1])
    node.down = True
    with pytest.raises(NodeUnavailableError):
        join(nodes, folder(tmp_path / "a", 0))
    join(nodes, folder(tmp_path / "b", 0), wait=lambda pause_s: setattr(node, "down", False), timeout_s=30)


def test_a_provisioning_that_was_broken_off_is_completed_with_the_same_identity(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    memory_node(nodes[1]).put(b"foreign", b"value")
    with pytest.raises(WrongNodeError, match="not empty"):
        join(nodes, data)
    intent = data.read(INTENT)
    memory_node(nodes[1]).flush()
    cluster_id = join(nodes, data)
    assert cluster_id in (intent or b"")
    # And the other half: one node has its marker, the other not.
    (data.path / "cluster").unlink()
    memory_node(nodes[1]).flush()
    assert join(nodes, data) == cluster_id


@pytest.mark.parametrize("lost", [slice(1), slice(2)], ids=["one", "all"])
def test_nodes_that_lost_their_data_are_joined_to_be_repaired_and_never_provisioned_again(
    folder: Folder, tmp_path: Path, lost: slice
) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    cluster_id = join(nodes, data)
    for node in nodes[lost]:
        memory_node(node).flush()
    assert join(nodes, data) == cluster_id
    assert not any(memory_node(node).values for node in nodes[lost])


def test_the_nodes_of_another_cluster_are_refused(folder: Folder, tmp_path: Path) -> None:
    data = folder(tmp_path, 0)
    join(addresses(), data)
    other = addresses()
    join(other, folder(tmp_path / "other", 0))
    with pytest.raises(WrongNodeError, match=r"hold the rows of cluster .*The data folder .* is of cluster"):
        join(other, data)


def test_a_folder_and_nodes_of_an_earlier_release_are_told_by_the_markers(folder: Folder, tmp_path: Path) -> None:
    nodes, data = addresses(), folder(tmp_path, 0)
    cluster_id = join(nodes, data)
    data.write(CLUSTER, [msgpack.packb({"cluster_id": cluster_id, "generation": b"lifetime"})])  # without the cluster map
    for index, node in enumerate(nodes):
        memory_node(node).put(MARKER_KEY, msgpack.packb(["kvemb-marker", 3, cluster_id, index, b"lifetime", 0, 0, ""]))
    with pytest.raises(WrongNodeError, match="its marker has format 3, this release of kvemb reads 5 and 6"):
        join(nodes, data)
    with pytest.raises(NotProvisionedError, match=r"The data folder .* is an older cluster's. .* \(parameter_servers.data_dir\)"):
        join(addresses(), data)  # the checkpoint's new nodes, and the old folder


def test_a_shard_that_has_left_is_not_where_another_one_is_whose_address_stands_at_its_position(folder: Folder, tmp_path: Path) -> None:
    left = replace(ClusterMap.first(1, 3), shards=(NodePlace("", IN_FILE), NodePlace("", GONE), NodePlace("c:3", BY_COMMAND)))
    for shard in (1, 2):
        data = folder(tmp_path, shard)
        keep_identity(data, Identity(b"c" * 16, b"g" * 8, left))
    assert kept_place(tmp_path, 1, ("a:1", "c:3")) == ""
    assert kept_place(tmp_path, 1, ("a:1", "b:2")) == "b:2"  # it is to join again
    assert kept_place(tmp_path, 2, ("a:1", "c:3")) == "c:3"
    assert kept_place(tmp_path / "empty", 1, ("a:1", "c:3")) == "c:3"


def test_one_process_per_data_folder(folder: Folder, tmp_path: Path) -> None:
    first = folder(tmp_path, 0)
    with pytest.raises(ParameterServerError, match="another process runs shard 0"):
        folder(tmp_path, 0)
    folder(tmp_path, 1)
    first.close()
    folder(tmp_path, 0)


# --- the registry -------------------------------------------------------------------------------------------------------------------------


MakeRegistry = Callable[..., Registry]


@pytest.fixture
def registry(folder: Folder, tmp_path: Path) -> MakeRegistry:
    numbers = count()

    def make(nodes: tuple[str, ...], shard: int = 0) -> Registry:
        made = Registry(make_store(nodes), shard, 5, folder(tmp_path / str(next(numbers)), shard))
        made.load()
        return made

    return make


def test_a_created_table_is_on_every_node_and_found_by_the_other_shards(registry: MakeRegistry) -> None:
    nodes = addresses()
    other = registry(nodes, 1)
    created = registry(nodes).create(TABLE, exist_ok=False)
    assert all(META_NAME.encode() in memory_node(node).values for node in nodes)
    assert other.find("user", TABLE.schema) == created
    with pytest.raises(UnknownTableError, match="existing: user"):
        other.find("usr")


def test_another_identity_is_refused_and_another_default_is_not(registry: MakeRegistry) -> None:
    first = registry(addresses())
    first.create(TABLE, exist_ok=True)
    with pytest.raises(TableMismatchError, match="dim: exists with 4, asked for 8"):
        first.create(TableDef("user", 8, kvemb.optim.adam(), kvemb.init.normal()), exist_ok=True)
    with pytest.raises(InvalidInputError, match="exist_ok"):
        first.create(TABLE, exist_ok=False)
    again = first.create(TableDef("user", 4, kvemb.optim.adam(lr=0.7), kvemb.init.normal()), exist_ok=True)
    assert again == TABLE


def test_a_table_that_exists_keeps_its_algorithm_of_first_values(registry: MakeRegistry) -> None:
    made = registry(addresses())
    earlier = made.create(replace(TABLE, init_algorithm=1), exist_ok=False)
    assert made.create(TABLE, exist_ok=True) == earlier
    with pytest.raises(TableMismatchError, match="seed"):
        made.create(replace(TABLE, seed=9), exist_ok=True)


def test_tags_are_unique(registry: MakeRegistry) -> None:
    by_tag: dict[bytes, str] = {}
    pair = next((by_tag[tag], f"t{n}") for n in count() if by_tag.setdefault(tag := table_tag(f"t{n}"), f"t{n}") != f"t{n}")
    made = registry(addresses())
    first, second = (made.create(TableDef(name, 1, kvemb.optim.sgd(), kvemb.init.zeros()), exist_ok=False) for name in pair)
    assert (first.tag_attempt, second.tag_attempt) == (0, 1)
    assert first.tag != second.tag


def test_records_too_large_for_the_store_are_refused_at_creation(registry: MakeRegistry) -> None:
    made = registry(addresses())
    with pytest.raises(InvalidInputError, match="at most 1048576"):
        made.create(TableDef("wide", 65536, kvemb.optim.adam(amsgrad=True), kvemb.init.zeros()), exist_ok=True)
    assert made.tables == []


def test_a_creation_that_was_broken_off_is_completed_by_the_next_one(registry: MakeRegistry) -> None:
    nodes = addresses()
    made = registry(nodes)
    memory_node(nodes[1]).down = True
    for _ in range(2):
        with pytest.raises(KvembError):
            made.create(TABLE, exist_ok=True)
    memory_node(nodes[1]).down = False
    made.create(TableDef("item", 1, kvemb.optim.sgd(), kvemb.init.zeros()), exist_ok=True)
    assert [table.name for table in registry(nodes, 1).tables] == ["item", "user"]


def test_a_shard_takes_nothing_by_policies_that_it_cannot_read_yet(registry: MakeRegistry) -> None:
    nodes = addresses()
    first, other = registry(nodes), registry(nodes, 1)
    first.create(TABLE, exist_ok=True)
    first.set_policies("user", {"admission": {"kind": "after", "n": 2}})
    for node in nodes:
        memory_node(node).down = True
    for _ in range(2):
        with pytest.raises(KvembError):
            other.reach(first.serial)
    for node in nodes:
        memory_node(node).down = False
    with pytest.raises(ShardUnavailableError, match="serial 3"):
        other.reach(first.serial + 1)
    other.reach(first.serial)
    assert [other.policies(TABLE.key, serial).admission for serial in (0, 1, 2)] == [admit.after(2), admit.any(), admit.after(2)]


def test_a_change_of_policies_that_was_broken_off_is_completed_by_the_same_call(registry: MakeRegistry) -> None:
    nodes = addresses()
    first = registry(nodes)
    first.create(TABLE, exist_ok=True)
    memory_node(nodes[1]).down = True
    with pytest.raises(KvembError):
        first.set_policies("user", {"admission": {"kind": "after", "n": 2}})
    memory_node(nodes[1]).down = False
    first.set_policies("user", {"admission": {"kind": "after", "n": 2}})
    assert registry(nodes, 1).policies(TABLE.key).admission == admit.after(2)
    copies = {memory_node(node).values[META_NAME.encode()][0] for node in nodes}
    assert len(copies) == 1


def test_only_the_last_changes_of_policies_are_kept(registry: MakeRegistry) -> None:
    first = registry(addresses())
    first.create(TABLE, exist_ok=True)
    for n in range(2, 20):
        first.set_policies("user", {"admission": {"kind": "after", "n": n}})
    assert first.policies(TABLE.key, 1).admission == admit.after(20 - KEPT_CHANGES)
    assert first.policies(TABLE.key).admission == admit.after(19)


def test_a_shard_puts_a_registry_back_that_is_older_than_a_copy_only_where_that_is_damaged(registry: MakeRegistry) -> None:
    nodes = addresses()
    behind, first = registry(nodes, 1), registry(nodes)
    first.create(TABLE, exist_ok=True)
    newest, older = first.put_back(None), behind.put_back(None)
    assert newest is not None
    assert older is not None
    assert (behind.put_back(newest), first.put_back(older), behind.put_back(b"junk")) == (None, newest, older)


def test_nodes_that_all_have_an_older_registry_than_shard_0_get_it_from_its_folder(registry: MakeRegistry) -> None:
    nodes = addresses()
    first = registry(nodes)
    first.create(TABLE, exist_ok=True)
    older = {node: memory_node(node).values[META_NAME.encode()][0] for node in nodes}
    first.create(TableDef("item", 1, kvemb.optim.sgd(), kvemb.init.zeros()), exist_ok=True)
    for node, copy in older.items():
        memory_node(node).put(META_NAME.encode(), copy)
    first.load()
    assert [table.name for table in registry(nodes, 1).tables] == ["item", "user"]


def test_a_process_that_was_shard_0_does_not_take_back_a_registry_of_its_successor(registry: MakeRegistry) -> None:
    nodes = addresses()
    zombie, first = registry(nodes), registry(nodes)
    first.create(TABLE, exist_ok=True)
    other = TableDef("item", 1, kvemb.optim.sgd(), kvemb.init.zeros())
    with pytest.raises(ShardUnavailableError, match="another process has changed the registry"):
        zombie.create(other, exist_ok=True)
    assert [table.name for table in registry(nodes, 1).tables] == ["user"]


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def full(self: DataDir, name: str, chunks: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DataDir, "write", full)
        yield


def test_what_cannot_be_kept_in_the_folder_is_not_begun_and_what_was_begun_is_ended_all_the_same(
    registry: MakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, wider = addresses(), replace(TABLE, dim=8)
    first = registry(nodes)
    first.create(TABLE, exist_ok=True)
    with full_disk(monkeypatch):
        for begin in (
            lambda: first.create(replace(TABLE, name="item"), exist_ok=True),
            lambda: first.begin_alter(TABLE.key, wider),
            lambda: first.begin_drop("user"),
            lambda: first.set_policies("user", {"admission": {"kind": "after", "n": 2}}),
        ):
            with pytest.raises(ParameterServerError, match="No space left"):
                begin()
    first.load()
    assert (first.serial, registry(nodes, 1).serial, first.unfinished, dict(first.altering)) == (1, 1, "", {})
    first.begin_alter(TABLE.key, wider)
    with full_disk(monkeypatch):
        first.abort_alter("user")
    key = first.begin_alter(TABLE.key, wider).key
    with full_disk(monkeypatch):
        first.switch(key)
    assert (dict(first.altering), dict(registry(nodes, 1).altering)) == ({}, {})
    first.load()  # as shard 0 does now and then: its folder has it, too
    for node in nodes:
        memory_node(node).flush()
    first.load()
    assert first.find("user").dim == 8


def test_a_shard_that_cannot_keep_a_newer_registry_takes_nothing_by_it_and_asks_again(
    registry: MakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = addresses()
    first, other = registry(nodes), registry(nodes, 1)
    first.create(TABLE, exist_ok=True)
    with full_disk(monkeypatch):
        for _ in range(2):
            with pytest.raises(ShardUnavailableError, match="No space left"):
                other.reach(first.serial)
    other.reach(first.serial)
    assert other.find("user") == first.find("user")


def test_only_shard_0_creates_tables(registry: MakeRegistry) -> None:
    with pytest.raises(ParameterServerError, match="shard 0"):
        registry(addresses(), 1).create(TABLE, exist_ok=True)
