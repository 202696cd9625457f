"""The verb `kvemb feed`: a line for everything that the shards change."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvemb.api import connect
from kvemb.errors import ConfigError, n_of

if TYPE_CHECKING:
    from kvemb.feed.cluster_feed import FeedEvent

_SHOWN = 5  # ids of an event


def feed_command(args: argparse.Namespace) -> int:
    """Print events until the reader of the output has gone."""
    tables = [name for name in args.tables.split(",") if name] or None
    with connect(args.config) as cluster, cluster.feed.open(tables, from_=_start(args.start), weights=args.weights) as feed:
        there = cluster.tables()
        for name in sorted(set(tables or ()) - set(there)):
            print(f"there is no table {name!r} now; tables: {', '.join(there)}", file=sys.stderr)
        for event in feed:
            print(json.dumps({**_fields(event), "position": feed.position}) if args.json else _text(event), flush=True)
    return 0


def _start(text: str) -> str | Mapping[int, Sequence[int]]:
    if not text.startswith("{"):
        return text
    try:
        return {int(shard): tuple(at) for shard, at in json.loads(text).items()}
    except (ValueError, TypeError) as error:
        raise ConfigError(f'--from: {text!r} is no position, as the events of --json have one: {{"0": [EPOCH, K, …], …}}') from error


def _fields(event: "FeedEvent") -> dict[str, Any]:
    """Return what an event has, for JSON."""
    fields: dict[str, Any] = {"kind": event.kind, "shard": event.shard, "epoch": event.epoch, "k": event.k}
    if event.table:
        fields["table"] = event.table
    if len(event.ids):
        fields |= {"ids": event.ids.tolist(), "versions": event.versions.tolist()}
    if event.reason:
        fields["reason"] = event.reason
    if event.weights is not None:
        fields["weights"] = event.weights.tolist()
    if event.kind == "moved":
        fields |= {name: {shard: slots.tolist() for shard, slots in getattr(event, name).items()} for name in ("gone", "came")}
    return fields


def _text(event: "FeedEvent") -> str:
    words = [f"shard {event.shard}", f"epoch {event.epoch} batch {event.k}", *(word for word in (event.kind, event.reason) if word)]
    if event.table:
        words.append(f"table {event.table!r}")
    if len(event.ids):
        shown = ", ".join(map(str, event.ids[:_SHOWN].tolist()))
        words.append(f"{n_of(len(event.ids), 'row')}: {shown}{', …' if len(event.ids) > _SHOWN else ''}")
    words += [f"{n_of(len(slots), 'slot')} to shard {shard}" for shard, slots in event.gone.items()]
    words += [f"{n_of(len(slots), 'slot')} from shard {shard}" for shard, slots in event.came.items()]
    return "  ".join(words)
