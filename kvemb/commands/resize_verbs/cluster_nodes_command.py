"""What `kvemb nodes` and `kvemb moves` do on a Redis Cluster or Valkey Cluster: this process drives the cluster's own commands."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from kvemb.commands.progress_meter import ProgressMeter
from kvemb.commands.text_table import text_table
from kvemb.config import StorageConfig
from kvemb.errors import ConfigError
from kvemb.net.deadline import Deadline
from kvemb.net.tls_link import connector_of
from kvemb.status.node_traffic import traffic_between
from kvemb.stores.redis_cluster.cluster_topology import ClusterTopology
from kvemb.stores.redis_cluster.scaling.node_scaling import NodeScaling, Progress
from kvemb.stores.redis_cluster.scaling.scaling_plans import ScalingPlan
from kvemb.stores.redis_server.redis_commands import RedisAccess

_MB = 1e6


def cluster_nodes(
    config: StorageConfig, action: str, words: Sequence[str], weights: Mapping[str, float] | None, args: argparse.Namespace
) -> int:
    """See `kvemb.commands.resize_verbs.nodes_command.nodes_command`."""
    with NodeScaling(config, max_mb_per_s=args.max_mb_per_s or None) as nodes:
        if action == "show":
            print(render_members(nodes))
            return 0
        plan = _plan(nodes, action, words, weights)
        print(f"{plan.n_slots:,} slots move, with about {plan.n_bytes / _MB:,.1f} MB", flush=True)
        if args.dry_run:
            return 0
        if not agreed(args, "begin"):
            return 1
        return _say(_driven(lambda progress: nodes.carry_out(plan, progress)))


def cluster_moves(config: StorageConfig, action: str) -> int:
    """See `kvemb.commands.resize_verbs.nodes_command.moves_command`."""
    with NodeScaling(config) as nodes:
        if action == "show":
            print(_under_way(nodes))
            return 0
        begun = nodes.plans.under_way() is not None
        remarks = _driven(nodes.abort if action == "abort" else nodes.resume)
        return _say(remarks) if begun or remarks else _say([], _under_way(nodes))


def cluster_addresses(config: StorageConfig) -> tuple[str, ...]:
    """Return the primaries that hold slots, as the cluster says now: a shard may know an older truth."""
    return ClusterTopology(RedisAccess(config, connector_of(config.tls))).refreshed(Deadline.after(config.timeout_s)).addresses


def render_members(nodes: NodeScaling) -> str:
    """Return the primaries as a table, and what moves."""
    rows: list[tuple[object, ...]] = [("ADDRESS", "SLOTS", "ROWS' BYTES", "USED", "HEADROOM", "TRAFFIC", "REPLICAS", "STATE")]
    traffic = traffic_between(nodes.plans.traffic_bytes)
    for node in nodes.plans.show():
        free = f"{(node.limit_bytes - node.used_bytes) / _MB:,.1f} MB" if node.limit_bytes else "-"
        used, state = f"{node.used_bytes / _MB:,.1f} MB", "failed" if node.failed else "ok"
        sizes = (f"{node.n_slots:,}", f"{node.row_bytes / _MB:,.1f} MB", used, free)
        rows.append((node.address, *sizes, traffic.get(node.address, "-"), node.n_replicas, state))
    return "\n".join([text_table(rows), _under_way(nodes)])


def agreed(args: argparse.Namespace, question: str) -> bool:
    """Ask on a terminal, unless --yes was said; elsewhere only --yes will do."""
    if args.yes:
        return True
    if not sys.stdin.isatty():
        print("nothing was changed: say --yes to begin", file=sys.stderr)
        return False
    return input(f"{question}? [y/N] ").strip().lower() in ("y", "yes")


def _plan(nodes: NodeScaling, action: str, words: Sequence[str], weights: Mapping[str, float] | None) -> ScalingPlan:
    n_words = {"add": 1, "remove": 1, "replace": 2, "rebalance": 0}[action]
    if len(words) != n_words or (weights and action != "rebalance"):
        raise ConfigError(f"kvemb nodes {action}: takes {n_words} addresses on a Redis Cluster, and --weights with rebalance only")
    if action == "rebalance":
        return nodes.plans.rebalance(weights)
    if action == "replace":
        return nodes.plans.replace(*words)
    return (nodes.plans.add if action == "add" else nodes.plans.remove)(*words)


def _under_way(nodes: NodeScaling) -> str:
    change = nodes.plans.under_way()
    if change is None:
        view = nodes.plans.view()
        idle = [node.address for node in view.primaries if not view.n_slots(node.name)]
        waits = f"; without slots: {', '.join(idle)} (`kvemb nodes add ADDRESS` gives it some, `kvemb nodes remove ADDRESS` takes it out)"
        return f"nothing moves{waits if idle else ''}"
    what = "being taken back" if change.aborting else "under way"
    return (
        f"a change of nodes ({change.kind}) is {what}, {nodes.n_left(change):,} slots to go: `kvemb moves resume`, or `kvemb moves abort`"
    )


def _driven(carry_out: Callable[[Progress], list[str]]) -> list[str]:
    try:
        with ProgressMeter(sys.stdout, "B") as meter:
            return carry_out(meter)
    except KeyboardInterrupt:
        print("\nstopped between two slots: `kvemb moves` says how far it came, and what goes on or takes it back", file=sys.stderr)
        raise


def _say(remarks: Sequence[str], outcome: str = "done") -> int:
    print("\n".join([outcome, *remarks]))
    return 0
