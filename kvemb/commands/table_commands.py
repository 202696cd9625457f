"""The verbs `kvemb tables`, `show`, `drop` and `alter`: the tables of a cluster, what their policies erase, and one row as storage, index
and cache know it.
"""

import argparse
import json
import sys
from typing import Any

import numpy as np

from kvemb.alter.altered_table import AlteredTable, TableChanges
from kvemb.api import Cluster, connect
from kvemb.arrays.ids import normalize
from kvemb.commands.terminal_output import ProgressMeter, agreed, text_table
from kvemb.errors import InvalidInputError, StorageError, n_of
from kvemb.net.deadline import Deadline
from kvemb.operate.inspection_messages import SHOW_ROW, ShowRowReply, ShowRowRequest
from kvemb.optim import OptimizerSpec
from kvemb.schema.record import split_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart

_SHOWN = 8  # of a row's weights


def tables_command(args: argparse.Namespace) -> int:
    """List the tables, first those that have given the shards the most work since they were started; or what their policies erase."""
    if args.evictions or args.dry_run:
        return _evictions(args)
    with connect(args.config) as cluster:
        found = [_table(cluster, name) for name in cluster.tables()]
    found.sort(key=lambda table: -table["rows_applied"])
    if args.json:
        print(json.dumps(found))
        return 0
    head = ("TABLE", "DIM", "DTYPE", "OPTIMIZER", "REDUCE", "LAYOUT", "ADMISSION", "EVICTION", "ROWS", "STEPS", "APPLIED", "RECORD", "MB")
    print(text_table([head, *map(_cells, found)]))
    return 0


def _evictions(args: argparse.Namespace) -> int:
    from kvemb.life.eviction_messages import EVICTIONS, EvictionsRequest

    with connect(args.config) as cluster:
        asked = cluster.questions.ask_each(EVICTIONS, EvictionsRequest(args.dry_run, args.timeout), args.timeout)
    by_shard = {shard: reply.tables for shard, reply in asked.items()}
    found = sorted(({"shard": shard, **one} for shard, tables in by_shard.items() for one in tables), key=lambda one: one["table"])
    if args.json:
        print(json.dumps(found))
        return 0
    if not found:
        print("no table has an eviction policy: create_table(eviction=…) or Table.set_policies(eviction=…) gives it one")
        return 0
    went = "WOULD GO" if args.dry_run else "EVICTED"
    head = ("TABLE", "SHARD", "ROWS", "BY", went, "MB", "OLDEST")
    print(text_table([head, *(line for one in found for line in _eviction_cells(one))]))
    return 0


def _eviction_cells(one: dict[str, Any]) -> list[tuple[object, ...]]:
    """A line for each policy that has sent rows; the first has what is known of all of them."""
    by = list(one["by_policy"].items()) or [(one["policy"], 0)]
    oldest = "-" if one["oldest_batch"] < 0 else f"batch {one['oldest_batch']:,}"
    oldest += f", {one['oldest_s'] / 3600:,.1f} h ago" if one["oldest_s"] else ""
    whole = f"{one['bytes'] / 1e6:,.1f}", oldest
    first = one["table"], one["shard"], f"{one['rows']:,}", by[0][0], f"{by[0][1]:,}", *whole
    return [first, *(("", "", "", policy, f"{n_rows:,}", "", "") for policy, n_rows in by[1:])]


def _cells(table: dict[str, Any]) -> tuple[object, ...]:
    words = (table[word] for word in ("name", "dim", "dtype", "optimizer", "reduce", "layout", "admission", "eviction"))
    counts = (f"{table[word]:,}" for word in ("rows", "steps", "rows_applied"))
    return (*words, *counts, f"{table['record_bytes']} B", f"{table['rows'] * table['record_bytes'] / 1e6:,.1f}")


def _table(cluster: Cluster, name: str) -> dict[str, Any]:
    table = cluster.table(name)
    definition, policies = table.definition, table.policies()
    return {
        "name": name,
        "dim": definition.dim,
        "dtype": definition.dtype,
        "optimizer": definition.optimizer.kind,
        "reduce": definition.reduce,
        "layout": _layout(definition, pages=cluster.store.capabilities.pages),
        "admission": str(policies.admission),
        "eviction": str(policies.eviction),
        "rows": len(table),
        "steps": cluster.questions.step(name),
        "rows_applied": cluster.questions.rows_applied(name),
        "record_bytes": definition.record.size_bytes,
    }


