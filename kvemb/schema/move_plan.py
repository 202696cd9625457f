"""A plan of slots that move between nodes, or between shards, while training goes on. Pure; docs/adr/0058, 0060 and 0062 say how it goes.

The map names the present owners of the slots, and the plan the other ones: until the flip the future owners, after it the former ones.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.slots import from_runs, runs_of

NODES, SHARDS = "nodes", "shards"
MOVING, FLIPPED, CLEANING, ABORTING = "moving", "flipped", "cleaning", "aborting"
HOLDING, DRAINING, SERVING = "holding", "draining", "serving"
PHASES_OF = {NODES: (MOVING, FLIPPED, CLEANING, ABORTING), SHARDS: (MOVING, HOLDING, DRAINING, FLIPPED, SERVING, ABORTING)}
PHASES = (MOVING, HOLDING, DRAINING, FLIPPED, SERVING, CLEANING, ABORTING)
MAX_WHY = 1000


@dataclass(frozen=True, eq=False)
class MovePlan:
    """One plan."""

    kind: str  # "nodes" or "shards"
    # between nodes "moving", "flipped", "cleaning" or "aborting"; between shards "moving", "holding" (in sync jobs), "draining", "flipped",
    # "serving" or "aborting"
    phase: str
    slot_owners: NDArray[np.uint16]  # uint16 [16384], the other owner of each slot; of slots that stay, the same one
    leaving: tuple[int, ...] = ()  # numbers of owners that have no slots any more, and are gone, when the plan is done
    joining: tuple[int, ...] = ()  # numbers of owners that came with the plan, and are gone if it is aborted
    max_bytes_per_s: int = 0  # how fast all shards together may copy; 0: as fast as storage takes it
    why: str = ""  # the reason of an abort
    last_step: int = 0  # of a sync job, once it is draining: the last step that shards take by the map of before the flip

    @property
    def writes_both(self) -> bool:
        """Whether rows of the slots that move are written to both owners."""
        return self.phase in (MOVING, FLIPPED)

    @property
    def flipped(self) -> bool:
        """Whether the map names the future owners of the slots by now, and the plan the former ones."""
        return self.phase in (FLIPPED, CLEANING, SERVING)

    @property
    def renews_markers(self) -> bool:
        """Whether nodes may still have markers of the map before the flip."""
        return self.phase in (FLIPPED, SERVING)

    def to_list(self) -> list[Any]:
        """Return the plan as it stands in the map's bytes."""
        runs, leaving, joining = runs_of(self.slot_owners), list(self.leaving), list(self.joining)
        items: list[Any] = [self.kind, self.phase, runs, leaving, joining, self.max_bytes_per_s, self.why]
        return [*items, self.last_step] if self.last_step else items

    @staticmethod
    def from_list(items: object, n_owners: dict[str, int]) -> "MovePlan":
        """Read what `to_list` returned; `n_owners` has the number of owners of each kind."""
        types = [str, str, bytes, list, list, int, str]
        if not isinstance(items, list) or [type(item) for item in items] not in (types, [*types, int]):
            raise ValueError("no plan")
        kind, phase, runs, leaving, joining, max_bytes_per_s, why, last_step = items if len(items) > len(types) else [*items, 0]
        if kind not in n_owners or phase not in PHASES_OF[kind] or max_bytes_per_s < 0 or len(why) > MAX_WHY or last_step < 0:
            raise ValueError("no plan of this release")
        if not all(type(number) is int and 0 <= number < n_owners[kind] for number in [*leaving, *joining]):
            raise ValueError("an owner comes or goes that there is not")
        return MovePlan(kind, phase, from_runs(runs, n_owners[kind]), tuple(leaving), tuple(joining), max_bytes_per_s, why, last_step)


def refuses(plan: MovePlan | None) -> str:
    """Say why what needs slots to stay with their shards cannot be done now; "" where they do."""
    if plan is None or plan.kind != SHARDS:
        return ""
    return (
        f"slots are moving between shards (phase {plan.phase}), and nothing was changed. `kvemb moves` shows how far that is; ask again "
        "when it is done."
    )
