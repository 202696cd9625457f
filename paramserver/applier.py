"""The apply thread: takes work from the intake, has the engine apply it, and answers. The only thread that changes rows."""

import logging
import threading
from collections.abc import Callable

from kvemb.errors import KvembError, StorageError
from kvemb.messages import PushReply
from paramserver.aggregate import merge
from paramserver.batch import Batch, Part, RowsWork
from paramserver.engine import Engine
from paramserver.intake import Intake, Work
from paramserver.staleness import staleness
from paramserver.tables import Tables

log = logging.getLogger("paramserver")


class AbandonedError(Exception):
    """The shard was told to stop while a batch waited for storage; the batch is not applied."""


class Applier:
    """Owns the apply thread.

    Args:
        intake: where work comes from.
        engine: what applies it.
        tables: for staleness.
        sync: whether lists of pushes are steps of a sync job.
        failed: called once when the shard stops applying for good.
    """

    def __init__(self, intake: Intake, engine: Engine, tables: Tables, *, sync: bool, failed: Callable[[], None] = lambda: None) -> None:
        self._intake, self._engine, self._tables, self._sync = intake, engine, tables, sync
        self._failed = failed
        self._abandon = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvemb-apply", daemon=True)

    def start(self) -> None:
        """Start applying."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Give up the batch that waits for storage, if any, and end the thread; return whether it ended in time."""
        self._intake.stop()
        self._abandon.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                work = self._intake.take()
                if work is None:
                    return
                self._intake.settle(work, self._apply(work))
            except AbandonedError:
                return
            except Exception as error:
                log.error("failed because %s: %s", type(error).__name__, error, exc_info=not isinstance(error, KvembError))
                self._intake.fail(error)
                self._failed()

    def _apply(self, work: Work) -> dict[int, PushReply]:
        """Apply one batch; return the reply of each part, by id() of its ticket."""
        if isinstance(work, RowsWork):
            work.n_existed = self._engine.run(Batch(work.kind, (work.rows,)), self._pause).n_existed
            work.applied = True
            return {}
        parts = [part for push in work for part in push.parts]
        stale = [self._staleness(part) for part in parts]
        k = self._engine.run(merge(work, sync=self._sync), self._pause).k
        return {
            id(part.ticket): PushReply(part.ticket.sequence, "applied", k, changed, elapsed)
            for part, (changed, elapsed) in zip(parts, stale, strict=True)
        }

    def _staleness(self, part: Part) -> tuple[float, int]:
        seen = [rows for rows in part.tables if len(rows.versions)]
        return staleness((rows.versions, self._tables.state(rows.definition).versions(rows.ids)) for rows in seen)

    def _pause(self, error: StorageError, pause_s: float) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self._intake.last_error:
            log.warning("retrying because %s", text)
        self._intake.last_error = text
        if self._abandon.wait(pause_s):
            raise AbandonedError from error
