"""Lets a sync job's steps follow the cluster map: they stop, go on, and are sent anew as it says, and nothing else does.

So a new start changes nothing. It is looked at under the lock under which steps are handed out and parts are taken.
"""

from collections.abc import Sequence

from kvemb.errors import SlotsMovedError, to_wire
from kvemb.schema.cluster_map import ClusterMap

from .barrier import Barrier
from .ingest_state import IngestState
from .map_gate import MapGate, last_step
from .outcomes import Outcomes
from .sessions import Sessions
from .step_hold import HeldSteps
from .work_queue import WorkQueue


class StepsByMap:
    """What the map in force says of one shard's steps. Nothing in async mode, which has none.

    Args:
        state, sessions, barrier, queue, outcomes, gate: ingest's.
    """

    def __init__(
        self, state: IngestState, sessions: Sessions, barrier: Barrier | None, queue: WorkQueue, outcomes: Outcomes, gate: MapGate
    ) -> None:
        self._state, self._sessions, self._barrier = state, sessions, barrier
        self._queue, self._outcomes, self._gate = queue, outcomes, gate
        self._followed, self._held_serial = gate.now, 0
        self._follow(self._followed)

    def follow(self) -> HeldSteps:
        """Hold steps as the map in force says, or let them go on by it; return how far that is. Any thread."""
        with self._state.changed:
            self.look()
            return HeldSteps() if self._barrier is None else self._barrier.held

    def expect(self, members: Sequence[tuple[str, int]]) -> None:
        """Wait for these members of a job before its first step here; see `Barrier.expect`. Any thread."""
        with self._state.changed:
            if self._barrier is not None and members:
                self._barrier.expect(members)

    def look(self) -> None:
        """Follow a newer map, if there is one. Under the lock `changed`."""
        if (now := self._gate.now) is not self._followed:
            self._follow(now)
            self._followed = now
            self._state.changed.notify_all()

    def _follow(self, now: ClusterMap) -> None:
        if self._barrier is None:
            return
        if 0 < self._held_serial < now.shards_serial:
            self._refuse_waiting(now.shards_serial)
        last = last_step(now)
        if last is None:
            self._barrier.go_on()
        else:
            self._barrier.hold(last)
        self._held_serial = 0 if last is None else now.shards_serial

    def _refuse_waiting(self, serial: int) -> None:
        """Refuse the pushes that wait for the others of their step, or for their last part.

        Nothing was journaled of them, and their sequences are free: trainers send them again by the map in force.
        """
        cause = to_wire(SlotsMovedError(f"slots have moved: the cluster map of serial {serial} is in force; nothing was taken"))
        for session in self._sessions.live:
            session.give_up_incomplete(cause)
        waiting = self._queue.in_unfinished_steps()
        for push in waiting:
            if self._sessions.is_live(push.trainer, push.incarnation):
                self._sessions.find(push.trainer, push.incarnation).take_back(push)
        self._queue.forget_unfinished()
        for push in waiting:
            self._outcomes.give_up(push, cause, handed_out=False)
