"""The job of examples/ray_torch.py on a Ray of two nodes, of which the second comes and goes while it trains.

    resized_ray_job.py URL FOLDER

Ray changes the number of workers itself. So that the job does not end before it does, a worker waits before step 30 until there is a
second one, and both wait before step 50 until one is lost. FOLDER/starts tells how many began where.
"""

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray_torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer
from torch import distributed

WAIT_S = 300.0


def worker(job: dict[str, Any]) -> str:
    """Be one rank, which Ray ends where it waits."""
    world, folder, begun = distributed.get_world_size(), Path(job["folder"]), False

    def wait(step: int) -> None:
        nonlocal begun
        if not begun and distributed.get_rank() == 0:
            with (folder / "starts").open("a") as file:
                file.write(f"{world} workers from {step}\n")
        begun = True
        alone, together = folder / "alone", folder / "together"
        if (step == 30 and world == 1 and not together.exists()) or (step == 50 and world == 2):
            (alone if world == 1 else together).touch()
            time.sleep(WAIT_S)

    return ray_torch.work(job, wait)


def seen(mark: Path, job: "Future[Any]") -> None:
    """Wait for a mark that a worker sets."""
    while not mark.exists() and not job.done():
        time.sleep(0.1)


def main(url: str, folder: Path) -> None:
    """Start a Ray of one node, and the job; add a second node once a worker waits for it, and kill it once both wait."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(nodes.address, log_to_driver=False)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"config": url, "folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=1.0),
        run_config=ray.train.RunConfig(
            name="kvemb", storage_path=str(folder / "ray"), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    with ThreadPoolExecutor(1) as thread:
        fit = thread.submit(trainer.fit)
        seen(folder / "alone", fit)
        second = nodes.add_node(num_cpus=1)
        seen(folder / "together", fit)
        nodes.remove_node(second, allow_graceful=False)
        print(fit.result().return_value, flush=True)
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
