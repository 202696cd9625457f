"""The job of test_rank_exchange: a small click model whose ranks exchange rows, or do not. As a program it is one rank.

    python exchange_job.py URL RANK WORLD FOLDER WHAT

What came of it is in FOLDER/WHAT-RANK.npz.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import kvemb
from kvemb.arrays.hashing import mix64
from kvemb.errors import InvalidInputError, NodeUnavailableError
from kvemb.torch import Embedding, EmbeddingBag, SparseOptimizer, prepare

N_STEPS, BATCH, LR = 20, 16, 0.05
TIMEOUT_S, PATIENT_S = 15.0, 120.0
"""Of the ranks' group: where one of them hangs, and everywhere else."""
N_USERS, N_TAGS = 40, 60
SAVED_AT, DIES_AT = 10, 14
N_UNEVEN = (12, 8)
"""Batches of either rank where they are not equally many."""
DIM = {"users": 8, "tags": 4}
FEATURES = {"users": "users", "tags": lambda batch: (batch["tags"], batch["offsets"])}
PADDING = 3
Batch = dict[str, Tensor]


class ClickModel(nn.Module):
    """A layer over a user's vector, of which one id is padding, and the sum of the tags' vectors."""

    def __init__(self, tables: dict[str, kvemb.Table]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users = Embedding(tables["users"], padding_idx=PADDING)
        self.tags = EmbeddingBag(tables["tags"], mode="sum")
        self.dense = nn.Linear(sum(DIM.values()), 1)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits float32 [b]."""
        return self.dense(torch.cat([self.users(batch["users"]), self.tags(batch["tags"], batch["offsets"])], dim=1)).squeeze(1)


def ids_of() -> dict[str, np.ndarray]:
    """All ids of each table: small ones, and hashed ones of 63 bits."""
    return {"users": np.arange(N_USERS), "tags": mix64(np.arange(1, N_TAGS + 1, dtype=np.uint64)) >> np.uint64(1)}


def batches(rank: int, n: int = N_STEPS) -> list[Batch]:
    """This rank's batches: skewed ids, duplicates, now and then no tag at all on one of the ranks, or nothing but padding."""
    rng = np.random.default_rng(rank + 5)
    made = []
    for step in range(n):
        users = (N_USERS * rng.random(BATCH) ** 2).astype(np.int64)
        counts = rng.integers(0, 5, BATCH) * (step % 5 != rank + 1)
        tags = ids_of()["tags"][(N_TAGS * rng.random(counts.sum()) ** 3).astype(int)].view(np.int64)
        users = np.full(BATCH, PADDING) if step % 7 == 3 * rank else users
        offsets = np.cumsum(counts) - counts
        labels = (rng.random(BATCH) < 0.4).astype(np.float32)
        arrays = {"users": users, "tags": tags, "offsets": offsets, "labels": labels}
        made.append({name: torch.from_numpy(array) for name, array in arrays.items()})
    return made


def open_tables(cluster: kvemb.Cluster, suffix: str) -> dict[str, kvemb.Table]:
    """Open both tables, with the same first rows whatever their names; one divides by the ranks, the other does not."""
    made = {
        name: cluster.create_table(
            f"{name}.{suffix}", dim=dim, optimizer=kvemb.optim.adam(LR), exist_ok=True, reduce="mean" if name == "users" else "sum",
            id_dtype="int64" if name == "users" else "uint64",
        )
        for name, dim in DIM.items()
    }  # fmt: skip
    if distributed.get_rank() == 0 and not len(made["users"]):
        for name, ids in ids_of().items():
            made[name].assign(ids, np.random.default_rng(1).normal(size=(len(ids), DIM[name])))
    distributed.barrier()
    return made


def overflows(rank: int, step: int) -> bool:
    """Whether gradients overflow in a step, so that this rank pushes none."""
    return rank == 1 and step % 6 == 5


def average(model: ClickModel) -> None:
    """Average dense gradients over the ranks, as DistributedDataParallel does."""
    for parameter in model.dense.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= distributed.get_world_size()


def train(
    model: ClickModel,
    loader: Iterable[Batch],
    *,
    at_step: Callable[[int], None] = lambda step: None,
    average: Callable[[ClickModel], None] = average,
    losses: list[float] | None = None,
    first: int = 0,
) -> list[float]:
    """Train; return the loss of each step, in `losses` if that is given."""
    optimizer, dense = SparseOptimizer(model), torch.optim.SGD(model.dense.parameters(), lr=LR)
    losses = [] if losses is None else losses
    for step, batch in enumerate(loader, start=first):
        loss = F.binary_cross_entropy_with_logits(model(batch), batch["labels"])
        dense.zero_grad()
        loss.backward()
        optimizer.found_inf = float(overflows(distributed.get_rank(), step))  # type: ignore[attr-defined]  # as GradScaler says it
        average(model)
        at_step(step)
        optimizer.step()
        dense.step()
        losses.append(loss.item())
    return losses


@contextmanager
def counted(fails_at: int) -> Iterator[list[int]]:
    """Count the rows that this process pulls from storage, and those that it pushes: [pulled, pushed]. The pull `fails_at` fails."""
    n_pulls, counts, pull, push = itertools.count(1), [0, 0], kvemb.Cluster.pull_versions, kvemb.Cluster.push

    def counting_pull(self: kvemb.Cluster, ids: Any, **options: Any) -> Any:
        if next(n_pulls) == fails_at:
            raise NodeUnavailableError("the node is away, as this test says")
        counts[0] += sum(len(of) for of in ids.values())
        return pull(self, ids, **options)

    def counting_push(self: kvemb.Cluster, tables: Any, **options: Any) -> Any:
        counts[1] += sum(len(ids) for ids, _ in tables.values())
        return push(self, tables, **options)

    kvemb.Cluster.pull_versions, kvemb.Cluster.push = counting_pull, counting_push  # type: ignore[method-assign, assignment]
    try:
        yield counts
    finally:
        kvemb.Cluster.pull_versions, kvemb.Cluster.push = pull, push  # type: ignore[method-assign]


def prepared(model: ClickModel, loader: Iterable[Batch], suffix: str, **options: Any) -> Any:
    """The loader of a job: "plain" without exchange."""
    group = {} if suffix.startswith("plain") else {"exchange": distributed.group.WORLD}
    return prepare(model, loader, consistency="exact", **group, **({"features": FEATURES} | options))


def equal(url: str, rank: int) -> dict[str, Any]:
    """The same training without exchange, with it, with a first batch that is watched, and with a pull that fails on one rank."""
    came: dict[str, Any] = {}
    for suffix in ("plain", "exchanged", "watched", "failing"):
        with kvemb.connect(url, trainer=f"trainer-{rank}", timeout_s=60) as cluster:
            tables = open_tables(cluster, suffix)
            model = ClickModel(tables)
            loader = prepared(model, batches(rank), suffix, **({"features": None} if suffix == "watched" else {}))
            with counted(fails_at=5 if suffix == "failing" and rank == 1 else 0) as counts:
                came[f"losses.{suffix}"] = train(model, loader)
            came[f"rows.{suffix}"] = counts
            came[f"ahead.{suffix}"] = model.users.shared.n_ahead
            came |= {f"{name}.{suffix}": table.pull(ids_of()[name]) for name, table in tables.items()}
            came[f"epoch 2.{suffix}"] = train(model, (batch for _, batch in zip(range(5), loader, strict=False)))
            came |= {f"{name} 2.{suffix}": table.pull(ids_of()[name]) for name, table in tables.items()}
        distributed.barrier()
    return came


def uneven(url: str, rank: int) -> dict[str, Any]:
    """One rank has fewer batches, or a wrong one, closes its cluster and so leaves; the other goes on. Dense weights stay as they are."""
    came: dict[str, Any] = {}
    for suffix in ("plain.uneven", "exchanged.uneven", "exchanged.wrong"):
        with kvemb.connect(url, trainer=f"trainer-{rank}", timeout_s=60) as cluster:
            tables = open_tables(cluster, suffix)
            model = ClickModel(tables)
            model.dense.requires_grad_(False)
            mine, losses = batches(rank, N_UNEVEN[rank]), list[float]()
            if suffix == "exchanged.wrong" and rank == 1:
                mine.append({})
            try:
                train(model, prepared(model, mine, suffix), average=lambda model: None, losses=losses)
            except InvalidInputError as error:
                came[f"error.{suffix}"] = str(error)
            came[f"losses.{suffix}"] = losses
            if rank == 0:
                came |= {f"{name}.{suffix}": table.pull(ids_of()[name]) for name, table in tables.items()}
        distributed.barrier()
    return came


def broken(url: str, rank: int, folder: Path, end: signal.Signals) -> dict[str, Any]:
    """Save after some steps; in a later one rank 1 ends, before its gradients have gone. Says how long rank 0 took to notice."""

    def at_step(step: int) -> None:
        if step == SAVED_AT:
            distributed.barrier()
            if rank == 0:
                cluster.save(folder.joinpath("saved").as_uri())
                torch.save(model.dense.state_dict(), folder / "dense.pt")
            distributed.barrier()
        if step == DIES_AT:
            died_s.append(time.monotonic())
            if rank == 1:
                os.kill(os.getpid(), end)

    died_s: list[float] = []
    with kvemb.connect(url, trainer=f"trainer-{rank}", timeout_s=60) as cluster:
        model = ClickModel(open_tables(cluster, "exchanged"))
        try:
            train(model, prepared(model, batches(rank), "exchanged"), at_step=at_step)
        except kvemb.errors.KvembError as error:
            return {"error": type(error).__name__, "said": str(error), "took_s": time.monotonic() - died_s[0]}
    return {"error": ""}


def resumed(url: str, rank: int, folder: Path) -> dict[str, Any]:
    """Load the checkpoint, and go on from there to the end."""
    with kvemb.connect(url, trainer=f"trainer-{rank}", timeout_s=60) as cluster:
        if rank == 0:
            cluster.load(folder.joinpath("saved").as_uri())
        distributed.barrier()
        tables = open_tables(cluster, "exchanged")
        model = ClickModel(tables)
        model.dense.load_state_dict(torch.load(folder / "dense.pt", weights_only=True))
        losses = train(model, prepared(model, batches(rank)[SAVED_AT:], "exchanged"), first=SAVED_AT)
        return {"losses": losses, **{name: table.pull(ids_of()[name]) for name, table in tables.items()}}


def main(url: str, rank: int, world: int, folder: Path, what: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S if what == "stopped" else PATIENT_S)
    distributed.init_process_group("gloo", init_method=(folder / f"gloo-{what}").as_uri(), rank=rank, world_size=world, timeout=timeout)
    jobs = {
        "equal": lambda: equal(url, rank),
        "uneven": lambda: uneven(url, rank),
        "killed": lambda: broken(url, rank, folder, signal.SIGKILL),
        "stopped": lambda: broken(url, rank, folder, signal.SIGSTOP),
        "resumed": lambda: resumed(url, rank, folder),
    }
    np.savez(folder / f"{what}-{rank}.npz", **jobs[what]())
    os._exit(0)  # groups that lost a rank are not taken down in order


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
