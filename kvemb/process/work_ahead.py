"""Results in order, the next ones being made meanwhile by a few threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def work_ahead(work: Callable[[T], R], items: Iterable[T], *, n_threads: int, name: str) -> Generator[R, None, None]:
    """Yield `work(item)` of each item in order; at most one result a thread is there before it is asked for."""
    running: deque[Future[R]] = deque()
    with ThreadPoolExecutor(n_threads, thread_name_prefix=name) as pool:
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) > n_threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:  # the caller wants no more
            for one in running:
                one.cancel()
