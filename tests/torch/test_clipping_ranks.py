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
from trainer.torch.lookup.parameter_walks import ParametersWithLeaves

pytestmark = pytest.mark.full  # jobs of several processes; tests/bridges and test_prefetch_consistency.py say how they train

ROOT = Path(__file__).resolve().parents[2]
N_RANKS, MAX_NORM = 2, 0.25
TOLD = "torch.nn.utils.clip_grad_norm_ leaves the gradients of rows out in a job of 2 ranks (table 'user'"


# What clips, by which norm.
WAYS = {
    "ours": 2.0,
    "ours by the largest": float("inf"),
    "torch's": 2.0,
    "the optimizer's unclipped": 2.0,
    "the optimizer's at once": 2.0,
    "the optimizer's scaled": 2.0,
}


def main(rank: int, folder: Path) -> None:
    """Run one rank, all ways one after another; a line of stderr begins each."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=(folder / "gloo").as_uri(), rank=rank, world_size=N_RANKS)
    for which, norm_type in WAYS.items():
        print(f"== {which}", file=sys.stderr, flush=True)
        ParametersWithLeaves.told = False  # as in a process of its own
        torch.manual_seed(0)
        (clip_the_optimizers if which.startswith("the optimizer's") else clip_the_models)(rank, norm_type, which)
    torch.distributed.destroy_process_group()


def clip_the_models(rank: int, norm_type: float, which: str) -> None:
    """Clip all of a model whose ranks have ids of their own; its rows' gradients are summed over the ranks."""
    cluster = MemoryCluster()
    model = nn.Sequential(Embedding(cluster.table("user", 3, optim.sgd(1.0))), nn.Linear(3, 1, bias=False))
    optimizer, replica = SparseOptimizer(model), nn.parallel.DistributedDataParallel(model)
    replica(torch.tensor([rank * 10, rank * 10 + 1])).square().sum().backward()
    if which.startswith("ours"):
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


Ranks = tuple[list[np.ndarray], list[np.ndarray], list[str]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    """By way: the dense gradients, those of rows, and what was told, of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent, Path(__file__).parents[1]))),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, __file__, str(folder)]
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
    said = [dict(zip(WAYS, map(json.loads, out.splitlines()), strict=True)) for out, _ in outputs]
    told = [dict(part.split("\n", 1) for part in error.split("== ")[1:]) for _, error in outputs]
    return {
        which: ([np.array(of[which][0]) for of in said], [np.array(of[which][1]) for of in said], [of[which] for of in told])
        for which in WAYS
    }


@pytest.mark.parametrize("which", ["ours", "ours by the largest"])
def test_all_ranks_clip_by_one_norm_of_all_ranks_rows(ranks: dict[str, Ranks], which: str) -> None:
    dense, rows, _ = ranks[which]
    assert np.array_equal(*dense), "the replicas stay equal"
    together = np.concatenate([dense[0].reshape(-1), *(of.reshape(-1) for of in rows)])
    assert np.linalg.norm(together, WAYS[which]) == pytest.approx(MAX_NORM, rel=1e-5)


def test_torchs_function_in_a_job_of_several_ranks_tells_that_rows_are_left_out(ranks: dict[str, Ranks]) -> None:
    dense, _, errors = ranks["torch's"]
    assert np.array_equal(*dense), "rows that one rank has alone do not scale its replica"
    for error in errors:
        assert error.count(TOLD) == 1
        assert "kvemb.torch.clip_grad_norm_(model, …)" in error


@pytest.mark.parametrize("which", ["the optimizer's at once", "the optimizer's scaled"])
def test_clipping_what_the_optimizer_has_scales_the_replicas_alike(ranks: dict[str, Ranks], which: str) -> None:
    dense, rows, errors = ranks[which]
    assert np.array_equal(*dense), "rows that one rank has alone do not scale its replica"
    assert np.linalg.norm(dense[0]) == pytest.approx(MAX_NORM, rel=1e-5)
    for mine, theirs in zip(rows, ranks["the optimizer's unclipped"][1], strict=True):
        assert mine.tolist() == theirs.tolist(), "GradScaler finds what waits, and zero_grad"
    if "at once" not in which:
        assert [error.count(TOLD) for error in errors] == [1] * N_RANKS


if __name__ == "__main__":
    main(int(sys.argv[2]), Path(sys.argv[1]))
