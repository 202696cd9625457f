"""Faults of storage servers: emptied, full, set to evict, sent back to an old snapshot. Talks to the servers past the proxies."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import numpy as np
from pymemcache.client.base import Client
from pymemcache.exceptions import MemcacheError

from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.schema.keys import RowKeys
from tests.real_servers import memcached_client, redis_client

_JUNK = "junk:%0*d"
_KEY_BYTES = RowKeys(b"abc", np.zeros(1, np.uint64)).encode().shape[1]  # junk of a record's size lies where records lie
_MAX_JUNK = 2_000_000
_LEFT_BYTES = 40 << 20  # of pages left to values of a record's size


def flush(server: StorageServer) -> None:
    """Make it forget everything: FLUSHALL, or flush_all and a moment in which nothing older can come back."""
    if server.kind == "memcached":
        with closing(memcached_client(server)) as client:
            client.flush_all(noreply=False)
    else:
        with redis_client(server) as client:
            client.flushall()


def snapshot(server: StorageServer) -> None:
    """Keep what a Redis or Valkey server holds, for `FaultyCluster.restart_nodes(…, snapshot=True)`."""
    with redis_client(server) as client:
        client.save()
    shutil.copyfile(server.snapshot_path, server.snapshot_path.with_suffix(".kept"))


def has_snapshot(server: StorageServer) -> bool:
    """Whether `snapshot` has kept one."""
    return server.snapshot_path.with_suffix(".kept").exists()


def swap_databases(server: StorageServer) -> None:
    """Let a Redis or Valkey server show what was in its second database, in the same process."""
    with redis_client(server) as client:
        client.swapdb(0, 1)


def set_policy(server: StorageServer, policy: str) -> None:
    """Change maxmemory-policy of a Redis or Valkey server while it runs."""
    with redis_client(server) as client:
        client.config_set("maxmemory-policy", policy)


@contextmanager
def full(server: StorageServer, record_bytes: int = 100) -> Iterator[None]:
    """Have a node without room for one more record, for the length of a `with` block.

    Redis: its limit is set below what it uses, so every write is refused. memcached: filled with values of others until it refuses one
    of a record's size (it goes on taking values of other sizes where it has set pages aside for them).

    Args:
        server: which.
        record_bytes: size of a record.
    """
    if server.kind == "memcached":
        with closing(memcached_client(server)) as client:
            names = _fill(client, record_bytes)
            try:
                yield
            finally:
                client.version()  # pymemcache has closed its socket after the refusal
                client.sock.sendall(b"".join(b"delete %s noreply\r\n" % name.encode() for name in names))
                client.version()  # answered when all of it has been done
        return
    with redis_client(server) as client:
        limit = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            client.config_set("maxmemory", limit)


def _fill(client: Client, record_bytes: int) -> list[str]:
    """Take most pages with large values and the rest with values of a record's size; return the keys.

    Pages stay with the size that they were first used for, so enough of them must go to records: deleting the junk gives those back.
    """
    names: list[str] = []

    def put(size: int, n: int) -> None:
        more = [_JUNK % (_KEY_BYTES - 5, len(names) + i) for i in range(n)]
        names.extend(more)
        client.set(more[0], bytes(size), noreply=False)  # SERVER_ERROR when there is no room
        value = b" 0 0 %d noreply\r\n%s\r\n" % (size, bytes(size))
        client.sock.sendall(b"".join(b"set " + name.encode() + value for name in more[1:]))
        client.set(more[0], bytes(size), noreply=False)

    with suppress(MemcacheError):
        while _free_bytes(client) > _LEFT_BYTES:
            put(500_000, 8)
    with suppress(MemcacheError):
        while len(names) < _MAX_JUNK:
            put(record_bytes, 10_000)
    return names


def _free_bytes(client: Client) -> int:
    """Memory that belongs to no size of value yet."""
    return int(client.stats()[b"limit_maxbytes"]) - int(client.stats("slabs")[b"total_malloced"])
