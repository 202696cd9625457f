"""Findings: present and coming faults, each with its mend, of a storage node and of a shard, by their own answers. Pure."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvemb.client.shard_channel import HANGS, LAST_WORDS
from kvemb.config import Config
from kvemb.errors import n_of
from kvemb.operate.inspection_messages import ExamineReply
from kvemb.protocol.messages import DescribeReply, StatusReply
from kvemb.schema.bucket_limits import BucketLimits, misfits
from kvemb.schema.table_def import TableDef
from kvemb.stores.store_nodes import NodeStats

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """One finding of the doctor."""

    name: str  # of the kind of finding, for scripts: it does not change
    level: str  # ERROR: rows or pushes are in danger, or nothing goes on. WARNING: that may come, or the cost is higher than needed.
    where: str  # node, shard or file
    what: str  # the fault; without `where`, with which the messages of errors begin
    mend: str  # the next step

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", self.what.removeprefix(f"{self.where}: "))


def error(name: str, where: str, what: str, mend: str) -> Finding:
    """Make a finding that cannot wait."""
    return Finding(name, ERROR, where, what, mend)


def warning(name: str, where: str, what: str, mend: str) -> Finding:
    """Make a finding that can wait."""
    return Finding(name, WARNING, where, what, mend)


UNUSABLE = "tls-files"
_UNSET = re.compile(r"variables that are not set: ([^.]+)")  # the words of `TlsConfig.lacks`
LEAST_HEADROOM, NEARLY_FULL = 0.1, 0.7
LEAST_CONNECTIONS = 256
SLOW_S = 1.0
_NEVER = str(2**32 - 1)  # memcached's age of an item that no item reaches
_OLDEST = {"redis": (6, 0), "valkey": (7, 0), "memcached": (1, 6)}
_SLOW = "Look at its host (CPU, swap, network), and for a command that takes long (SLOWLOG GET); kvemb bench compares the nodes."
_READ_AHEAD_BYTES = 16 << 20  # what one connection may be sent at once: six steps of at most a megabyte, or of 1024 large rows
_LACKS = "commands that it does not know"  # of the settings of a Redis or Valkey
_SERVES_NOT = "does not serve now"  # of `kvemb.stores`, for a server that answers with an error
_SILENT = "no complete answer within"  # the words of `kvemb.net.exchange` for a server with an open connection
_PASSWORD = (
    "Where all nodes refuse, set the variables that storage.username_env and password_env name, here and for shards and trainers; where "
    "one does, give that node the users and passwords of the others."
)
_NO_TLS = "no TLS connection"  # the words of `kvemb.net.tls_link`
_SPEAK_TLS = "See that it speaks TLS at this port, takes this process's certificate, and that the address is right."
_WAITS = "It runs, and says why it does not serve. Shards wait for it and lose nothing; kvemb repair is not needed."
_UNREACHED = "Start it, or put its address right in storage.nodes. Shards wait for it and lose nothing; kvemb repair is not needed."


def judge_node(node: NodeStats, settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the faults of one node."""
    where = f"node {node.address}"
    if node.error:
        yield _unreached(where, node.error)
        return
    if node.answer_s >= SLOW_S:
        yield warning("node-slow", where, f"answers, but took {node.answer_s:.1f} s to say how it is; pulls and shards wait as long", _SLOW)
    yield from _judge_version(where, node.server)
    yield from _judge_memory(where, node)
    if "redis_version" in settings:
        yield from _judge_redis(where, settings)
        return
    if node.unsafe:  # of Redis it is one of its settings
        mend = "Then restart the shards that stopped for it (kvemb status)."
        yield error("node-eviction", where, node.unsafe.removeprefix(f"{where}: "), mend)
    yield from _judge_memcached(where, settings)


def judge_limits(address: str, tables: Sequence[TableDef], limits: BucketLimits) -> Iterator[Finding]:
    """Yield a finding for tables whose rows a Redis or Valkey node keeps in a form that does not suit them."""
    mend = "Type that on the node and put it into its configuration. Rows that lie there already change when they are written next."
    for misfit in misfits(tables, limits):
        yield warning("node-hash-limits", f"node {address}", misfit, mend)


