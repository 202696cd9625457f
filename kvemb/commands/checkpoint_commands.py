"""The verbs `kvemb save`, `load`, `ls`, `verify` and `prune`. Their options are read in `kvemb.cli`."""

import argparse
import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import absolute_url
from kvemb.checkpoint.format.checkpoint_manifest import CheckpointManifest
from kvemb.checkpoint.listing import Listed, checkpoint_at, list_checkpoints, prune
from kvemb.checkpoint.verify import verify_chain
from kvemb.commands.terminal_output import ProgressMeter, agreed, text_table
from kvemb.errors import CheckpointError, InvalidInputError, ParameterServerError, StorageError, n_of

if TYPE_CHECKING:
    from kvemb.checkpoint.save import SaveResult


def save_command(args: argparse.Namespace) -> int:
    """Save a cluster; with --keep, delete older checkpoints beside it afterwards. With --every go on until the command is ended."""
    from kvemb.api import connect

    try:
        extra = json.loads(args.extra) if args.extra else {}
    except ValueError as error:
        raise InvalidInputError(f"--extra: no JSON: {error}") from error
    if args.every:
        _save_every(args, extra)
    with connect(args.config) as cluster, ProgressMeter(sys.stderr, "rows") as meter:
        done = cluster.save(
            args.url,
            base=args.base or None,
            weights_only=args.weights_only,
            extra=extra,
            resume=args.resume,
            progress=lambda rows, total, _: meter("saving", rows, total),
        )
    _print_saved(done)
    if args.keep:
        _print_gone(prune(done.url.rpartition("/")[0], keep=args.keep, like=done.manifest))
    return 0


def _save_every(args: argparse.Namespace, extra: dict[str, object]) -> NoReturn:
    """Write a log of checkpoints. When a save fails, that is said, and the next one is tried in its time."""
    from kvemb.api import connect
    from kvemb.checkpoint.checkpoint_log import CheckpointLog

    if args.base or args.resume:
        raise InvalidInputError("--every takes no --base and no --resume: it finds the base itself, and begins anew what was broken off")
    with connect(args.config) as cluster:
        saves = CheckpointLog(cluster.save, args.url, weights_only=args.weights_only, keep=args.keep)
        while True:
            begun = time.monotonic()
            try:
                with ProgressMeter(sys.stderr, "rows") as meter:
                    done = saves.save(extra=extra, progress=lambda rows, total, _: meter("saving", rows, total))
                _print_saved(done)
            except (CheckpointError, ParameterServerError, StorageError) as error:
                print(f"kvemb save: {type(error).__name__}: {error}; the next try is in {args.every:g} s", file=sys.stderr, flush=True)
            time.sleep(max(0.0, begun + args.every - time.monotonic()))


def _print_saved(done: "SaveResult") -> None:
    manifest = done.manifest
    rate = manifest.size_bytes / 1e6 / max(done.seconds, 1e-9)
    size = f"{manifest.size_bytes / 1e6:.1f} MB in {done.seconds:.1f} s ({rate:.0f} MB/s)"
    print(f"saved {n_of(manifest.n_rows, 'row')}, {size} to {done.url}", flush=True)


def load_command(args: argparse.Namespace) -> int:
    """Load a checkpoint, or some of its tables, into a cluster; with --offline only decide it. Rows that go are asked about."""
    from kvemb.api import connect

    if args.until:
        args.url = checkpoint_at(args.url, args.until)
    if args.offline and args.tables:
        raise InvalidInputError("--offline takes no --table: what other tables need is known to running shards alone")
    if args.offline:
        return _decide_command(args)
    open_chain(args.url, args.tables or ())  # before anything is asked
    with connect(args.config) as cluster:
        there = [name for name in args.tables or cluster.tables() if name in cluster.tables()]
        n_rows = sum(len(cluster.table(name)) for name in there)
        question = f"the {n_of(n_rows, 'row')} of table {', '.join(there)} go, and those of {args.url} take their place; begin"
        if n_rows and not agreed(question, yes=args.yes):
            return 1
        with ProgressMeter(sys.stderr, "rows") as meter, ProgressMeter(sys.stderr, "B") as verifying:
            show = {"verifying": verifying, "loading": meter}
            done = cluster.load(args.url, tables=args.tables, progress=lambda what, n, total: show[what](what, n, total))
    print(f"loaded {n_of(done.n_rows, 'row')} in {done.seconds:.1f} s from {done.url}")
    if done.manifest.extra:
        print(f"extra: {json.dumps(done.manifest.extra)}")
    return 0


