"""Keeps gRPC calls and pushes whole when Ctrl-C or the program's end interrupts them. No gRPC is imported here.

Delivery at the end: if a program ends without closing its cluster, its pushes are delivered, or it is told how many were not. From its
first push until it is closed, a client is kept here, also when no other reference to it remains. The interpreter's end has two moments.
Before the program's threads are waited for, threads can still be started: broken connections have time to come back. After all else,
atexit's functions included, no thread pushes any more: the remaining pushes are delivered, or counted in a message. A process of
`multiprocessing` may never get that far, so it does the same when its function has returned. `os._exit`, and signals that end a process,
give no such moment.

Calls off the main thread: a signal interrupts the main thread wherever it is. While a call begins or is cancelled, that leaves the lock of
gRPC's channel held for ever. Every later call on it waits past its deadline, because the thread that would end it needs the lock, too. So a
thread of its own makes a call for the main thread, which waits for it, and may leave that wait at any time. So it is with closing: the
interpreter's end collects a channel that is closed by half, and waits for ever for gRPC's thread, which runs no more.

`StopFlag`: a signal handler may not set a `threading.Event`. It runs in the main thread, perhaps inside the event's own `wait`. There it
would wait for ever for the lock that the interrupted wait holds. Here nothing is locked, and `wait` looks at the flag again and again.
"""

import atexit
import multiprocessing.process
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from kvemb.errors import KvembError, n_of
from kvemb.net.deadline import Deadline

DELIVERY_TIMEOUT_S = 10.0
"""How long the end of a program may take because of pushes that are on their way."""
UNDELIVERED = 4
"""Exit code of a program that ended with pushes that were not delivered; a shard that is not drained ends with it, too."""


class Deliverable(Protocol):
    """A push that is on its way."""

    @property
    def accepted(self) -> bool:
        """Whether every shard has accepted its part."""
        ...

    def wait_answered(self, timeout_s: float) -> None:
        """Wait until every shard has accepted or refused its part, or the time is over."""
        ...


class ClosingClient(Protocol):
    """The part of a client of the shards that is needed here."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where its shards are."""
        ...

    @property
    def trainer(self) -> str:
        """The name under which it pushes."""
        ...

    @property
    def forked(self) -> bool:
        """Whether it belongs to the process that this one is a fork of."""
        ...

    def undelivered(self) -> Sequence[Deliverable]:
        """Pushes that not every shard has accepted."""
        ...

    def close(self, *, timeout_s: float | None = None) -> None:
        """Deliver, and leave."""
        ...


_LAST = -100  # after multiprocessing's own, which send the items in its queues
_clients: dict[int, ClosingClient] = {}
_stuck = False
_prepared_in = 0  # the process whose end is watched


def remember(client: ClosingClient) -> None:
    """Deliver what this client pushes at the latest when the program ends."""
    _clients[id(client)] = client


def prepare() -> None:
    """Watch for the end of this process: once it has begun it is too late."""
    global _prepared_in
    if _prepared_in == os.getpid():
        return
    inherited, _prepared_in = bool(_prepared_in), os.getpid()
    if multiprocessing.process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _end_of_child, exitpriority=_LAST)
    if inherited:  # by a fork
        return
    try:
        threading._register_atexit(_before_threads_end)  # type: ignore[attr-defined]  # there is nothing public; concurrent.futures uses it, too
    except (RuntimeError, AttributeError):  # the interpreter is ending already
        atexit.register(_leave)


def forget(client: ClosingClient) -> None:
    """It was closed."""
    _clients.pop(id(client), None)


def end_at_once() -> None:
    """Skip gRPC's end: it would wait for ever for a thread that it could not start any more."""
    global _stuck
    _stuck = True


def deliver_to(addresses: Sequence[str]) -> str:
    """Wait until the shards at these addresses, which are about to end, have this process's pushes; return a message to show, or ""."""
    deadline = Deadline.after(DELIVERY_TIMEOUT_S)
    clients = [client for client in _own() if set(client.addresses) & set(addresses)]
    for client in clients:
        _wait(client, deadline)
    return " ".join(filter(None, (_told(client.trainer, client.undelivered(), None) for client in clients)))


def _own() -> list[ClosingClient]:
    return [client for client in list(_clients.values()) if not client.forked]


