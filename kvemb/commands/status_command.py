"""The verbs `kvemb status`, `doctor` and `repair`.

`repair` asks every shard at once; it does not touch storage itself: nodes that need a repair refuse usual connections.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from kvemb.client.all_shards import AllShards
from kvemb.commands.terminal_output import text_table
from kvemb.config import Config, load
from kvemb.errors import ConfigError, NodeLostError, ShardUnavailableError, n_of
from kvemb.net.deadline import Deadline
from kvemb.operate.cluster_status import ClusterStatus, ShardStatus, healthy, open_slots_line, survey
from kvemb.operate.examination import examine
from kvemb.operate.findings import ERROR, STOPPED
from kvemb.protocol.message_format import installed_version
from kvemb.protocol.messages import GET_STATUS, REPAIR, Empty, RepairReply, RepairRequest
from kvemb.stores.row_io import HeldRows
from kvemb.stores.store_nodes import NodeStats

_CLEAR = "\x1b[H\x1b[2J"


def status_command(args: argparse.Namespace) -> int:
    """Print the state of the cluster; with --watch again and again, until Ctrl-C."""
    config = load(args.config, os.environ)
    if args.watch is None:
        return _look(config, args)
    while True:
        if sys.stdout.isatty() and not args.json:
            print(_CLEAR + time.strftime("%H:%M:%S"))
        _look(config, args)
        time.sleep(args.watch)


def _look(config: Config, args: argparse.Namespace) -> int:
    status = survey(config)
    print(json.dumps(as_json(config.cluster, status)) if args.json else render(status), flush=True)
    return 0 if healthy(status) else 1


def as_json(cluster: str, status: ClusterStatus) -> dict[str, Any]:
    """Return the status for programs: keys may be added, and none of them is removed or changes its meaning."""
    shards = []
    for shard in status.shards:
        seen = dataclasses.asdict(shard.reply) if shard.reply is not None else {}
        shards.append({**seen, "shard": shard.shard, "address": shard.address, "error": shard.error})
    return {
        "cluster": cluster,
        "healthy": healthy(status),
        "nodes": [dataclasses.asdict(node) for node in status.nodes],
        "nodes_error": status.nodes_error,
        "held": {name: [one and dataclasses.asdict(one) for one in of] for name, of in status.held},
        "shards": shards,
        "strangers": status.strangers,
    }


_MB = 1e6


def render(status: ClusterStatus) -> str:
    """Return aligned plain text: nodes with keys and memory headroom, shards with their applied batches and their lag.

    A key is a row, a bucket or a page. On Redis and Valkey the rows of each table on each node are counted, and what its pages hold beside
    rows. Above the tables: servers that are not of the cluster that kvemb.yaml means. Below them, each on its own line: a shard's error,
    and its repair.
    HEADROOM counts what a node says it stores. memcached counts stored bytes, not the slab pages it has set aside: it may be out of room
    for rows of one size while some headroom remains.
    """
    nodes = text_table([("NODE", "SERVER", "KEYS", "USED", "LIMIT", "HEADROOM", "EVICTED"), *map(_node_row, status.nodes)], right_from=2)
    head = ("SHARD", "ADDRESS", "ROWS", "BATCHES", "ROWS APPLIED", "PENDING", "LAG", "CACHE HITS", "TRAINERS", "STATE")
    shards = text_table([head, *map(_shard_row, status.shards)], right_from=2)
    lines = [f"storage nodes: {status.nodes_error}" if status.nodes_error else nodes]
    troubles = [f"shard {shard.shard}: {_trouble(shard)}" for shard in status.shards if _trouble(shard)]
    repairs = [f"shard {s.shard} repairs: {s.reply.repair}" for s in status.shards if s.reply is not None and s.reply.repair]
    told = " ".join(status.strangers.split())
    strangers = [told if told.startswith(NodeLostError.__name__) else f"not as kvemb.yaml says: {told}"] if told else []
    unsafe = [node.unsafe for node in status.nodes if node.unsafe]
    open_slots = [open_slots_line(status.open_slots)] if status.open_slots else []
    return "\n".join([*strangers, *lines, *_held_lines(status), *unsafe, *open_slots, "", shards, *troubles, *repairs])


def _held_lines(status: ClusterStatus) -> list[str]:
    """Return how many rows of each table every node holds, for the tables where it can tell."""
    told = [(name, of) for name, of in status.held if None not in of]
    if not told:
        return []
    rows = [(name, *(_held(one) for one in of if one is not None)) for name, of in told]
    return ["", text_table([("ROWS OF", *(node.address for node in status.nodes)), *rows], right_from=2)]


def _held(one: HeldRows) -> str:
    idle = f" and {one.idle_bytes / _MB:,.1f} MB of no row" if one.idle_bytes >= _MB / 20 else ""
    return f"{'' if one.exact else 'about '}{one.n_rows:,}{idle}"


def _node_row(node: NodeStats) -> tuple[str, ...]:
    if node.error:
        return (node.address, "-", "-", "-", "-", "-", node.error)
    limit = f"{node.limit_bytes / _MB:,.0f} MB" if node.limit_bytes else "none set"
    headroom = f"{max(0, round(100 * (1 - node.used_bytes / node.limit_bytes)))} %" if node.limit_bytes else "-"
    used = f"{node.used_bytes / _MB:,.1f} MB"
    return (node.address, node.server, f"{node.n_keys:,}", used, limit, headroom, f"{node.evicted:,}")


def _shard_row(shard: ShardStatus) -> tuple[str, ...]:
    reply = shard.reply
    if reply is None:
        return (str(shard.shard), shard.address, *["-"] * 7, "no answer")
    if reply.starting:
        return (str(shard.shard), shard.address, *["-"] * 7, "starting")
    state = "ok" if not reply.failure else "failed" if reply.failure.startswith(STOPPED) else "retrying"
    counts = (f"{reply.n_rows:,}", f"{reply.k:,}", f"{reply.rows_applied:,}", f"{reply.pending_parts:,}")
    hits = f"{100 * reply.cache_hits / reply.cache_lookups:.0f} %" if reply.cache_lookups else "-"
    return (str(shard.shard), shard.address, *counts, f"{reply.lag_s:.2f} s", hits, str(reply.n_trainers), state)


def _trouble(shard: ShardStatus) -> str:
    error = shard.error.removeprefix(f"shard {shard.shard} ({shard.address}): ")
    return " ".join((error if shard.reply is None else shard.reply.starting or shard.reply.failure).split())


def doctor_command(args: argparse.Namespace) -> int:
    """Examine the cluster, and print every fault found."""
    config = load(args.config, os.environ)
    examined = examine(config, installed_version())
    found = examined.findings
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found]))
    else:
        for finding in found:
            print(f"{finding.level}: {finding.where}: {' '.join(finding.what.split())}\n    {finding.mend} [{finding.name}]")
        n_errors = sum(finding.level == ERROR for finding in found)
        asked = f"{n_of(examined.n_nodes, 'node')} and {n_of(examined.n_shards, 'shard')}"
        print(f"{asked}: {n_of(n_errors, 'error')}, {n_of(len(found) - n_errors, 'warning')}" if found else f"{asked}: nothing to mend")
    return 1 if any(finding.level == ERROR for finding in found) else 0


def repair_command(args: argparse.Namespace) -> int:
    """Restore rows, and print each shard's report."""
    print(render_repair(repair(load(args.config, os.environ), args.node, all_nodes=args.all, timeout_s=args.timeout)))
    return 0


