"""Asks every node and shard of a kvemb.yaml, without connecting to the cluster: so those that are down are reported, too."""

import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from kvemb.client.all_shards import AllShards
from kvemb.client.shard_questions import ShardQuestions
from kvemb.config import Config
from kvemb.errors import (
    ConfigError,
    DeadlineExceededError,
    KvembError,
    NodeLostError,
    NodeSuspectError,
    NodeUnavailableError,
    NotProvisionedError,
    StorageError,
    UnsafeNodeError,
    WrongNodeError,
)
from kvemb.evict import never
from kvemb.net.deadline import Deadline
from kvemb.net.name_lookup import is_loopback
from kvemb.net.tls_config import TlsConfig
from kvemb.net.tls_probe import SeenCertificate, look_at, look_at_own
from kvemb.operate.cluster_status import ask_all, hasty, nodes_of_another, open_slots_line
from kvemb.operate.findings import (
    ERROR,
    NEARLY_FULL,
    SLOW_S,
    UNUSABLE,
    Finding,
    ShardFacts,
    error,
    judge_addresses,
    judge_limits,
    judge_node,
    judge_shard,
    unusable_files,
    warning,
)
from kvemb.operate.inspection_messages import EXAMINE
from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import DESCRIBE, DescribeReply, Empty, StatusReply
from kvemb.protocol.roles import caller_of
from kvemb.scaling.slot_moves import SlotMoves
from kvemb.schema.table_def import TableDef
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store
from kvemb.stores.store_nodes import NodeStats

M = TypeVar("M", bound=Message)
_PATIENCE_S = 10.0  # with each node: longer than a batch has, so that slow ones are told from those that are gone
_UNREACHED = ("node-unreachable", "node-hangs", "shard-unreachable", "shard-hangs", "shard-refuses", "storage")
_OF_MARKERS: tuple[tuple[type[KvembError], str, str], ...] = (
    (
        WrongNodeError,
        "node-marker",
        "Take the address out of storage.nodes that is not of this cluster, or put its own there; nothing was written meanwhile.",
    ),
    (
        NotProvisionedError,
        "not-provisioned",
        "Start the shards: shard 0 provisions empty nodes. If they held rows, mend the addresses.",
    ),
    (NodeSuspectError, "node-suspect", "See that all shards run: they compare its rows and renew the marker by themselves."),
    (NodeLostError, "node-lost", "See that all shards run: they bring its rows back by themselves; kvemb status shows how far they are."),
)


@dataclass(frozen=True)
class Examination:
    """The faults, worst first within each part, and how many nodes and shards were examined: the cluster's own, as far as it names them."""

    findings: list[Finding]
    n_nodes: int
    n_shards: int


def examine(config: Config, our_version: str) -> Examination:
    """Look at all nodes and shards of a cluster."""
    config = hasty(config)
    certificates = list(judge_certificates(config, config.storage.timeout_s))
    told = {finding.where for finding in certificates if finding.level == ERROR}
    with ExitStack() as stack:
        store = stack.enter_context(open_store(replace(config.storage, on_lost_node="fail"), role="trainer"))
        nodes, statuses = _stats(store, config), dict[int, StatusReply | Exception]()
        found = [*certificates, *_nodes(store, nodes, config.storage.timeout_s)]
        try:
            servers = AllShards.of(config.servers)
        except ConfigError as problem:  # no channel can be opened with our certificate, or token
            if not told:
                found.append(unusable_files("parameter_servers.tls", str(problem)))
        else:
            stack.callback(servers.close)
            timeout_s = config.storage.timeout_s
            statuses, unknown = ask_all(servers, timeout_s, store.nodes.cluster_map)
            if unknown:
                mend = "Use the kvemb.yaml that the shards were started with."
                found.append(error("shard-count", "parameter_servers.shards", unknown, mend))
            # Only shards that serve: each question would wait for the others again.
            serving = {shard: Empty() for shard, reply in statuses.items() if isinstance(reply, StatusReply) and not reply.starting}
            described = servers.try_each(DESCRIBE, serving, Deadline.after(timeout_s))
            found = [*_another_clusters(store, described, config), *found]  # first whether they are another cluster's, then advice
            found += [*_hash_limits(store, described, found, timeout_s), *_move(store, servers, serving, timeout_s)]
            found += _growing(servers, described, nodes, timeout_s)
            known = () if nodes and all(node.error for node in nodes) else store.nodes.addresses  # else they are but the file's
            found += _shards(servers, statuses, described, config, known, our_version)
    # If a server's certificate is not good, it is known why the server cannot be reached.
    kept = sorted((one for one in found if one.name not in _UNREACHED or one.where not in told), key=lambda finding: finding.level)
    return Examination(kept, len(nodes), len(statuses))


