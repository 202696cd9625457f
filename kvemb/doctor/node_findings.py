"""What is wrong with a storage node, from what it says of itself. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence

from kvemb.doctor.finding import Finding, error, warning
from kvemb.schema.bucket_limits import BucketLimits, misfits
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import NodeStats

LEAST_HEADROOM = 0.1
LEAST_CONNECTIONS = 256
SLOW_S = 1.0
_OLDEST = {"redis": (6, 0), "valkey": (7, 0), "memcached": (1, 6)}
_SLOW = "Look at its host (CPU, swap, network), and for a command that takes long (SLOWLOG GET); kvemb bench compares the nodes."
_SILENT = "no complete answer within"  # so says `kvemb.net.exchange` of a server that was connected to
_UNREACHED = "Start it, or put its address right in storage.nodes. Shards wait for it and lose nothing; kvemb repair is not needed."


def judge_node(node: NodeStats, settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with one node.

    Args:
        node: as it answered, or why not.
        settings: see `Store.settings`.
    """
    where = f"node {node.address}"
    if node.error:
        yield _unreached(where, node.error)
        return
    if node.answer_s >= SLOW_S:
        yield warning("node-slow", where, f"answers, but took {node.answer_s:.1f} s to say how it is; pulls and shards wait as long", _SLOW)
    yield from _judge_version(where, node.server)
    yield from _judge_memory(where, node)
    yield from _judge_redis(where, settings) if "redis_version" in settings else _judge_memcached(where, settings)


def judge_limits(address: str, tables: Sequence[TableDef], limits: BucketLimits) -> Iterator[Finding]:
    """Yield which tables' rows a Redis or Valkey node keeps in a way that does not suit them.

    Args:
        address: of the node.
        tables: of the cluster.
        limits: up to where the node keeps hashes as compact strings.
    """
    mend = "Type that on the node and put it into its configuration. Rows that lie there already change when they are written next."
    for misfit in misfits(tables, limits):
        yield warning("node-hash-limits", f"node {address}", misfit, mend)


def _unreached(where: str, why: str) -> Finding:
    if re.search(r"(?i)name or service|name resolution|not known|no address associated", why):
        return error("node-name", where, why, "Its host name has no address here: mend the name in storage.nodes, or DNS.")
    if re.search(r"(?i)NOAUTH|WRONGPASS|NOPERM|authent|password", why):
        return error("node-password", where, why, "Set the variables that storage.username_env and password_env name.")
    if _SILENT in why:
        return error("node-hangs", where, f"takes connections, and does not answer: {why}", f"It is stopped, or far too slow. {_SLOW}")
    return error("node-unreachable", where, why, _UNREACHED)


def _judge_version(where: str, server: str) -> Iterator[Finding]:
    name, _, text = server.partition(" ")
    found = re.match(r"(\d+)\.(\d+)", text)
    oldest = _OLDEST.get(name)
    if found and oldest and (int(found[1]), int(found[2])) < oldest:
        yield error("node-version", where, f"is {server}", f"Run {name} {oldest[0]}.{oldest[1]} or newer.")


def _judge_memory(where: str, node: NodeStats) -> Iterator[Finding]:
    if node.evicted:
        what = f"has thrown {node.evicted:,} keys away since it was started"
        yield error("node-evicted", where, what, f"Give it more memory, then: kvemb repair --node {node.address}")
    if not node.limit_bytes:
        what = "has no memory limit: when the host is full the kernel ends it, and all its rows are restored"
        yield warning("node-no-limit", where, what, "CONFIG SET maxmemory, and in its file, to what the host can spare.")
    elif node.used_bytes > (1 - LEAST_HEADROOM) * node.limit_bytes:
        what = f"uses {node.used_bytes / 1e6:,.0f} of {node.limit_bytes / 1e6:,.0f} MB; full, it refuses writes and shards wait"
        yield error("node-headroom", where, what, "Raise its limit (maxmemory, or -m), or move to more nodes (docs/compose.md).")


def _judge_redis(where: str, settings: Mapping[str, str]) -> Iterator[Finding]:
    policy = settings.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        what = f"maxmemory-policy is {policy}: it evicts rows when memory is full"
        yield error("node-eviction", where, what, "CONFIG SET maxmemory-policy noeviction, and in redis.conf.")
    if settings.get("role") == "slave" and settings.get("cluster_enabled") != "1":
        what = f"is a replica of {settings.get('master_host')}: it takes no writes"
        yield error("node-replica", where, what, "Name the primary in storage.nodes, or run REPLICAOF NO ONE here.")
    # Without a schedule the server takes writes, whatever became of the last one.
    if settings.get("rdb_last_bgsave_status") == "err" and settings.get("save", "unknown"):
        what = "its last snapshot failed: it refuses writes while stop-writes-on-bgsave-error is on"
        yield error("node-snapshot-failed", where, what, 'Give its disk room, or switch snapshots off: CONFIG SET save "".')
    if settings.get("aof_enabled") == "1" or settings.get("save"):
        kind = "an append-only file" if settings.get("aof_enabled") == "1" else f"snapshots (save {settings['save']})"
        what = f"keeps {kind}, which costs writes and memory; shards bring rows back without it"
        yield warning("node-persistence", where, what, 'CONFIG SET save "" and CONFIG SET appendonly no, unless you mean it.')
    yield from _judge_connections(where, settings.get("maxclients", ""), "CONFIG SET maxclients 10000, and in redis.conf.")


def _judge_memcached(where: str, settings: Mapping[str, str]) -> Iterator[Finding]:
    unsafe = {
        "evictions": (settings.get("evictions") == "on", "evicts rows when memory is full"),
        "slab_reassign": (settings.get("slab_reassign") == "yes", "moves slab pages, and throws rows away with them"),
        "cas_enabled": (settings.get("cas_enabled") == "no", "knows no conditional writes"),
        "memory_file": (settings.get("memory_file", "") not in ("", "(null)"), "may come back old after a warm restart"),
    }
    for bad, why in unsafe.values():
        if bad:
            yield error("node-eviction", where, f"memcached {why}", "Start it with -M -o no_slab_reassign, without -C and -e.")
    if settings.get("lru_maintainer_thread") == "yes":
        what = "runs memcached's LRU maintainer, which nothing here needs"
        mend = "Start it with -o no_lru_maintainer -R 200: a third less CPU time per row (docs/adr/0021)."
        yield warning("node-lru-maintainer", where, what, mend)
    yield from _judge_connections(where, settings.get("maxconns", ""), "Start it with -c 4096.")


def _judge_connections(where: str, most: str, mend: str) -> Iterator[Finding]:
    if most.isdigit() and int(most) < LEAST_CONNECTIONS:
        yield warning("node-connections", where, f"takes {most} connections at most; every trainer and shard needs several", mend)