def _before_threads_end() -> None:
    """Give pushes on their way some time while threads can be started, and come back when all else is over."""
    _wait_all()
    atexit.register(_after_all_else)  # the last to be registered is the first to be called


def _after_all_else() -> None:
    atexit.unregister(_after_all_else)
    atexit._run_exitfuncs()  # they may push, flush and close
    if not _leave() or _stuck:
        _exit(UNDELIVERED)


def _end_of_child() -> None:
    me = threading.current_thread()
    if any(not thread.daemon and thread not in (me, threading.main_thread()) for thread in threading.enumerate()):
        _wait_all()  # some Pythons wait for the others after this: they may push yet
    elif not _leave():
        _exit(UNDELIVERED)


def _leave() -> bool:
    """Close every client and report the pushes that were not delivered; return whether all were."""
    told = []
    deadline = Deadline.after(DELIVERY_TIMEOUT_S)
    for client in _own():
        pushes = client.undelivered()
        failure: BaseException | None = None
        try:
            client.close(timeout_s=deadline.remaining_s())
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        lost = [push for push in dict.fromkeys([*pushes, *client.undelivered()]) if not push.accepted]
        told.append(_told(client.trainer, lost, failure))
    for line in filter(None, told):
        with suppress(Exception):  # there may be no standard error any more
            print(line, file=sys.stderr, flush=True)
    return not any(told)


def _told(trainer: str, lost: Sequence[Deliverable], failure: BaseException | None) -> str:
    if not lost and not isinstance(failure, KvembError):
        return ""
    why = "" if failure is None else f" {type(failure).__name__}: {failure}"
    pushes = n_of(len(lost), "push", "pushes")
    return (
        f"kvemb: the program ended and {pushes} of trainer {trainer!r} had not been acknowledged by every shard; those that have their "
        f"part apply it once.{why} Close the cluster, or use `with kvemb.connect(...)`, to have such an error where it can be handled."
    )


def _wait_all() -> None:
    deadline = Deadline.after(DELIVERY_TIMEOUT_S)
    with suppress(KeyboardInterrupt):  # pushes that are lost by that are reported later
        for client in _own():
            _wait(client, deadline)


def _wait(client: ClosingClient, deadline: Deadline) -> None:
    for push in client.undelivered():
        push.wait_answered(deadline.remaining_s())


def _exit(code: int) -> NoReturn:
    """End the process with this code: Python has chosen another one by now."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def begin_off_main_thread(begin: Callable[[], Any], timeout_s: float) -> Any:
    """Begin a call, and return a future of its result: gRPC's own, or in the main thread one that stands for it."""
    if threading.current_thread() is not threading.main_thread():
        return begin()
    made: Future[Any] = Future()
    try:
        threading.Thread(target=_make, args=(made, begin, timeout_s), name="kvemb-call", daemon=True).start()
    except RuntimeError:  # the interpreter is ending, and starts no threads any more
        return begin()
    return made


def _make(made: "Future[Any]", begin: Callable[[], Any], timeout_s: float) -> None:
    try:
        result = begin().result(timeout_s)
    except BaseException as error:
        made.set_exception(error)
    else:
        made.set_result(result)


def finish_off_main_thread(act: Callable[[], None]) -> None:
    """Do something that Ctrl-C must not cut short: in a thread that the program's end waits for. Only the wait for it can be left."""
    if threading.current_thread() is not threading.main_thread():
        act()
        return
    done = StopFlag()

    def finish() -> None:
        try:
            act()
        finally:
            done.set()

    try:
        threading.Thread(target=finish, name="kvemb-close").start()
    except RuntimeError:  # the interpreter is ending, and starts no threads any more
        act()
        return
    done.wait(DELIVERY_TIMEOUT_S, look_s=_LOOK_AT_CLOSE_S)  # not `join`: when it is interrupted it counts the thread as ended


_LOOK_S, _LOOK_AT_CLOSE_S = 0.05, 0.002


class StopFlag:
    """Set once, by a handler or by any thread."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Set it."""
        self._set = True

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._set

    def wait(self, timeout_s: float, look_s: float = _LOOK_S) -> bool:
        """Wait at most so long until it is set, looking every `look_s`; return whether it is."""
        end = time.monotonic() + timeout_s
        while not self._set and (left_s := end - time.monotonic()) > 0:
            time.sleep(min(left_s, look_s))
        return self._set
