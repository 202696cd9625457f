"""Attendance: trainers say hello and goodbye, and a sync job drops those that it has waited for too long.

Each of these is durable before it has an effect. The steps of a sync job follow the cluster map here, too (`StepsByMap`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial

from kvemb.errors import JournalFullError, PushRejectedError, ShardUnavailableError, SlotsMovedError, TableDroppedError, to_wire
from kvemb.schema.cluster_map import ClusterMap

from ..model.table_registry import Registry
from .ingest_state import POLL_S, IngestState
from .outcomes import Outcomes
from .part_checks import MapGate, last_step
from .sessions import Sessions
from .step_waits import lacking, lost, waits_for
from .sync_steps import HeldSteps
from .work_queue import WorkQueue

log = logging.getLogger("paramserver")

Record = Callable[[str, int], None]
"""(trainer, incarnation, or 0 for a goodbye): makes it durable. Raises JournalFullError, FencedError."""


class Attendance:
    """The trainers of one shard. Thread-safe, apart from `fence_late`, which needs the lock."""

    def __init__(self, state: IngestState, sessions: Sessions, outcomes: Outcomes, record: Record) -> None:
        self._state, self._sessions, self._outcomes, self._record = state, sessions, outcomes, record
        self._dropping: set[str] = set()  # decided, and not in the journal yet

    def hello(self, trainer: str, incarnation: int) -> tuple[int, int]:
        """Grant a hello and make it durable; return (incarnation, last sequence taken)."""
        state = self._state
        with state.changed:
            state.refuse_if_closed()
            while trainer in self._dropping:  # the journal must have that before it has this hello
                if state.trouble.journal:
                    raise ShardUnavailableError(f"a hello cannot be answered now: {state.trouble.journal}")
                state.changed.wait(POLL_S)
                state.refuse_if_closed()
            self._sessions.check_hello(trainer, incarnation)
            if state.steps is not None:
                state.steps.check_join(trainer)
            session = self._sessions.hello(trainer, incarnation)
            if state.steps is not None:
                steps, given_up = state.steps.join(trainer, session.incarnation, state.clock())
                state.become(steps)
                for push in given_up:
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
        """Return the number of the sync step that a trainer's next push is for; 0 in async mode, and while it is not known."""
        with self._state.changed:
            return 0 if self._state.steps is None else self._state.steps.first_step(trainer)

    def bye(self, trainer: str, incarnation: int) -> None:
        """Let a trainer go. First durable, since a sync step without it may follow at once; when the disk is full it goes all the same.

        The trainer may be one that has not come back since the shard's restart, or that was here before the shard joined.
        """
        with self._state.changed:
            unseen = self._state.steps is not None and self._state.steps.awaits(trainer, incarnation)
            if not unseen:
                self._sessions.find_any(trainer, incarnation)
        with suppress(JournalFullError):
            self._record(trainer, 0)
        with self._state.changed:
            with suppress(PushRejectedError) if unseen else nullcontext():
                self._sessions.bye(trainer, incarnation)
            if self._state.steps is not None:
                self._state.become(self._state.steps.leave(trainer))
            self._state.changed.notify_all()

    def excuse(self) -> None:
        """Begin the lease of every member of a sync job again: storage is away, and a silent one may be waiting for it."""
        with self._state.changed:
            if (steps := self._state.steps) is not None:
                for name in steps.places:
                    steps = steps.heard(name, self._state.clock())
                self._state.become(steps)

    def fence_late(self) -> Mapping[str, int]:
        """Fence the members that a step has waited for too long: nothing more is taken from them; return the fences. Under the lock."""
        now_s, steps = self._state.clock(), self._state.steps
        late = [] if steps is None or self._state.stopped else lost(steps, now_s)
        if steps is None or not late:
            return {}
        why = waits_for(steps, now_s)
        self._dropping.update(late)
        for trainer in late:
            log.warning("trainer %s is dropped: %s", trainer, why)
        return {trainer: self._sessions.fence(trainer, why) for trainer in late}

    def drop(self, late: Mapping[str, int]) -> None:
        """Go on without members: make that durable, so that a restart does not wait for them, then release the step."""
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
                    if recorded and self._state.steps is not None:
                        self._state.become(self._state.steps.drop(trainer))
                self._dropping.difference_update(late)
                self._state.changed.notify_all()

    def to_save(self) -> tuple[list[tuple[str, int, int]], tuple[tuple[str, int], ...], bool]:
        """Return the state of trainers for a restart: sessions, members of a sync job, whether that was complete."""
        with self._state.changed:
            if self._state.steps is None:
                return self._sessions.to_save(), (), False
            membership = self._state.steps.membership
            return self._sessions.to_save(), membership.members, membership.complete

    def members(self) -> tuple[tuple[str, int], ...]:
        """Return (trainer, incarnation) of each member of a sync job; none before all its trainers have been here at once."""
        _, members, complete = self.to_save()
        return members if complete else ()

    @property
    def trainers(self) -> list[str]:
        """Names of the trainers that are here."""
        with self._state.changed:
            return [session.trainer for session in self._sessions.live]

    @property
    def n_trainers(self) -> int:
        return len(self.trainers)

    @property
    def step(self) -> str:
        """Name the oldest step that lacks a member's push, and whose; "" where none waits."""
        with self._state.changed:
            return "" if self._state.steps is None else lacking(self._state.steps)[1]


