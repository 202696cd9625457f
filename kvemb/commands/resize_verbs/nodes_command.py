"""What `kvemb nodes`, `kvemb moves` and `kvemb config` do: storage nodes come and go, and what the cluster is now."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import yaml

from kvemb.client.all_shards import AllShards
from kvemb.client.resizing.node_moves import NodeMoves, NodePlan
from kvemb.client.resizing.slot_moves import MoveState, SlotMoves
from kvemb.commands.config_option import words_of
from kvemb.commands.progress_meter import ProgressMeter
from kvemb.commands.resize_verbs.cluster_nodes_command import agreed, cluster_addresses, cluster_moves, cluster_nodes
from kvemb.commands.text_table import text_table
from kvemb.config import Config, load
from kvemb.errors import ConfigError, MoveRefusedError, ShardUnavailableError
from kvemb.schema.cluster_map import GONE
from kvemb.schema.move_plan import NODES
from kvemb.status.cluster_status import survey
from kvemb.status.node_traffic import NodeTraffic, look_twice
from kvemb.stores.store import NodeStats

NODE_ACTIONS = ("show", "add", "remove", "replace", "rebalance")
REDIS_CLUSTER = "redis-cluster"
MOVE_ACTIONS = ("show", "abort", "resume")
_MB = 1e6
_ASK_S = 5.0


def nodes_command(args: argparse.Namespace) -> int:
    """Show the nodes, or move slots between them."""
    action, source, words = words_of(args, NODE_ACTIONS)
    config = load(source, os.environ)
    if config.storage.kind == REDIS_CLUSTER:
        return cluster_nodes(config.storage, action, words, weights_of(args.weights), args)
    with _moves(config) as moves:
        if action == "show":
            print(render_nodes(moves, *look_twice(config.storage)))
            return 0
        if action == "replace":
            return _replace(moves, config, words, args)
        plan = _plan(moves, action, words, weights_of(args.weights))
        return _carry_out(moves, plan, args) if plan.n_slots or plan.join or plan.leave else nothing_to_do()


def moves_command(args: argparse.Namespace) -> int:
    """Show the move under way, take it back, or look on until it has ended."""
    action, source, words = words_of(args, MOVE_ACTIONS)
    if words:
        raise ConfigError(f"{' '.join(words)}: {action} takes nothing but the path of a kvemb.yaml")
    config = load(source, os.environ)
    if config.storage.kind == REDIS_CLUSTER:
        shards = _of_shards(config)
        if action == "show" or not shards:
            code = cluster_moves(config.storage, action)
            if shards:
                print(shards)
            return code
    with _moves(config) as moves:
        if action == "abort":
            if not moves.abort().phase:
                print("the move was taken back, and everything is as before")
                return 0
            return look_on(moves, expected_back=True)
        if action == "resume":
            return look_on(moves)
        print(describe(moves.state()))
        return 0


def _of_shards(config: Config) -> str:
    """What moves between the shards of a Redis Cluster; "" for nothing. Its nodes can be asked for theirs while no shard answers."""
    try:
        with _moves(config, timeout_s=_ASK_S) as moves:
            state = moves.state()
    except ShardUnavailableError:
        return ""
    return "" if state.map.plan is None else describe(state)


def config_command(args: argparse.Namespace) -> int:
    """Show where nodes and shards are now, as the cluster itself knows it, in the form of a kvemb.yaml."""
    _, source, _ = words_of(args, ("show",))
    config = load(source, os.environ)
    with _moves(config) as moves:
        state = moves.state()
    shards = [address for address in state.map.shard_places(config.servers.shards) if address]
    own_map = config.storage.kind != REDIS_CLUSTER
    nodes = {"kind": config.storage.kind, "nodes": list(state.nodes.values() if own_map else cluster_addresses(config.storage))}
    print(yaml.safe_dump({"cluster": config.cluster, "storage": nodes, "parameter_servers": {"shards": shards}}, sort_keys=False), end="")
    return 0


def describe(state: MoveState) -> str:
    """Return what is under way, in words."""
    plan = state.map.plan
    if plan is None:
        last = "".join(f"\nthe last move was taken back: {why}" for why in state.troubles)
        return f"nothing moves; the cluster map is of version {state.map.version}{last}"
    owners = state.map.slot_nodes if plan.kind == NODES else state.map.slot_shards
    n_slots = int(np.count_nonzero(owners != plan.slot_owners))
    rows = f", {state.rows:,} of {state.n_rows:,} rows gone through" if state.n_rows else ""
    lines = [f"{n_slots:,} slots move between {plan.kind}: {plan.phase}{rows}"]
    lines += [f"taken back because: {plan.why}"] if plan.why else []
    lines += [f"waits for shard {', '.join(map(str, state.silent))}"] if state.silent else []
    return "\n".join([*lines, *state.troubles])


def render_nodes(moves: NodeMoves, stats: Sequence[NodeStats], traffic: Mapping[str, NodeTraffic]) -> str:
    """Return the nodes as a table, and what moves."""
    state, sizes, seen = moves.state(), moves.sizes(), {node.address: node for node in stats}
    rows: list[tuple[object, ...]] = [("NODE", "ADDRESS", "SLOTS", "ROWS", "RECORDS", "USED", "HEADROOM", "TRAFFIC")]
    for number, place in enumerate(state.places):
        slots = state.map.slot_nodes == number
        if not place:
            continue
        node = seen.get(place)
        used = "-" if node is None or node.error else f"{node.used_bytes / _MB:,.1f} MB"
        free = "-" if node is None or node.error or not node.limit_bytes else f"{(node.limit_bytes - node.used_bytes) / _MB:,.1f} MB"
        size = f"{int(sizes.record_bytes[slots].sum()) / _MB:,.1f} MB"
        rows.append(
            (number, place, f"{int(slots.sum()):,}", f"{int(sizes.rows[slots].sum()):,}", size, used, free, traffic.get(place, "-"))
        )
    gone = [number for number, place in enumerate(state.map.places) if place.said_by == GONE]
    left = [f"gone: node {', '.join(map(str, gone))}"] if gone else []
    return "\n".join([text_table(rows), *left, describe(state)])


def _plan(moves: NodeMoves, action: str, words: Sequence[str], weights: Mapping[str, float] | None) -> NodePlan:
    if action == "rebalance":
        if words:
            raise ConfigError(f"kvemb nodes rebalance: {' '.join(words)}: give shares as --weights ADDR=2,ADDR=1")
        return moves.rebalance(weights)
    if not words:
        raise ConfigError(f"kvemb nodes {action}: give host:port of the node")
    return (moves.add if action == "add" else moves.remove)(*words, weights=weights)


def _replace(moves: NodeMoves, config: Config, words: Sequence[str], args: argparse.Namespace) -> int:
    if len(words) != 2:
        raise ConfigError("kvemb nodes replace: give host:port of the old node and of the new one")
    old, new = words
    stats = {node.address: node for node in survey(config).nodes}
    if old in stats and not stats[old].error:
        return _carry_out(moves, moves.exchange(old, new), args)
    print(f"node {old} does not answer: the shards bring its rows back on {new}, from their journals and snapshots")
    if args.dry_run or not agreed(args, "is it gone for good"):
        return 0 if args.dry_run else 1
    moves.replace_dead(old, new)
    print(f"node {new} has its number now; `kvemb status` shows how far the shards are")
    return 0


def _carry_out(moves: NodeMoves, plan: NodePlan, args: argparse.Namespace) -> int:
    names = [f"{word} {', '.join(some)}" for word, some in (("joins:", plan.join), ("leaves:", plan.leave)) if some]
    speed = f", {plan.n_bytes / _MB / args.max_mb_per_s:,.0f} s at least" if args.max_mb_per_s else ""
    print(f"{plan.n_slots:,} slots move, with {plan.n_rows:,} rows of {plan.n_bytes / _MB:,.1f} MB{speed}", *names, sep="\n", flush=True)
    if args.dry_run:
        return 0
    if not agreed(args, "begin"):
        return 1
    moves.begin(plan, max_mb_per_s=args.max_mb_per_s)
    code = look_on(moves)
    if plan.join or plan.leave:
        print(for_the_file("storage.nodes", moves.state().nodes.values()))
    return code


def for_the_file(key: str, addresses: Iterable[str]) -> str:
    """Return what kvemb.yaml is to say now, as a line."""
    return f"put into kvemb.yaml, when it suits you: {key}: [{', '.join(addresses)}]"


def look_on(moves: SlotMoves, *, expected_back: bool = False) -> int:
    """Show how far a move is until it has ended; return the exit code."""
    said = ""

    def show(state: MoveState) -> None:
        nonlocal said
        if state.phase:
            meter(state.phase, state.rows, state.n_rows)
        if state.troubles and said != (said := "; ".join(state.troubles)):
            print(said, file=sys.stderr)

    try:
        with ProgressMeter(sys.stdout, "rows") as meter:
            state = moves.wait(progress=show)
    except MoveRefusedError as error:
        if not expected_back:
            raise
        print(error)
        return 0
    except KeyboardInterrupt:
        print(
            "\nthe move goes on without this command: `kvemb moves` shows how far it is, `kvemb moves abort` takes it back", file=sys.stderr
        )
        raise
    shards = ", ".join(map(str, state.map.shard_numbers))
    print(f"done: nodes {', '.join(state.nodes.values())}; shards {shards} (cluster map of version {state.map.version})")
    return 0


def nothing_to_do() -> int:
    """Say so."""
    print("nothing has to move")
    return 0


def weights_of(text: str) -> dict[str, float] | None:
    """Read `--weights`; None where it was not given."""
    if not text:
        return None
    try:
        pairs = [part.rpartition("=") for part in text.split(",")]
        weights = {address: float(share) for address, _, share in pairs}
    except ValueError as error:
        raise ConfigError(f"--weights {text}: give shares as ADDR=2,ADDR=1") from error
    if not all(address and share >= 0 for address, share in weights.items()):
        raise ConfigError(f"--weights {text}: give shares as ADDR=2,ADDR=1")
    return weights


@contextmanager
def _moves(config: Config, timeout_s: float = 30.0) -> Iterator[NodeMoves]:
    servers = AllShards.of(config.servers)
    try:
        yield NodeMoves(servers, timeout_s)
    finally:
        servers.close()


Command = Callable[[argparse.Namespace], int]
COMMANDS: Mapping[str, Command] = {"nodes": nodes_command, "moves": moves_command, "config": config_command}
