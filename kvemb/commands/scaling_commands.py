"""The verbs `kvemb nodes`, `shards`, `moves` and `config`: nodes and shards join, leave and take other shares.

All go the same way: show, or work a plan out, print its effect, ask, and have shard 0 carry it out (`kvemb.scaling.slot_moves`). A Redis
Cluster moves its slots itself: about its nodes the commands of redis-cli are printed.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Protocol

import numpy as np
import yaml

from kvemb.client.all_shards import AllShards
from kvemb.commands.terminal_output import ProgressMeter, agreed, text_table
from kvemb.commands.verb_options import words_of
from kvemb.config import Config, StorageConfig, is_address, load
from kvemb.errors import ConfigError, MoveRefusedError, n_of
from kvemb.net.deadline import Deadline
from kvemb.net.tls_link import connector_of
from kvemb.operate.cluster_status import survey
from kvemb.operate.pull_rates import look_twice
from kvemb.scaling.slot_moves import INDEX_BYTES, MoveState, NodeMoves, ShardScaling, SlotMoves
from kvemb.schema.cluster_map import GONE
from kvemb.schema.slot_dealing import SlotPlan, SlotSizes
from kvemb.stores.redis_cluster.node_commands import node_commands
from kvemb.stores.redis_cluster.slot_map import ClusterTopology, SlotMap, bus_port_of
from kvemb.stores.redis_server.redis_login import RedisAccess

NODE_ACTIONS = ("show", "add", "remove", "replace", "rebalance")
SHARD_ACTIONS = ("show", "add", "remove", "rebalance")
MOVE_ACTIONS = ("show", "abort", "resume")
REDIS_CLUSTER = "redis-cluster"
Weights = Mapping[str, float] | None


class _OwnersFront(Protocol):
    """The steps that differ by the kind of owners of slots."""

    def table(self) -> str:
        """Return the owners, and the slots that move, as a table."""

    def plan(self, action: str, words: Sequence[str], weights: Weights) -> SlotPlan:
        """Work out the plan of an action."""

    def lines(self, plan: SlotPlan) -> list[str]:
        """Return the plan's effect in words."""

    def carry_out(self, plan: SlotPlan) -> int:
        """Carry the plan out; return the exit code."""


def nodes_command(args: argparse.Namespace) -> int:
    """Show the nodes, or move slots between them."""
    action, source, words = _addresses_of(args, NODE_ACTIONS)
    config = load(source, os.environ)
    if config.storage.kind == REDIS_CLUSTER:
        if args.max_mb_per_s:
            raise ConfigError("--max-mb-per-s: a Redis Cluster moves its slots itself; redis-cli has no such limit")
        return _redis_cluster(action, words, config, weights_of(args.weights))
    with closing(AllShards.of(config.servers)) as servers:
        front = _NodesFront(NodeMoves(servers), config, args.max_mb_per_s)
        if action == "replace" and front.is_dead(words):
            return front.replace_dead(words, args)
        return _run(front, action, words, args)


def shards_command(args: argparse.Namespace) -> int:
    """Show the shards, or move slots between them."""
    action, source, words = _addresses_of(args, SHARD_ACTIONS)
    with closing(AllShards.of(load(source, os.environ).servers)) as servers:
        return _run(_ShardsFront(ShardScaling(servers)), action, words, args)


def _addresses_of(args: argparse.Namespace, actions: Sequence[str]) -> tuple[str, str, list[str]]:
    action, source, words = words_of(args, actions)
    for word in words:
        if action in ("add", "remove", "replace") and not is_address(word):
            raise ConfigError(f"{action}: got {word!r}, expected host:port")
    return action, source, words


def _run(front: _OwnersFront, action: str, words: Sequence[str], args: argparse.Namespace) -> int:
    if action == "show":
        print(front.table())
        return 0
    plan = front.plan(action, words, weights_of(args.weights))
    if plan.does_nothing:
        print("nothing has to move")
        return 0
    print(*front.lines(plan), sep="\n", flush=True)
    if args.dry_run:
        return 0
    return front.carry_out(plan) if agreed("begin", yes=args.yes) else 1


def moves_command(args: argparse.Namespace) -> int:
    """Show the move under way, take it back, or watch it until it has ended."""
    action, source, words = words_of(args, MOVE_ACTIONS)
    if words:
        raise ConfigError(f"{' '.join(words)}: {action} takes nothing but the path of a kvemb.yaml")
    config = load(source, os.environ)
    with closing(AllShards.of(config.servers)) as servers:
        moves = SlotMoves(servers)
        if action == "abort":
            if moves.abort().phase:
                return _look_on(moves, expected_back=True)
            print("the move was taken back, and everything is as before")
            return 0
        if action == "resume":
            return _look_on(moves)
        print(moves.state())
        return 0


