"""One trainer process of `scale`: pulls when told to. A process of its own, as trainers are.

It says "ready", then answers each line `seconds` on its input with one line: rows, wall seconds, CPU seconds. It ends with its input.
"""

import subprocess
import sys
from types import SimpleNamespace
from typing import IO

import kvemb
from benchmarks.measure import Turn, repeated
from benchmarks.pull import make_batches, verify
from benchmarks.servers import written_weights
from kvemb.errors import KvembError
from kvemb.local_cluster.processes import launch, python_env

_N_BATCHES = 4
_TIMEOUT_S = 60.0


class Trainer:
    """Such a process, seen from the benchmark. A context manager.

    Args:
        url: of a cluster that `benchmarks.servers.filled` has filled.
        n_rows: in its table.
    """

    def __init__(self, url: str, n_rows: int) -> None:
        command = [sys.executable, "-m", "benchmarks.scale_trainer", url, str(n_rows)]
        self._process = launch(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr.fileno(), extra_env=python_env())

    def wait_ready(self) -> None:
        """Return once it can pull.

        Raises:
            KvembError: it ended.
        """
        self._line()

    def start(self, seconds: float) -> None:
        """Let it pull for about so long."""
        stdin = _pipe(self._process.stdin)
        stdin.write(b"%f\n" % seconds)
        stdin.flush()

    def finish(self) -> Turn:
        """Wait for what came of it.

        Raises:
            KvembError: it ended, having read a wrong row, for example; its own words are on stderr.
        """
        n_rows, wall_s, cpu_s = self._line().split()
        return Turn(int(n_rows), float(wall_s), float(cpu_s))

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait(_TIMEOUT_S)
        _pipe(self._process.stdout).close()

    def _line(self) -> str:
        line = _pipe(self._process.stdout).readline().decode()
        if not line:
            raise KvembError(f"a trainer process ended by itself, with exit code {self._process.wait(_TIMEOUT_S)}")
        return line


def main(url: str, n_rows: int) -> None:
    """Serve until the input ends."""
    with kvemb.connect(url, read_only=True) as opened:
        table = opened.table("bench")
        target = SimpleNamespace(table=table, weights=written_weights(table.dim, n_rows), n_rows=n_rows)
        batches = make_batches(target, "uniform", 0.0, n=_N_BATCHES)  # type: ignore[arg-type]  # what it needs of a Filled
        turn = repeated(
            lambda index: table.pull(batches[index].ids, timeout_s=_TIMEOUT_S),
            lambda index, rows: verify(batches[index], rows),
            len(batches),
        )
        print("ready", flush=True)
        for line in sys.stdin:
            done = turn(float(line))
            print(done.n_rows, done.wall_s, done.client_cpu_s, flush=True)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