def _decide_command(args: argparse.Namespace) -> int:
    from kvemb.api import connect
    from kvemb.checkpoint.load import decide

    open_chain(args.url)
    if not agreed(
        f"all rows of the cluster go when its shards are started, and those of {args.url} take their place; decide", yes=args.yes
    ):
        return 1
    with connect(args.config, read_only=True) as cluster, ProgressMeter(sys.stderr, "B") as meter:
        tables = {name: cluster.table(name).definition for name in cluster.tables()}
        decide(cluster.store, tables, args.url, timeout_s=cluster.config.storage.timeout_s, progress=meter)
    print(f"decided: shards load {absolute_url(args.url)} when they are started; restart those that run")
    return 0


def ls_command(args: argparse.Namespace) -> int:
    """List checkpoints; of a single one also its tables."""
    found = list_checkpoints(args.url)
    if not found:
        print("no checkpoints")
        return 1
    rows = [("NAME", "SAVED", "KIND", "ROWS", "MB", "SHARDS", "BUILT ON"), *map(_line, found)]
    print(text_table(rows))
    if len(found) == 1 and found[0].manifest is not None and absolute_url(args.url) == found[0].url:
        _print_contents(found[0].manifest)
    return 0 if all(one.manifest is not None for one in found) else 1


def verify_command(args: argparse.Namespace) -> int:
    """Check every byte of a checkpoint; with --against-storage compare every row with the cluster's."""
    chain = open_chain(args.url)
    with ProgressMeter(sys.stderr, "B") as meter:
        report = verify_chain(chain, lambda done, total: meter("verifying", done, total))
    for fault in report.faults:
        print(fault, file=sys.stderr)
    what = f"{n_of(report.n_files, 'file')} of {n_of(report.n_checkpoints, 'checkpoint')}, {n_of(report.n_rows, 'row')}"
    print(f"{what}, {report.n_bytes / 1e6:.1f} MB: {'good' if not report.faults else f'{len(report.faults)} damaged'}")
    if report.faults:
        return 1
    if not args.against_storage:
        return 0
    from kvemb.api import connect
    from kvemb.checkpoint.verify import compare

    with connect(args.config) as cluster, ProgressMeter(sys.stderr, "rows") as meter:
        counts = {name: len(cluster.table(name)) for name in cluster.tables()}
        results = compare(
            chain,
            cluster.store,
            {name: cluster.table(name).definition for name in cluster.tables()},
            cluster_id=cluster.cluster_id.hex(),
            timeout_s=cluster.config.storage.timeout_s,
            progress=lambda done, total: meter("comparing", done, total),
        )
    head = ("TABLE", "ROWS", "SAME", "NEWER", "DIFFERENT", "MISSING", "IN CLUSTER", "FIRST BAD ID")
    rows = [(*dataclasses.astuple(r)[:6], counts.get(r.table, 0), "-" if r.first is None else r.first) for r in results]
    print(text_table([head, *rows]))
    return 0 if all(result.good for result in results) else 1


def prune_command(args: argparse.Namespace) -> int:
    """Delete old checkpoints, or only name them."""
    gone = prune(absolute_url(args.url), keep=args.keep, dry_run=args.dry_run)
    _print_gone(gone, "would be deleted" if args.dry_run else "deleted")
    return 0


def _print_gone(names: list[str], word: str = "deleted") -> None:
    print(f"{word}: {', '.join(names) or 'none'}")


def _line(one: Listed) -> tuple[object, ...]:
    manifest = one.manifest
    if manifest is None:
        return one.name, "-", one.problem, "-", "-", "-", "-"
    kind = ("incremental" if manifest.base else "full") + (", weights only" if manifest.weights_only else "")
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_s if manifest.cut_s is None else manifest.cut_s))
    base = manifest.base.name if manifest.base else "-"
    return one.name, saved, kind, f"{manifest.n_rows:,}", f"{manifest.size_bytes / 1e6:.1f}", manifest.n_writers, base


def _print_contents(manifest: CheckpointManifest) -> None:
    print(f"\ncluster {manifest.cluster}, save {manifest.save_id}")
    rows: list[tuple[object, ...]] = [("TABLE", "DIM", "DTYPE", "OPTIMIZER", "ROWS", "STEPS")]
    for table in manifest.tables:
        definition = table.definition
        n_rows = sum(file.rows for file in manifest.files if (file.table, file.role) == (definition.name, "rows"))
        steps = f"{min(table.steps):,} to {max(table.steps):,}" if min(table.steps) != max(table.steps) else f"{table.steps[0]:,}"
        rows.append((definition.name, definition.dim, definition.dtype, definition.optimizer.kind, f"{n_rows:,}", steps))
    print(text_table(rows))
    if manifest.extra:
        print(f"extra: {json.dumps(manifest.extra)}")
