"""Train DLRM, the model of MLPerf's recommendation benchmark, in PyTorch on rows that live in Redis, Valkey or memcached.

    python examples/dlrm_torch.py --data synthetic
    python examples/dlrm_torch.py --data day_0.gz --config kvemb.yaml --tensorboard runs/dlrm

Reads Criteo files (label, 13 numbers, 26 categories, tab-separated). Rows are pulled ahead of the step that uses them; how
far, and what the steps waited for, is told at the end. The model and its data are in dlrm/. --local trains the same model
on torch's own embeddings.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from deepfm.metrics import auc, log_loss
from dlrm.data import Batch, Lines, criteo, synthetic
from dlrm.local_bags import LocalBags
from dlrm.model import DLRM
from dlrm.place import add_arguments, opened
from dlrm.planted_clicks import KEYS
from torch.nn import functional as F

import kvemb
from kvemb.cli import exit_in_order
from kvemb.errors import KvembError
from kvemb.torch import EmbeddingBagCollection, EmbeddingBagConfig, SparseOptimizer, prepare
from kvemb.trainer import StepReport

SYNTHETIC_LINES = 100_000
VALID_FRACTION = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; 0, or 1 after an error that was told in one line on standard error."""
    args = _arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.sparse.check_sparse_tensor_invariants.disable()  # --local: torch warns until somebody decides
    try:
        lines = synthetic(args.lines, args.ids, args.seed) if args.data == "synthetic" else criteo(args.data, args.ids)
        with opened(args) as cluster:
            _run(args, lines, cluster)
    except KvembError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace, lines: Lines, cluster: Any) -> None:
    log, valid = lines.split(int(len(lines) * VALID_FRACTION))
    tables = [
        EmbeddingBagConfig(name=key, embedding_dim=args.dim, num_embeddings=args.ids, optimizer=kvemb.optim.adagrad(lr=args.lr))
        for key in KEYS
    ]
    lookups = LocalBags(tables) if cluster is None else EmbeddingBagCollection(tables, cluster)
    model = DLRM(lookups, n_features=len(KEYS), dim=args.dim)
    dense = torch.optim.Adagrad(model.dense_parameters(), lr=args.lr)
    rows = torch.optim.Adagrad(lookups.parameters(), lr=args.lr) if cluster is None else SparseOptimizer(model)
    loader: Any = log.loader(args.batch_size, args.seed)
    if cluster is not None:
        loader = prepare(model, loader, consistency=args.consistency, report=StepReport(writer=_writer(args.tensorboard)))
    with nullcontext() if cluster is None else loader:
        for epoch in range(1, args.epochs + 1):
            loss = train(model, loader, [rows, dense], args.steps)
            if cluster is not None:
                cluster.flush()
            print(f"epoch {epoch}: train logloss {loss:.4f}, valid {evaluate(model, valid, args.batch_size)}", flush=True)
        if cluster is not None:
            print(loader.report)


def train(model: DLRM, loader: Iterable[Batch], optimizers: Sequence[torch.optim.Optimizer], n_steps: int | None) -> float:
    """Train for one epoch, or so many steps of it; return the mean loss."""
    losses = []
    for numbers, categories, labels in loader:
        loss = F.binary_cross_entropy_with_logits(model(numbers, categories), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if len(losses) == n_steps:
            break
    return float(np.mean(losses))


def evaluate(model: DLRM, valid: Lines, batch_size: int) -> str:
    """Measure log loss and AUC on lines that were not trained on."""
    model.eval()
    parts = [list(range(at, min(at + batch_size, len(valid)))) for at in range(0, len(valid), batch_size)]
    with torch.no_grad():
        batches = (valid[part] for part in parts)
        p = np.concatenate([torch.sigmoid(model(batch.numbers, batch.categories)).numpy() for batch in batches])
    model.train()
    return f"logloss {log_loss(valid.labels, p):.4f}, AUC {auc(valid.labels, p):.4f}"


def _writer(folder: str | None) -> Any:
    if folder is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train DLRM on rows that live in key-value storage.")
    add_arguments(parser)
    add: Callable[..., Any] = parser.add_argument
    add("--data", default="synthetic", metavar="FILE", help="Criteo TSV, .gz fine (default: synthetic)")
    add("--lines", type=int, default=SYNTHETIC_LINES, help="of synthetic data (default 100000)")
    add("--ids", type=int, default=100_000, help="ids per table that categories are hashed to (default 100000)")
    add("--dim", type=int, default=16, help="weights per row (default 16)")
    add("--lr", type=float, default=0.01, help="of Adagrad, for rows and dense weights (default 0.01)")
    add("--epochs", type=int, default=1, help="default 1")
    add("--steps", type=int, help="steps per epoch (default: all there are)")
    add("--batch-size", type=int, default=2048, help="default 2048")
    add("--consistency", choices=("stale", "exact"), default="stale", help="of rows pulled ahead; exact needs a sync cluster")
    add("--tensorboard", metavar="DIR", help="write loss, staleness, stalls and rows/s there")
    add("--seed", type=int, default=0, help="of data, initial weights and order of lines (default 0)")
    add("--threads", type=int, default=1, help="torch's threads (default 1: servers need cores too)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_in_order()
    sys.exit(main())
