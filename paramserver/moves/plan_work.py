"""A shard's part in plans of either kind. What is done for one that moves slots between nodes is `slot_mover`'s, between shards
`handover_work`'s."""

from collections.abc import Callable

from kvemb.schema.move_plan import SHARDS
from kvemb.stores.store import Store

from .handover_work import HandoverWork
from .slot_mover import MoveFigures, MoveProgress, SlotMover


class PlanWork:
    """Both of one shard. `step` is for the apply thread, the rest for any thread.

    Args:
        store: open; says which map is in force.
        nodes, shards: see above.
        done: told when the shard has done its part of a phase.
    """

    def __init__(self, store: Store, nodes: SlotMover, shards: HandoverWork, done: Callable[[], None]) -> None:
        self._store, self._nodes, self._shards, self._done = store, nodes, shards, done

    @property
    def figures(self) -> MoveFigures:
        """What was moved between nodes."""
        return self._nodes.figures

    @property
    def progress(self) -> MoveProgress:
        """How far the shard is in the phase of the map in force."""
        return self._now.progress

    @property
    def trouble(self) -> str:
        """Why this shard does not come further, if it has not for seconds."""
        return self._now.trouble

    @property
    def changes_runs(self) -> bool:
        """See `HandoverWork`."""
        return self._shards.changes_runs

    def due_in_s(self) -> float | None:
        """When there is something to do; None while there is not."""
        return min((due_s for due_s in (self._nodes.due_in_s(), self._shards.due_in_s()) if due_s is not None), default=None)

    def step(self, *, loaded: bool = False) -> bool:
        """Do a slice; return whether there is more at once."""
        was_done = self._now.progress
        handing = self._shards.step(loaded=loaded)
        more = self._nodes.step(loaded=loaded) or handing
        if (now := self._now.progress).done and now is not was_done:
            self._done()
        return more

    @property
    def _now(self) -> SlotMover | HandoverWork:
        plan = self._store.cluster_map.plan
        return self._shards if plan is not None and plan.kind == SHARDS else self._nodes