def unusable_files(where: str, why: str) -> Finding:
    """Return the finding that no server can be asked with this process's keys, certificates and tokens."""
    unset = _UNSET.search(why)
    mend = (
        f"Set {unset[1]} for this process, to the files of its certificate and key (docs/security.md)."
        if unset
        else "See docs/security.md."
    )
    return error(UNUSABLE, where, why, mend)


def _unreached(where: str, why: str) -> Finding:
    if _UNSET.search(why):
        return unusable_files(where, why)
    if re.search(r"(?i)name or service|name resolution|not known|no address associated", why):
        return error("node-name", where, why, "Its host name has no address here: mend the name in storage.nodes, or DNS.")
    if re.search(r"(?i)NOAUTH|WRONGPASS|NOPERM|authent|password", why):
        return error("node-password", where, why, _PASSWORD)
    if _NO_TLS in why:
        return error("tls-refused", where, why, _SPEAK_TLS)
    if _SILENT in why:
        return error("node-hangs", where, f"takes connections, and does not answer: {why}", f"It is stopped, or far too slow. {_SLOW}")
    return error("node-unreachable", where, why, _WAITS if _SERVES_NOT in why else _UNREACHED)


def _judge_version(where: str, server: str) -> Iterator[Finding]:
    name, _, text = server.partition(" ")
    found = re.match(r"(\d+)\.(\d+)", text)
    oldest = _OLDEST.get(name)
    if found and oldest and (int(found[1]), int(found[2])) < oldest:
        yield error("node-version", where, f"is {server}", f"Run {name} {oldest[0]}.{oldest[1]} or newer.")


def _judge_memory(where: str, node: NodeStats) -> Iterator[Finding]:
    if node.evicted:
        what = f"has thrown {n_of(node.evicted, 'key')} away since it was started"
        yield error("node-evicted", where, what, f"Give it more memory, then: kvemb repair --node {node.address}")
    if not node.limit_bytes:
        what = "has no memory limit: when the host is full the kernel ends it, and all its rows are restored"
        yield warning("node-no-limit", where, what, "CONFIG SET maxmemory, and in its file, to what the host can spare.")
    elif node.used_bytes > (1 - LEAST_HEADROOM) * node.limit_bytes:
        what = f"uses {node.used_bytes / 1e6:,.0f} of {node.limit_bytes / 1e6:,.0f} MB; full, it takes no writes, and shards wait"
        mend = "Raise its limit (maxmemory, or -m; of rows on flash the size in ext_path), or `kvemb nodes add` (docs/scaling.md)."
        yield error("node-headroom", where, what, mend)


def _judge_redis(where: str, settings: Mapping[str, str]) -> Iterator[Finding]:
    policy = settings.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        what = f"maxmemory-policy is {policy}: it evicts rows when memory is full"
        yield error("node-eviction", where, what, "CONFIG SET maxmemory-policy noeviction, and in redis.conf.")
    if settings.get("role") == "slave" and settings.get("cluster_enabled") != "1":
        what = f"is a replica of {settings.get('master_host')}: it takes no writes"
        own = "Where it was a node of its own: REPLICAOF NO ONE and FLUSHALL here, for it has that server's rows; shards restore its own."
        yield error("node-replica", where, what, f"Name the primary in storage.nodes. {own}")
    # Without a schedule the server takes writes, also if the last save failed.
    if settings.get("rdb_last_bgsave_status") == "err" and settings.get("save", "unknown"):
        what = "its last snapshot failed: it refuses writes while stop-writes-on-bgsave-error is on"
        yield error("node-snapshot-failed", where, what, 'Give its disk room, or switch snapshots off: CONFIG SET save "".')
    if settings.get("aof_enabled") == "1" or settings.get("save"):
        kind = "an append-only file" if settings.get("aof_enabled") == "1" else f"snapshots (save {settings['save']})"
        what = f"keeps {kind}, which costs writes and memory; shards bring rows back without it"
        yield warning("node-persistence", where, what, 'CONFIG SET save "" and CONFIG SET appendonly no, unless you mean it.')
    if lacks := settings.get(_LACKS):
        what = f"does not know {lacks}, which shards need: renamed or switched off; a shard does not start with it"
        yield error("node-command", where, what, "Take `rename-command` out of its configuration, and start it again.")
    yield from _judge_client_limits(where, settings)
    yield from _judge_connections(where, settings.get("maxclients", ""), "CONFIG SET maxclients 10000, and in redis.conf.")


