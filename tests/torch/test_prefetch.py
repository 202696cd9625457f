"""Rows pulled ahead over real servers: DataLoader workers, nodes that die, loops that are left, and nothing left behind."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import kvemb
from kvemb.errors import StorageError
from kvemb.local_cluster import LocalCluster
from tests.warm_clusters import warm
from trainer.lookahead.pull_threads import NAME
from trainer.torch import Embedding, SparseOptimizer, prepare

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
N_LINES, BATCH = 240, 16


class Model(nn.Module):
    def __init__(self, cluster: Any, name: str) -> None:
        super().__init__()
        optimizer = kvemb.optim.adagrad(0.1)
        self.rows = Embedding(cluster.create_table(name, dim=4, optimizer=optimizer, exist_ok=True))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids).square().mean()


class Dying(Dataset):  # type: ignore[type-arg]
    """The process that reads line 100 ends."""

    def __len__(self) -> int:
        return N_LINES

    def __getitem__(self, line: int) -> Tensor:
        if line == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([line])


def lines() -> TensorDataset:
    return TensorDataset(torch.arange(N_LINES * 2).reshape(N_LINES, 2))


@pytest.fixture(scope="module")
def local(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server("redis-server")
    with warm("redis", 2, shards=2) as cluster:
        yield cluster


def with_timeout(cluster: LocalCluster, timeout_s: float, on_lost_node: str) -> str:
    """The cluster's kvemb.yaml with another timeout, in a file beside it."""
    config = yaml.safe_load(cluster.config_path.read_text())
    config["storage"] |= {"timeout_s": timeout_s, "on_lost_node": on_lost_node}
    path = cluster.folder / f"kvemb-{on_lost_node}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path.as_uri()


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]


def n_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def train(model: Model, optimizer: SparseOptimizer, loader: Any, n: int | None = None, done: list[int] | None = None) -> int:
    done = [] if done is None else done
    for (ids,) in loader:
        model(ids).backward()
        optimizer.step()
        done.append(len(ids))
        if len(done) == n:
            break
    return len(done)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_loader_with_worker_processes_is_read_over_several_epochs(local: LocalCluster, method: str) -> None:
    with kvemb.connect(local.url) as cluster:
        model = Model(cluster, f"workers.{method}")
        optimizer = SparseOptimizer(model)
        loader = DataLoader(lines(), BATCH, num_workers=2, multiprocessing_context=method, shuffle=True)
        prepared = prepare(model, loader)
        assert len(prepared) == len(loader)
        for _ in range(2):
            assert train(model, optimizer, prepared) == len(loader)
            assert (ours(), multiprocessing.active_children()) == ([], [])
        cluster.flush()
        assert len(model.rows.table) == 2 * N_LINES
        assert (model.rows.shared.n_ahead, model.rows.shared.n_pulled) == (2 * len(loader) - 1, 1)


