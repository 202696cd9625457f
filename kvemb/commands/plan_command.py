"""The verb `kvemb plan`: how many machines a table will need, how long its jobs take, what breaks first; and what was not measured."""

import argparse
import json
from typing import Any

from kvemb import init, optim
from kvemb.commands.terminal_output import text_table
from kvemb.errors import n_of
from kvemb.operate import capacity as costs
from kvemb.operate.capacity import BUSY, FULL, LOAD_S, CapacityPlan, Workload, cautions, parts_of, plans_for, smallest, ten_times
from kvemb.operate.row_costs import JOIN, LOAD, REPAIR, SAVE, SERVER, SHARD, START
from kvemb.schema.table_def import TableDef

_GB, _MB = 1e9, 1e6
_WHY = "FOR MEMORY", "FOR CPU"
_HEAD = "STORAGE", "LAYOUT", "B/ROW", "MEMORY", "NODES", *_WHY, "SHARDS", *_WHY, "FOR LOAD", "FOR LOG", "NODE BACK IN"
_JOBS = {
    SAVE: "a full checkpoint is saved in",
    LOAD: "a full checkpoint is loaded in",
    REPAIR: "a lost node has its rows back in",
    START: "a killed shard with a full journal serves in",
    JOIN: "a node more has its rows in",
}
_GROWN = 1.1
_WAITS = {SERVER: "a node's core", SHARD: "the shards' cores"}