def _stats(store: Store, config: Config) -> list[NodeStats]:
    timeout_s = config.storage.timeout_s
    try:
        store.nodes.find(Deadline.after(timeout_s))
        return store.nodes.stats(Deadline.after(max(timeout_s, _PATIENCE_S) * len(store.nodes.addresses)))
    except (StorageError, ConfigError) as problem:  # a Redis Cluster none of whose members answers; or files of ours that cannot be used
        return [NodeStats(address, "-", 0, 0, 0, 0, error=str(problem)) for address in config.storage.nodes]


def _nodes(store: Store, stats: Sequence[NodeStats], timeout_s: float) -> Iterator[Finding]:
    for node in stats:
        yield from judge_node(node, _settings(store, node, timeout_s))
    if any(node.error for node in stats):
        return
    with suppress(KvembError):
        if slots := store.nodes.open_slots(Deadline.after(timeout_s)):
            mend = f"redis-cli --cluster fix {stats[0].address} --cluster-replace, once no other redis-cli moves slots (docs/scaling.md)."
            yield warning("open-slots", "storage", open_slots_line(slots), mend)
    try:
        store.open(Deadline.after(timeout_s))
    except UnsafeNodeError:
        return  # found above
    except (DeadlineExceededError, NodeUnavailableError) as problem:
        if all(node.answer_s < SLOW_S for node in stats):  # otherwise found above
            yield error("storage", "storage", str(problem), "See the message.")
    except KvembError as problem:
        name, mend = next(((name, mend) for kind, name, mend in _OF_MARKERS if isinstance(problem, kind)), ("storage", "See the message."))
        yield error(name, "storage", str(problem), mend)


def _another_clusters(store: Store, described: Mapping[int, DescribeReply | Exception], config: Config) -> Iterator[Finding]:
    served = {answer.cluster_id for answer in described.values() if not isinstance(answer, Exception)}
    with suppress(KvembError):  # `_nodes` has said why they cannot be opened
        another = nodes_of_another(store, config, Deadline.after(config.storage.timeout_s), served)
        if another is not None:
            yield error("node-marker", "storage", *another)


def _settings(store: Store, node: NodeStats, timeout_s: float) -> dict[str, str]:
    if node.error:
        return {}
    try:
        return store.nodes.settings(node.address, Deadline.after(timeout_s))
    except StorageError:  # it was there a moment ago
        return {}


def _hash_limits(
    store: Store, described: Mapping[int, DescribeReply | Exception], found: Sequence[Finding], timeout_s: float
) -> Iterator[Finding]:
    """The tables are those that shards know. A node with an error already, or one whose user may not read limits, is passed over."""
    tables = next((answer.tables for answer in described.values() if not isinstance(answer, Exception)), [])
    in_trouble = {one.where for one in found if one.level == ERROR}
    for address in store.nodes.addresses:
        if tables and f"node {address}" not in in_trouble:
            with suppress(KvembError):
                limits = store.rows.bucket_limits(address, Deadline.after(timeout_s))
                if limits is not None:
                    yield from judge_limits(address, [TableDef.from_dict(table) for table in tables], limits)


