"""Train a two-tower retrieval model in PyTorch on rows that live in Redis, Valkey or memcached, and print its recall.

    python examples/two_tower_torch.py
    python examples/two_tower_torch.py --users 1000000 --items 200000 --config kvemb.yaml

One tower turns a user into a vector, the other an item; a user's items are those whose vectors have the largest products
with the user's. Trained with in-batch softmax: the other users' items are the wrong answers, corrected for how often popular
items occur among them. The data is synthetic: every user has two interests, which nobody is told, and mostly takes items
of these. --local trains the same model on torch's own embeddings.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from dlrm.place import add_arguments, opened
from torch import Tensor, nn
from torch.nn import functional as F
from two_tower.data import Batches
from two_tower.interests import Pairs, best_of_popular, draw

import kvemb
from kvemb.cli import exit_in_order
from kvemb.errors import KvembError
from kvemb.torch import Embedding, SparseOptimizer, prepare


class TwoTower(nn.Module):
    """Vectors of users and items, of length 1. Source: Yi et al., "Sampling-bias-corrected neural modeling", RecSys 2019."""

    def __init__(self, users: nn.Module, items: nn.Module, dim: int, temperature: float = 0.1) -> None:
        super().__init__()
        self.users, self.items, self.temperature = users, items, temperature
        self.user_tower, self.item_tower = (nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(2))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch: "user" and "item" int64 [b], "log_q" float32 [b], the log of each item's share of all pairs."""
        logits = self.user_vectors(batch["user"]) @ self.item_vectors(batch["item"]).T / self.temperature - batch["log_q"]
        twice = (batch["item"][:, None] == batch["item"]).fill_diagonal_(False)  # the right answer once more is no wrong one
        return F.cross_entropy(logits.masked_fill(twice, -torch.inf), torch.arange(len(logits)))

    def user_vectors(self, ids: Tensor) -> Tensor:
        """float32 [b, dim]."""
        return F.normalize(self.user_tower(self.users(ids)), dim=1)

    def item_vectors(self, ids: Tensor) -> Tensor:
        """float32 [b, dim]."""
        return F.normalize(self.item_tower(self.items(ids)), dim=1)


def recall(model: TwoTower, wanted: Pairs, n_items: int, k: int) -> float:
    """Return how many of the items to be found are among the k best of all items."""
    model.eval()
    with torch.no_grad():
        items = model.item_vectors(torch.arange(n_items))
        hits = [
            (model.user_vectors(part[:, 0]) @ items.T).topk(k).indices.eq(part[:, 1:]).any(dim=1)
            for part in torch.from_numpy(wanted).split(1024)
        ]
    model.train()
    return float(torch.cat(hits).float().mean())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; 0, or 1 after an error that was told in one line on standard error."""
    args = _arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.sparse.check_sparse_tensor_invariants.disable()  # --local: torch warns until somebody decides
    try:
        with opened(args) as cluster:
            _run(args, cluster)
    except KvembError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace, cluster: Any) -> None:
    rng = np.random.default_rng(args.seed)
    pairs, wanted = draw(args.users, args.items, rng)
    print(best_of_popular(pairs, wanted, args.items, args.k))
    users, items = (_rows(cluster, name, n, args) for name, n in (("user", args.users), ("item", args.items)))
    model, loader = TwoTower(users, items, args.dim), Batches(pairs, args.batch_size, rng)
    towers = torch.optim.Adam([*model.user_tower.parameters(), *model.item_tower.parameters()], lr=args.lr)
    rows = SparseOptimizer(model) if cluster else torch.optim.Adagrad([*users.parameters(), *items.parameters()], lr=args.row_lr)
    batches: Any = prepare(model, loader) if cluster else loader
    for epoch in range(1, args.epochs + 1):
        losses = []
        for batch in batches:
            loss = model(batch)
            rows.zero_grad()
            towers.zero_grad()
            loss.backward()
            rows.step()
            towers.step()
            losses.append(loss.item())
        if cluster:
            cluster.flush()
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}, recall@{args.k} {recall(model, wanted, args.items, args.k):.3f}", flush=True)


def _rows(cluster: Any, name: str, n: int, args: argparse.Namespace) -> nn.Module:
    if cluster is None:
        return nn.Embedding.from_pretrained(torch.randn(n, args.dim) * 0.1, freeze=False, sparse=True)
    first, rule = kvemb.init.normal(std=0.1), kvemb.optim.adagrad(lr=args.row_lr)
    return Embedding(cluster.create_table(f"two_tower.{name}", dim=args.dim, optimizer=rule, initializer=first, num_ids=n, exist_ok=True))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a two-tower retrieval model on rows that live in key-value storage.")
    add_arguments(parser)
    for name, default, what in (
        ("users", 5000, "users"), ("items", 2000, "items"), ("dim", 16, "weights per row"), ("epochs", 5, "times through all pairs"),
        ("batch-size", 512, "pairs per step"), ("k", 50, "items to return"), ("seed", 0, "of everything drawn"), ("threads", 1, "of torch"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--lr", type=float, default=0.003, help="of the towers' Adam (default 0.003)")
    parser.add_argument("--row-lr", type=float, default=0.1, help="of the rows' Adagrad (default 0.1)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_in_order()
    sys.exit(main())
