"""The verbs `kvemb status`, `doctor` and `repair`.

`status` looks at every shard and node, once or again and again, and prints tables or JSON. `doctor` prints each finding and its mend; its
exit code is 1 if one is an error. `repair` asks every shard at once to repair storage nodes. It does not touch storage itself: nodes that
need a repair refuse usual connections.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvemb.client.all_shards import AllShards
from kvemb.config import Config, load
from kvemb.errors import ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.operate.cluster_status import ClusterStatus, healthy, render, survey
from kvemb.operate.examination import examine
from kvemb.operate.findings import ERROR
from kvemb.protocol.message_format import installed_version
from kvemb.protocol.messages import Empty, RepairReply, RepairRequest, StatusReply

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
        asked = f"{examined.n_nodes} nodes and {examined.n_shards} shards"
        print(f"{asked}: {n_errors} errors, {len(found) - n_errors} warnings" if found else f"{asked}: nothing to mend")
    return 1 if any(finding.level == ERROR for finding in found) else 0


_PRESENT_S = 30.0  # a command is no trainer: its user can start a shard, and repeat the command
_ANSWER_MARGIN_S = 1.0  # a shard gives up before we do, and says what it waited for


def repair(config: Config, addresses: Sequence[str] = (), *, all_nodes: bool = False, timeout_s: float = 3600.0) -> dict[int, RepairReply]:
    """Restore the rows of every node that has lost them; return each shard's report, by its number, when all have done their part.

    Args:
        config: of the cluster.
        addresses: nodes to compare row by row although they seem to be in order.
        all_nodes: compare every node.
        timeout_s: of the whole call.

    Raises:
        InvalidInputError: no such node.
        LostRowError: a row cannot be restored.
        ShardUnavailableError: a shard has been away for half a minute: nothing was begun. Or it went away later: the others wait for it,
            and end the repair when it is back.
        DeadlineExceededError: the repair goes on.
    """
    servers = AllShards.of(config.servers)
    try:
        request = RepairRequest(list(addresses), all_nodes, max(timeout_s - _ANSWER_MARGIN_S, timeout_s / 2))
        deadline = Deadline.after(timeout_s)
        _require_all(servers, deadline)
        return servers.call_each("Repair", request, RepairReply, deadline)
    finally:
        servers.close()


def _require_all(servers: AllShards, deadline: Deadline) -> None:
    """Find out which shards exist, and require that each is present; one that is starting counts, and is waited for."""
    replies = servers.try_each("Status", Empty(), StatusReply, deadline.within(_PRESENT_S))
    if not isinstance(replies.get(0), ShardUnavailableError):
        servers.ask_map(deadline)
        joined = {shard: Empty() for shard in servers.numbers if shard not in replies}
        replies |= servers.try_each("Status", joined, StatusReply, deadline.within(_PRESENT_S))
    away = [str(replies[shard]) for shard in servers.numbers if isinstance(replies[shard], ShardUnavailableError)]
    if away:
        raise ShardUnavailableError(f"{len(away)} of {len(servers.numbers)} shards are away, and nothing was begun: {' '.join(away)}")
