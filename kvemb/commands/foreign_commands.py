"""The verbs `kvemb import` and `export`: rows of other programs' files into a table, and back. The work is `TableFiles.import_rows`'s."""

import argparse
import sys
from collections.abc import Mapping, Sequence

from kvemb.commands.terminal_output import ProgressMeter
from kvemb.errors import ConfigError, KvembError, n_of


def import_command(args: argparse.Namespace) -> int:
    """Import a file; where that is broken off, say how far it came."""
    from kvemb.api import connect

    state = _state(args.state)
    with connect(args.config) as cluster:
        try:
            with ProgressMeter(sys.stderr, "rows") as meter:
                done = cluster.files.import_rows(
                    args.table,
                    args.url,
                    ids=args.ids,
                    weights=args.weights,
                    state=state,
                    format=args.format,
                    resume=args.resume,
                    progress=meter,
                )
        except (KvembError, KeyboardInterrupt) as error:
            print("".join(f"{note}\n" for note in getattr(error, "__notes__", ())), end="", file=sys.stderr)
            raise
    found = f", {done.n_found:,} of them there already" if done.n_found else ""
    rate = done.n_rows / max(done.seconds, 1e-9)
    print(f"imported {n_of(done.n_rows, 'row')} into table {args.table!r}{found}, in {done.seconds:.1f} s ({rate:,.0f} rows/s)")
    return 0


def export_command(args: argparse.Namespace) -> int:
    """Export a table."""
    from kvemb.api import connect

    with connect(args.config) as cluster, ProgressMeter(sys.stderr, "rows") as meter:
        done = cluster.files.export_rows(args.table, args.url, format=args.format, ids=args.ids, dtype=args.dtype, progress=meter)
    print(f"exported {n_of(done.n_rows, 'row')} of table {args.table!r} in {done.seconds:.1f} s to {args.url}")
    return 0


def _state(words: Sequence[str]) -> str | Mapping[str, str] | None:
    """Return what `--state` names: NAME once, or FIELD=NAME of each field."""
    if len(words) <= 1 and not any("=" in word for word in words):
        return words[0] if words else None
    if not all("=" in word for word in words):
        raise ConfigError("--state is NAME of one array once, or FIELD=NAME of each field of the optimizer's state")
    return dict(word.split("=", 1) for word in words)
