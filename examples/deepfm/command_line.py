"""The command line of the DeepFM example: its options, and which of them go together."""

import argparse
from collections.abc import Sequence

# sgd's is for Criteo's numbers, which reach 10 after the logarithm: 13 of them all large diverge with 0.01.
DEFAULT_LR = {"sgd": 0.002, "adagrad": 0.03, "adam": 0.002}
STORES = ("valkey", "redis", "redis-cluster", "memcached")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; wrong usage ends the program with exit code 2."""
    parser = argparse.ArgumentParser(description="Train a DeepFM click model on rows that live in key-value storage.")
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="libsvm/libfm or Criteo TSV, .gz fine; or 'synthetic'")
    add("--valid", type=_valid, default=0.1, metavar="FILE|FRACTION", help="what to validate on (default 0.1)")
    add("--store", choices=STORES, help="storage of a cluster started for this run (default valkey)")
    add("--nodes", type=_count, help="storage nodes of that cluster (default 2; redis-cluster 3)")
    add("--shards", type=_count, help="parameter-server shards of that cluster (default 2)")
    add("--config", metavar="kvemb.yaml", help="use this running cluster instead")
    add("--local", action="store_true", help="keep rows in torch's own modules instead, for comparison")
    add("--ids", type=_count, default=1 << 20, help="ids that features are hashed to (default 1048576)")
    add("--dim", type=_count, default=8, help="weights per factor (default 8)")
    add("--hidden", type=_widths, default=(64, 32), help="widths of the hidden layers (default 64,32)")
    add("--epochs", type=_count, default=2, help="default 2")
    add("--batch-size", type=_count, default=1024, help="default 1024")
    add("--optimizer", choices=sorted(DEFAULT_LR), default="adam", help="of rows and dense weights (default adam)")
    add("--lr", type=_rate, help="learning rate (default: adam 0.002, adagrad 0.03, sgd 0.002)")
    add("--seed", type=_seed, default=0, help="of data, initial weights and order of lines (default 0)")
    add("--threads", type=_count, default=1, help="torch's threads (default 1: servers need cores too)")
    add("--checkpoint", metavar="URL", help="folder for checkpoints of this run: a path or URL that the shards reach too")
    add("--save-every", type=_count, metavar="STEPS", help="from one checkpoint to the next (default 1000); one more at the end")
    add("--keep", type=_count, metavar="N", help="checkpoints to keep (default 3)")
    add("--resume", action="store_true", help="go on from the newest checkpoint; from the beginning if there is none")
    args = parser.parse_args(argv)
    if args.config and args.local:
        parser.error("--config and --local exclude each other")
    if (args.config or args.local) and (args.store or args.nodes or args.shards):
        parser.error("--store, --nodes and --shards describe a cluster to start; --config and --local start none")
    if not args.checkpoint and (args.save_every or args.keep or args.resume):
        parser.error("--save-every, --keep and --resume need --checkpoint")
    if args.checkpoint and args.local:
        parser.error("--checkpoint saves a cluster; --local has none")
    args.save_every, args.keep = args.save_every or 1000, args.keep or 3
    args.store, args.shards = args.store or "valkey", args.shards or 2
    args.nodes = args.nodes or (3 if args.store == "redis-cluster" else 2)
    args.lr = DEFAULT_LR[args.optimizer] if args.lr is None else args.lr
    return args


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 63):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 2**63 - 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1e9")
    return rate


def _widths(text: str) -> tuple[int, ...]:
    return tuple(_count(width) for width in text.split(","))


def _valid(text: str) -> float | str:
    """A fraction if it is a number, otherwise a file."""
    try:
        fraction = float(text)
    except ValueError:
        return text
    if not 0 < fraction < 1:
        raise argparse.ArgumentTypeError(f"{text} is no fraction between 0 and 1")
    return fraction
