"""The demo's trainer processes as seen from the job: started, told to go, listened to, ended."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

from kvemb.errors import KvembError
from kvemb.local_cluster.processes import launch, python_env

_END_GRACE_S = 5.0


class TrainerError(KvembError):
    """A trainer process ended before its work was done; the message holds its last words."""


class Trainers:
    """T trainer processes; a context manager.

    Args:
        config: kvemb.yaml or its URL.
        n_trainers: how many.
        seed: of the run.
    """

    def __init__(self, config: str, n_trainers: int, seed: int) -> None:
        self._events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue(maxsize=10_000)
        self._errors = [""] * n_trainers
        self._children: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._command = [sys.executable, "-m", "kvemb.demo.trainer_process", "--config", config, "--seed", str(seed)]
        self._n = n_trainers

    def __enter__(self) -> "Trainers":
        for index in range(self._n):
            command = [*self._command, "--trainer", str(index), "--trainers", str(self._n)]
            pipe = subprocess.PIPE
            self._children.append(launch(command, stdin=pipe, stdout=pipe, stderr=pipe, extra_env=python_env()))
            for stream, target in ((self._children[index].stdout, self._listen), (self._children[index].stderr, self._listen_errors)):
                thread = threading.Thread(target=target, args=(index, stream), name=f"kvemb-demo-trainer-{index}", daemon=True)
                thread.start()
                self._readers.append(thread)
        return self

    def __exit__(self, *exception: object) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        for child in self._children:
            try:
                child.wait(_END_GRACE_S if exception[0] is None else 0.1)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for thread in self._readers:
            thread.join()
        for child in self._children:
            for stream in (child.stdout, child.stderr):
                assert stream is not None
                stream.close()

    def start_pass(self) -> None:
        """Let every trainer begin its next pass."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()

    def events(self, until: str, poll_s: float) -> Iterator[tuple[int, dict[str, Any]] | None]:
        """Yield (trainer, message) as they come, None when nothing came for a while, until every trainer has sent `until`.

        Raises:
            TrainerError: a trainer has ended.
        """
        missing = set(range(self._n))
        while missing:
            try:
                index, message = self._events.get(timeout=poll_s)
            except queue.Empty:
                yield None
                continue
            if "ended" in message:
                self._children[index].wait()
                self._readers[2 * index + 1].join(1.0)
                raise TrainerError(f"trainer {index} ended before its work was done; its last words:\n{self._errors[index] or '(none)'}")
            if until in message:
                missing.discard(index)
            yield index, message

    def _listen(self, index: int, stream: IO[bytes]) -> None:
        for line in stream:
            self._events.put((index, json.loads(line)))
        self._events.put((index, {"ended": True}))

    def _listen_errors(self, index: int, stream: IO[bytes]) -> None:
        for line in stream:
            self._errors[index] = (self._errors[index] + line.decode("utf-8", "replace"))[-4000:]
