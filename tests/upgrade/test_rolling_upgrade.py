"""A cluster of an older release becomes one of the present, part by part, while trainers push: no push is lost or doubled."""

import io
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from counting_trainer import DIM, SHARED, TABLE, ids_of
from releases import PATIENCE_S, MixedCluster, Release, older, present

import kvemb
from kvemb.cli import main
from kvemb.local_cluster.processes import LocalProcess
from kvemb.net.deadline import Deadline

PROGRAM = str(Path(__file__).with_name("counting_trainer.py"))


class Job:
    """Two trainers at work on a cluster, each of a release of its own."""

    def __init__(self, cluster: MixedCluster, release: Release) -> None:
        self.cluster = cluster
        self.files = [cluster.folder / f"trainer-{trainer}" for trainer in range(2)]
        self.trainers: list[LocalProcess] = []
        for trainer in range(2):
            self.start(trainer, release)

    def start(self, trainer: int, release: Release) -> None:
        command = [*release.python, PROGRAM, str(self.cluster.config_path), str(trainer), str(self.files[trainer])]
        log = self.cluster.folder / f"trainer-{trainer}.log"
        self.trainers[trainer : trainer + 1] = [LocalProcess(f"trainer {trainer} ({release.name})", command, log, release.env)]

    def exchange(self, trainer: int, release: Release) -> None:
        assert self.trainers[trainer].stop(PATIENCE_S) == 0, self.trainers[trainer].log_tail()
        self.start(trainer, release)

    def pushes(self) -> list[int]:
        """How many pushes of each trainer were acknowledged."""
        return [int(file.read_text()) if file.exists() else 0 for file in self.files]

    def goes_on(self) -> None:
        """Each trainer has three more acknowledged."""
        wanted, deadline = [n + 3 for n in self.pushes()], Deadline.after(PATIENCE_S)
        while any(n < least for n, least in zip(self.pushes(), wanted, strict=True)):
            words = "\n".join(f"{one.name}:\n{one.log_tail()}" for one in (*self.trainers, *self.cluster.shards))
            assert all(one.poll() is None for one in self.trainers), words
            assert not deadline.expired, f"{self.pushes()}, waited for {wanted}\n{words}"
            time.sleep(0.05)

    def judge(self) -> None:
        """End the trainers; every push must have been applied once, each row compared."""
        for one in self.trainers:
            assert one.stop(PATIENCE_S) == 0, one.log_tail()
        pushed = [ids_of(trainer, n) for trainer, last in enumerate(self.pushes()) for n in range(1, last + 1)]
        ids, counts = np.unique(np.concatenate(pushed), return_counts=True)
        with kvemb.connect(self.cluster.url, trainer="judge") as client:
            table = client.table(TABLE)
            table.flush()
            np.testing.assert_array_equal(table.pull(ids), np.repeat(counts[:, None], DIM, axis=1))
            assert len(table) == len(ids) > SHARED


@contextmanager
def job(release: Release, kind: str, mode: str) -> Iterator[Job]:
    trainers = 2 if mode == "sync" else 0
    with MixedCluster(release, kind, 3 if kind == "redis-cluster" else 2, shards=2, mode=mode, trainers=trainers) as cluster:
        with kvemb.connect(cluster.url, read_only=False, trainer="t0") as client:
            client.create_table(TABLE, dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        running = Job(cluster, release)
        try:
            running.goes_on()
            yield running
        finally:
            for one in running.trainers:
                one.kill()


def here(*arguments: str) -> str:
    """Run the present release's `kvemb` in this process: a start takes as long as all else that it does."""
    with redirect_stdout(io.StringIO()) as told:
        assert main([*arguments]) == 0
    return told.getvalue()


def lives(told: str) -> bool:
    """Whether `kvemb status --json` has told of two shards that serve."""
    return [shard["failure"] for shard in json.loads(told)["shards"]] == ["", ""]


ORDERS = (
    ("redis", "async"),
    pytest.param("memcached", "async", marks=pytest.mark.full),
    pytest.param("redis", "sync", marks=pytest.mark.full),
    pytest.param("redis-cluster", "async", marks=pytest.mark.long),
)


@pytest.mark.timeout(480)  # some thirty processes start, one after the other
@pytest.mark.parametrize(("kind", "mode"), ORDERS)
def test_a_cluster_is_upgraded_part_by_part_and_the_older_release_refuses_to_go_back(
    kind: str, mode: str, tmp_path: Path, require_server: Callable[[str], str]
) -> None:
    require_server("memcached" if kind == "memcached" else "redis-server")
    old, new = older(tmp_path / "older"), present()
    with job(old, kind, mode) as running:
        cluster, config, addresses = running.cluster, str(running.cluster.config_path), running.cluster.addresses

        def in_this_mixture() -> None:
            running.goes_on()
            assert lives(old.done("status", "--json", config))
            assert lives(here("status", "--json", config))

        in_this_mixture()
        old.done("save", config, (tmp_path / "saved-by-old").as_uri())
        cluster.exchange_shard(1, new)
        in_this_mixture()
        assert old.kvemb("save", config, (tmp_path / "mixed").as_uri()).returncode != 0
        old.done("shards", "rebalance", config, "--yes", "--weights", f"{addresses[0]}=1,{addresses[1]}=3")
        cluster.exchange_shard(0, new)
        in_this_mixture()
        for trainer in (0, 1):
            running.exchange(trainer, new)
            in_this_mixture()
        here("save", config, (tmp_path / "saved-by-new").as_uri())

        assert cluster.shards[0].stop(PATIENCE_S) == 0, cluster.shards[0].log_tail()  # an older release cannot go on from here, and says so
        cluster.releases[0] = old
        refused = cluster.launch_shard(0)
        assert refused._child.wait(PATIENCE_S) == 3, refused.log_tail()
        assert "start the shards with this release, and run `kvemb load URL` (docs/upgrade.md)" in refused.log_tail()
        cluster.releases[0] = new
        cluster.start_shard(0)
        here("shards", "rebalance", config, "--yes")
        in_this_mixture()
        running.judge()
    here("verify", (tmp_path / "saved-by-old").as_uri())
    here("verify", (tmp_path / "saved-by-new").as_uri())


def test_each_process_runs_its_own_release(tmp_path: Path) -> None:
    old, new = older(tmp_path), present()
    program = "from kvemb.own import import_own; print(import_own('paramserver.journal').__file__)"
    where = [
        subprocess.run([*one.python, "-c", program], env={**os.environ, **one.env}, capture_output=True, check=True, text=True).stdout
        for one in (old, new)
    ]
    assert where[0].startswith(str(tmp_path))
    assert where[1].startswith(str(Path(kvemb.__file__).parents[1] / "paramserver"))
    assert old.done("--version") == "kvemb 0.1.0\n"