class StepsByMap:
    """Stops the steps of a sync job, lets them go on, or refuses them, as the cluster map says, and the registry of tables.

    Only these decide, so a restart changes nothing. They are read under the lock under which steps are handed out and parts are taken.
    Nothing is done in async mode, which has no steps.
    """

    def __init__(
        self,
        state: IngestState,
        sessions: Sessions,
        queue: WorkQueue,
        outcomes: Outcomes,
        gate: MapGate,
        registry: Registry | None = None,
    ) -> None:
        self._state, self._sessions = state, sessions
        self._queue, self._outcomes, self._gate, self._registry = queue, outcomes, gate, registry
        self._followed, self._held_serial = gate.now, 0
        self._tables_serial, self._last_asked = self._serial, 0  # the latter, while a table is being altered: the step to go on to
        self._follow(self._followed)

    @property
    def _serial(self) -> int:
        return 0 if self._registry is None else self._registry.serial

    def hold_behind(self, last: int) -> HeldSteps:
        """While a table is being altered, hand out no step after this one, or after the one that was handed out last. Any thread."""
        with self._state.changed:
            self._last_asked = max(self._last_asked, last)
            self._follow(self._gate.now)
            self._state.changed.notify_all()
            return HeldSteps() if self._state.steps is None else self._state.steps.held

    def follow(self) -> HeldSteps:
        """Hold steps, or let them go on, as the map in force says; return how far the shard is. Any thread."""
        with self._state.changed:
            self.look()
            return HeldSteps() if self._state.steps is None else self._state.steps.held

    def expect(self, members: Sequence[tuple[str, int]]) -> None:
        """Wait for these members of a job before its first step here; see `SyncSteps.expect`. Any thread."""
        with self._state.changed:
            if self._state.steps is not None and members:
                self._state.become(self._state.steps.expect(members))

    def look(self) -> None:
        """Follow a newer map, if there is one. Under the lock `changed`."""
        if (now := self._gate.now) is not self._followed or self._serial != self._tables_serial:
            self._follow(now)
            self._followed = now
            self._state.changed.notify_all()

    def _follow(self, now: ClusterMap) -> None:
        if self._state.steps is None:
            return
        if 0 < self._held_serial < now.shards_serial:
            serial = now.shards_serial
            self._refuse_waiting(SlotsMovedError(f"slots have moved: the cluster map of serial {serial} is in force; nothing was taken"))
        last = last_step(now)
        self._tables_serial = self._serial
        if self._registry is not None:
            if not self._registry.altering:
                self._last_asked = 0
            elif last is None:
                last = self._last_asked
            self._refuse_closed(self._registry)
        steps = self._state.steps
        after = steps.go_on() if last is None else steps.hold_behind(last)
        for name in after.places if last is None and steps.hold.last is not None else ():  # leases begin again
            after = after.heard(name, self._state.clock())
        self._state.become(after)
        if after.held != steps.held:
            log.info("steps of the sync job: %s, the last one was step %d", after.held.phase, after.held.last)
        self._held_serial = 0 if last is None else now.shards_serial

    def _refuse_closed(self, registry: Registry) -> None:
        """Refuse the pushes that wait, if one of them names a table that was altered or dropped."""
        try:
            for key in {key for push in self._queue.in_unfinished_steps() for key in push.table_keys}:
                registry.require_open(key, waits=False)
        except TableDroppedError as error:
            self._refuse_waiting(error)

    def _refuse_waiting(self, why: SlotsMovedError | TableDroppedError) -> None:
        """Refuse the pushes that wait for the others of their step, or for their last part.

        None of them was journaled, and their sequences are free. Trainers send them again by the map in force, if slots have moved.
        """
        cause = to_wire(why)
        for session in self._sessions.live:
            session.give_up_incomplete(cause)
        waiting = self._queue.in_unfinished_steps()
        for push in waiting:
            if self._sessions.is_live(push.trainer, push.incarnation):
                self._sessions.find(push.trainer, push.incarnation).take_back(push)
        self._queue.forget_unfinished()
        for push in waiting:
            self._outcomes.give_up(push, cause, handed_out=False)
