"""Train a DeepFM click model in PyTorch on rows that live in Redis, Valkey or memcached.

    python examples/deepfm_torch.py --data synthetic
    python examples/deepfm_torch.py --data train.txt --valid test.txt --store redis --nodes 2 --shards 2
    python examples/deepfm_torch.py --data day_0.gz --valid 0.05 --config kvemb.yaml
    python examples/deepfm_torch.py --data train.txt --checkpoint /data/run --resume      # the same line again after a crash

Reads libsvm/libfm or Criteo files; prints log loss, AUC and RMSE per epoch. This file is the command line; the model and
the training loop are in deepfm/. --local trains the identical model with torch's own embeddings, for comparison.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from deepfm import metrics, synthetic
from deepfm.clicks import Clicks, split
from deepfm.model import DeepFM
from deepfm.readers import format_of, read_clicks
from deepfm.resume import TRAINER, Checkpoints, describe
from deepfm.rows import DENSE, Rows, Settings, indexed, local_rows, stored_rows
from deepfm.training import Progress, train

import kvemb
from kvemb.cli import exit_in_order
from kvemb.errors import InvalidInputError, KvembError

# sgd's is for Criteo's numbers, which reach 10 after the logarithm: 13 of them all large diverge with 0.01.
DEFAULT_LR = {"sgd": 0.005, "adagrad": 0.03, "adam": 0.002}
SYNTHETIC = "synthetic"
SYNTHETIC_LINES = 400_000
STORES = ("valkey", "redis", "redis-cluster", "memcached")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Returns:
        0; 1 after an error that was told in one line on standard error; 130 after Ctrl-C. SIGTERM and SIGHUP raise
        SystemExit once the servers that it started have been ended.
    """
    args = _arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.sparse.check_sparse_tensor_invariants.disable()  # --local: torch warns until somebody decides
    try:
        log = _load(args)
        with _rows(args, log) as (rows, log, cluster):
            _train(args, rows, log, cluster)
    except KvembError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _train(args: argparse.Namespace, rows: Rows, log: tuple[Clicks, Clicks], cluster: Any) -> None:
    n_fields = log[0].n_fields if log[0].n_fields == log[1].n_fields else None
    model = DeepFM(rows.linear, rows.factors, dim=args.dim, n_fields=n_fields, hidden=args.hidden)
    dense = DENSE[args.optimizer](model.dense_parameters(), lr=args.lr)
    checkpoints = _checkpoints(args, log[0], cluster) if args.checkpoint else None
    progress = checkpoints.begin(model, dense, resume=args.resume) if checkpoints else Progress()
    train(
        model,
        log,
        [rows.optimizer, dense],
        epochs=args.epochs,
        batch_size=args.batch_size,
        seed=args.seed,
        settle=rows.settle,
        progress=progress,
        after_step=lambda: checkpoints.after_step(progress, model, dense) if checkpoints else None,
    )
    if checkpoints:
        checkpoints.save(progress, model, dense)


def _checkpoints(args: argparse.Namespace, clicks: Clicks, cluster: Any) -> Checkpoints:
    names = ("optimizer", "lr", "dim", "batch_size", "seed")
    run = describe(clicks, hidden=list(args.hidden), **{name: getattr(args, name) for name in names})
    return Checkpoints(cluster, args.checkpoint, run, every=args.save_every, keep=args.keep)


