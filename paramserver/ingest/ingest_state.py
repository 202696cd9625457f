"""The state that all parts of ingest share, with its one lock: whether a shard takes and applies work, and the reason of a wait."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from kvemb.errors import DeadlineExceededError, FencedError, JournalFullError, ShardFailedError, ShardUnavailableError
from kvemb.net.deadline import Deadline, WhyWaiting, pauses

from .step_waits import waited_s, waits_for
from .sync_steps import SyncSteps

POLL_S = 1.0  # of waits that a notification ends; it cannot be missed, so this is only for safety
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
T = TypeVar("T")
log = logging.getLogger("paramserver")


class AbandonedError(Exception):
    """The shard was told to stop while this thread waited for storage or disk."""


class Trouble:
    """Why a shard waits for its disk or storage now: written by the threads that wait, read by any thread."""

    def __init__(self) -> None:
        self.storage = ""  # why a batch is tried again
        self.looking = WhyWaiting()  # why nodes cannot be looked at; written by the watch over them
        self.journal = ""  # why nothing can be acknowledged

    def storage_waits(self, why: str) -> bool:
        """Record why storage is tried again; return whether that is news."""
        before, self.storage = self.storage, why
        return why != before

    def storage_works(self) -> None:
        """Record that storage has taken the write that was tried again."""
        if self.storage:
            log.info("storage takes writes again")
        self.storage = ""

    def until_there_is_room(self, write: Callable[[], T], wait: Callable[[float], bool]) -> T:
        """Write to the journal, again and again while its disk is full; return the result of `write`.

        Raises:
            AbandonedError: the shard is to stop; the write may not be in the journal.
        """
        waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                done = write()
                if self.journal:
                    log.info("the journal can be written again")
                self.journal = ""
                return done
            except JournalFullError as error:
                before, self.journal = self.journal, f"{type(error).__name__}: {error}"
                if self.journal != before:
                    log.warning("nothing is acknowledged because %s", self.journal)
                if wait(next(waits)):
                    raise AbandonedError from error

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.journal, self.storage or self.looking.why)))


class IngestState:
    """The state that the parts of one shard's ingest share; to be used under the lock `changed`, unless a docstring says otherwise."""

    def __init__(self, steps: SyncSteps | None, clock: Callable[[], float]) -> None:
        self.steps, self.clock = steps, clock
        self.changed = threading.Condition()
        self.draining = self.stopped = False
        self.failure: ShardFailedError | ShardUnavailableError | None = None
        self.trouble = Trouble()

    @property
    def waits_for(self) -> str:
        """The reason why pushes wait now (disk, storage or a trainer), or "". Any thread."""
        with self.changed:
            late = "" if self.steps is None else waits_for(self.steps, self.clock())
        return "; ".join(filter(None, (str(self.trouble), late)))

    @property
    def step_wait_s(self) -> float:
        """Seconds that a sync step has waited for trainers; 0.0 where none waits. Any thread."""
        with self.changed:
            return 0.0 if self.steps is None else waited_s(self.steps, self.clock())

    def become(self, steps: SyncSteps) -> None:
        """Replace the steps of the sync job by their state after an event."""
        self.steps = steps

    @property
    def takes_pushes(self) -> bool:
        """Whether the shard takes new work: it has not failed, and does not drain. Any thread."""
        return self.failure is None and not self.draining

    @property
    def why_failed(self) -> str:
        """Why the shard stopped applying, or "". Any thread."""
        return str(self.failure) if self.failure is not None else ""

    def stop(self) -> None:
        """Let the committer end after its present work. Any thread."""
        with self.changed:
            self.draining = self.stopped = True
            self.changed.notify_all()

    def wait_stopped(self, timeout_s: float) -> bool:
        """Wait until the shard is told to stop; return whether it is. Any thread."""
        with self.changed:
            return self.changed.wait_for(lambda: self.stopped, timeout_s)

    def drain(self) -> None:
        self.draining = True
        self.changed.notify_all()

    def fail(self, error: BaseException) -> ShardFailedError | ShardUnavailableError:
        """Apply nothing from now on; return the error that all pending and all later work gets."""
        text = f"{type(error).__name__}: {error}"
        self.trouble.storage_waits(text)
        if isinstance(error, FencedError):
            self.failure = ShardUnavailableError(f"this process has lost the shard: {error}")
        else:
            self.failure = ShardFailedError(f"the shard stopped applying: {text.rstrip('.')}. Mend the cause, then restart the shard.")
        self.changed.notify_all()
        return self.failure

    def refuse_if_closed(self) -> None:
        """Raise if the shard takes nothing new, because it failed or drains."""
        if self.failure is not None:
            raise self.failure
        if self.draining:
            raise ShardUnavailableError("the shard is draining: it takes nothing new and will stop; send it again after its restart")

    def wait(self, deadline: Deadline, what: str) -> None:
        """Wait for a change; raise when the deadline has passed, or no change can come any more."""
        if self.failure is not None:
            raise self.failure
        if self.stopped:
            raise ShardUnavailableError(f"the shard stopped before {what}")
        if deadline.expired:
            cause = f"; last error: {waits}" if (waits := self.waits_for) else ""
            raise DeadlineExceededError(f"waited {deadline.timeout_s:.1f} s for {what}{cause}")
        self.changed.wait(min(POLL_S, deadline.remaining_s()))
