"""`prefetch`: any iterable of batches, each with the data that was fetched for it before it came."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from kvemb.errors import InvalidInputError
from kvemb.net.deadline import checked_timeout

from .loader_runs import LoaderRuns
from .pipeline import Pipeline, Waited
from .pool_sizes import AUTO, Sizes
from .pull_threads import Executor

B = TypeVar("B")
N = TypeVar("N")
R = TypeVar("R")
_LONG = 256  # elements of a list


class Prefetch(LoaderRuns[tuple[B, R]], Generic[B, R]):
    """Batches with the data fetched for them; see `prefetch`. Each `iter` is a new run over the loader; close() ends the present one."""

    def __init__(
        self,
        batches: Iterable[B],
        work: Callable[[B], tuple[R, int]],
        sizes: Sizes,
        executor: Executor | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(batches, sizes)
        self._work, self._executor, self._timeout_s = work, executor, checked_timeout(timeout_s)
        self.waited = Waited()

    def _batches(self, batches: Iterator[B]) -> Generator[tuple[B, R], None, None]:
        run = Pipeline(batches, self._work, self._sizes, waited=self.waited, executor=self._executor, timeout_s=self._timeout_s)
        del batches  # the run's: a loader's processes end with it
        try:
            while True:
                try:
                    batch = run.next()
                except StopIteration:
                    return
                yield batch
                del batch
        finally:
            run.close()

    @property
    def report(self) -> str:
        """The sizes chosen and the times measured, in one line."""
        waited = self.waited
        per_batch_ms = 1e3 * waited.working_s / max(1, waited.n_batches)
        return f"{self._sizes}; {waited.n_batches} batches, waited {per_batch_ms:.3g} ms for each"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.report}>"


def prefetch(
    batches: Iterable[B],
    need: Callable[[B], N],
    pull: Callable[[N], R],
    *,
    threads_num: int | str = AUTO,
    capacity: int | str = AUTO,
    executor: Executor | None = None,
    timeout_s: float = 600.0,
) -> Prefetch[B, R]:
    """Fetch the data of batches before they are used, in other threads, while earlier batches are used.

    Rows are as old as `capacity` batches: the pushes of the batches in between are not in them.

    Args:
        batches: any iterable, a DataLoader for one. Read in the thread that iterates the result; each `iter` reads it again.
        need: returns the needs of a batch, e.g. `lambda batch: {"user": batch["user_id"]}`; called in a thread that pulls.
        pull: fetches them, e.g. `cluster.pull_versions`; called there, too. Its own timeout bounds the wait for it.
        threads_num: pulls at a time, 1 to 8; "auto" measures and chooses, `Prefetch.report` says what.
        capacity: batches that may lie ready or be pulled beyond the one in use, 1 to 1024; "auto" chooses, within 256 MB of batches and
            rows.
        executor: runs the pulls instead of threads of our own, e.g. a ThreadPoolExecutor, with its own number of threads.
        timeout_s: of the wait for one batch in `next`; see `pull`.

    Returns:
        An iterable of (batch, result of `pull`), in order; a context manager, with the length of `batches` if that has one.

    Raises:
        InvalidInputError: a number out of range, or `threads_num` with `executor`. While iterating: any error of `batches`, `need` and
            `pull`, at the batch concerned; the iteration is over then.

    Example:
        >>> import numpy as np
        >>> weights = np.arange(12.0).reshape(6, 2)
        >>> batches = [np.array([0, 5]), np.array([1])]
        >>> for ids, rows in prefetch(batches, need=lambda ids: ids, pull=weights.__getitem__, threads_num=1, capacity=1):
        ...     print(ids.tolist(), rows.tolist())
        [0, 5] [[0.0, 1.0], [10.0, 11.0]]
        [1] [[2.0, 3.0]]
    """
    check_executor(executor, threads_num)

    def work(batch: B) -> tuple[R, int]:
        found = pull(need(batch))
        return found, size_of(batch) + size_of(found)

    return Prefetch(batches, work, Sizes(threads_num, capacity, own_threads=executor is None), executor, timeout_s)


def check_executor(executor: object, threads_num: object) -> None:
    """Refuse an object that is no executor, or a number of threads beside one."""
    if executor is None:
        return
    if not hasattr(executor, "submit"):
        raise InvalidInputError(f"executor is {type(executor).__name__}; give one with submit(), e.g. a ThreadPoolExecutor")
    if threads_num != AUTO:
        raise InvalidInputError(f"threads_num={threads_num!r} has no effect with an executor, which has threads of its own; leave it out")


def size_of(value: Any) -> int:
    """Return the bytes of the arrays and tensors in a batch, by some elements of a long list."""
    return _size_of(value, 4)


def _size_of(value: Any, depth: int) -> int:
    size = None
    with suppress(Exception):  # a sparse tensor has none, and says so by raising
        size = value.nbytes
    if isinstance(size, int):
        return size
    if depth == 0 or isinstance(value, str | bytes):
        return 0
    if isinstance(value, Mapping):
        return sum(_size_of(one, depth - 1) for one in value.values())
    if isinstance(value, list | tuple) and len(value) > _LONG:
        some = value[:: len(value) // _LONG + 1]
        return len(value) * _size_of(some, depth) // len(some)
    if isinstance(value, list | tuple):
        return sum(_size_of(one, depth - 1) for one in value)
    return sum(_size_of(one, depth - 1) for one in vars(value).values()) if hasattr(value, "__dict__") else 0
