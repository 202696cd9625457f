"""Which trainers are here: they say hello and goodbye, and a sync job goes on without those that it has waited for too long.

Each of these is durable before it has an effect.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial

from kvemb.errors import JournalFullError, PushRejectedError, ShardUnavailableError, to_wire

from .barrier import Barrier
from .ingest_state import POLL_S, IngestState
from .outcomes import Outcomes
from .sessions import Sessions

log = logging.getLogger("paramserver")

Record = Callable[[str, int], None]
"""(trainer, incarnation, or 0 for a goodbye): makes it durable. Raises JournalFullError, FencedError."""


class Attendance:
    """The trainers of one shard. Thread-safe, but for `fence_late`.

    Args:
        state, sessions, barrier: ingest's.
        outcomes: told of pushes that are given up.
        record: keeps hellos and goodbyes.
    """

    def __init__(self, state: IngestState, sessions: Sessions, barrier: Barrier | None, outcomes: Outcomes, record: Record) -> None:
        self._state, self._sessions, self._barrier, self._outcomes, self._record = state, sessions, barrier, outcomes, record
        self._dropping: set[str] = set()  # decided, and not in the journal yet

    def hello(self, trainer: str, incarnation: int) -> tuple[int, int]:
        """Grant a hello and make it durable; return (incarnation, last sequence taken).

        Raises:
            KvembError: what `Sessions.check_hello`, `Barrier` and `Record` raise; the trainer may say hello again.
        """
        state = self._state
        with state.changed:
            state.refuse_if_closed()
            while trainer in self._dropping:  # the journal must have that before it has this hello
                if state.trouble.journal:
                    raise ShardUnavailableError(f"a hello cannot be answered now: {state.trouble.journal}")
                state.changed.wait(POLL_S)
                state.refuse_if_closed()
            self._sessions.check_hello(trainer, incarnation)
            if self._barrier is not None:
                self._barrier.check_join(trainer)
            session = self._sessions.hello(trainer, incarnation)
            if self._barrier is not None:
                for push in self._barrier.join(trainer, session.incarnation, state.clock()):
                    self._outcomes.give_up(push, to_wire(self._sessions.fenced(trainer, push.incarnation)))
            state.changed.notify_all()
            granted, recorded = (session.incarnation, session.last_sequence), session.recorded
        if not recorded:
            try:
                self._record(trainer, granted[0])
            except JournalFullError as error:
                raise ShardUnavailableError(f"a hello cannot be answered now: {error}") from error
            session.record()
        return granted

    def first_step(self, trainer: str) -> int:
        """Return the number of the sync step that a trainer's next push is for; 0 in async mode, and while nobody knows."""
        with self._state.changed:
            return 0 if self._barrier is None else self._barrier.first_step(trainer)

    def bye(self, trainer: str, incarnation: int) -> None:
        """Let a trainer go; durable first, since a sync step without it may follow at once (or not, when the disk is full).

        It may be one that has not come back since the shard's restart, or that was here before the shard joined.
        """
        with self._state.changed:
            unseen = self._barrier is not None and self._barrier.awaits(trainer, incarnation)
            if not unseen:
                self._sessions.find_any(trainer, incarnation)
        with suppress(JournalFullError):
            self._record(trainer, 0)
        with self._state.changed:
            with suppress(PushRejectedError) if unseen else nullcontext():
                self._sessions.bye(trainer, incarnation)
            if self._barrier is not None:
                self._barrier.leave(trainer)
            self._state.changed.notify_all()

    def fence_late(self) -> Mapping[str, int]:
        """Let in nothing more from the members that a step has waited for too long; return their fences. Under the lock."""
        now_s = self._state.clock()
        late = [] if self._barrier is None or self._state.stopped else self._barrier.lost(now_s)
        if self._barrier is None or not late:
            return {}
        why = self._barrier.waits_for(now_s)
        self._dropping.update(late)
        for trainer in late:
            log.warning("trainer %s is dropped: %s", trainer, why)
        return {trainer: self._sessions.fence(trainer, why) for trainer in late}

    def drop(self, late: Mapping[str, int]) -> None:
        """Go on without members: first durable, so that a restart knows them no more, then the step that waits for them.

        Raises:
            AbandonedError: the shard is to stop, and the journal's disk is full.
        """
        recorded = False
        try:
            for trainer, fence in late.items():
                for number in (fence, 0):
                    write = partial(self._record, trainer, number)
                    self._state.trouble.until_there_is_room(write, self._state.wait_stopped)
            recorded = True
        finally:
            with self._state.changed:
                for trainer in late:
                    if recorded and self._barrier is not None:
                        self._barrier.drop(trainer)
                self._dropping.difference_update(late)
                self._state.changed.notify_all()

    def to_save(self) -> tuple[list[tuple[str, int, int]], tuple[tuple[str, int], ...], bool]:
        """Return what a restart needs to know of trainers: sessions, members of a sync job, whether that was complete."""
        with self._state.changed:
            if self._barrier is None:
                return self._sessions.to_save(), (), False
            return self._sessions.to_save(), self._barrier.membership.members, self._barrier.membership.complete

    def members(self) -> tuple[tuple[str, int], ...]:
        """Return (trainer, incarnation) of each member of a sync job whose trainers have all been here; none of another."""
        _, members, complete = self.to_save()
        return members if complete else ()

    @property
    def trainers(self) -> list[str]:
        """Names of the trainers that are here."""
        with self._state.changed:
            return [session.trainer for session in self._sessions.live]

    @property
    def n_trainers(self) -> int:
        """How many trainers are here."""
        return len(self.trainers)
