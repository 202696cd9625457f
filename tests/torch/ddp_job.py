"""The job of test_ddp: a click model, trained by one process on torch's own rows, or under torchrun with dense weights in DDP.

As a program it is one rank. Every rank takes its share of each batch and the mean loss of it: DDP averages dense gradients over the ranks,
and tables of reduce="mean" do the same with the rows'.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import kvemb
from kvemb.torch import Embedding, EmbeddingBag, SparseOptimizer, prepare

N_STEPS, BATCH, DIM, SEED = 60, 48, 8, 3
USERS, TAGS, TAGS_PER_LINE = 60, 200, 4
SIZES = {"users": USERS, "tags": TAGS}
LEARNING_RATE = {"sgd": 0.5, "adagrad": 0.05, "adam": 0.01}
SPECS = {"sgd": kvemb.optim.sgd, "adagrad": kvemb.optim.adagrad, "adam": kvemb.optim.adam}
DENSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
SPARSE = {**DENSE, "adam": torch.optim.SparseAdam}
INITIALIZER = kvemb.init.uniform(-0.5, 0.5)
CASES = {"sgd": ("sgd", None), "adagrad": ("adagrad", None), "adam": ("adam", None), "adam-ahead": ("adam", "exact")}
"""By name: the optimizer, and the consistency of rows pulled ahead, or None to pull them in the step."""
Batch = tuple[Tensor, Tensor, Tensor]
"""Users int64 [b], tags int64 [b, 4], labels float32 [b]."""


class Model(nn.Module):
    """A perceptron over a user's vector and the sum of the tags' vectors."""

    def __init__(self, users: nn.Module, tags: nn.Module) -> None:
        super().__init__()
        self.users, self.tags = users, tags
        widths = [2 * DIM, 16, 8]
        self.perceptron = nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())), nn.Linear(8, 1))

    def forward(self, users: Tensor, tags: Tensor) -> Tensor:
        """Return logits float32 [b]."""
        return self.perceptron(torch.cat([self.users(users), self.tags(tags)], dim=1)).squeeze(1)


def batches(rank: int, world: int) -> list[Batch]:
    """This rank's share of every batch: skewed ids, labels that depend on them."""
    rng = np.random.default_rng(7)
    users = (USERS * rng.random((N_STEPS, BATCH)) ** 2).astype(np.int64)
    tags = (TAGS * rng.random((N_STEPS, BATCH, TAGS_PER_LINE)) ** 3).astype(np.int64)
    logits = 2 * rng.normal(size=USERS)[users] + rng.normal(size=TAGS)[tags].sum(axis=2)
    labels = (rng.random((N_STEPS, BATCH)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return [tuple(torch.from_numpy(array[step, share]) for array in (users, tags, labels)) for step in range(N_STEPS)]


def train(model: nn.Module, loader: object, optimizers: list[torch.optim.Optimizer]) -> list[float]:
    """Train on batches of features and, last, labels; return the loss of each step."""
    losses = []
    for *features, labels in loader:
        loss = F.binary_cross_entropy_with_logits(model(*features), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def alone(case: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train in this process, on whole batches and torch's own rows; return losses and all weights at the end."""
    kind, _ = CASES[case]
    first = {name: INITIALIZER.rows(np.arange(n, dtype=np.uint64), DIM, table=f"{name}.{case}", seed=SEED) for name, n in SIZES.items()}
    users = nn.Embedding.from_pretrained(torch.from_numpy(first["users"]), freeze=False, sparse=True)
    tags = nn.EmbeddingBag.from_pretrained(torch.from_numpy(first["tags"]), freeze=False, sparse=True, mode="sum")
    torch.manual_seed(SEED)
    model = Model(users, tags)
    lr = LEARNING_RATE[kind]
    optimizers = [SPARSE[kind]([users.weight, tags.weight], lr=lr), DENSE[kind](model.perceptron.parameters(), lr=lr)]
    losses = train(model, batches(0, 1), optimizers)
    return losses, {"users": users.weight.detach().numpy(), "tags": tags.weight.detach().numpy(), **dense_weights(model)}


def dense_weights(model: Model) -> dict[str, np.ndarray]:
    """The perceptron's weights by name."""
    return {name: weight.detach().numpy() for name, weight in model.perceptron.named_parameters()}


def one_case(cluster: kvemb.Cluster, case: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train this rank's share under DDP; return losses and all weights at the end."""
    rank, world, (kind, ahead) = distributed.get_rank(), distributed.get_world_size(), CASES[case]
    options = {"initializer": INITIALIZER, "seed": SEED, "reduce": "mean", "exist_ok": True, "dim": DIM}
    optimizer = SPECS[kind](LEARNING_RATE[kind])
    tables = {name: cluster.create_table(f"{name}.{case}", optimizer=optimizer, num_ids=n, **options) for name, n in SIZES.items()}
    torch.manual_seed(SEED + rank)  # DDP gives all ranks the weights of rank 0, drawn with SEED
    model = Model(Embedding(tables["users"]), EmbeddingBag(tables["tags"], mode="sum"))
    parallel = DistributedDataParallel(model)
    optimizers = [SparseOptimizer(model), DENSE[kind](model.perceptron.parameters(), lr=LEARNING_RATE[kind])]
    loader = batches(rank, world)
    losses = train(parallel, loader if ahead is None else prepare(parallel, loader, consistency=ahead), optimizers)
    foreseen = optimizers[0].shared.n_ahead  # two lookups a step; the first batch is watched
    assert foreseen == (0 if ahead is None else 2 * (N_STEPS - 1)), foreseen
    rows = {name: table.pull(np.arange(SIZES[name])) for name, table in tables.items()}
    return losses, {**rows, **dense_weights(model)}


def main(url: str, folder: Path) -> None:
    """Run one rank, case after case; losses go to losses-<rank>.json, and of rank 0 all weights to <case>.npz."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    losses = {}
    for case in CASES:
        with kvemb.connect(url, trainer=f"trainer-{rank}") as cluster:
            losses[case], weights = one_case(cluster, case)
        if rank == 0:
            np.savez(folder / f"{case}.npz", **weights)
        distributed.barrier()
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert "RANK" in os.environ, "start it with torchrun"
    main(sys.argv[1], Path(sys.argv[2]))
