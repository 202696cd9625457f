"""Threads that pull: a pool of a few named threads that can be resized, and that never outlives its owner.

Why not `concurrent.futures.ThreadPoolExecutor`: its number of threads is fixed, and "auto" changes it while training runs.

The threads know the queue of tasks and nothing else. So a pool without references is collected, and its threads end. At the interpreter's
exit they are ended before it is taken down. Thread-safe; a fork's child has no threads and must not use it.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

from kvemb.errors import ClosedError
from kvemb.net.deadline import Deadline

NAME = "kvemb-lookahead"
_AT_EXIT_S = 10.0


class Executor(Protocol):
    """The methods of a pool that are needed; `concurrent.futures.ThreadPoolExecutor` has them."""

    def submit(self, task: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        """Run `task(*args)` in some thread."""


Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class PullThreads:
    """Threads that run tasks in the order in which they were submitted."""

    def __init__(self, n: int) -> None:
        self._n, self._closed = n, False
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._n_staying = 0  # of them, those that no end is queued for
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, self._tasks, self._threads)

    def submit(self, task: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        """Run `task(*args)` in one of the threads."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the threads that pull ahead were closed")
            self._tasks.put((future, task, args))
            while self._n_staying < self._n:
                self._start_one()
        return future

    def resize(self, n: int) -> None:
        """Have n threads from now on; surplus ones end after the tasks that are queued."""
        if n == self._n:
            return
        with self._lock:
            self._n = n
            self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
            while self._n_staying > n:
                self._tasks.put(None)
                self._n_staying -= 1

    def close(self, deadline: Deadline) -> None:
        """End the threads once they have done their present and queued tasks; first cancel tasks that shall not run. Idempotent."""
        with self._lock:
            self._closed = True
        self._end.detach()
        _end(self._tasks, self._threads, deadline)

    def _start_one(self) -> None:
        name = f"{NAME}-{len(self._threads)}"
        thread = threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True)  # daemon: ended at exit by `_end`
        self._threads.append(thread)
        self._n_staying += 1
        thread.start()


def _serve(tasks: "SimpleQueue[Task | None]") -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        _run(*task)
        del task  # an idle thread keeps no batch alive


def _run(future: "Future[Any]", task: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = task(*args)
    except BaseException as error:
        future.set_exception(error)
        del future  # the error's traceback holds this frame
    else:
        future.set_result(result)


def _end(tasks: "SimpleQueue[Task | None]", threads: list[threading.Thread], deadline: Deadline | None = None) -> None:
    for _ in threads:
        tasks.put(None)
    me = threading.current_thread()  # the last reference to a pool may be dropped by a task of its own
    deadline = deadline or Deadline.after(_AT_EXIT_S)
    for thread in threads:
        if thread is not me:
            thread.join(deadline.remaining_s())
    threads.clear()