def _growing(
    servers: AllShards, described: Mapping[int, DescribeReply | Exception], nodes: Sequence[NodeStats], timeout_s: float
) -> Iterator[Finding]:
    """Tables that take new ids for ever, where a node has not much room left."""
    fullest = max((node for node in nodes if node.limit_bytes), key=lambda node: node.used_bytes / node.limit_bytes, default=None)
    first = described.get(0)
    if not isinstance(first, DescribeReply) or fullest is None or fullest.used_bytes < NEARLY_FULL * fullest.limit_bytes:
        return
    room = f"node {fullest.address} uses {100 * fullest.used_bytes // fullest.limit_bytes} % of its memory"
    questions = ShardQuestions(servers, timeout_s)
    for table in [TableDef.from_dict(table) for table in first.tables]:
        with suppress(KvembError):
            if table.num_ids is None and questions.policies(table.name).eviction == never():
                mend = "Table.set_policies(eviction=kvemb.evict.keep(rows)) bounds it (docs/id-lifecycle.md); or add nodes."
                yield warning(
                    "table-grows", f"table {table.name}", f"has no eviction policy, so each new id takes memory, and {room}", mend
                )


def _move(store: Store, servers: AllShards, serving: Collection[int], timeout_s: float) -> Iterator[Finding]:
    """A move of slots that shard 0 carries: it may have been broken off, or be held by a shard that is away."""
    mend = (
        "Nothing, as long as it gets further: kvemb moves shows that. Where it stands, see that all shards run, and mend what is named; it "
        "then goes on by itself. Or take it back: kvemb moves abort (docs/scaling.md)."
    )
    plan = store.nodes.cluster_map.plan
    told = "" if plan is None else f"slots move between {plan.kind} ({plan.phase}), and shard 0, which carries the move, does not answer"
    if 0 in serving:
        with suppress(KvembError):
            state = SlotMoves(servers, timeout_s).state()
            told = str(state) if state.phase else ""
    if told:
        yield warning("slots-move", "cluster map", told, mend)


def _shards(
    servers: AllShards,
    statuses: Mapping[int, StatusReply | Exception],
    described: Mapping[int, DescribeReply | Exception],
    config: Config,
    nodes: Sequence[str],
    our_version: str,
) -> Iterator[Finding]:
    asked_s, of_cluster = time.time(), [*nodes, *(channel.address for channel in servers.channels.values())] if nodes else ()
    own_nodes = () if config.storage.kind == "redis-cluster" else nodes  # there replicas may be named, too
    yield from judge_addresses(config, own_nodes, [channel.address for channel in servers.channels.values()])
    examined = servers.try_each(EXAMINE, dict.fromkeys(described, Empty()), Deadline.after(config.storage.timeout_s))
    for shard, status in statuses.items():
        facts = ShardFacts(shard, servers.channels[shard].address, asked_s=asked_s, of_cluster=of_cluster)
        if isinstance(status, Exception):
            facts = replace(facts, error=str(status))
        elif shard not in described:
            facts = replace(facts, status=status)
        elif isinstance(describe := described[shard], Exception):
            facts = replace(facts, error=str(describe))
        else:
            facts = replace(facts, describe=describe, status=status, examine=_answer(examined[shard]))
        yield from judge_shard(facts, config, our_version)


def _answer(answer: M | Exception) -> M | None:
    return None if isinstance(answer, Exception) else answer


LEAST_DAYS = 14
_DAY_S = 86_400.0
_OF_OTHERS = stat.S_IROTH | stat.S_IWOTH
_RENEW = "Issue another one and replace the file in one step (mv); no process need be restarted (docs/security.md)."