def render_repair(replies: Mapping[int, RepairReply]) -> str:
    """Return the results of a repair in words, shard by shard and in all."""
    if not any(reply.nodes for reply in replies.values()):
        return "no node has lost its rows; give --node or --all to compare nodes row by row"
    lines = []
    for shard, reply in replies.items():
        rows, nodes = n_of(reply.rows, "row"), n_of(reply.nodes, "node")
        lines.append(f"shard {shard}: {rows} rewritten on {nodes} in {_rate(reply.rows, reply.seconds)}")
    n_rows, seconds = sum(reply.rows for reply in replies.values()), max(reply.seconds for reply in replies.values())
    return "\n".join([*lines, f"in all: {n_of(n_rows, 'row')} in {_rate(n_rows, seconds)}"])


def _rate(n_rows: int, seconds: float) -> str:
    return f"{seconds:.1f} s ({n_rows / max(seconds, 1e-9):,.0f} rows/s)"


_PRESENT_S = 30.0  # a command is no trainer: its user can start a shard, and repeat the command
_ANSWER_MARGIN_S = 1.0  # a shard gives up before we do, and says what it waited for


def repair(config: Config, addresses: Sequence[str] = (), *, all_nodes: bool = False, timeout_s: float = 3600.0) -> dict[int, RepairReply]:
    """Restore the rows of every node that has lost them; return each shard's report, by its number, when all have done their part.

    Raises:
        ShardUnavailableError: a shard has been away for half a minute: nothing was begun. Or it went away later: the others wait for it,
            and end the repair when it is back.
    """
    servers = AllShards.of(config.servers)
    try:
        request = RepairRequest(list(addresses), all_nodes, max(timeout_s - _ANSWER_MARGIN_S, timeout_s / 2))
        deadline = Deadline.after(timeout_s)
        _require_all(servers, deadline)
        return servers.call_each(REPAIR, request, deadline)
    finally:
        servers.close()