_DEPENDS = """\
Memory and times per row: benchmarks/RESULTS.md, of a virtual machine with 2 cores and tables of up to ten million rows. Times change with
the processor, the network and how many rows share a command; no row is taken to be in a shard's cache. Memory is what servers count
against their limit; their processes take more. Traffic of shards and disk follow from the formats."""


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan of one table."""
    optimizer = getattr(optim, args.optimizer)()
    table = TableDef("plan", args.dim, optimizer, init.zeros(), args.dtype)
    work = Workload(
        table,
        args.ids,
        min(args.step_ids, args.ids),
        args.steps_per_s,
        args.trainers,
        args.node_gb * _GB,
        args.shard_gb * _GB,
        args.cache_mb * _MB,
    )
    plans = plans_for(work)
    print(json.dumps(_as_json(work, plans)) if args.json else _text(args, work, plans))
    return 0


def _text(args: argparse.Namespace, work: Workload, plans: list[CapacityPlan]) -> str:
    table, best = work.table, smallest(plans)
    parts = " + ".join(f"{size} {name}" for name, size in parts_of(table).items())
    lines = [
        f"{best.at.nodes:,} {best.kind} nodes of {args.node_gb:g} GB and {n_of(best.at.shards, 'shard')} of {args.shard_gb:g} GB, "
        f"{best.at.nodes + best.at.shards:,} machines at least ({best.layout} layout).",
        "",
        f"{work.n_rows:,} rows of {table.dim} {table.dtype} weights, {args.optimizer}: "
        f"records of {table.record.size_bytes} bytes ({parts})",
        f"{work.step_rows:,} distinct ids a step, {work.steps_per_s:g} steps/s, {work.trainers} trainers: "
        f"{work.rows_per_s:,.0f} rows/s pulled and trained",
        "",
        f"Enough for a load in at most {LOAD_S / 3600:g} h, memory filled to {FULL:.0%}, and a core of each busy to {BUSY:.0%} at most:",
        text_table(_machines(best)),
        f"Trainers need {best.trainer_cores:.1f} cores for rows.",
        "",
        text_table([(f"{words} ", _time(best.times[job][0]), f"(waits for {_WAITS[best.times[job][1]]})") for job, words in _JOBS.items()]),
        "",
        *_at_ten_times(best),
        "",
        "Every kind of storage; pages: only where ids are 0 to N - 1",
        text_table([_HEAD, *(_row(plan) for plan in plans)]),
        "",
        _DEPENDS,
        *cautions(plans),
    ]
    return "\n".join(lines)


def _machines(plan: CapacityPlan) -> list[tuple[object, ...]]:
    at, shares = plan.at, plan.shares()

    def row(what: str, node: float | None, shard: float, unit: str = "", note: str = "") -> tuple[object, ...]:
        nodes = ("-", "-") if node is None else (f"{_bytes(node * at.nodes)}{unit}", f"{_bytes(node)}{unit}")
        return (what, *nodes, f"{_bytes(shard * at.shards)}{unit}", f"{_bytes(shard)}{unit}{note}")

    log_note = f" ({costs.logged_share(plan.shard_rows):.1%} of its rows are known from its disk alone)"
    return [
        ("", "ALL NODES", "EACH", "ALL SHARDS", "EACH"),
        row("memory", plan.node_bytes, plan.shard_bytes),
        row("  index", None, plan.index_bytes, note=log_note),
        row("disk", None, plan.shard_disk_bytes, note=" at most"),
        row("  journal", None, plan.journal_bytes_per_s / at.shards, "/s"),
        row("network", plan.node_network, plan.shard_network, "/s"),
        (
            "CPU",
            f"{plan.us[SERVER]:.1f} µs a row",
            f"{shares['CPU of a node'] * BUSY:.1%} of a core",
            f"{plan.us[SHARD]:.1f} µs a row",
            f"{shares['CPU of a shard'] * BUSY:.1%} of a core",
        ),
    ]


def _at_ten_times(plan: CapacityPlan) -> list[str]:
    """Say what each part of what the plan may use comes to at ten times the load, and which part is the first that does not suffice."""
    plans = {"as planned": plan, **ten_times(plan)}
    shares = {name: one.shares() for name, one in plans.items()}
    rows = [
        ("SHARE OF WHAT IT MAY USE", *(name.upper() for name in plans)),
        *((what, *(f"{each[what]:.1%}" for each in shares.values())) for what in plan.shares()),
        ("nodes + shards", *(f"{one.at.nodes:,} + {one.at.shards:,} ({one.kind}, {one.layout})" for one in plans.values())),
        ("a lost node has its rows back in", *(_time(one.times[REPAIR][0]) for one in plans.values())),
    ]
    return [text_table(rows), *(_first_to_break(name, shares["as planned"], each) for name, each in shares.items() if name != "as planned")]


def _first_to_break(name: str, planned: dict[str, float], shares: dict[str, float]) -> str:
    """Name what has grown most in relation to what it may use; memory has not where machines were added for it."""
    grown = {what: share for what, share in shares.items() if share > _GROWN * planned[what]} or shares
    first = max(grown, key=grown.__getitem__)
    begin = "First to break" if grown[first] > 1 else "Nothing breaks, nearest to its limit"
    return f"{begin} at {name}: {first}, {grown[first]:.0%} of what it may use."


def _row(plan: CapacityPlan) -> tuple[object, ...]:
    return (
        plan.kind,
        plan.layout,
        f"{plan.row_bytes:.0f}",
        _bytes(plan.node_bytes * plan.at.nodes),
        f"{plan.at.nodes:,}",
        f"{plan.nodes.for_memory:,}",
        f"{plan.nodes.for_cpu:,}",
        f"{plan.at.shards:,}",
        f"{plan.shards.for_memory:,}",
        f"{plan.shards.for_cpu:,}",
        f"{plan.shards.for_load:,}",
        f"{plan.shards.for_log:,}",
        _time(plan.times[REPAIR][0]),
    )


def _as_json(work: Workload, plans: list[CapacityPlan]) -> dict[str, Any]:
    return {
        "record_bytes": work.table.record.size_bytes,
        "rows": work.n_rows,
        "rows_per_s": work.rows_per_s,
        "plans": [_fields(plan) for plan in plans],
        "cautions": cautions(plans),
    }


def _fields(plan: CapacityPlan) -> dict[str, Any]:
    return {
        "kind": plan.kind,
        "layout": plan.layout,
        "nodes": plan.at.nodes,
        "nodes_for_memory": plan.nodes.for_memory,
        "nodes_for_cpu": plan.nodes.for_cpu,
        "shards": plan.at.shards,
        "shards_for_memory": plan.shards.for_memory,
        "shards_for_cpu": plan.shards.for_cpu,
        "shards_for_load": plan.shards.for_load,
        "shards_for_log": plan.shards.for_log,
        "row_bytes": plan.row_bytes,
        "node_bytes": plan.node_bytes,
        "shard_bytes": plan.shard_bytes,
        "shard_disk_bytes": plan.shard_disk_bytes,
        "node_network_bytes_per_s": plan.node_network,
        "shard_network_bytes_per_s": plan.shard_network,
        "us_per_row": dict(plan.us),
        "seconds": {job: took_s for job, (took_s, _) in plan.times.items()},
        "shares": plan.shares(),
    }


def _bytes(n: float) -> str:
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.{0 if n >= 100 * size else 1}f} {unit}"
    return f"{n:.0f} B"


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{seconds:.0f} s"