def judge_certificates(config: Config, timeout_s: float, now_s: float | None = None) -> Iterator[Finding]:
    """Yield the faults of every key and certificate that can be seen from here."""
    at_s = time.time() if now_s is None else now_s
    sections = (
        ("parameter_servers", config.servers.tls, config.servers.insecure, "shard", config.servers.shards),
        ("storage", config.storage.tls, config.storage.insecure, "node", config.storage.nodes),
    )
    for section, tls, insecure, who, addresses in sections:
        at = f"{section}.tls"
        if tls is None:
            yield from _judge_plain_text(section, insecure, addresses)
            continue
        own = list(_judge_own(tls, at, config.cluster if who == "shard" else "", at_s))
        yield from own
        if any(one.name == UNUSABLE for one in own):
            continue  # no server can be asked with them
        for index, address in enumerate(addresses):
            where = f"node {address}" if who == "node" else f"shard {index} ({address})"
            yield from _judge(look_at(address, tls, Deadline.after(timeout_s)), where, at, at_s, "serverAuth")


def _judge_plain_text(section: str, insecure: bool, addresses: tuple[str, ...]) -> Iterator[Finding]:
    beyond = [address for address in addresses if not is_loopback(address)]
    if beyond and not insecure:
        what = f"{section}.tls is missing, and {beyond[0]} is not an address of this machine's own: shards and trainers refuse to start"
        mend = f"Give {section}.tls, or {section}.insecure: true on a network that nothing else reaches (docs/security.md)."
        yield error("not-encrypted", section, what, mend)
    elif beyond:
        what = f"{section}.insecure is true: a reader of the network to {beyond[0]} reads rows and gradients, and may change them"
        yield warning("not-encrypted", section, what, f"Give {section}.tls, and take insecure out (docs/security.md).")


def _judge_own(tls: TlsConfig, at: str, cluster: str, now_s: float) -> Iterator[Finding]:
    for name in ("key", "token_file"):
        path = getattr(tls, name)
        mode = os.stat(path).st_mode if path is not None and os.path.exists(path) else 0
        if mode & _OF_OTHERS:
            what = f"{at}.{name} may be read by every user of this machine (mode {stat.S_IMODE(mode):o})"
            yield error("key-readable", path, what, f"chmod 600 {path}, and renew it: it may have been read.")
    if not tls.own:
        return
    seen, where = look_at_own(tls), str(tls.cert)
    yield from _judge(seen, where, at, now_s, "clientAuth")
    if cluster and not seen.fault and not caller_of(seen.uris, cluster).grants:
        what = f"says {', '.join(seen.uris) or 'no URI'}, expected kvemb://{cluster}/trainer/NAME, admin or reader"
        yield error("certificate-name", where, what, "Issue one with that name among its URIs (docs/security.md).")


def _judge(seen: SeenCertificate, where: str, at: str, now_s: float, purpose: str) -> Iterator[Finding]:
    left_s = seen.ends_s - now_s
    if seen.fault:
        yield from _judge_fault(seen, where, at, purpose)
    elif seen.ends and left_s < LEAST_DAYS * _DAY_S:
        yield warning("certificate-ends", where, f"its certificate ends in {left_s / _DAY_S:.1f} days ({seen.ends})", _RENEW)


def _judge_fault(seen: SeenCertificate, where: str, at: str, purpose: str) -> Iterator[Finding]:
    what = f"its certificate is not good: {seen.why}"
    match seen.fault:
        case "expired":
            yield error("certificate-expired", where, what, _RENEW)
        case "not yet valid":
            yield error("certificate-expired", where, what, "Set the clocks: of this machine, or of the one that issued it.")
        case "names":
            yield error("certificate-name", where, what, "Issue one with this host name or address among its names.")
        case "purpose":
            yield error("certificate-purpose", where, what, f"Issue one with extendedKeyUsage {purpose}.")
        case "untrusted":
            mend = f"Put the authority that signed it into {at}.ca, or issue one by that of {at}.ca."
            yield error("certificate-untrusted", where, what, mend)
        case "no tls":
            yield error("tls-refused", where, f"no TLS: {seen.why}", "See that it speaks TLS at this port, and that the address is right.")
        case "files":
            what, mend = f"{at}: cannot be used: {seen.why}", f"See that {at}.ca, cert and key can be read, and the last two are a pair."
            yield error(UNUSABLE, where, what, mend)
        # "nobody" (no connection): the checks that ask the server for more report it
