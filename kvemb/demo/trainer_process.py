"""One trainer of the demo, a process of its own, and how the job deals with several.

Its arguments are kvemb.yaml, its index, the number of trainers, the seed, and the port of its metrics (0: none). The job writes a line
before each pass, so that the held-out loss of a pass is measured when every trainer has finished it. A trainer writes marked lines of JSON:
null when it waits for a pass, its progress otherwise. Any other output is its last words. It ends when its standard input ends.
"""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator

from kvemb.api import connect
from kvemb.demo.corpus import load
from kvemb.demo.skipgram import PassText, TrainingProgress, train_pass
from kvemb.demo.word_rows import ClusterRows
from kvemb.errors import KvembError
from kvemb.local_cluster.processes import launch, python_env

_MARK = "\x1e"
_SILENCE_S = 600.0  # longer than any step, with all the waits for a node that comes back
_END_GRACE_S = 5.0


class TrainerError(KvembError):
    """A trainer process ended before its work was done, with its last words; or nothing was heard of any for long."""


class Trainers:
    """The demo's trainer processes, started together and ended together; a context manager."""

    def __init__(self, config: str, n_trainers: int, seed: int, metrics_port: int = 0) -> None:
        self._heard: queue.Queue[tuple[int, TrainingProgress | TrainerError | None]] = queue.Queue(maxsize=10_000)
        self._children: list[tuple[subprocess.Popen[bytes], threading.Thread]] = []
        self._config, self._n, self._seed, self._port = config, n_trainers, seed, metrics_port

    def __enter__(self) -> "Trainers":
        for index in range(self._n):
            words = (self._config, str(index), str(self._n), str(self._seed), str(self._port + index if self._port else 0))
            command = [sys.executable, "-m", "kvemb.demo.trainer_process", *words]
            child = launch(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, extra_env=python_env())
            thread = threading.Thread(target=self._listen, args=(index, child), name=f"kvemb-demo-trainer-{index}", daemon=True)
            self._children.append((child, thread))
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for child, _ in self._children:
            assert child.stdin is not None
            child.stdin.close()
        for child, thread in self._children:
            try:
                child.wait(_END_GRACE_S if exception[0] is None else 0.1)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            thread.join()

    def start_pass(self) -> None:
        """Let every trainer begin its next pass."""
        for child, _ in self._children:
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()

    def until_idle(self) -> Iterator[tuple[int, TrainingProgress]]:
        """Yield (trainer, progress) as it comes, until every trainer waits for a pass."""
        busy = set(range(self._n))
        while busy:
            try:
                index, said = self._heard.get(timeout=_SILENCE_S)
            except queue.Empty as error:
                raise TrainerError(f"no word of trainers {sorted(busy)} for {_SILENCE_S:.0f} s; see `kvemb status`") from error
            if isinstance(said, TrainerError):
                raise said
            if said is None:
                busy.discard(index)
            else:
                yield index, said

    def _listen(self, index: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        words = ""
        with child.stdout as lines:
            for line in lines:
                text = line.decode("utf-8", "replace")
                if text.startswith(_MARK):
                    said = json.loads(text[1:])
                    self._heard.put((index, None if said is None else TrainingProgress(*said)))
                else:
                    words = (words + text)[-4000:]
        error = TrainerError(f"trainer {index} ended before its work was done; its last words:\n{words or '(none)'}")
        self._heard.put((index, error))


def main() -> int:
    """Run one trainer; see the module."""
    config, trainer, n_trainers, seed, port = sys.argv[1], *map(int, sys.argv[2:6])
    try:
        _train(config, trainer, n_trainers, seed, port)
    except KvembError as error:
        print(f"trainer {trainer}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _train(config: str, trainer: int, n_trainers: int, seed: int, port: int) -> None:
    with connect(config, metrics_port=port or None) as cluster:
        corpus, rows = load(), ClusterRows(cluster, seed)
        _say(None)
        for pass_index, _ in enumerate(sys.stdin):
            text = PassText(corpus, seed=seed, pass_index=pass_index)
            for progress in train_pass(rows, text, trainer=trainer, n_trainers=n_trainers):
                _say(progress)
            rows.flush()
            _say(None)


def _say(what: TrainingProgress | None) -> None:
    print(_MARK + json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
