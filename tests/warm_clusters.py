"""Clusters that the tests of one process hand on to one another: a start and an end cost more than most tests.

`with warm("valkey", shards=2) as local:` is a `LocalCluster` of those options, without tables. Who kills, moves or adds what it consists of
leaves none to others: what comes back changed is ended, but for shards that run again.
What a test wants to know of the start, the end, the count of batches, the size of a journal or of a server that hangs is asked of a
`LocalCluster` of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kvemb
from kvemb.errors import KvembError
from kvemb.local_cluster import LocalCluster

_PATIENCE_S = 20.0
_LOOK_S = 5.0
"""A cluster that does not answer so soon is ended."""
_MOST_IDLE = 2
"""So many clusters of a process wait for their next test; more take memory, and each a little time."""

_idle: list[tuple[dict[str, Any], LocalCluster]] = []  # the one that was given back last comes last


class _Patient(LocalCluster):
    """Its shards and nodes may take their time to answer: several tests share the machine."""

    def _config(self, *nodes: str, shards: list[str]) -> dict[str, Any]:
        tree: dict[str, Any] = super()._config(*nodes, shards=shards)
        return tree | {"storage": tree["storage"] | {"timeout_s": _PATIENCE_S}}


@contextmanager
def warm(store: str = "valkey", nodes: int = 1, **options: Any) -> Iterator[LocalCluster]:
    """Give a cluster of these options of `LocalCluster`; a test that fails ends it."""
    wanted = {"store": store, "nodes": nodes, **options}
    cluster = _taken(wanted) or _Patient(**wanted).__enter__()
    before = _parts(cluster)
    try:
        yield cluster
        usable = _parts(cluster) == before and _emptied(cluster)
    except BaseException:
        cluster.__exit__(None, None, None)
        raise
    if usable:
        _idle.append((wanted, cluster))
    else:
        cluster.__exit__(None, None, None)
    end_idle(_MOST_IDLE)


@contextmanager
def warm_url(store: str = "valkey", **options: Any) -> Iterator[str]:
    """Give what `kvemb.connect` takes, as `kvemb.local` does."""
    with warm(store, **options) as cluster:
        yield cluster.url


def end_idle(but: int = 0) -> None:
    """End those that wait, but for so many."""
    while len(_idle) > but:
        _idle.pop(0)[1].__exit__(None, None, None)


def _taken(wanted: dict[str, Any]) -> LocalCluster | None:
    for index in range(len(_idle) - 1, -1, -1):
        if _idle[index][0] == wanted:
            return _idle.pop(index)[1]
    return None


def _parts(cluster: LocalCluster) -> tuple[str, list[int], int]:
    """What it was started as, its storage servers, and how many shards it has; these may have been killed, and started again."""
    return cluster.config_path.read_text(), [server.process.pid for server in cluster.servers], len(cluster.shards)


def _emptied(cluster: LocalCluster) -> bool:
    """Drop its tables; return whether it is as one that has just been started."""
    processes = [*cluster.shards, *(server.process for server in cluster.servers)]
    if any(process.poll() is not None for process in processes):
        return False
    try:
        with kvemb.connect(cluster.url, trainer="warm", timeout_s=_LOOK_S) as client:
            for name in client.tables():
                client.drop_table(name, timeout_s=_LOOK_S)
            replies = [shard.reply for shard in client.status(timeout_s=_LOOK_S).shards]
            moved = client.store.nodes.cluster_map.serial != 1
    except KvembError:
        return False
    for process in processes:
        process.log.write_bytes(b"")
    return not moved and all(reply and not (reply.n_rows or reply.n_trainers or reply.failure or reply.repair) for reply in replies)
