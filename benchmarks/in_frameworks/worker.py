"""A framework's process: `python -m benchmarks.in_frameworks.worker MODULE`. JSON lines in, JSON lines out.

MODULE is one of this folder: `contenders(problem, where)` in it makes the contenders, by name; `VERSIONS` has the releases that it runs on.
"""

import importlib
import json
import os
import sys
import time

import numpy as np

from benchmarks.in_frameworks.problem import Problem

_REPLIES = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # frameworks print; only replies may go where replies are read


class Worker:
    """The contenders of one framework."""

    def __init__(self, module):
        self._module = module

    def open(self, problem, where):
        """Make the contenders; `where` is what the module needs to find rows. A framework that is not installed is said to be absent."""
        try:
            framework = importlib.import_module(f"benchmarks.in_frameworks.{self._module}")
        except ModuleNotFoundError as error:
            return {"absent": str(error.name)}
        self._contenders = framework.contenders(Problem.load(problem), where)
        return {"contenders": list(self._contenders), "versions": framework.VERSIONS}

    def turn(self, contender, indices, lead):
        """Train on these batches; the first `lead` steps are not timed, for a loop takes some until all that it does beside runs."""
        one, clocks, n_done = self._contenders[contender], [], 0

        def after_step():
            nonlocal n_done
            n_done += 1
            if n_done == lead:
                clocks.extend((time.perf_counter(), time.process_time()))

        losses = one.train(indices, after_step)
        one.settle()
        wall_s, cpu_s = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
        n = len(indices) - lead
        return {"step_s": wall_s / n, "cpu_s": cpu_s / n, "loss": float(np.mean([float(loss) for loss in losses]))}


def main():
    """Answer requests until standard input ends."""
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # reported to the parent, which decides
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=_REPLIES, flush=True)


if __name__ == "__main__":
    main()
