"""Makes gRPC calls where no interrupt reaches.

Ctrl-C, and every other signal, interrupts the main thread wherever it is. While a call begins or is cancelled, that leaves the lock of
gRPC's channel held for ever. Every later call on it waits past its deadline, because the thread that would end it needs the lock, too. So
a thread of its own makes a call for the main thread, which waits for it, and may leave that wait at any time.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def make(begin: Callable[[], Any], timeout_s: float) -> Any:
    """Begin a call, and return a future of its result: gRPC's own, or in the main thread one that stands for it.

    Args:
        begin: begins it, and returns gRPC's future.
        timeout_s: of the whole call, a little more than gRPC's own.

    Raises:
        Exception: of beginning it, where that is done here; the future raises it otherwise.
    """
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
