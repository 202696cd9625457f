"""One run over the batches of a loader: threads fetch the data of a batch while the batches before it are used.

The work of each thread:

* The caller's thread reads the loader, a batch for each batch that it asks for (two while the pipeline fills). A reader thread of ours
  would save time only where the loader computes in Python, and that is where it hurts. It takes the interpreter's lock from the thread that
  trains, whose every operation then waits for it (docs/adr/0015). A loader that has to work should have worker processes. Also, a loader's
  processes are forked while no thread of ours is in the middle of something. Its signals and exceptions come up where they always did. A
  loader and a model that draw from one global generator draw in another order than without reading ahead, and in one that depends on the
  capacity: docs/async-lookup.md says how to be repeatable.
* Threads, our own or the caller's executor, do the work of a batch each, several at a time.
* Batches are handed out in order. At most `capacity` of them, done or being done, lie ahead of the one in use.

Errors of the loader or of the work come up from `next` at the batch concerned, after those before it; then the run is over. `close` ends it
at any time. Use it from one thread. A fork's child has none of the threads: `next` says so there, and `close` waits for nothing.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvemb.errors import ClosedError, DeadlineExceededError
from kvemb.net.deadline import Deadline

from ..report.step_times import counted
from .pool_sizes import Sizes
from .pull_threads import Executor, PullThreads

B = TypeVar("B")
R = TypeVar("R")
_BRIEF_S = 0.5
"""How long the end waits for work under way in a hurry (`hurry`, an interrupt, a timeout)."""
_CLOSE_S = 30.0
"""How long it waits else: a pull may wait for a node for much longer."""


@dataclass(eq=False)
class Entry(Generic[B, R]):
    """A batch on its way: `done` yields its result, the seconds that took, and its size in bytes."""

    batch: B
    read_s: float
    done: "Future[tuple[R, float, int]]"


@dataclass
class Waited:
    """Sums over all runs of the caller's thread in `next`: seconds of waiting for work, and batches."""

    working_s: float = 0.0
    n_batches: int = 0

    def read(self, seconds: float) -> None:
        """Add time of reading to the report in force."""
        if (times := counted()) is not None:
            times.loader_s += seconds

    def reading(self, batches: Iterator[B]) -> Iterator[B]:
        """Read without a pipeline, and add the time."""
        while True:
            began_s = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.read(time.perf_counter() - began_s)
            yield batch
            del batch

    def waited(self, seconds: float) -> None:
        """Add time of waiting for work, to the report in force, too."""
        self.working_s += seconds
        if (times := counted()) is not None:
            times.ahead_s += seconds


