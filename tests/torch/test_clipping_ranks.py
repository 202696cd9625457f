"""clip_grad_norm_ in a job of several ranks: one norm for all, so that dense weights which are equal stay equal.

As a program this file is one rank: it prints its dense gradients after clipping, and those of its rows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from making_cluster import MakingCluster
from memory_cluster import MemoryCluster
from torch import nn

from kvemb import optim
from trainer.torch import Embedding, SparseOptimizer, clip_grad_norm_, distribute

ROOT = Path(__file__).resolve().parents[2]
N_RANKS, MAX_NORM = 2, 0.25
TOLD = "torch.nn.utils.clip_grad_norm_ leaves the gradients of rows out in a job of 2 ranks (table 'user'"


def main(rank: int, folder: Path, norm_type: float, which: str) -> None:
    """Run one rank, with ids of its own; its rows' gradients are summed over the ranks."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=(folder / "gloo").as_uri(), rank=rank, world_size=N_RANKS)
    torch.manual_seed(0)
    if which.startswith("the optimizer's"):
        return clip_the_optimizers(rank, norm_type, which)
    cluster = MemoryCluster()
    model = nn.Sequential(Embedding(cluster.table("user", 3, optim.sgd(1.0))), nn.Linear(3, 1, bias=False))
    optimizer, replica = SparseOptimizer(model), nn.parallel.DistributedDataParallel(model)
    replica(torch.tensor([rank * 10, rank * 10 + 1])).square().sum().backward()
    if which == "ours":
        clip_grad_norm_(model, MAX_NORM, norm_type)
    else:
        nn.utils.clip_grad_norm_(replica.parameters(), MAX_NORM, norm_type)
    optimizer.step()
    say(model, cluster)


def clip_the_optimizers(rank: int, norm_type: float, which: str) -> None:
    """Clip what the optimizer's groups hold, as Lightning does; "at once" as most programs do."""
    model, cluster = nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 1, bias=False)), MakingCluster()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, names={"0": "user"}, carry_weights=True, quiet=True)
    replica = nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaled" in which)
    scaler.scale(replica(torch.tensor([rank * 10, 3])).sum() * 1e6).backward()
    optimizer.zero_grad()  # leaves nothing of this
    scaler.scale(replica(torch.tensor([rank * 10, rank * 10 + 1])).square().sum()).backward()
    scaler.unscale_(optimizer)
    params = (param for group in optimizer.param_groups for param in group["params"])
    if "unclipped" not in which:
        nn.utils.clip_grad_norm_(list(params) if "at once" in which else params, MAX_NORM, norm_type)
    scaler.step(optimizer)
    say(model, cluster)


def say(model: nn.Sequential, cluster: MemoryCluster) -> None:
    print(json.dumps([model[1].weight.grad.tolist(), cluster.pushes[0]["user"][1].tolist()]))
    torch.distributed.destroy_process_group()


def run(folder: Path, norm_type: float, which: str) -> tuple[list[np.ndarray], list[np.ndarray], list[str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent, Path(__file__).parents[1]))),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, __file__, str(folder), str(norm_type), which]
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(N_RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * N_RANKS, "\n".join(error[-2000:] for _, error in outputs)
    dense, rows = zip(*(json.loads(out) for out, _ in outputs), strict=True)
    return [np.array(of) for of in dense], [np.array(of) for of in rows], [error for _, error in outputs]


@pytest.mark.parametrize("norm_type", [2.0, pytest.param(float("inf"), marks=pytest.mark.full)])
def test_all_ranks_clip_by_one_norm_of_all_ranks_rows(tmp_path: Path, norm_type: float) -> None:
    dense, rows, _ = run(tmp_path, norm_type, "ours")
    assert np.array_equal(*dense), "the replicas stay equal"
    together = np.concatenate([dense[0].reshape(-1), *(of.reshape(-1) for of in rows)])
    assert np.linalg.norm(together, norm_type) == pytest.approx(MAX_NORM, rel=1e-5)


def test_torchs_function_in_a_job_of_several_ranks_tells_that_rows_are_left_out(tmp_path: Path) -> None:
    dense, _, errors = run(tmp_path, 2.0, "torch's")
    assert np.array_equal(*dense), "rows that one rank has alone do not scale its replica"
    for error in errors:
        assert error.count(TOLD) == 1
        assert "kvemb.torch.clip_grad_norm_(model, …)" in error


@pytest.fixture(scope="module")
def unclipped_rows(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """Gradients of each rank's rows where nothing is clipped."""
    return run(tmp_path_factory.mktemp("unclipped"), 2.0, "the optimizer's unclipped")[1]


@pytest.mark.parametrize("which", [" at once", " scaled"])
def test_clipping_what_the_optimizer_has_scales_the_replicas_alike(tmp_path: Path, unclipped_rows: list[np.ndarray], which: str) -> None:
    dense, rows, errors = run(tmp_path, 2.0, "the optimizer's" + which)
    assert np.array_equal(*dense), "rows that one rank has alone do not scale its replica"
    assert np.linalg.norm(dense[0]) == pytest.approx(MAX_NORM, rel=1e-5)
    for mine, theirs in zip(rows, unclipped_rows, strict=True):
        assert mine.tolist() == theirs.tolist(), "GradScaler finds what waits, and zero_grad"
    if "at once" not in which:
        assert [error.count(TOLD) for error in errors] == [1] * N_RANKS


if __name__ == "__main__":
    main(int(sys.argv[4]), Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