def _load(args: argparse.Namespace) -> tuple[Clicks, Clicks]:
    """Return lines to train on and lines to validate on, and say what they are."""
    truth = None
    if isinstance(args.valid, str):
        formats = [SYNTHETIC if args.data == SYNTHETIC else format_of(args.data), format_of(args.valid)]
        if formats[0] != formats[1]:
            raise InvalidInputError(f"--data {args.data} is {formats[0]} and --valid {args.valid} {formats[1]}: they have no ids in common")
    if args.data == SYNTHETIC:
        clicks, truth = synthetic.draw(SYNTHETIC_LINES, args.seed)
    else:
        clicks = read_clicks(args.data)
    if isinstance(args.valid, str):
        log = clicks, read_clicks(args.valid)
    else:
        train_lines, valid_lines = split(len(clicks), args.valid, args.seed)
        log = clicks.take(train_lines), clicks.take(valid_lines)
    if not len(log[0]):
        raise InvalidInputError(f"{args.data}: --valid {args.valid} takes all of its {len(clicks)} line(s); none is left to train on")
    fields = f"{clicks.n_fields} fields" if clicks.n_fields else f"{len(clicks.ids) / len(clicks):.1f} features per line"
    print(f"data: {len(log[0]):,} lines to train on, {len(log[1]):,} to validate on, {fields}")
    if truth is not None:
        print(f"the best any model can do on the latter: {_figures(log[1].labels, truth[valid_lines])}")
    return log


def _figures(labels: np.ndarray[Any, Any], p: np.ndarray[Any, Any]) -> str:
    best = metrics.log_loss(labels, p), metrics.auc(labels, p), metrics.rmse(labels, p)
    return "logloss {:.4f}, Bayes-optimal AUC {:.4f}, RMSE {:.4f}".format(*best)


@contextmanager
def _rows(args: argparse.Namespace, log: tuple[Clicks, Clicks]) -> Iterator[tuple[Rows, tuple[Clicks, Clicks], Any]]:
    """Open the place where rows live; the log comes back with ids as that place knows them, and the cluster, if it is one."""
    trainer = TRAINER if args.checkpoint else None
    settings = Settings(args.dim, args.optimizer, args.lr, args.seed)
    if args.local:
        known_ids = np.unique(np.concatenate([part.ids for part in log]))
        print(f"rows: {len(known_ids):,}, in torch's own modules in this process", flush=True)
        yield local_rows(known_ids, settings), (indexed(log[0], known_ids), indexed(log[1], known_ids)), None
    elif args.config:
        with kvemb.connect(args.config, trainer=trainer) as cluster:
            if cluster.config.servers.trainers > 1:
                raise InvalidInputError(f"{args.config}: a sync job of several trainers; this example is one trainer")
            print(f"rows: in the cluster of {args.config}", flush=True)
            yield stored_rows(cluster, settings), log, cluster
    else:
        # Sync, so that the figures are those of --local to the last digit but one; async would be faster.
        place = {"store": args.store, "nodes": args.nodes, "shards": args.shards}
        with kvemb.local(**place, mode="sync", trainers=1) as url, kvemb.connect(url, trainer=trainer) as cluster:
            print(f"rows: in {args.nodes} {args.store} nodes, {args.shards} parameter-server shards", flush=True)
            yield stored_rows(cluster, settings), log, cluster


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a DeepFM click model on rows that live in key-value storage.")
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="libsvm/libfm or Criteo TSV, .gz fine; or 'synthetic'")
    add("--valid", type=_valid, default=0.1, metavar="FILE|FRACTION", help="what to validate on (default 0.1)")
    add("--store", choices=STORES, help="storage of a cluster started for this run (default valkey)")
    add("--nodes", type=_count, help="storage nodes of that cluster (default 2; redis-cluster 3)")
    add("--shards", type=_count, help="parameter-server shards of that cluster (default 2)")
    add("--config", metavar="kvemb.yaml", help="use this running cluster instead")
    add("--local", action="store_true", help="keep rows in torch's own modules instead, for comparison")
    add("--dim", type=_count, default=8, help="weights per factor (default 8)")
    add("--hidden", type=_widths, default=(64, 32), help="widths of the hidden layers (default 64,32)")
    add("--epochs", type=_count, default=2, help="default 2")
    add("--batch-size", type=_count, default=1024, help="default 1024")
    add("--optimizer", choices=sorted(DEFAULT_LR), default="adam", help="of rows and dense weights (default adam)")
    add("--lr", type=_rate, help="learning rate (default: adam 0.002, adagrad 0.03, sgd 0.005)")
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


if __name__ == "__main__":
    exit_in_order()
    sys.exit(main())