def config_command(args: argparse.Namespace) -> int:
    """Show where nodes and shards are now, as the cluster itself knows it, in the form of a kvemb.yaml."""
    _, source, _ = words_of(args, ("show",))
    config = load(source, os.environ)
    with closing(AllShards.of(config.servers)) as servers:
        state = SlotMoves(servers).state()
    shards = [address for address in state.map.shard_places(config.servers.shards) if address]
    nodes = _cluster_map(config.storage).addresses if config.storage.kind == REDIS_CLUSTER else state.nodes.values()
    storage = {"kind": config.storage.kind, "nodes": list(nodes)}
    print(yaml.safe_dump({"cluster": config.cluster, "storage": storage, "parameter_servers": {"shards": shards}}, sort_keys=False), end="")
    return 0


# --- what shard 0 carries -----------------------------------------------------------------------------------------------------------


class _NodesFront:
    """Nodes under kvemb's own cluster map."""

    def __init__(self, moves: NodeMoves, config: Config, max_mb_per_s: float) -> None:
        self._moves, self._config, self._max_mb_per_s = moves, config, max_mb_per_s

    def table(self) -> str:
        stats, traffic = look_twice(self._config.storage)
        state, sizes, seen = self._moves.state(), self._moves.sizes(), {node.address: node for node in stats if not node.error}
        rows: list[tuple[object, ...]] = [("NODE", "ADDRESS", "SLOTS", "ROWS", "RECORDS", "USED", "HEADROOM", "TRAFFIC")]
        for number, place in state.nodes.items():
            node = seen.get(place)
            used = "-" if node is None else _mb(node.used_bytes)
            free = "-" if node is None or not node.limit_bytes else _mb(node.limit_bytes - node.used_bytes)
            held = _held(sizes, state.map.slot_nodes == number)
            rows.append((number, place, *held, used, free, traffic.get(place, "-")))
        gone = [number for number, place in enumerate(state.map.places) if place.said_by == GONE]
        return _with_gone(rows, "node", gone, state)

    def plan(self, action: str, words: Sequence[str], weights: Weights) -> SlotPlan:
        return self._moves.exchange(*words) if action == "replace" else _planned(self._moves, "node", action, words, weights)

    def lines(self, plan: SlotPlan) -> list[str]:
        least = f", {plan.n_bytes / 1e6 / self._max_mb_per_s:,.0f} s at least" if self._max_mb_per_s else ""
        return [f"{n_of(plan.n_slots, 'slot')} move, with {n_of(plan.n_rows, 'row')} of {_mb(plan.n_bytes)}{least}", *_who(plan)]

    def carry_out(self, plan: SlotPlan) -> int:
        self._moves.begin(plan, max_mb_per_s=self._max_mb_per_s)
        code = _look_on(self._moves)
        if plan.join or plan.leave:
            print(_for_the_file("storage.nodes", self._moves.state().nodes.values()))
        return code

    def is_dead(self, words: Sequence[str]) -> bool:
        """Whether the first of two addresses does not answer."""
        if len(words) != 2:
            raise ConfigError("replace: give host:port of the old node and of the new one")
        return not any(node.address == words[0] and not node.error for node in survey(self._config).nodes)

    def replace_dead(self, words: Sequence[str], args: argparse.Namespace) -> int:
        """Put another address in the place of a node that does not answer, once the user agrees that it is gone for good."""
        old, new = words
        print(f"node {old} does not answer: the shards bring its rows back on {new}, from their journals and snapshots")
        if args.dry_run or not agreed("is it gone for good", yes=args.yes):
            return 0 if args.dry_run else 1
        self._moves.replace_dead(old, new)
        print(f"node {new} has its number now; `kvemb status` shows how far the shards are")
        return 0


class _ShardsFront:
    """Shards, on every kind of storage."""

    def __init__(self, shards: ShardScaling) -> None:
        self._shards = shards

    def table(self) -> str:
        addresses, state, sizes = self._shards.addresses(), self._shards.state(), self._shards.sizes()
        rows: list[tuple[object, ...]] = [("SHARD", "ADDRESS", "SLOTS", "ROWS", "RECORDS")]
        rows += [(shard, address, *_held(sizes, state.map.slot_shards == shard)) for shard, address in addresses.items()]
        return _with_gone(rows, "shard", sorted(set(range(state.map.n_shards)) - set(state.map.shard_numbers)), state)

    def plan(self, action: str, words: Sequence[str], weights: Weights) -> SlotPlan:
        return _planned(self._shards, "shard", action, words, weights)

    def lines(self, plan: SlotPlan) -> list[str]:
        told = f"shards tell each other {_mb(plan.n_rows * INDEX_BYTES)}"
        return [
            f"{n_of(plan.n_slots, 'slot')} to another shard, with {n_of(plan.n_rows, 'row')}, which stay where they are",
            told,
            *_who(plan),
        ]

    def carry_out(self, plan: SlotPlan) -> int:
        self._shards.begin(plan)
        code = _look_on(self._shards)
        if plan.join or plan.leave:
            print(_for_the_file("parameter_servers.shards", self._shards.addresses().values()))
        return code