def _judge_client_limits(where: str, settings: Mapping[str, str]) -> Iterator[Finding]:
    normal = re.search(r"normal (\d+) (\d+)", settings.get("client-output-buffer-limit", ""))
    limits = {
        'client-output-buffer-limit "normal 0 0 0"': [int(n) for n in normal.groups()] if normal else [],
        "maxmemory-clients 0": [int(n) for n in [settings.get("maxmemory-clients", "")] if n.isdigit()],
    }
    for without, sizes in limits.items():
        least = min((n for n in sizes if n), default=0)
        if 0 < least < _READ_AHEAD_BYTES:
            what = (
                f"{without.split()[0]} is {least / 1e6:g} MB: it closes connections that wait for more, and pulls then read in small steps"
            )
            yield warning("node-client-limit", where, what, f"CONFIG SET {without}, and in redis.conf.")


def _judge_memcached(where: str, settings: Mapping[str, str]) -> Iterator[Finding]:
    unsafe = {
        "evictions": (settings.get("evictions") == "on", "evicts rows when memory is full"),
        "slab_reassign": (settings.get("slab_reassign") == "yes", "moves slab pages, and throws rows away with them"),
        "cas_enabled": (settings.get("cas_enabled") == "no", "knows no conditional writes"),
        "memory_file": (settings.get("memory_file", "") not in ("", "(null)"), "may come back old after a warm restart"),
        "ext_drop_unread": (settings.get("ext_drop_unread") == "yes", "throws rows on flash away that were not read for long"),
    }
    mend = "Start it with -M -o no_slab_reassign, without -C, -e and ext_drop_unread."
    for bad, why in unsafe.values():
        if bad:
            yield error("node-eviction", where, f"memcached {why}", mend)
    if settings.get("ext_item_age") == _NEVER:
        what = "has a flash file (ext_path), and moves no row there by its age: memory fills first, and 1.6.18 moves none even then"
        yield warning("node-flash-idle", where, what, "Start it with -o ext_item_age=1 beside ext_path (docs/capacity.md).")
    if settings.get("lru_maintainer_thread") == "yes":
        what = "runs memcached's LRU maintainer, which nothing here needs"
        mend = "Start it with -o no_lru_maintainer -R 200: a third less CPU time per row (docs/adr/0021)."
        yield warning("node-lru-maintainer", where, what, mend)
    yield from _judge_connections(where, settings.get("maxconns", ""), "Start it with -c 4096.")


def _judge_connections(where: str, most: str, mend: str) -> Iterator[Finding]:
    if most.isdigit() and int(most) < LEAST_CONNECTIONS:
        yield warning("node-connections", where, f"takes {most} connections at most; every trainer and shard needs several", mend)


SLOW_SYNC_S = 0.02
LEAST_FILES = 1024
MOST_SKEW_S = 5.0
MOST_LAG_S = 10.0
STOPPED = "the shard stopped applying"
"""What a ShardFailedError begins with; any other trouble is tried again."""
_SAME_FILE = "Start every shard and trainer with the same kvemb.yaml."