class Pipeline(Generic[B, R]):
    """One run over a loader: batches on their way, and their rows."""

    def __init__(
        self,
        batches: Iterator[B],
        work: Callable[[B], tuple[R, int]],
        sizes: Sizes,
        *,
        waited: Waited,
        executor: Executor | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._batches: Iterator[B] | None = batches
        self._work, self._sizes, self._waited, self._timeout_s = work, sizes, waited, timeout_s
        self._close_timeout_s = min(timeout_s, _CLOSE_S)  # of the end, for work under way
        self._pid = os.getpid()
        self._own = PullThreads(sizes.threads_num) if executor is None else None
        self._executor: Executor = executor or self._own  # type: ignore[assignment]
        self.ahead: deque[Entry[B, R]] = deque()
        """Batches not yet handed out, oldest first."""
        self._error: Exception | None = None  # of the loader; comes up after the batches that were read before
        self._handed_out: tuple[float, float, float, int] | None = None  # when; and read_s, pull_s, size_bytes of that batch

    def next(self) -> tuple[B, R]:
        """Return the next batch and its result."""
        try:
            self._check_process()
            self._note_step()
            if not self.ahead:
                self._read()
            if not self.ahead:
                raise self._end()
            result = self._wait(self.ahead[0])
            entry = self.ahead.popleft()
            self._fill()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | DeadlineExceededError):
                self.hurry()
            self.close()
            raise
        self._waited.n_batches += 1
        _, pull_s, size_bytes = entry.done.result()
        self._handed_out = time.perf_counter(), entry.read_s, pull_s, size_bytes
        return entry.batch, result

    def coming(self, n: int) -> list[R]:
        """Return the results of the next batches, n at most, up to one that fails; waits for them."""
        results: list[R] = []
        for entry in list(self.ahead)[:n]:
            try:
                results.append(self._wait(entry))
            except Exception:
                break
        return results

    def hurry(self) -> None:
        """Let the end wait only briefly for work under way: the program wants to stop."""
        self._close_timeout_s = _BRIEF_S

    def close(self) -> None:
        """End the run: no more work is begun; work under way is waited for, briefly after `hurry`, interrupts, timeouts. Idempotent."""
        batches, self._batches = self._batches, None
        entries, self.ahead = self.ahead, deque()
        if os.getpid() == self._pid:
            deadline = Deadline.after(self._close_timeout_s)
            for entry in entries:
                entry.done.cancel()
            if self._own is not None:
                self._own.close(deadline)
            for entry in entries:  # of a foreign executor: its threads must not be at it any more when this returns
                if not entry.done.cancelled():
                    _settle(entry.done, deadline)
        close = getattr(batches, "close", None)  # of a generator; a DataLoader's iterator ends with its last reference
        if close is not None:
            close()

    def _fill(self) -> None:
        for _ in range(2):
            if len(self.ahead) < self._sizes.capacity:
                self._read()

    def _read(self) -> None:
        if self._batches is None or self._error is not None:
            return
        began_s = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            return
        except Exception as error:
            self._error = error
            return
        read_s = time.perf_counter() - began_s
        self._waited.read(read_s)
        self.ahead.append(Entry(batch, read_s, self._executor.submit(_timed, self._work, batch)))

    def _wait(self, entry: Entry[B, R]) -> R:
        began_s = time.perf_counter()
        try:
            return entry.done.result(self._timeout_s)[0]
        except (KeyboardInterrupt, SystemExit):  # also where it is waited for outside of `next`, by `coming`
            self.hurry()
            raise
        except TimeoutError:
            if entry.done.done():
                raise  # the work's own
            raise self._late() from None
        finally:
            self._waited.waited(time.perf_counter() - began_s)

    def _end(self) -> Exception:
        error, self._error = self._error, None
        return error or StopIteration()

    def _late(self) -> DeadlineExceededError:
        if self._own is None:
            why = "its task still waits or works in the executor. Give an executor that has threads to spare, or none."
        else:
            why = "the pull neither ended nor failed by itself. Give it a timeout of its own, below this one."
        return DeadlineExceededError(f"the rows of a batch were not pulled within {self._timeout_s:g} s: {why}")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this iteration was begun by process {self._pid}, whose threads do not survive fork(). Iterate the loader again in this "
                "process, or start it with the 'spawn' or 'forkserver' method."
            )

    def _note_step(self) -> None:
        """Add the time for which the batch handed out last was used."""
        if self._handed_out is None:
            return
        since_s, read_s, pull_s, size_bytes = self._handed_out
        self._sizes.add(read_s=read_s, pull_s=pull_s, step_s=time.perf_counter() - since_s, size_bytes=size_bytes)
        self._handed_out = None
        if self._own is not None:
            self._own.resize(self._sizes.threads_num)


def _timed(work: Callable[[B], tuple[R, int]], batch: B) -> tuple[R, float, int]:
    began_s = time.perf_counter()
    result, size_bytes = work(batch)
    return result, time.perf_counter() - began_s, size_bytes


def _settle(done: "Future[Any]", deadline: Deadline) -> None:
    with suppress(TimeoutError):
        done.exception(deadline.remaining_s())
