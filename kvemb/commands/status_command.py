"""What `kvemb status` does: one look at every shard and node, or one look after the other, as tables or as JSON."""

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import Any

from kvemb.config import Config, load
from kvemb.status.cluster_status import ClusterStatus, survey
from kvemb.status.status_tables import healthy, render

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
