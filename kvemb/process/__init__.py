"""Files written whole, locks that survive a fork, JSON log lines, a line of progress: the same for every program of kvemb.

Knows nothing of the content of files and lines. A file is written beside its place, made durable, then renamed. In a forked child a lock is
open, for the thread that held it does not exist there; the data that it guards may be in the middle of a change. Shards and trainers have
one format of log lines, so one reader is enough. A line of progress is overwritten on a terminal; a log file gets nothing, or a plain line
now and then.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO
from weakref import WeakSet


def replace_atomically(
    path: Path,
    chunks: Iterable[bytes | memoryview],
    *,
    temporary: str,
    check: Callable[[], None] = lambda: None,
    opener: Callable[[str, int], int] | None = None,
) -> None:
    """Put a new file in the place of an old one, if there is one. The folder is still to be synced."""
    beside = path.with_name(temporary)
    try:
        beside.unlink(missing_ok=True)  # and never opened: it may be a link, put there by another user, to a file of ours
        with open(beside, "xb", opener=opener) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        check()
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Return when the names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_locks: "WeakSet[ForkLock]" = WeakSet()


class ForkLock:
    """As threading.RLock in a `with`, for state that pulls and a forked child's other calls use. Thread- and fork-safe."""

    def __init__(self) -> None:
        self._held = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._held.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(RuntimeError):  # renewed meanwhile, by a fork within the `with`
            self._held.release()

    def renew(self) -> None:
        """Open the lock, also if another thread holds it."""
        self._held = threading.RLock()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)


_NAMES = {"levelname": "level", "threadName": "thread"}


def json_log_formatter(cluster: str = "", trainer: str = "") -> logging.Formatter:
    """Return a formatter for `logging` that makes each line an object with time (UTC), level, thread, message, and exc_info of an error.

    Trainers log to "kvemb" and below by the standard `logging`; without a handler of the program's own only warnings are seen.

    Args:
        cluster: its name, in every line; "" leaves it out.
        trainer: this process's name in the job, likewise.

    Example:
        >>> import json, logging
        >>> formatter = json_log_formatter(cluster="ads", trainer="rank-0")
        >>> record = logging.LogRecord("kvemb", logging.WARNING, "", 0, "node %s is back", ("n:1",), None)
        >>> line = json.loads(formatter.format(record))
        >>> line["level"], line["cluster"], line["trainer"], line["message"]
        ('WARNING', 'ads', 'rank-0', 'node n:1 is back')

    In a program: `handler = logging.StreamHandler(); handler.setFormatter(kvemb.json_log_formatter(trainer="rank-0"));
    logging.basicConfig(level="INFO", handlers=[handler])`.
    """
    own = {name: value for name, value in (("cluster", cluster), ("trainer", trainer)) if value}
    return formatter_of((), own)


def formatter_of(attributes: tuple[str, ...], own: dict[str, str]) -> logging.Formatter:
    """Return a formatter that shows further attributes of each record, and values of its own in every line."""
    from pythonjsonlogger.json import JsonFormatter

    fields = ("levelname", *attributes, "message", "threadName")
    return JsonFormatter(fields, timestamp="time", rename_fields=_NAMES, static_fields=own)


_EVERY_S = 0.5


class ProgressLine:
    """One line that says how far a piece of work has come. For one thread."""

    def __init__(self, stream: TextIO, *, plain_every_s: float = math.inf, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock_s = stream, clock_s
        self._terminal = stream.isatty()
        self._every_s = _EVERY_S if self._terminal else plain_every_s
        self._next_s = -math.inf
        self._shown = 0  # characters on the terminal's line

    @property
    def due(self) -> bool:
        """Whether it is time to show something new."""
        return math.isfinite(self._every_s) and self._clock_s() >= self._next_s

    def show(self, text: str) -> None:
        """Overwrite the line; where the stream is no terminal, write a new one."""
        if self._terminal:
            text = text[: self._columns() - 1]
            self._write("\r" + text.ljust(self._shown))
            self._shown = len(text)
        elif math.isfinite(self._every_s):
            self._write(f"{text}\n")
        self._next_s = self._clock_s() + self._every_s

    def say(self, text: str = "") -> None:
        """Replace the line by one that stays."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Erase the line."""
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")
        self._shown = 0

    def end(self) -> None:
        """Keep the line as it is, and go on below it."""
        if self._shown:
            self._write("\n")
        self._shown, self._next_s = 0, -math.inf

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _columns(self) -> int:
        try:
            return max(20, os.get_terminal_size(self._stream.fileno()).columns or 80)
        except (OSError, ValueError, AttributeError):  # the terminal does not know its size, or the stream has no file
            return 80
