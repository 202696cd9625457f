"""The intake: everything between "a message came in" and "the apply thread takes it", under one lock.

It accepts parts in order, bounds what waits (a stream that finds no room is simply not read any further: HTTP/2 flow control is the
backpressure), hands work to the one apply thread and tells every waiter the outcome. What is decided is decided in pure code beside
(sessions, barrier, aggregate); no I/O here.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from kvemb.errors import (
    BarrierError,
    DeadlineExceededError,
    KvembError,
    PushRejectedError,
    ShardFailedError,
    ShardUnavailableError,
    to_wire,
)
from kvemb.messages import PushPart, PushReply
from kvemb.net.deadline import Deadline
from paramserver.aggregate import hyper_by_table, n_mergeable
from paramserver.barrier import Barrier
from paramserver.batch import CheckedRows, Part, Push, RowsWork, Sink, Ticket
from paramserver.pending import Limits, Pending
from paramserver.sessions import Session, Sessions

_POLL_S = 1.0  # of waits that have nothing to wake them but a notification that cannot be missed: only a belt to the braces


Work = list[Push] | RowsWork
"""What the apply thread takes: pushes to apply as one batch, or an assign or erase."""


class Intake:
    """The queue of a shard.

    Args:
        sessions: of this shard.
        barrier: in sync mode; None applies as pushes come.
        limits: bounds.
    """

    def __init__(self, sessions: Sessions, barrier: Barrier | None, limits: Limits | None = None) -> None:
        self.sessions = sessions
        self._barrier = barrier
        self._changed = threading.Condition()
        self._queue: deque[Work] = deque()
        self._pending = Pending(limits or Limits())
        self._draining = self._stopped = False
        self._failure: ShardFailedError | None = None
        self._lost: KvembError | None = None
        self.last_error = ""

    # --- trainers come and go --------------------------------------------------------------------------------------------------

    def hello(self, trainer: str, incarnation: int) -> tuple[int, int]:
        """Grant a hello; return (incarnation, last accepted sequence). Raises what `Sessions.check_hello` and `Barrier` raise."""
        with self._changed:
            self._refuse_if_closed()
            self.sessions.check_hello(trainer, incarnation)
            if self._barrier is not None:
                self._barrier.join(trainer)
            session = self.sessions.hello(trainer, incarnation)
            self._changed.notify_all()
            return session.incarnation, session.last_sequence

    def bye(self, trainer: str, incarnation: int) -> None:
        """Let a trainer go."""
        with self._changed:
            self.sessions.bye(trainer, incarnation)
            if self._barrier is not None:
                self._barrier.leave(trainer)
            self._changed.notify_all()

    # --- work comes in ---------------------------------------------------------------------------------------------------------

    def submit(self, part: PushPart, tables: tuple[CheckedRows, ...], sink: Sink, cancelled: Callable[[], bool]) -> None:
        """Accept a checked part, waiting for room; the sink hears "accepted" before this returns, and the outcome later.

        Raises:
            PushRejectedError, FencedError: nothing was accepted; the sequence may be used again.
            ShardUnavailableError, ShardFailedError: the shard takes no pushes.
        """
        size = sum(rows.size_bytes for rows in tables)
        with self._changed:
            session = self._wait_for_room(part, cancelled)
            ticket = session.known(part.sequence, part.digest)
            if ticket is not None:
                ticket.answer(sink)
                return
            new = Part(tables, Ticket(part.sequence, part.digest, size))
            self._pending.check_size(session, new)
            hyper_by_table([*(session.held if session.held_step == part.step else ()), new])
            session.accept(new, part.step)
            new.ticket.answer(sink)
            if not part.more:
                self._enqueue(session.complete(part.step))

    def submit_rows(self, work: RowsWork, deadline: Deadline) -> int:
        """Queue an assign or erase and wait until it is applied; return how many of its rows existed before.

        Raises:
            DeadlineExceededError: it stays queued and will be applied.
        """
        with self._changed:
            while not self._pending.has_room():
                self._refuse_if_closed()
                self._wait(deadline, "room in the shard's queue")
            self._refuse_if_closed()
            number = self._enqueue(work)
            while number in self._pending:
                self._wait(deadline, f"{work.kind} to be applied; it stays queued")
            if self._failure is not None and not work.applied:
                raise self._failure
            return work.n_existed

    def wake(self) -> None:
        """Let waiting submitters look at their `cancelled` again."""
        with self._changed:
            self._changed.notify_all()

    # --- the apply thread ------------------------------------------------------------------------------------------------------

    def take(self) -> Work | None:
        """Return the next work, waiting for it; None when the shard stops.

        Raises:
            BarrierError: a sync step cannot be completed; the caller calls `fail`.
            KvembError: what `lose` was told; likewise.
        """
        with self._changed:
            while not self._stopped:
                if self._lost is not None:
                    lost, self._lost = self._lost, None
                    raise lost
                self._release_steps()
                if self._queue:
                    return self._pop()
                due_s = self._barrier.deadline_s() if self._barrier is not None else None
                self._changed.wait(None if due_s is None else min(_POLL_S, max(0.0, due_s - time.monotonic())))
            return None

    def lose(self, error: KvembError) -> None:
        """Let the apply thread fail with this error before its next work: told from outside that rows are lost."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def settle(self, work: Work, replies: dict[int, PushReply]) -> None:
        """Record that work was applied.

        Args:
            work: as taken.
            replies: outcome of each part, by id() of its ticket.
        """
        with self._changed:
            for item in work if isinstance(work, list) else [work]:
                self._forget(item, lambda ticket: replies[id(ticket)])
            self.last_error = ""
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop applying for good: everything pending and everything later gets ShardFailedError with this cause."""
        text = f"{type(error).__name__}: {error}"
        with self._changed:
            self._failure = ShardFailedError(f"the shard stopped applying: {text.rstrip('.')}. Mend the cause, then restart the shard.")
            self.last_error = text
            in_step = {id(push) for push in self._barrier.waiting()} if self._barrier and isinstance(error, BarrierError) else set()
            for item in self._pending.all():
                cause = to_wire(error if id(item) in in_step else self._failure)
                self._forget(item, lambda ticket, cause=cause: PushReply(ticket.sequence, "failed", error=cause))  # type: ignore[misc]
            self.sessions.drop_all_held(to_wire(self._failure))
            self._queue.clear()
            if self._barrier is not None:
                self._barrier.clear()
            self._changed.notify_all()

    # --- waiting and asking ----------------------------------------------------------------------------------------------------

    def flush(self, deadline: Deadline) -> None:
        """Wait until everything accepted before this call is applied; pushes whose last part is still to come are not waited for.

        Raises:
            DeadlineExceededError: with the last storage error, or what a sync step waits for.
            ShardFailedError: it will never be applied.
        """
        with self._changed:
            last = self._pending.last
            while self._pending.up_to(last):
                self._wait(deadline, f"{len(self._pending)} pushes to be applied")
            if self._failure is not None:
                raise self._failure

    def drain(self, deadline: Deadline) -> bool:
        """Take nothing new from now on and wait until everything accepted is applied; return whether it is."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            while len(self._pending) and self._failure is None and not deadline.expired:
                self._changed.wait(min(_POLL_S, deadline.remaining_s()))
            return not len(self._pending) and self._failure is None

    def stop(self) -> None:
        """Let the apply thread end after what it is doing."""
        with self._changed:
            self._draining = self._stopped = True
            self._changed.notify_all()

    def pending(self) -> tuple[int, float]:
        """Return (pushes and row changes that wait, age of the oldest in seconds)."""
        with self._changed:
            return len(self._pending), self._pending.age_s(time.monotonic())

    def describe_pending(self) -> str:
        """Say what is not applied, for the last words of a shard that could not drain."""
        with self._changed:
            text = self._pending.describe()
            return text + (f"; last error: {self.last_error}" if self.last_error else "")

    @property
    def failure(self) -> str:
        """Why the shard stopped applying, or ""."""
        return str(self._failure) if self._failure is not None else ""

    @property
    def n_trainers(self) -> int:
        """Trainers that are here."""
        with self._changed:
            return len(self.sessions.live)

    # --- inside the lock -------------------------------------------------------------------------------------------------------

    def _wait_for_room(self, part: PushPart, cancelled: Callable[[], bool]) -> Session:
        while True:
            self._refuse_if_closed()
            session = self.sessions.find(part.trainer, part.incarnation)
            if session.known(part.sequence, part.digest) is not None or self._pending.has_room(session):
                return session
            if cancelled():
                raise ShardUnavailableError("the stream was closed while its part waited for room; nothing of the part was accepted")
            self._changed.wait(_POLL_S)

    def _enqueue(self, item: Push | RowsWork) -> int:
        number = self._pending.add(item)
        if isinstance(item, RowsWork):
            self._queue.append(item)
        elif self._barrier is None:
            self._queue.append([item])
        else:
            self._barrier.add(item)
        self._changed.notify_all()
        return number

    def _release_steps(self) -> None:
        """Move complete steps from the barrier to the queue."""
        if self._barrier is None or self._failure is not None:
            return
        while step := self._barrier.next_step():
            try:
                hyper_by_table(part for push in step for part in push.parts)
                self._queue.append(step)
            except PushRejectedError as error:
                self._reject(step, error)
        if not self._queue:
            self._barrier.check_overdue(time.monotonic())

    def _reject(self, step: list[Push], error: KvembError) -> None:
        for push in step:
            self._forget(push, lambda ticket: PushReply(ticket.sequence, "failed", error=to_wire(error)))
        self._changed.notify_all()

    def _pop(self) -> Work:
        first = self._queue.popleft()
        if isinstance(first, RowsWork) or self._barrier is not None:
            return first
        pushes = list(first)
        for item in self._queue:
            if isinstance(item, RowsWork):
                break
            pushes += item
        n = n_mergeable(pushes)
        for _ in range(n - 1):
            self._queue.popleft()
        return pushes[:n]

    def _forget(self, item: Push | RowsWork, reply: Callable[[Ticket], PushReply]) -> None:
        self._pending.remove(item)
        if isinstance(item, Push):
            self.sessions.settled(item)
            for part in item.parts:
                part.ticket.finish(reply(part.ticket))

    def _refuse_if_closed(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._draining:
            raise ShardUnavailableError("the shard is draining: it takes nothing new and will stop; send it again after its restart")

    def _wait(self, deadline: Deadline, what: str) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stopped:
            raise ShardUnavailableError(f"the shard stopped before {what}")
        if deadline.expired:
            cause = f"; last storage error: {self.last_error}" if self.last_error else ""
            raise DeadlineExceededError(f"waited {deadline.timeout_s:.1f} s for {what}{cause}")
        self._changed.wait(min(_POLL_S, deadline.remaining_s()))
