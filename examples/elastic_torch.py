"""Train under torchrun while ranks are killed, as if none had been: rows in a cluster, dense weights in DistributedDataParallel.

    python examples/elastic_torch.py                    # a local cluster, and two ranks under torchrun
    python examples/elastic_torch.py --kill-at 50       # rank 1 is killed before step 50: all start again, and go on from step 40
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1         # your own cluster
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic_torch.py --config kvemb.yaml --folder /shared/run

The last one is the program of a rank. Its cluster is in sync mode, with as many trainers as there may ever be ranks; with fewer, steps go
on with those. docs/engines.md says what makes it right: `connect_rank`, then rows and dense weights of one checkpoint.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import kvemb
from kvemb.checkpoint.listing import list_checkpoints
from kvemb.torch import EmbeddingBag, SparseOptimizer, connect_rank

N_STEPS, EVERY, BATCH, N_IDS = 80, 20, 48, 500
Save = Callable[[int, dict[str, Any]], None]


class Model(nn.Module):
    """A click model: a perceptron over the sum of the rows of a line's ids."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows, self.top = rows, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits float32 [b] of ids int64 [b, 4]."""
        return self.top(self.rows(ids)).squeeze(1)


def share(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Return this rank's lines of the step's batch, ids int64 [b, 4] and labels float32 [b]: all ranks together always have the same."""
    rng = np.random.default_rng(step)
    ids = (N_IDS * rng.random((BATCH, 4)) ** 3).astype(np.int64)
    labels = (ids.sum(axis=1) % 3 == 0).astype(np.float32)
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return torch.from_numpy(ids[mine]), torch.from_numpy(labels[mine])


def train(cluster: kvemb.Cluster, found: dict[str, Any] | None, save: Save, before: Callable[[int], None] = lambda step: None) -> str:
    """Train from where a checkpoint is; return a line that tells the last loss, and the rows at the end.

    Args:
        cluster: of this rank.
        found: what `save` was given for the newest checkpoint; None: there is none. The rows are those that were saved with it.
        save: called on every rank with a step and the rest of the state, while no rank is in a step.
        before: called before each step.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    table = cluster.create_table("ids", dim=8, optimizer=kvemb.optim.adagrad(lr=0.05), reduce="mean", exist_ok=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(EmbeddingBag(table, mode="sum")))
    optimizers = [SparseOptimizer(model), torch.optim.Adagrad(model.module.top.parameters(), lr=0.05)]
    if found is not None:
        model.module.top.load_state_dict(found["model"])
        optimizers[1].load_state_dict(found["optimizer"])
    loss = torch.zeros(())
    for step in range(0 if found is None else found["step"], N_STEPS):
        if step % EVERY == 0 and (found is None or step > found["step"]):  # the first before any step: rows can always be taken back
            cluster.flush()
            distributed.barrier()
            save(step, {"step": step, "model": model.module.top.state_dict(), "optimizer": optimizers[1].state_dict()})
            distributed.barrier()
        before(step)
        ids, labels = share(step, rank, world)
        loss = F.binary_cross_entropy_with_logits(model(ids), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    cluster.flush()
    distributed.all_reduce(loss := loss.detach() / world)
    return f"loss {loss.item():.6f}, rows {hashlib.sha256(table.pull(np.arange(N_IDS)).tobytes()).hexdigest()[:16]}"


def load_newest(cluster: kvemb.Cluster, folder: Path) -> dict[str, Any] | None:
    """Bring the cluster to the newest checkpoint; return the rest of it on every rank. The rows' manifest is written last: it decides."""
    names = [one.name for one in list_checkpoints(str(folder / "rows")) if one.manifest is not None]
    if not names:
        return None
    if distributed.get_rank() == 0:
        cluster.load(str(folder / "rows" / max(names)))
    distributed.barrier()
    return torch.load(folder / f"{max(names)}.pt", weights_only=True)


def rank_program(config: str, folder: Path, kill_at: int | None) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def kill(step: int) -> None:
        if step == kill_at and first_life and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with connect_rank(config) as cluster:

        def save(step: int, state: dict[str, Any]) -> None:
            if distributed.get_rank():
                return
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / f"step-{step:06d}.pt")
            cluster.save(str(folder / "rows" / f"step-{step:06d}"))

        found = load_newest(cluster, folder)
        if distributed.get_rank() == 0:
            print(f"{distributed.get_world_size()} ranks begin at step {found['step'] if found else 0}", flush=True)
        told = train(cluster, found, save, kill)
        distributed.barrier()
        if distributed.get_rank() == 0:
            print(told, flush=True)
    distributed.destroy_process_group()


def launch(kill_at: int | None) -> int:
    """Start a cluster and two ranks under torchrun; return its exit code."""
    with tempfile.TemporaryDirectory() as folder, kvemb.local(shards=2, mode="sync", trainers=2) as url:
        # As --standalone, without looking up this machine's own name.
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        ranks = [*meet, "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "3"]
        program = [__file__, "--config", url, "--folder", folder, *(["--kill-at", str(kill_at)] if kill_at is not None else [])]
        # Else a rank that is started again may find the address of one that is gone: docs/engines.md.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", *ranks, *program], env=env, check=False).returncode


def main() -> int:
    """Be a rank where a launcher has started one, and the launcher elsewhere."""
    parser = argparse.ArgumentParser(description="Train under torchrun, killed in the middle.")
    parser.add_argument("--config", help="kvemb.yaml of a running cluster in sync mode (of a rank)")
    parser.add_argument("--folder", type=Path, help="for checkpoints, reached by all ranks and shards (of a rank)")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill rank 1 before this step, once")
    args = parser.parse_args()
    if (args.config is None) != (args.folder is None):
        parser.error("--config and --folder go together")
    if args.config is None:
        return launch(args.kill_at)
    rank_program(args.config, args.folder, args.kill_at)
    return 0


if __name__ == "__main__":
    sys.exit(main())
