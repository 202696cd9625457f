"""Control records (markers, owners, the cluster map, the registry, primaries) that another program writes over, on some nodes or on all."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest
from jobs import PATIENCE_S, add, counting_table, eventually, require

import kvemb
from kvemb.commands.status_command import repair
from kvemb.config import load
from kvemb.coordination.map_copies import MAP_NAME
from kvemb.coordination.markers import MARKER_KEY
from kvemb.coordination.registry_format import META_NAME
from kvemb.coordination.shard_owners import Owner, newest_owner, owner_name
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.net.deadline import Deadline
from kvemb.schema.slots import N_SLOTS, text_slot
from kvemb.stores.redis_cluster.slot_map import marker_keys
from kvemb.stores.redis_cluster.whole_primaries import MEMBERS, decode_members
from kvemb.stores.storage_kinds import open_store
from tests.real_servers import memcached_client, redis_client

IDS = np.arange(600)
Harm = Callable[[bytes | None], bytes | None]
HARM: dict[str, Harm] = {
    "junk": lambda value: b"junk",
    "empty": lambda value: b"",
    "cut short": lambda value: (value or b"")[: len(value or b"") // 2],
    "gone": lambda value: None,
    "of an earlier owner": lambda value: Owner(1, 2).encode(),
    "too large": lambda value: b"x" * (900 << 10),
    "far too large": lambda value: b"x" * (3 << 20),
}
WHERE = ([1], [0, 2], [0, 1, 2])


@pytest.fixture
def cluster(kind: str) -> Iterator[LocalCluster]:
    with LocalCluster(kind, 3, shards=2, memory_mb=128, barrier_timeout_s=None) as local:
        yield local


def write(server: StorageServer, key: bytes, harm: Harm | None) -> None:
    """Put something else in the place of a value; None: a list."""
    if server.kind == "memcached":
        with closing(memcached_client(server)) as client:
            value = (harm or HARM["junk"])(client.get(key))
            if value is None:
                client.delete(key, noreply=False)
            else:
                client.set(key, value[: 900 << 10], noreply=False)
        return
    with redis_client(server) as redis:
        value = harm(redis.get(key)) if harm is not None else None
        redis.delete(key)
        if harm is None:
            redis.rpush(key, "a")
        elif value is not None:
            redis.set(key, value)


def harm_records(local: LocalCluster, nodes: Sequence[int], harm: Harm | None, *, markers: bool = True) -> None:
    """Write over every control record on these nodes; a Redis Cluster has one copy of each, and markers in thousands of slots."""
    names = [META_NAME.encode(), MAP_NAME.encode(), owner_name(0).encode(), owner_name(1).encode()]
    if local.store != "redis-cluster":
        for node in nodes:
            for key in [*names, *[MARKER_KEY][: int(markers)]]:
                write(local.servers[node], key, harm)
        return
    bounds = np.array([N_SLOTS * node // 3 for node in range(1, 3)])
    slots = [node * N_SLOTS // 3 + 77 for node in nodes]
    for key in [*names, MEMBERS.encode(), *(marker_keys()[slot] for slot in slots if markers)]:
        write(local.servers[int(np.searchsorted(bounds, text_slot(key), side="right"))], key, harm)


def require_whole(local: LocalCluster, epochs: Sequence[int]) -> None:
    """Every copy is good again, and no owner's epoch has gone back."""
    with open_store(load(local.config_path, {}).storage, role="shard:9") as store:
        assert store.open(Deadline.after(60))
        assert None not in store.values.get(META_NAME, Deadline.after(60))
        assert len(set(store.values.get(META_NAME, Deadline.after(60)))) == 1
        assert set(store.values.get(MAP_NAME, Deadline.after(60))) == {store.nodes.cluster_map.encode()}
        for shard, least in enumerate(epochs):
            copies = set(store.values.get(owner_name(shard), Deadline.after(60)))
            assert len(copies) == 1
            owner = newest_owner(copies, shard)
            assert owner is not None
            assert owner.epoch >= least
        if local.store == "redis-cluster":
            assert len(decode_members(store.values.get(MEMBERS, Deadline.after(60))[0])) == 3


def is_whole(local: LocalCluster, epochs: Sequence[int]) -> bool:
    try:
        require_whole(local, epochs)
    except AssertionError:
        return False
    return True


def test_damaged_control_records_are_mended_while_the_cluster_works(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url, timeout_s=PATIENCE_S) as connected:
        table, much = counting_table(connected, "copies"), 0
        every = 3 if cluster.store == "redis-cluster" else 1  # it has thousands of markers to renew each time
        for number, (what, harm) in enumerate([("a list", None), *HARM.items()][::every]):
            harm_records(cluster, WHERE[number % 3], harm)
            add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
            much += 1
            require(table, IDS, much)
            if number % 2:
                repair(connected.config, all_nodes=True)
            eventually(lambda: is_whole(cluster, [1, 1]), f"every copy is good again: {what}")
        with kvemb.connect(cluster.url, timeout_s=PATIENCE_S) as another:
            require(another.table("copies"), IDS, much)


@pytest.mark.full
def test_damaged_copies_are_mended_on_nodes_that_need_no_repair(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url, timeout_s=PATIENCE_S) as connected:
        table = counting_table(connected, "copies")
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
        for nodes, harm in zip(WHERE, (HARM["junk"], None, HARM["of an earlier owner"]), strict=True):
            harm_records(cluster, nodes, harm, markers=False)
            eventually(lambda: is_whole(cluster, [1, 1]), "every copy is good again")
        require(table, IDS, 1)


@pytest.mark.full
def test_shards_start_and_trainers_connect_although_control_records_are_damaged(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url, timeout_s=PATIENCE_S) as connected:
        add(counting_table(connected, "copies"), IDS).wait_applied(timeout_s=PATIENCE_S)
    for number, (nodes, harm) in enumerate(zip(WHERE, (HARM["junk"], None, HARM["cut short"]), strict=True)):
        for shard in cluster.shards:
            shard.signal(signal.SIGTERM if number else signal.SIGKILL)
            shard.stop(PATIENCE_S)
        harm_records(cluster, nodes, harm)
        for shard_number in range(2):
            cluster.launch_shard(shard_number)
        with kvemb.connect(cluster.url, timeout_s=PATIENCE_S) as connected:
            table = connected.table("copies")
            add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
            require(table, IDS, number + 2)
        eventually(lambda: is_whole(cluster, [number + 2, number + 2]), "every copy is good again")  # noqa: B023
