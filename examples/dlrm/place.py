"""Where the rows of the examples live: a cluster started for this run, or one that runs already."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kvemb

STORES = ("valkey", "redis", "redis-cluster", "memcached")


def add_arguments(parser: argparse.ArgumentParser, *, local: bool = True) -> None:
    """Declare --store, --config, and --local where the framework's own modules are there to compare with."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--store", choices=STORES, default="valkey", help="storage of a cluster started for this run (default valkey)")
    where.add_argument("--config", metavar="kvemb.yaml", help="use this running cluster instead")
    parser.set_defaults(local=False)
    if local:
        where.add_argument("--local", action="store_true", help="keep rows in torch's own modules instead, for comparison")


@contextmanager
def started(args: argparse.Namespace) -> Iterator[str]:
    """Start the cluster that was asked for, unless it runs; its kvemb.yaml."""
    if args.config:
        yield args.config
    else:
        with kvemb.local(args.store, nodes=3 if args.store == "redis-cluster" else 1, shards=2) as url:
            yield url


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[Any]:
    """Open the cluster that was asked for; None for --local."""
    if args.local:
        yield None
    else:
        patience_s = None if args.config else 60  # all share one machine
        with started(args) as url, kvemb.connect(url, timeout_s=patience_s) as cluster:
            yield cluster