def _planned(moves: NodeMoves | ShardScaling, noun: str, action: str, words: Sequence[str], weights: Weights) -> SlotPlan:
    if action == "rebalance":
        if words:
            raise ConfigError(f"rebalance: {' '.join(words)}: give shares as --weights ADDR=2,ADDR=1")
        return moves.rebalance(weights)
    if not words:
        raise ConfigError(f"{action}: give host:port of the {noun}")
    return (moves.add if action == "add" else moves.remove)(*words, weights=weights)


def _look_on(moves: SlotMoves, *, expected_back: bool = False) -> int:
    """Show the progress of a move until it has ended; return the exit code."""
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
        goes_on = "the move goes on without this command: `kvemb moves` shows how far it is, `kvemb moves abort` takes it back"
        print(f"\n{goes_on}", file=sys.stderr)
        raise
    shards = ", ".join(map(str, state.map.shard_numbers))
    print(f"done: nodes {', '.join(state.nodes.values())}; shards {shards} (cluster map of version {state.map.version})")
    return 0


# --- a cluster that places its slots itself -------------------------------------------------------------------------------------------


def _redis_cluster(action: str, words: Sequence[str], config: Config, weights: Weights) -> int:
    """Show the primaries of a Redis Cluster, or the commands of redis-cli that change them."""
    slot_map = _cluster_map(config.storage)
    if action == "show":
        print(_primaries(config.storage, slot_map))
        return 0
    dead = action == "replace" and not any(node.address in words[:1] and not node.error for node in survey(config).nodes)
    bus_port = bus_port_of(slot_map.source, _access(config.storage), Deadline.after(config.storage.timeout_s)) if dead else 0
    lines = node_commands(action, words, weights or {}, slot_map, config.storage, bus_port=bus_port)
    login = "" if config.storage.password is None else "export REDISCLI_AUTH, the administrator's password; "
    print(f"a Redis Cluster moves its slots itself. Type, while training goes on ({login}docs/scaling.md):", *lines, sep="\n")
    return 0


def _primaries(config: StorageConfig, slot_map: SlotMap) -> str:
    stats, traffic = look_twice(config)
    rows: list[tuple[object, ...]] = [("ADDRESS", "SLOTS", "USED", "HEADROOM", "TRAFFIC", "STATE")]
    for node in stats:
        free = _mb(node.limit_bytes - node.used_bytes) if node.limit_bytes else "-"
        slots = f"{int(slot_map.slots_of(node.address).sum()):,}"
        rows.append((node.address, slots, _mb(node.used_bytes), free, traffic.get(node.address, "-"), node.error or "ok"))
    return text_table(rows)


def _cluster_map(config: StorageConfig) -> SlotMap:
    """Ask the cluster itself: a shard's knowledge may be older."""
    return ClusterTopology(_access(config)).refreshed(Deadline.after(config.timeout_s))


def _access(config: StorageConfig) -> RedisAccess:
    return RedisAccess(config, connector_of(config.tls))


# --- words --------------------------------------------------------------------------------------------------------------------------


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


def _who(plan: SlotPlan) -> list[str]:
    return [f"{word}: {', '.join(some)}" for word, some in (("joins", plan.join), ("leaves", plan.leave)) if some]


def _for_the_file(key: str, addresses: Iterable[str]) -> str:
    return f"put into kvemb.yaml, when it suits you: {key}: [{', '.join(addresses)}]"


def _held(sizes: SlotSizes, slots: np.ndarray) -> tuple[str, str, str]:
    """Return the numbers of slots and rows, and the bytes of records, of one owner."""
    return f"{int(slots.sum()):,}", f"{int(sizes.rows[slots].sum()):,}", _mb(int(sizes.record_bytes[slots].sum()))


def _with_gone(rows: Sequence[tuple[object, ...]], noun: str, gone: Sequence[int], state: MoveState) -> str:
    left = [f"gone: {noun} {', '.join(map(str, gone))}"] if gone else []
    return "\n".join([text_table(rows), *left, str(state)])


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"
