"""The job of elastic_torch.py on Ray: TorchTrainer starts the ranks, and starts them all again when one is lost.

    pip install 'ray[train]' torch pyarrow fsspec
    python examples/ray_torch.py                        # a local cluster, and two workers of a local Ray
    python examples/ray_torch.py --kill-at 50           # worker 1 is killed before step 50: all start again; the same loss and rows
    python examples/ray_torch.py --config kvemb.yaml --folder /shared/run --workers 8          # your own cluster; --address of your Ray
    python examples/ray_torch.py --config kvemb.yaml --folder /shared/run --workers 1:8 --address auto    # as many as there is room for

Storage and shards are outside of Ray. A `ray.train.Checkpoint` has the dense weights, and names the kvemb checkpoint that goes with them,
so Ray says where a job goes on: after a failure, and when the driver is started again with the same folder. docs/engines.md says more.
"""

import argparse
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from elastic_torch import train
from ray.train.torch import TorchTrainer
from torch import distributed

import kvemb
from kvemb.torch import connect_rank


def load_named(cluster: kvemb.Cluster, checkpoint: ray.train.Checkpoint | None) -> dict[str, Any] | None:
    """Bring the cluster to the rows that a checkpoint of Ray names; return its state. Every rank calls it."""
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        found: dict[str, Any] = torch.load(Path(folder) / "state.pt", weights_only=True)
    if distributed.get_rank() == 0:
        cluster.load(found["rows"])
    distributed.barrier()
    return found


def worker(job: dict[str, Any]) -> str:
    """Be one rank; Ray has called init_process_group."""
    torch.set_num_threads(1)
    rank, checkpoint = distributed.get_rank(), ray.train.get_checkpoint()

    def kill(step: int) -> None:
        mark = Path(job["folder"]) / "killed"
        if step == job["kill_at"] and rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with connect_rank(job["config"]) as cluster:

        def save(step: int, state: dict[str, Any]) -> None:
            if rank:
                ray.train.report({"step": step})  # as often as rank 0: it is a barrier
                return
            # A name of its own: a worker that is lost before Ray has its report leaves a checkpoint that nothing names.
            rows = str(Path(job["folder"]) / "rows" / f"step-{step:06d}-{uuid.uuid4().hex[:8]}")
            cluster.save(rows)
            with tempfile.TemporaryDirectory() as folder:
                torch.save({**state, "rows": rows}, Path(folder) / "state.pt")
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))

        found = load_named(cluster, checkpoint)
        begun = f"{distributed.get_world_size()} workers went on at step {found['step'] if found else 0}"
        told = train(cluster, found, save, kill)
        distributed.barrier()
    return f"{begun}\n{told}"


def run(args: argparse.Namespace, config: str, folder: Path) -> int:
    """Train on Ray; return the exit code."""
    # A Ray that is started here has nothing but what the workers need.
    own = {"num_cpus": most(args.workers), "include_dashboard": False, "object_store_memory": 100 << 20}
    ray.init(args.address or "local", **({} if args.address else own), log_to_driver=False)
    job = {"config": config, "folder": str(folder), "kill_at": args.kill_at}
    trainer = TorchTrainer(
        worker,
        train_loop_config=job,
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            name="kvemb", storage_path=str(folder / "ray"), failure_config=ray.train.FailureConfig(max_failures=args.max_failures)
        ),
    )
    try:
        print(trainer.fit().return_value, flush=True)
    except ray.train.TrainingFailedError as error:
        print(f"failed ({type(error).__name__}): start it again with the same --config and --folder", flush=True)
        return 1
    finally:
        ray.shutdown()
    return 0


def workers(word: str) -> int | tuple[int, int]:
    """Read N, or MIN:MAX."""
    least, _, greatest = word.partition(":")
    return (int(least), int(greatest)) if greatest else int(least)


def most(n_workers: int | tuple[int, int]) -> int:
    """How many workers there may be."""
    return n_workers if isinstance(n_workers, int) else n_workers[1]


def main() -> int:
    """Start the workers."""
    parser = argparse.ArgumentParser(description="Train on Ray, killed in the middle.")
    parser.add_argument("--config", help="kvemb.yaml of a running cluster in sync mode")
    parser.add_argument("--folder", type=Path, help="for checkpoints, reached by all workers and shards")
    parser.add_argument("--workers", type=workers, default=2, metavar="N", help="of Ray (2); MIN:MAX: Ray changes it while the job runs")
    parser.add_argument("--address", help="of a running Ray; without, one is started here")
    parser.add_argument("--max-failures", type=int, default=3, metavar="N", help="how often Ray starts all workers again (3)")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill worker 1 before this step, once")
    args = parser.parse_args()
    if (args.config is None) != (args.folder is None):
        parser.error("--config and --folder go together")
    if args.config is not None:
        return run(args, args.config, args.folder.absolute())
    with tempfile.TemporaryDirectory() as folder, kvemb.local(shards=2, mode="sync", trainers=most(args.workers)) as url:
        return run(args, url, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