@dataclass(frozen=True, eq=False)
class ShardFacts:
    """The answers of one shard."""

    # shard, address: as the cluster map says, or kvemb.yaml
    shard: int
    address: str
    error: str = ""  # why it did not answer
    # describe, status, examine: its answers; None where there was none
    describe: DescribeReply | None = None
    status: StatusReply | None = None
    examine: ExamineReply | None = None
    asked_s: float = 0.0  # the time of day here when the shard was asked for its own
    of_cluster: Collection[str] = ()  # the addresses of the cluster's nodes and shards, as far as they are known

    @property
    def where(self) -> str:
        """The shard, for people."""
        return f"shard {self.shard} ({self.address})"


def judge_shard(facts: ShardFacts, config: Config, our_version: str) -> Iterator[Finding]:
    """Yield the faults of one shard."""
    if facts.error and re.search(r"certificate|token|TLS", facts.error):
        mend = "Give this process a certificate of its authority for this cluster and role, or the token (docs/security.md)."
        yield error("shard-refuses", facts.where, facts.error, mend)
        return
    if HANGS in facts.error:
        yield error("shard-hangs", facts.where, facts.error, _mend_hanging(facts))
        return
    if facts.error:
        first = "Mend what its last words name, then start it" if LAST_WORDS in facts.error else "Start it"
        mend = f"{first}: kvemb shard --shard {facts.shard}. Trainers' pushes for its rows wait for it; its journal has what was accepted."
        yield error("shard-unreachable", facts.where, facts.error, mend)
        return
    if facts.describe is not None:
        yield from _judge_identity(facts.where, facts.shard, facts.describe, config)
    if facts.status is not None:
        yield from _judge_work(facts.where, facts.status)
    if facts.examine is not None:
        yield from _judge_host(facts.where, facts.examine)
        yield from _judge_disk(facts.where, facts.examine)
        yield from _judge_file(facts.where, facts.examine, config, facts.of_cluster)
        if facts.examine.lacks:
            yield warning("shard-lacks", facts.where, facts.examine.lacks, "Run that where every shard runs; no restart is needed.")
        skew_s = facts.examine.now_s - facts.asked_s
        if abs(skew_s) > MOST_SKEW_S:
            what = f"its clock is {abs(skew_s):,.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
            mend = "Run chrony or another NTP client on both: logs, metrics and certificates need one time."
            yield warning("clock-skew", facts.where, what, mend)
        if facts.examine.version != our_version:
            what = f"runs kvemb {facts.examine.version or '(not installed)'}, this command is {our_version or '(not installed)'}"
            mend = "Expected while an upgrade goes on (docs/upgrade.md); else install one release for shards, trainers and commands."
            yield warning("shard-version", facts.where, what, mend)


def _mend_hanging(facts: ShardFacts) -> str:
    process = re.search(r"\(process (\d+) on ([^)]+)\)", facts.error)
    end = f"kill -9 {process[1]} on {process[2]}" if process else "kill -9 its pid, which ss -ltnp says on its host"
    return (
        f"See why. If it does not come back, end it ({end}), then start the shard as always: kvemb shard --shard {facts.shard}. Only where "
        "it cannot be ended, its host being lost: the same with --take-over, on another host with its folder."
    )


def _judge_identity(where: str, shard: int, says: DescribeReply, config: Config) -> Iterator[Finding]:
    if says.cluster != config.cluster:
        what = f"belongs to cluster {says.cluster!r}, this file names {config.cluster!r}"
        yield error("cluster-name", where, what, "Use the kvemb.yaml of that cluster, or other addresses in parameter_servers.shards.")
    if says.shard != shard:
        mend = f"Put the addresses in parameter_servers.shards into their order. Where they are, end it, and start there: --shard {shard}."
        yield error("shard-swapped", where, f"answers as shard {says.shard}", mend)
    if says.mode != config.servers.mode:
        yield error("shard-mode", where, f"runs in {says.mode} mode, this file says {config.servers.mode}", _SAME_FILE)