def _require_all(servers: AllShards, deadline: Deadline) -> None:
    """Find out which shards exist, and require that each is present; one that is starting counts, and is waited for."""
    replies = servers.try_each(GET_STATUS, Empty(), deadline.within(_PRESENT_S))
    if not isinstance(replies.get(0), ShardUnavailableError):
        servers.ask_map(deadline)
        joined = {shard: Empty() for shard in servers.numbers if shard not in replies}
        replies |= servers.try_each(GET_STATUS, joined, deadline.within(_PRESENT_S))
    away = [str(replies[shard]) for shard in servers.numbers if isinstance(replies[shard], ShardUnavailableError)]
    if away:
        raise ShardUnavailableError(f"away: {len(away)} of {n_of(len(servers.numbers), 'shard')}. Nothing was begun: {' '.join(away)}")


def conformance_command(args: argparse.Namespace) -> int:
    """Say whether a server that speaks RESP can hold rows, check by check; the exit code is 1 if it lacks something that is needed."""
    from kvemb.projection.projection_target import TargetUrl

    url = TargetUrl.parse(args.conformance, ())
    server = url.server(os.environ, args.password_env)
    if url.encrypted:
        raise ConfigError("--conformance: takes redis:// alone, without encryption; which commands a server has does not depend on it")
    if find_spec("pytest") is None:
        raise ConfigError("--conformance: the contract of a store is written as tests: pip install pytest")
    os.environ.pop("PYTEST_ADDOPTS", None)  # the user's, of tests of their own
    from kvemb.testing.conformance import HOLDS, MISSING, ServerCheck, ServerExamination

    out, words = sys.stdout, {HOLDS: "holds", MISSING: "MISSING"}

    def report(check: ServerCheck) -> None:
        if args.json:
            return
        said = f": {check.said}" if check.said else ""
        costs = f"\n    {'costs' if check.needed else 'would be good; without,'} {check.costs}" if check.costs else ""
        print(f"{words.get(check.outcome, check.outcome)}: {check.name}{said}{costs}", file=out, flush=True)

    examination = ServerExamination(server, report)
    if not args.json:
        print(f"scratch keys begin with {examination.prefix} and are deleted at the end", file=out, flush=True)
    examination.run()
    if args.json:
        checks = [dataclasses.asdict(check) for check in examination.checks]
        print(json.dumps({"server": examination.server, "fits": examination.fits, "checks": checks}))
        return 0 if examination.fits else 1
    counts = [sum(check.outcome == outcome for check in examination.checks) for outcome in (HOLDS, MISSING)]
    tried = f"{n_of(counts[0], 'check')} hold, {counts[1]} miss, {len(examination.checks) - sum(counts)} were not tried"
    verdict = "can hold rows" if examination.fits else "is refused: kvemb's promises would not hold on it"
    print(f"{server.nodes[0]}, {examination.server}, {verdict} ({tried})", file=out)
    return 0 if examination.fits else 1