def test_every_push_is_measured_with_the_versions_that_its_rows_had(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        model = Model(cluster, "measured")
        optimizer = SparseOptimizer(model)
        loader = prepare(model, [(torch.arange(30),)] * 12, capacity=3)
        for (ids,) in loader:
            if loader._pipeline is not None:
                loader._pipeline.coming(1)  # so the next batch's rows are older than this push
            model(ids).backward()
            optimizer.step()
            assert optimizer.last_ack is not None
            optimizer.last_ack.wait_applied()  # a busy shard merges two pushes: the second one's rows would not have changed before it
        assert loader.mean_staleness.n == 11, "the first batch was pulled in its step"
        assert loader.staleness.changed_fraction == 1.0, "all rows of all batches are the same"
        assert 1 <= loader.staleness.batches_elapsed <= loader.mean_staleness.most_elapsed


def leave_early(url: str) -> None:
    """Epochs left in their middle; asserts that nothing of them stays. In a process of its own: it counts the process's files."""
    with kvemb.connect(url) as cluster:
        model = Model(cluster, "early")
        optimizer = SparseOptimizer(model)
        two_workers = DataLoader(lines(), BATCH, num_workers=2, multiprocessing_context="fork")
        prepared = prepare(model, two_workers, threads_num=2)
        train(model, optimizer, prepared, n=4)
        after_first = n_files()
        # Connections are kept, one to each node for as many threads as ever read at once, which may first happen in a later epoch.
        kept = 2 * prepared.threads_num
        for n in (1, 2, 5, 7) * 2:
            train(model, optimizer, prepared, n=n)
            assert (ours(), multiprocessing.active_children()) == ([], [])
        assert kept < 8, "so that one file of each epoch would be seen"
        assert n_files() <= after_first + kept, "neither sockets nor pipes pile up"


@pytest.mark.full
def test_leaving_a_data_loader_early_ends_its_processes_and_our_threads(local: LocalCluster) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    command = [sys.executable, "-c", "import sys, test_prefetch; test_prefetch.leave_early(sys.argv[1])", local.url]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.full
def test_processes_forked_while_pushes_are_under_way_live(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("forked", dim=4, optimizer=kvemb.optim.sgd(0.1))
        codes = set()
        for _ in range(60):
            table.push(range(500), torch.ones(500, 4).numpy())
            child = multiprocessing.get_context("fork").Process(target=os.getpid)
            child.start()
            table.push(range(500), torch.ones(500, 4).numpy())
            child.join(30)
            codes.add(child.exitcode)
        assert codes == {0}


def test_a_worker_process_that_dies_is_the_data_loaders_own_error(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        model = Model(cluster, "dying")
        optimizer = SparseOptimizer(model)
        # One batch at a time: with batches of it on their way, a process that dies may show as their broken connection instead.
        lines = DataLoader(Dying(), 10, num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
        loader = prepare(model, ((ids.flatten(),) for ids in lines))
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*\)"):
            train(model, optimizer, loader)
        assert ours() == []


@pytest.mark.full
def test_everything_is_closed_with_the_cluster(local: LocalCluster) -> None:
    def once() -> None:
        with kvemb.connect(local.url) as cluster:
            model = Model(cluster, "closed")
            train(model, SparseOptimizer(model), prepare(model, DataLoader(lines(), BATCH), threads_num=4, capacity=6), n=9)

    seen = []
    for _ in range(6):  # gRPC keeps some files and threads of its own, and may make them in the first few only
        once()
        seen.append((n_files(), threading.active_count()))
    for counts in zip(*seen, strict=True):
        assert min(counts[3:]) <= max(counts[:3]), f"each run leaves something: files, threads {seen}"


def test_a_node_that_dies_while_batches_are_pulled_is_an_error_within_the_timeout(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with warm("redis", 2, shards=1) as local, kvemb.connect(with_timeout(local, 10.0, "fail")) as cluster:
        model = Model(cluster, "one")
        optimizer = SparseOptimizer(model)
        done: list[int] = []

        def killed_at_5() -> Iterator[Any]:
            for i, batch in enumerate(DataLoader(lines(), BATCH)):
                if i == 5:
                    cluster.flush()
                    local.servers[0].process.kill()
                yield batch

        with pytest.raises(StorageError, match=local.servers[0].address):
            train(model, optimizer, prepare(model, killed_at_5(), threads_num=2, capacity=3), done=done)
        assert len(done) >= 2, "the batches that were pulled before came"
        assert ours() == []
        local.servers[0].restart()


def test_training_goes_on_when_the_node_comes_back_in_time(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with warm("redis", 2, shards=1) as local, kvemb.connect(with_timeout(local, 60.0, "wait")) as cluster:
        model = Model(cluster, "one")
        optimizer = SparseOptimizer(model)

        def lost_at_5() -> Iterator[Any]:
            for i, batch in enumerate(DataLoader(lines(), BATCH)):
                if i == 5:
                    cluster.flush()
                    local.servers[0].restart()  # empty
                yield batch

        n = train(model, optimizer, prepare(model, lost_at_5(), threads_num=2, capacity=3))
        assert n == N_LINES // BATCH
        cluster.flush()
        _, versions = model.rows.table.pull(range(2 * N_LINES), return_versions=True)
        assert (versions > 0).all(), "every row is there, those that the node lost included"


SCRIPT = """
import sys
import torch
import kvemb
from trainer.torch import Embedding, prepare
cluster = kvemb.connect(sys.argv[1])
model = Embedding(cluster.create_table("exit", dim=2, optimizer=kvemb.optim.sgd(0.1), exist_ok=True))
batches = prepare(model, [torch.tensor([i]) for i in range(1000)], threads_num=3, capacity=8)
run = iter(batches)
for _ in range(5):
    model(next(run))
print("left")
"""


@pytest.mark.full
def test_a_program_may_end_in_the_middle_of_a_run(local: LocalCluster) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, local.url]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")
