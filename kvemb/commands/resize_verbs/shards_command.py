"""What `kvemb shards` does: parameter-server shards join, leave and take other shares while training goes on."""

import argparse
import os
from collections.abc import Mapping, Sequence

from kvemb.client.all_shards import AllShards
from kvemb.client.resizing.shard_scaling import INDEX_BYTES, ShardMovePlan, ShardScaling
from kvemb.commands.config_option import words_of
from kvemb.commands.resize_verbs.cluster_nodes_command import agreed
from kvemb.commands.resize_verbs.nodes_command import COMMANDS as MOVE_COMMANDS
from kvemb.commands.resize_verbs.nodes_command import Command, describe, for_the_file, look_on, nothing_to_do, weights_of
from kvemb.commands.text_table import text_table
from kvemb.config import load
from kvemb.errors import ConfigError

SHARD_ACTIONS = ("show", "add", "remove", "rebalance")
_MB = 1e6


def shards_command(args: argparse.Namespace) -> int:
    """Show the shards, or move slots between them."""
    action, source, words = words_of(args, SHARD_ACTIONS)
    servers = AllShards.of(load(source, os.environ).servers)
    try:
        shards = ShardScaling(servers)
        if action == "show":
            print(render_shards(shards))
            return 0
        plan = _plan(shards, action, words, weights_of(args.weights))
        return _carry_out(shards, plan, args) if plan.n_slots or plan.join or plan.leave else nothing_to_do()
    finally:
        servers.close()


def render_shards(shards: ShardScaling) -> str:
    """Return the shards as a table, and what moves."""
    addresses, state, sizes = shards.addresses(), shards.state(), shards.sizes()
    rows: list[tuple[object, ...]] = [("SHARD", "ADDRESS", "SLOTS", "ROWS", "RECORDS")]
    for shard, address in addresses.items():
        slots = state.map.slot_shards == shard
        size = f"{int(sizes.record_bytes[slots].sum()) / _MB:,.1f} MB"
        rows.append((shard, address, f"{int(slots.sum()):,}", f"{int(sizes.rows[slots].sum()):,}", size))
    gone = sorted(set(range(state.map.n_shards)) - set(state.map.shard_numbers))
    left = [f"gone: shard {', '.join(map(str, gone))}"] if gone else []
    return "\n".join([text_table(rows), *left, describe(state)])


def _plan(shards: ShardScaling, action: str, words: Sequence[str], weights: Mapping[str, float] | None) -> ShardMovePlan:
    if action == "rebalance":
        if words:
            raise ConfigError(f"kvemb shards rebalance: {' '.join(words)}: give shares as --weights ADDR=2,ADDR=1")
        return shards.rebalance(weights)
    if not words:
        raise ConfigError(f"kvemb shards {action}: give host:port of the shard")
    return (shards.add if action == "add" else shards.remove)(*words, weights=weights)


def _carry_out(shards: ShardScaling, plan: ShardMovePlan, args: argparse.Namespace) -> int:
    some = (("joins:", plan.join), ("leaves: shard", tuple(map(str, plan.leave))))
    names = [f"{word} {', '.join(which)}" for word, which in some if which]
    told = plan.n_rows * INDEX_BYTES / _MB
    print(
        f"{plan.n_slots:,} slots get another shard, with {plan.n_rows:,} rows, which stay where they are",
        f"shards tell each other {told:,.1f} MB",
        *names,
        sep="\n",
        flush=True,
    )
    if args.dry_run:
        return 0
    if not agreed(args, "begin"):
        return 1
    shards.begin(plan)
    code = look_on(shards)
    if plan.join or plan.leave:
        print(for_the_file("parameter_servers.shards", shards.addresses().values()))
    return code


COMMANDS: Mapping[str, Command] = {**MOVE_COMMANDS, "shards": shards_command}
