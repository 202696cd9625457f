"""A ledger run: a faulty cluster, its trainers as processes, and the verdict at the end. Tests and chaos put the faults in between."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvemb
from chaos.cluster import FaultyCluster
from chaos.ledger import ACKED, DRIFT, MAX_TRAINERS, STARTED, STEP_IDS, STEPS, TABLE, Ids, Plan, Record, StepsTogether, Verdict, Verifier
from chaos.trainer import create_tables, trainer_name
from kvemb.client.ack import Ack
from kvemb.errors import KvembError
from kvemb.local_cluster.processes import LocalProcess, python_env
from kvemb.net.deadline import Deadline


class LedgerRun:
    """Trainers that push until told to stop; a context manager.

    Args:
        cluster: running.
        n_trainers: how many.
        seed: of what they push.
        pause_s: between two pushes of one trainer.
        grace_s: how long a trainer that was told to stop waits for its last acknowledgements.
        depth: pushes of one trainer on their way at once.
        closing: whether they push to the table that may be altered and dropped, too.
    """

    def __init__(
        self,
        cluster: FaultyCluster,
        *,
        n_trainers: int = 3,
        seed: int = 0,
        pause_s: float = 0.005,
        grace_s: float = 60.0,
        depth: int = 6,
        closing: bool = False,
    ) -> None:
        self.cluster, self.plan = cluster, Plan(seed, n_trainers)
        self._pause_s, self._grace_s, self._depth, self._closing = pause_s, grace_s, depth, closing
        self._files = [cluster.folder / f"ledger-{trainer}" for trainer in range(n_trainers)]
        self.trainers: list[LocalProcess] = []
        self._steps = StepsTogether(n_trainers)

    def __enter__(self) -> "LedgerRun":
        create_tables(self.cluster.url, closing=self._closing)
        for trainer in range(self.plan.n_trainers):
            self.start_trainer(trainer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.trainers:
            process.kill()

    def start_trainer(self, trainer: int) -> LocalProcess:
        """Start (again) one trainer; it goes on behind the last push that it sent."""
        plan = ["--seed", str(self.plan.seed), "--trainers", str(self.plan.n_trainers), "--trainer", str(trainer)]
        files = ["--config", str(self.cluster.config_path), "--file", str(self._files[trainer])]
        times = ["--pause-s", str(self._pause_s), "--grace-s", str(self._grace_s)]
        command = [sys.executable, "-m", "chaos.trainer", *plan, *files, *times, "--depth", str(self._depth)]
        command += ["--closing"] if self._closing else []
        process = LocalProcess(f"trainer {trainer}", command, self.cluster.folder / f"trainer-{trainer}.log", chaos_env())
        self.trainers[trainer : trainer + 1] = [process]
        return process

    def records(self) -> list[Record]:
        """What the trainers have noted so far."""
        return [Record.read(path) for path in self._files]

    def n_acked(self) -> list[int]:
        """Acknowledged pushes of each trainer so far."""
        return [len(record.numbers(ACKED)) for record in self.records()]

    def wait_for_acks(self, more: int, deadline: Deadline, trainers: Sequence[int] | None = None) -> None:
        """Wait until each of the trainers has so many more acknowledged pushes.

        Raises:
            TimeoutError: not within the deadline; with what the trainers and shards said last.
        """
        chosen = range(self.plan.n_trainers) if trainers is None else trainers
        wanted = [n + more for n in self.n_acked()]
        while not all(self.n_acked()[trainer] >= wanted[trainer] for trainer in chosen):
            if deadline.expired:
                raise TimeoutError(f"acknowledged {self.n_acked()}, waited for {wanted}:\n{self.last_words()}")
            time.sleep(0.05)

    def look_at_steps(self, deadline: Deadline) -> None:
        """Look whether the steps of a sync job are still applied whole; see `StepsTogether`.

        Raises:
            StepsApartError: they are not.
            KvembError: they cannot be read within the deadline.
        """
        with kvemb.connect(self.cluster.url, read_only=True, timeout_s=deadline.remaining_s()) as cluster:
            rows = cluster.table(STEPS).pull(STEP_IDS, timeout_s=deadline.remaining_s())
        self._steps.look(rows, sum(len(record.times(STARTED)) for record in self.records()))

    def stop(self, timeout_s: float = 90.0) -> None:
        """Stop the trainers, each once its pushes are acknowledged or its grace is over."""
        for process in self.trainers:
            process.signal(signal.SIGTERM)
        for process in self.trainers:
            process.stop(timeout_s)

    def finish(self, timeout_s: float = 90.0) -> Verdict:
        """Stop the trainers, wait until all that was accepted is applied, read every row, and judge."""
        self.stop(timeout_s)
        self._await_applied(Deadline.after(timeout_s))
        with kvemb.connect(self.cluster.url, read_only=True, timeout_s=timeout_s) as cluster:
            pull, pull_drift = (_reader(cluster.table(name), timeout_s) for name in (TABLE, DRIFT))
            return Verifier(self.plan, self.records(), self.cluster.slot_shards, pull, pull_drift).run()

    def last_words(self) -> str:
        """The ends of all logs."""
        processes = [*self.trainers, *self.cluster.shards]
        return "\n".join(f"{process.name} (exit code {process.poll()}):\n{process.log_tail()}" for process in processes)

    def _await_applied(self, deadline: Deadline) -> None:
        """Have every shard apply something behind all that it has accepted, from whomever: a push of every trainer, in its own place."""
        while True:
            try:
                with ExitStack() as stack:
                    connections = [stack.enter_context(self._connect(trainer)) for trainer in range(self.plan.n_trainers)]
                    for ack in push_together(connections, {STEPS: (np.arange(512), np.zeros((512, MAX_TRAINERS)))}, deadline):
                        ack.wait_applied(timeout_s=max(0.1, deadline.remaining_s()))
                    return
            except KvembError:
                if deadline.expired:
                    raise
                time.sleep(0.2)

    def _connect(self, trainer: int) -> kvemb.Cluster:
        return kvemb.connect(self.cluster.url, trainer=trainer_name(trainer), timeout_s=20)


def push_together(
    connections: Sequence[kvemb.Cluster], rows: Mapping[str, tuple[NDArray[Any], NDArray[Any]]], deadline: Deadline
) -> list[Ack]:
    """Push the same rows as several trainers, each in a thread of its own.

    In a sync job one waits for the others where a shard has not had steps that another has: each has to take part in them first.
    """
    with ThreadPoolExecutor(len(connections)) as pool:
        return list(pool.map(lambda connection: connection.push(rows, timeout_s=max(0.1, deadline.remaining_s())), connections))


def _reader(table: kvemb.Table, timeout_s: float) -> Callable[[Ids], NDArray[np.float32]]:
    return lambda ids: table.pull(ids, timeout_s=timeout_s)


def chaos_env() -> dict[str, str]:
    """Return what a process needs to find this package, too."""
    env = python_env()
    return {**env, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), env["PYTHONPATH"]])}