def _layout(definition: TableDef, *, pages: bool) -> str:
    if not pages:
        return "keys"
    return "pages" if definition.pages is not None else f"{definition.n_buckets} {'compact ' * (definition.layout == 'compact')}buckets"


def show_command(args: argparse.Namespace) -> int:
    """Print one row as storage, index and cache know it; exit code 1 where they do not agree."""
    with connect(args.config) as cluster:
        shown = _row(cluster, args.table, args.id)
    print(json.dumps(shown) if args.json else _text(shown))
    return 0 if shown["agrees"] else 1


def _row(cluster: Cluster, name: str, given: int) -> dict[str, Any]:
    definition = cluster.table(name).definition
    ids, _ = normalize([given], definition.id_dtype, name, definition.num_ids, minus_one=True)
    slot = int(definition.placement.slots(ids)[0])
    shard = int(cluster.store.nodes.cluster_map.slot_shards[slot])
    known = cluster.questions.ask(shard, SHOW_ROW, ShowRowRequest(name, int(ids[0])))
    store, record = cluster.store, definition.record
    keys = definition.keys(ids, pages=store.capabilities.pages)
    where = {
        "slot": slot,
        "node": store.rows.node_of(keys),
        "key": keys.described(0),
        "shard": shard,
        "address": cluster.questions.address(shard),
    }
    stored, trouble = b"", ""
    try:
        read = store.rows.read([ReadPart(keys, record.size_bytes, record.size_bytes)], Deadline.after(cluster.config.storage.timeout_s))[0]
        got = read.in_key_order()
        record.check(got.records, ids, got.found, store.rows.whereabouts(keys))
        stored = got.records[0].tobytes() if got.found[0] else b""
    except StorageError as error:
        trouble = f"{type(error).__name__}: {error}"
    said, agrees = _verdict(definition, known, stored, trouble)
    versions = {"index": known.version, "storage": _version(definition, stored), "cache": _version(definition, known.cached)}
    return {
        "table": name,
        "id": given,
        **where,
        "exists": known.version != 0,
        "versions": {place: list(split_version(version)) if version else None for place, version in versions.items()},
        "shard_batch": known.k,
        "trainers": known.trainers,
        "agrees": agrees,
        "verdict": said,
        **_values(definition, ids, stored or known.cached),
    }


def _version(definition: TableDef, record: bytes) -> int:
    return int(definition.record.versions(np.frombuffer(record, np.uint8)[None])[0]) if record else 0


def _verdict(definition: TableDef, known: ShowRowReply, stored: bytes, trouble: str) -> tuple[str, bool]:
    """Say whether the three agree; the shard was asked before storage, so a row written by a batch since is newer and fine."""
    if trouble:
        return f"storage could not be read: {trouble}", False
    at = _version(definition, stored)
    if not known.version and not stored:
        return "no such row: a pull returns its first value, and writes nothing", True
    if at > known.version and split_version(at)[1] > known.k:
        return "a batch has written the row since the shard was asked", True
    if at != known.version:
        mend = "the next batch or pull that touches it has it restored, and so has `kvemb repair --all`"
        return f"storage has {'no row' if not stored else 'another version'}: {mend}", False
    if known.cached and known.cached != stored:
        return "the cached record is not the stored one: report this, and restart the shard", False
    return f"index, {'cache, ' if known.cached else ''}storage agree", True


def _values(definition: TableDef, ids: np.ndarray[Any, np.dtype[np.uint64]], stored: bytes) -> dict[str, Any]:
    """Return the row's weights and state; without a record its first values."""
    if not stored:
        return {"weights": definition.initial_rows(ids)[0].tolist(), "state": {}}
    record = np.frombuffer(stored, np.uint8)[None]
    state = record[0, definition.record.prefix_bytes :].view("<f4")
    sizes = [1 if field.per_row else definition.dim for field in definition.optimizer.state_fields()]
    of_fields = np.split(state, np.cumsum(sizes, dtype=np.int64))[: len(sizes)]  # none for plain SGD
    fields = zip(definition.optimizer.state_fields(), of_fields, strict=True)
    return {"weights": definition.record.weights(record)[0].tolist(), "state": {field.name: values.tolist() for field, values in fields}}


