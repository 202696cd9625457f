"""The verb `kvemb plan`: the nodes and shards that a table will need, by kind of storage and layout, and the figures never measured."""

import argparse
import dataclasses
import json
from typing import Any

from kvemb import init, optim
from kvemb.commands.terminal_output import text_table
from kvemb.operate import capacity as costs
from kvemb.operate.capacity import BUSY, FULL, Counted, ShardPlan, StoragePlan, Workload, cautions, parts_of, plan_shards, plan_storage
from kvemb.schema.table_def import TableDef

_GB, _MB = 1e9, 1e6
_HEAD = ("STORAGE", "LAYOUT", "B/ROW", "MEMORY", "NODES", "MEMORY NEEDS", "CPU NEEDS", "µs/ROW", "NODE SENDS", "ONE NODE BACK IN")

_DEPENDS = """\
Memory and times per row: benchmarks/RESULTS.md, of a virtual machine with 2 cores and tables of up to 2 million rows. Times change with
the processor, the network and how many rows share a command. Memory is what servers count against their limit; their processes take
more (fragmentation, connections). Traffic and disk follow from the formats, without what the protocols add."""


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan of one table."""
    optimizer = getattr(optim, args.optimizer)()
    table = TableDef("plan", args.dim, optimizer, init.zeros(), args.dtype)
    work = Workload(table, args.ids, min(args.step_ids, args.ids), args.steps_per_s)
    storage = plan_storage(work, args.node_gb * _GB)
    shards = plan_shards(work, args.shard_gb * _GB, round(args.cache_mb * _MB))
    said = cautions(work, storage, shards)
    print(json.dumps(_as_json(work, storage, shards, said)) if args.json else _text(args, work, storage, shards, said))
    return 0


def _text(args: argparse.Namespace, work: Workload, storage: list[StoragePlan], shards: ShardPlan, said: list[str]) -> str:
    table = work.table
    parts = " + ".join(f"{size} {name}" for name, size in parts_of(table).items())
    lines = [
        f"{work.n_rows:,} rows of {table.dim} {table.dtype} weights, {args.optimizer}: "
        f"records of {table.record.size_bytes} bytes ({parts})",
        f"{work.step_rows:,} distinct ids a step, {work.steps_per_s:g} steps/s: {work.rows_per_s:,.0f} rows/s pulled and trained",
        "",
        f"Nodes, each with {args.node_gb:g} GB (filled to {FULL:.0%}) and one core (busy to {BUSY:.0%}); "
        "pages: only where ids are 0 to N - 1",
        text_table([_HEAD, *(_row(work, plan) for plan in storage)]),
        "",
        _shard_text(args, work, shards),
        "",
        _DEPENDS,
        *said,
    ]
    return "\n".join(lines)


def _row(work: Workload, plan: StoragePlan) -> tuple[object, ...]:
    return (
        plan.kind,
        plan.layout,
        f"{plan.row_bytes:.0f}",
        _bytes(plan.total_bytes),
        f"{plan.nodes.n:,}",
        f"{plan.nodes.for_memory:,}",
        f"{plan.nodes.for_cpu:,}",
        f"{plan.server_us:.2f}",
        f"{_bytes(work.rows_per_s / plan.nodes.n * plan.pull_bytes)}/s",
        _time(plan.repair_s),
    )


def _shard_text(args: argparse.Namespace, work: Workload, plan: ShardPlan) -> str:
    n = plan.shards.n
    return "\n".join(
        [
            f"Shards: {n:,}, each with {args.shard_gb:g} GB (filled to {FULL:.0%}) and one core (busy to {BUSY:.0%}); "
            f"memory needs {plan.shards.for_memory:,}, CPU {plan.shards.for_cpu:,}",
            f"  index     {_bytes(plan.index_bytes)} of memory, {costs.INDEX_BYTES_PER_ROW} bytes for every row; "
            f"{_bytes(plan.cut_bytes)} more while a checkpoint is saved; each shard {_bytes((plan.index_bytes + plan.cut_bytes) / n)}",
            f"  cache     {_bytes(plan.cache_bytes)} of records each",
            f"  process   {_bytes(costs.PROCESS_BYTES)} each, at most: code, connections, pushes and batches on their way",
            f"  disk      {_bytes(plan.snapshot_bytes / n)} each for local snapshots, at most, and journal_max_mb; "
            f"the journal grows by {_bytes(plan.journal_bytes_per_s / n)}/s",
            f"  network   each takes {_bytes(work.rows_per_s / n * plan.push_bytes)}/s of pushes, and writes "
            f"{_bytes(work.rows_per_s / n * work.table.record.size_bytes)}/s of rows to storage",
            f"  time      {plan.shard_us:.2f} µs of a shard and {plan.trainer_us:.2f} of a trainer for every trained row",
            f"  save      a full checkpoint takes {_time(plan.save_s)}, if every shard saves as fast as the one that was measured",
        ]
    )


def _as_json(work: Workload, storage: list[StoragePlan], shards: ShardPlan, said: list[str]) -> dict[str, Any]:
    return {
        "record_bytes": work.table.record.size_bytes,
        "rows": work.n_rows,
        "rows_per_s": work.rows_per_s,
        "storage": [_fields(plan, plan.nodes, "nodes") for plan in storage],
        "shards": _fields(shards, shards.shards, "shards"),
        "cautions": said,
    }


def _fields(plan: StoragePlan | ShardPlan, counted: Counted, name: str) -> dict[str, Any]:
    return {**dataclasses.asdict(plan), name: counted.n, f"{name}_for_memory": counted.for_memory, f"{name}_for_cpu": counted.for_cpu}


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