def _judge_work(where: str, status: StatusReply) -> Iterator[Finding]:
    if status.starting:
        mend = "Nothing, as long as it gets further: trainers wait for it. Mend the server that it waits for."
        yield warning("shard-starting", where, status.starting, mend)
    if status.failure.startswith(STOPPED):
        yield error("shard-failed", where, status.failure, "Mend the cause, then restart the shard; its journal has what was accepted.")
    elif status.failure:
        yield error("shard-waiting", where, status.failure, "Mend the cause: the shard goes on by itself.")
    if status.repair:
        mend = "All shards must be up for a repair to end; kvemb status says how far each is. Pulls of that node wait meanwhile."
        yield warning("node-repair", where, status.repair, mend)
    if status.lag_s > MOST_LAG_S and not status.failure:
        what = f"the oldest of {n_of(status.pending_parts, 'push', 'pushes')} has waited {status.lag_s:.0f} s"
        mend = "Storage is too slow, or shards are too few: compare kvemb_shard_apply_seconds (docs/operations.md)."
        yield warning("shard-lag", where, what, mend)


def _judge_host(where: str, says: ExamineReply) -> Iterator[Finding]:
    mend = (
        f"Raise it where the shard is started: ulimit -n 65536, LimitNOFILE= of its unit, or ulimits: in compose (at least {LEAST_FILES})."
    )
    if 0 < says.most_files < LEAST_FILES or says.open_files > 0.8 * says.most_files:
        yield error("open-files", where, f"may open {says.most_files} files, and has {says.open_files} open", mend)


def _judge_disk(where: str, says: ExamineReply) -> Iterator[Finding]:
    if says.sync_s < 0:
        yield error("disk-unwritable", where, "nothing can be written to the journal's disk", "Make room there, or mend its permissions.")
    if says.durability != "fsync":
        what = "acknowledges pushes before they are on disk: a power failure may lose them"
        yield warning("durability", where, what, "parameter_servers.durability: fsync, unless training may lose its last seconds.")
    elif says.sync_s > SLOW_SYNC_S:
        what = f"a small write takes {1e3 * says.sync_s:.0f} ms until it is durable, and every push waits for one"
        mend = "Put data_dir on an SSD of its own, or say durability: os where a power failure may lose pushes."
        yield warning("disk-slow", where, what, mend)
    if says.disk_free < says.journal_max_bytes:  # a share of the disk would say nothing: a tenth of a large one is room enough
        left = f"{says.disk_free / 1e9:,.1f} of {says.disk_bytes / 1e9:,.1f} GB"
        what = f"the journal's disk has {left} free, and the journal may grow to {says.journal_max_bytes / 1e9:,.1f} GB"
        mend = "Make room, or lower parameter_servers.journal_max_mb: a full disk stops acknowledgements."
        yield error("disk-space", where, what, mend)


def judge_addresses(config: Config, nodes: Collection[str], shards: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for addresses of this file that are not in the cluster map: of nodes or shards that left, or were replaced."""
    for key, named, have in (("storage.nodes", config.storage.nodes, nodes), ("parameter_servers.shards", config.servers.shards, shards)):
        if have and (odd := [address for address in named if address not in have]):
            what = f"{key} names {', '.join(odd)}, which the cluster has not; it has {_listed([*have])}"
            yield warning("file-addresses", "this kvemb.yaml", what, "Put these into the file: kvemb config show prints the lines.")


def _judge_file(where: str, says: ExamineReply, config: Config, of_cluster: Collection[str]) -> Iterator[Finding]:
    for key, theirs, ours in (
        ("parameter_servers.shards", says.shards, config.servers.shards),
        ("storage.nodes", sorted(says.nodes), sorted(config.storage.nodes)),  # whose order is free
    ):
        if list(theirs) != list(ours):
            odd = [address for address in dict.fromkeys([*theirs, *ours]) if of_cluster and address not in of_cluster]
            what = f"was started with {key} {_listed(theirs)}, this file has {_listed(ours)}"
            what += f"; none of the cluster's: {', '.join(odd)}" if odd else ""
            yield warning("other-file", where, what, f"{_SAME_FILE} A shard reads it at its start, and follows the cluster map until then.")


def _listed(addresses: Sequence[str]) -> str:
    return "[" + ", ".join(addresses) + "]"
