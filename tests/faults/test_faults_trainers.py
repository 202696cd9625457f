"""A trainer of a sync job that is killed in the middle of a step, under each rule for it: no step is applied by half on any shard."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from chaos import processes
from chaos.cluster import FaultyCluster
from chaos.proxy import UP, Flow
from chaos.run import LedgerRun
from jobs import PATIENCE_S, eventually
from sync_trainer import IDS, NAMES, open_table

import kvemb
from kvemb.local_cluster.processes import LocalProcess, python_env
from kvemb.net.deadline import Deadline
from tests.raw_shard import RawShard

PROGRAM = str(Path(__file__).with_name("sync_trainer.py"))
DIES_IN, GATE, STEPS = 6, 9, 12


class Job:
    """Three trainers as processes, of which c dies in the middle of a step: shard 0 has applied it then."""

    def __init__(self, cluster: FaultyCluster, stack: ExitStack) -> None:
        self.cluster, self._stack = cluster, stack
        looker = stack.enter_context(kvemb.connect(cluster.url, trainer="looker", timeout_s=PATIENCE_S))  # never pushes, so takes no seat
        self.table = open_table(looker)
        self.shards = [stack.enter_context(RawShard(proxy.address)) for proxy in cluster.shard_proxies]

    def start(self, gate: int) -> None:
        """Start the trainers; a and b wait before the step of the gate."""
        self.a, self.b = (self.launch(name, STEPS, "--gate", str(gate)) for name in "ab")
        self.c = self.launch("c", STEPS, "--die-in", str(DIES_IN))
        for name, process in zip(NAMES, (self.a, self.b, self.c), strict=True):
            ready = self.cluster.folder / f"{name}.ready"
            eventually(ready.exists, f"trainer {name} is not ready: {process.log_tail()}")
        self.sign("go")
        eventually(lambda: self.c.poll() is not None, "trainer c lives")
        assert self.c.poll() == -signal.SIGKILL, self.c.log_tail()

    def launch(self, name: str, steps: int, *options: str) -> LocalProcess:
        """Start one trainer."""
        command = [sys.executable, PROGRAM, "--config", self.cluster.url, "--folder", str(self.cluster.folder)]
        command += ["--name", name, "--steps", str(steps), *options]
        process = LocalProcess(f"trainer {name}", command, self.cluster.folder / f"{name}.log", python_env())
        self._stack.callback(process.kill)
        return process

    def sign(self, name: str) -> None:
        """Let the processes that wait for that file go on."""
        (self.cluster.folder / name).touch()

    def ends(self, process: LocalProcess, code: int = 0) -> None:
        """The process ends by itself, with that exit code."""
        eventually(lambda: process.poll() is not None, f"{process.name} does not end; {[shard.status() for shard in self.shards]}")
        assert process.poll() == code, process.log_tail()

    def comes_to(self, *expected: list[int]) -> None:
        """Each shard comes to have applied so many steps of (a, b, c), the same in all its rows; a and b are in every step."""

        def look() -> bool:
            rows = self.table.pull(IDS, timeout_s=PATIENCE_S)
            assert (rows[:, 0] == rows[:, 1]).all(), rows
            return bool((rows == np.repeat(expected, len(IDS) // 2, axis=0)).all())

        eventually(look, f"the counts of steps do not become {expected}")


@pytest.fixture
def start(require_server: Callable[[str], str]) -> Iterator[Callable[..., Job]]:
    require_server("redis-server")
    with ExitStack() as stack:

        @contextmanager
        def cluster(rule: str) -> Iterator[FaultyCluster]:
            servers = {"barrier_timeout_s": 4, "on_lost_trainer": rule}
            with FaultyCluster("redis", 2, shards=2, mode="sync", trainers=3, storage={"timeout_s": 1}, servers=servers) as made:
                yield made

        def begin(rule: str, gate: int = 0) -> Job:
            job = Job(stack.enter_context(cluster(rule)), stack)
            job.start(gate)
            return job

        yield begin


def test_abort_ends_the_others_and_nothing_of_the_step_is_applied_where_it_was_not_whole(start: Callable[..., Job]) -> None:
    job = start("abort")
    for process in (job.a, job.b):
        job.ends(process, 3)
        assert f"BarrierError: step {DIES_IN} waited 4" in process.log_tail()
        assert "for c; here are a, b" in process.log_tail()
    job.comes_to([DIES_IN] * 3, [DIES_IN - 1] * 3)


@pytest.mark.full
def test_wait_holds_the_step_and_says_so_until_a_trainer_of_that_name_is_back(start: Callable[..., Job]) -> None:
    job = start("wait")
    eventually(lambda: "for c; here are a, b" in job.shards[1].status().failure, "shard 1 does not say for whom it waits")
    eventually(lambda: "for c; here are a, b" in job.a.log_tail(), "nor does a waiting trainer")
    job.comes_to([DIES_IN] * 3, [DIES_IN - 1] * 3)
    back = job.launch("c", STEPS - DIES_IN)
    for process in (job.a, job.b, back):
        job.ends(process)
    # Its last push had reached shard 0 only; its successor took part in that step with nothing on shard 1, and from then on in every step.
    job.comes_to([STEPS] * 3, [STEPS, STEPS, STEPS - 1])
    assert job.shards[1].status().failure == ""


@pytest.mark.full
def test_drop_goes_on_without_the_trainer_also_over_a_restart_and_lets_it_in_again(start: Callable[..., Job]) -> None:
    job = start("drop", GATE)
    job.comes_to([GATE - 1, GATE - 1, DIES_IN], [GATE - 1, GATE - 1, DIES_IN - 1])
    for name in "ab":  # their steps are not only applied, they were told so: one that was not would come back to ask
        eventually((job.cluster.folder / f"{name}.gate").exists, f"trainer {name} is not at the gate")
    job.cluster.shards[1].kill()  # the decision is in its journal
    job.cluster.start_shard(1)
    back = job.launch("c", STEPS - GATE + 1)
    # At shard 1 it is the first: a and b come back when they have something to send.
    eventually(lambda: [shard.status().n_trainers for shard in job.shards] == [3, 1], f"c does not come back: {back.log_tail()}")
    job.sign("gate")
    for process in (job.a, job.b, back):
        job.ends(process)
    n_after = STEPS - GATE + 1
    job.comes_to([STEPS, STEPS, DIES_IN + n_after], [STEPS, STEPS, DIES_IN - 1 + n_after])


def test_trainers_that_all_start_again_behind_steps_which_one_shard_has_not_had_go_on(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    cluster = FaultyCluster("redis", 1, shards=2, mode="sync", trainers=2, servers={"on_lost_trainer": "wait"})
    with cluster, LedgerRun(cluster, n_trainers=2, depth=2) as run, ExitStack() as stack:
        shards = [stack.enter_context(RawShard(proxy.address)) for proxy in cluster.shard_proxies]
        run.wait_for_acks(3, Deadline.after(2 * PATIENCE_S))
        cluster.shard_proxies[0].set_open(Flow(swallow=True), UP)
        eventually(lambda: shards[1].status().k > shards[0].status().k, "shard 1 is not ahead")
        for trainer in run.trainers:
            processes.kill(trainer)
        cluster.shard_proxies[0].reset_all()
        verdict = run.finish(PATIENCE_S)
        assert verdict.kept, f"{verdict}\n{run.last_words()}"
