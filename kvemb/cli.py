"""The `kvemb` command. The command line and the environment are read here, and in `python -m paramserver`, and nowhere else."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from kvemb.errors import ConfigError, KvembError

# 128 + SIGINT, as a shell reports a program that Ctrl-C ended.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 well, 1 an error (one line on standard error), 2 wrong usage, 130 Ctrl-C."""
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("\ninterrupted; all processes of the cluster have been ended", file=sys.stderr)
        return _INTERRUPTED
    except ConfigError as error:
        print(f"kvemb {args.verb}: {error}", file=sys.stderr)
        return 2
    except KvembError as error:
        print(f"kvemb {args.verb}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvemb", description="Embedding tables in key-value storage.")
    parser.add_argument("--version", action="version", version=f"kvemb {_version()}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="train skip-gram embeddings on a real cluster, and compare with one process")
    demo.add_argument("--store", default="valkey", choices=("valkey", "redis", "redis-cluster", "memcached"), help="storage kind")
    demo.add_argument("--nodes", type=_count, default=None, help="storage nodes (default 2; redis-cluster 3)")
    demo.add_argument("--shards", type=_count, default=2, help="parameter-server shards (default 2)")
    demo.add_argument("--trainers", type=_count, default=2, help="trainer processes (default 2)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the run (default 0)")
    demo.add_argument("--config", default="", help="kvemb.yaml of a running cluster, instead of starting one")
    demo.set_defaults(run=_demo)
    status = verbs.add_parser("status", help="show nodes, rows, memory headroom and the lag of every shard")
    status.add_argument("config", nargs="?", default="kvemb.yaml", help="kvemb.yaml of the cluster (default: ./kvemb.yaml)")
    status.set_defaults(run=_status)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from kvemb.demo.job import Options, run_demo
    from kvemb.demo.progress import Display

    nodes = args.nodes or (3 if args.store == "redis-cluster" else 2)
    options = Options(args.store, nodes, args.shards, args.trainers, args.seed, args.config)
    return 0 if run_demo(options, Display(sys.stdout)) else 1


def _status(args: argparse.Namespace) -> int:
    from kvemb.cluster_status import survey
    from kvemb.config import load
    from kvemb.status import healthy, render

    status = survey(load(args.config, os.environ))
    print(render(status))
    return 0 if healthy(status) else 1


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number of processes")
    return value


def _version() -> str:
    try:
        return version("kvemb")
    except PackageNotFoundError:  # a source tree that was never installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
