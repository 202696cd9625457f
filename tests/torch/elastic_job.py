"""The job of test_elastic under torchrun: steps push ones for lines that are dealt to the ranks, so that a row counts its lines.

    elastic_job.py URL FOLDER

Its steps come in stages; before each further one it waits to be started anew in a world of so many ranks (WORLDS). Rank 1 is killed
once, by itself. In the first world it lives on when its agent and the others are killed, pushes when FOLDER/haunt is there, and says
what comes of it.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import distributed

import kvemb
from kvemb.api.table import Table
from kvemb.checkpoint.listing import list_checkpoints
from kvemb.errors import KvembError
from kvemb.torch import connect_rank

WORLDS = (2, 1, 3)
STAGE, EVERY, BATCH, KILLED_AT = 18, 8, 12, 5
N_STEPS, N_IDS, WAIT_S = STAGE * len(WORLDS), 40, 100.0


def lines(step: int) -> NDArray[np.int64]:
    """The ids of a step's batch, int64 [b]; hot ids come again and again."""
    return (N_IDS * np.random.default_rng(step).random(BATCH) ** 2).astype(np.int64)


def ledger() -> NDArray[np.int64]:
    """How often each id is in all batches, int64 [N_IDS]."""
    return np.bincount(np.concatenate([lines(step) for step in range(N_STEPS)]), minlength=N_IDS)


def main(url: str, folder: Path) -> None:
    """Be a rank: go on from the newest checkpoint; one is made before the first step, and then every few steps."""
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    sync = folder.name == "of-sync"
    with connect_rank(url, places=None if sync else max(WORLDS)) as cluster:
        table = cluster.create_table("count", dim=1, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), exist_ok=True)
        names = [one.name for one in list_checkpoints(str(folder / "rows")) if one.manifest is not None]
        if names and rank == 0:
            cluster.load(str(folder / "rows" / max(names)))
        distributed.barrier()
        begin = int(max(names, default="-1"))
        (folder / f"life-{time.time_ns()}-{rank}").write_text(f"{world} ranks from {max(0, begin)}")
        for step in range(max(0, begin), N_STEPS):
            if step % EVERY == 0 and step != begin:
                cluster.flush()
                distributed.barrier()
                if rank == 0:
                    cluster.save(str(folder / "rows" / f"{step:06d}"))
                distributed.barrier()
            if step % STAGE == 0 and world != WORLDS[step // STAGE]:
                cluster.flush()
                wait_to_be_ended(folder, cluster, step)
            if step == KILLED_AT and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            push(table, lines(step)[rank::world])
        cluster.flush()
    (folder / f"done-{rank}").touch()
    distributed.destroy_process_group()


def push(table: Table, ids: NDArray[np.int64]) -> None:
    """Count ids, once for each time that they are given."""
    table.push(ids, np.full((len(ids), 1), -1.0, np.float32)).wait(WAIT_S)


def wait_to_be_ended(folder: Path, cluster: kvemb.Cluster, step: int) -> None:
    """Be of a world that is over; its last checkpoint, if it may make one, has what a rank of the first world has pushed meanwhile."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    (folder / f"waits-{step}-{rank}").write_text(str(os.getpid()))
    for _ in itertools.count():
        if world == 1 and (folder / "told").exists():
            cluster.save(str(folder / "rows" / f"{step:06d}"))
            break
        if rank == 1 and (folder / "haunt").exists():
            try:
                push(cluster.table("count"), np.arange(N_IDS))
                told = "nothing"
            except KvembError as error:
                told = type(error).__name__
            (folder / "telling").write_text(told)
            (folder / "telling").rename(folder / "told")
            os._exit(0)
        time.sleep(0.05)
    time.sleep(WAIT_S)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
