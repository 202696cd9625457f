"""One trainer of test_ddp_elastic: async mode, step after step until it is told to leave. Every step moves rows by 1: each loss is a sum.

    python joining_job.py URL NAME ID FOLDER

It looks up its own ID in one table, and id 0 in another, which all trainers share; rows are pulled ahead. It says "N" when N pushes of its
own are accepted, and leaves in order when FOLDER/leave-NAME exists.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import kvemb
from kvemb.torch import Embedding, SparseOptimizer, prepare


class Model(nn.Module):
    """Sums what it looks up."""

    def __init__(self, own: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = own, shared

    def forward(self, own: Tensor, shared: Tensor) -> Tensor:
        """Return the sum of all rows."""
        return self.own(own).sum() + self.shared(shared).sum()


def batches(own: int, leave: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same batch until it is time to leave."""
    while not leave.exists():
        yield torch.tensor([own]), torch.tensor([0])


def main(url: str, name: str, own: int, folder: Path) -> None:
    """Train."""
    torch.set_num_threads(1)
    with kvemb.connect(url, trainer=name) as cluster:
        made = {"dim": 2, "optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros(), "exist_ok": True}
        model = Model(*(Embedding(cluster.create_table(table, **made)) for table in ("own", "shared")))
        optimizer = SparseOptimizer(model)
        steps = itertools.count(1)
        with prepare(model, batches(own, folder / f"leave-{name}"), features={"own": 0, "shared": 1}) as loader:
            for (ids, common), n in zip(loader, steps, strict=False):
                model(ids, common).backward()
                optimizer.step()
                assert optimizer.last_ack is not None
                optimizer.last_ack.wait(60)
                print(n, flush=True)
                time.sleep(0.01)  # leaves the cores to trainers that are about to join


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