def _text(row: dict[str, Any]) -> str:
    versions = [f"{place} {_shown(at)}" for place, at in row["versions"].items() if at or place != "cache"]
    lines = [
        f"table {row['table']!r}, id {row['id']}: {row['verdict']}",
        f"  where    slot {row['slot']}, node {row['node']}, shard {row['shard']} ({row['address']})",
        f"           {row['key']}",
        f"  version  {', '.join(versions)}; the shard is at batch {row['shard_batch']}",
        *([f"  batch    holds pushes of {', '.join(row['trainers'])}"] if row["trainers"] else []),
        f"  {'weights' if row['exists'] else 'first   '}  {_numbers(row['weights'])}",
    ]
    return "\n".join([*lines, *(f"  state    {name} {_numbers(values)}" for name, values in row["state"].items())])


def _shown(version: list[int] | None) -> str:
    return f"epoch {version[0]} batch {version[1]}" if version else "-"


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values[:_SHOWN]) + (f" … ({len(values)} in all)" if len(values) > _SHOWN else "")


def drop_command(args: argparse.Namespace) -> int:
    """Delete a table; without --yes only say how many rows it has."""
    with connect(args.config) as cluster:
        if not args.yes:
            print(f"table {args.table!r} has {n_of(len(cluster.table(args.table)), 'row')}, deleted for good with --yes")
            return 1
        print(f"table {args.table!r} was dropped: {n_of(cluster.drop_table(args.table), 'row')}")
    return 0


def alter_command(args: argparse.Namespace) -> int:
    """Say what would become of a table's rows, ask, and alter the table; or give an alteration up."""
    name = args.table
    given = {word: getattr(args, word) for word in ("dim", "dtype", "layout", "expected_rows") if getattr(args, word) is not None}
    if args.optimizer is not None:
        given["optimizer"] = _optimizer(args.optimizer)
    if args.abort and given:
        raise InvalidInputError("--abort takes no change of the table's definition")
    if not args.abort and not given:
        raise InvalidInputError("say what the table is to be: --dim, --optimizer, --dtype, --expected-rows")
    with connect(args.config) as cluster, ProgressMeter(sys.stderr, "rows") as meter:
        if args.abort:
            n_rows = cluster.abort_alter_table(name)
            print(
                f"table {name!r}: no alteration is under way, and its pushes go on; {n_of(n_rows, 'row')} of another definition were erased"
            )
            return 0
        table = cluster.table(name)
        change = AlteredTable.of(table.definition, TableChanges(**given, new_columns=args.new_columns))
        if not change.is_none:
            print(
                "\n".join([f"table {name!r}, {n_of(len(table), 'row')}:", *(f"  {line}" for line in _plan(change, len(table), args.save))])
            )
            if args.dry_run or not agreed(f"alter table {name!r}", yes=args.yes):
                return 0 if args.dry_run else 1
            if args.save:
                print(f"saved to {cluster.save(args.save).url}")
        cluster.alter_table(name, **given, new_columns=args.new_columns, progress=meter)
    print(f"table {name!r} has the new definition")
    return 0


def _plan(change: AlteredTable, n_rows: int, save: str | None) -> list[str]:
    more = n_rows * change.new.record.size_bytes / 1e6
    return [
        *change.words(),
        f"storage takes some {more:,.1f} MB more, until the rows of the old definition are erased at the end",
        "pushes to the table wait meanwhile, and so do the steps of a sync job; pulls go on",
        "processes that use the table connect again afterwards: by the old definition they are refused (TableAlteredError)",
        f"a checkpoint is saved first to {save}" if save else "no checkpoint is saved first: --save URL does that",
    ]


def _optimizer(text: str) -> OptimizerSpec:
    kind, *values = text.split(",")
    given: dict[str, object] = {"kind": kind}
    for value in values:
        name, _, number = value.partition("=")
        try:
            given[name] = number == "true" if number in ("true", "false") else float(number)
        except ValueError as error:
            raise InvalidInputError(f"--optimizer {text}: {value!r} is no NAME=NUMBER") from error
    return OptimizerSpec.from_dict(given)
