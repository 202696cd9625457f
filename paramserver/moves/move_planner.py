"""The plan for an operator's request: checked against the cluster map in force, and laid out as the next map."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError, MapChangedError, MoveRefusedError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import BY_COMMAND, GONE, IN_FILE, ClusterMap, NodePlace
from kvemb.schema.move_plan import MOVING, NODES, SHARDS, MovePlan
from kvemb.stores.store import Store


@dataclass(frozen=True, eq=False)
class WantedMove:
    """An operator's request: a move between nodes, or one between shards.

    Args:
        version: of the map that it was worked out from.
        slot_nodes: uint16 [16384], the node that each slot is to lie on; new nodes have the numbers behind those there are. None of shards.
        join: addresses of new nodes.
        leave: numbers of nodes that are to have nothing then, and go.
        max_bytes_per_s: of copies, all shards together; 0 for no bound.
        slot_shards, join_shards, leave_shards: likewise, of a move between shards. None of nodes.
    """

    version: int
    slot_nodes: NDArray[np.uint16] | None = None
    join: tuple[str, ...] = ()
    leave: tuple[int, ...] = ()
    max_bytes_per_s: int = 0
    slot_shards: NDArray[np.uint16] | None = None
    join_shards: tuple[str, ...] = ()
    leave_shards: tuple[int, ...] = ()


class MovePlanner:
    """Makes the map with which a plan begins.

    Args:
        store: open.
        metas: small values of which every node has a copy, by name.
        in_file: the shards' addresses by kvemb.yaml.
        unfinished: describes the tables that are being dropped or altered; "" for none.
    """

    def __init__(
        self,
        store: Store,
        metas: Callable[[], Mapping[str, bytes]],
        in_file: Sequence[str],
        unfinished: Callable[[], str] = str,
    ) -> None:
        self._store, self._metas, self._in_file, self._unfinished = store, metas, in_file, unfinished

    def plan(self, now: ClusterMap, wanted: WantedMove, deadline: Deadline) -> ClusterMap:
        """Return the map in force with the plan in it. New nodes are prepared; nothing else is changed.

        Raises: as `MoveCarrier.begin`.
        """
        _require_newest(now, wanted.version)
        nodes = wanted.slot_nodes
        return self._of_shards(now, wanted) if nodes is None else self._of_nodes(now, wanted, nodes, deadline)

    def exchanged(self, now: ClusterMap, number: int, address: str, version: int, deadline: Deadline) -> ClusterMap:
        """Return the map in force with a node at another, empty address.

        Raises: as `MoveCarrier.replace_address`.
        """
        _require_newest(now, version)
        places = self._places(now)
        if not 0 <= number < now.n_nodes or places[number].said_by == GONE:
            raise InvalidInputError(f"node {number}: is none of the cluster's, which has {now.n_nodes}; nothing was changed")
        _require_new(places, [address])
        self._store.nodes.require_empty(address, deadline)
        changed = tuple(NodePlace(address, BY_COMMAND) if at == number else place for at, place in enumerate(places))
        return replace(now, version=now.version + 1, places=changed)

    def _of_nodes(self, now: ClusterMap, wanted: WantedMove, slot_nodes: NDArray[np.uint16], deadline: Deadline) -> ClusterMap:
        places = self._places(now)
        joining = tuple(range(now.n_nodes, now.n_nodes + len(wanted.join)))
        _check(now, places, wanted, slot_nodes)
        for number, address in zip(joining, wanted.join, strict=True):
            try:
                self._store.nodes.prepare(address, number, self._metas(), deadline)
            except NodeUnavailableError as error:
                raise NodeUnavailableError(f"{error} Nothing was changed.") from error
        plan = MovePlan(NODES, MOVING, slot_nodes, wanted.leave, joining, wanted.max_bytes_per_s)
        places = (*places, *(NodePlace(address, BY_COMMAND) for address in wanted.join))
        return replace(now, version=now.version + 1, n_nodes=len(places), places=places, plan=plan)

    def _of_shards(self, now: ClusterMap, wanted: WantedMove) -> ClusterMap:
        slot_shards = wanted.slot_shards
        assert slot_shards is not None
        if unfinished := self._unfinished():  # a shard that has erased its rows would get others
            raise MoveRefusedError(f"{unfinished}. Nothing was changed; ask again when that is done.")
        noted = now.shards or [NodePlace("", IN_FILE)] * now.n_shards
        places = tuple(place._replace(address=at) for place, at in zip(noted, now.shard_places(self._in_file), strict=True))
        joining = now.free_shards(len(wanted.join_shards))
        there, named = set(now.shard_numbers) | set(joining), set(np.unique(slot_shards).tolist())
        if not named <= there - set(wanted.leave_shards) or not set(wanted.leave_shards) <= there - {0}:
            raise InvalidInputError(
                f"slots for shards {sorted(named - there)}, and shards {sorted(wanted.leave_shards)} to leave: there are {sorted(there)}, "
                "and shard 0 stays, since it carries moves"
            )
        if again := {place.address for place in places} & set(wanted.join_shards) or len(set(wanted.join_shards)) < len(joining):
            raise InvalidInputError(f"shard {', '.join(wanted.join_shards)}: is one of the cluster's already, or stands twice ({again})")
        plan = MovePlan(SHARDS, MOVING, slot_shards, wanted.leave_shards, joining)
        after = dict(enumerate(places)) | {at: NodePlace(to, BY_COMMAND) for at, to in zip(joining, wanted.join_shards, strict=True)}
        places = tuple(after[number] for number in sorted(after))
        planned = replace(now, version=now.version + 1, n_shards=len(places), shards=places, plan=plan)
        if both := [shard for shard in there if planned.gives(shard).any() and planned.takes(shard).any()]:
            raise InvalidInputError(f"shards {both} would give slots and take others in one move; nothing was changed. Ask for two moves.")
        return planned

    def _places(self, now: ClusterMap) -> tuple[NodePlace, ...]:
        """Where the nodes are, as this process knows it: kvemb.yaml may say something newer than the map."""
        known = self._store.nodes.places
        kept = now.places or tuple(NodePlace(address, IN_FILE) for address in known)
        return tuple(place if place.said_by == GONE else place._replace(address=known[at]) for at, place in enumerate(kept))


def _require_newest(now: ClusterMap, version: int) -> None:
    if now.plan is not None:
        raise MoveRefusedError(
            f"a move of {now.plan.kind} is under way (phase {now.plan.phase}); nothing was changed. `kvemb moves` shows how far it is, "
            "`kvemb moves abort` takes it back."
        )
    if now.version != version:
        raise MapChangedError(
            f"the cluster map is of version {now.version}, the request was worked out from version {version}; nothing was changed. "
            "Ask again."
        )


def _check(now: ClusterMap, places: Sequence[NodePlace], wanted: WantedMove, slot_nodes: NDArray[np.uint16]) -> None:
    there = {at for at, place in enumerate(places) if place.said_by != GONE} | set(range(now.n_nodes, now.n_nodes + len(wanted.join)))
    _require_new(places, wanted.join)
    named = set(np.unique(slot_nodes).tolist())
    if not named <= there - set(wanted.leave) or not set(wanted.leave) <= there:
        raise InvalidInputError(
            f"slots for nodes {sorted(named - there)}, and nodes {sorted(wanted.leave)} to leave: there are {sorted(there)}"
        )


def _require_new(places: Sequence[NodePlace], addresses: Sequence[str]) -> None:
    known = {place.address for place in places}
    for address in addresses:
        if address in known or list(addresses).count(address) > 1:
            raise InvalidInputError(f"node {address} is one of the cluster's already; nothing was changed")
