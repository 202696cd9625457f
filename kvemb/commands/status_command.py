"""What `kvemb status` does: one look at every shard and node, or one look after the other, as tables or as JSON.

What `kvemb doctor` prints: each finding, and its mend; exit code 1 where one of them is an error.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import Any

from kvemb.config import Config, load
from kvemb.doctor.examination import examine
from kvemb.doctor.findings import ERROR
from kvemb.protocol.message_format import installed_version
from kvemb.status.cluster_status import ClusterStatus, healthy, render, survey

_CLEAR = "\x1b[H\x1b[2J"


def status_command(args: argparse.Namespace) -> int:
    """Print how the cluster is; with --watch again and again, until Ctrl-C."""
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
    """Return what was seen for programs: keys may come, and none of them goes or changes its meaning."""
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
    """Examine the cluster, and say what is wrong with it."""
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
