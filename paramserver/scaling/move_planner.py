"""The plan for an operator's request: checked against the cluster map in force, and laid out as the next map."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.registry_format import META_NAME
from kvemb.coordination.shard_owners import newest_owner, owner_name
from kvemb.errors import InvalidInputError, MapChangedError, MoveRefusedError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import BY_COMMAND, GONE, IN_FILE, ClusterMap, NodePlace
from kvemb.schema.move_plan import MOVING, NODES, SHARDS, MovePlan

from ..model.bucket_settings import require_records_fit
from ..recovery.shard_parts import ShardParts


@dataclass(frozen=True, eq=False)
class WantedMove:
    """An operator's request: a move between nodes, or one between shards.

    Args:
        version: of the map that it was worked out from.
        kind: NODES or SHARDS, between which slots move.
        slot_owners: uint16 [16384], the node or shard that is to have each slot; new nodes have the numbers behind those there are.
        join: addresses of new ones.
        leave: numbers of those that are to have nothing then, and go.
        max_bytes_per_s: of copies between nodes, all shards together; 0 for no bound.
    """

    version: int
    kind: str
    slot_owners: NDArray[np.uint16]
    join: tuple[str, ...]
    leave: tuple[int, ...]
    max_bytes_per_s: int


class MovePlanner:
    """Makes the map with which a plan begins."""

    def __init__(self, parts: ShardParts) -> None:
        self._store, self._registry, self._timeout_s = parts.store, parts.registry, parts.timeout_s
        self._in_file = parts.config.servers.shards

    def plan(self, now: ClusterMap, wanted: WantedMove, deadline: Deadline) -> ClusterMap:
        """Return the map in force with the plan in it. New nodes are prepared; nothing else is changed."""
        _require_newest(now, wanted.version)
        return self._of_shards(now, wanted) if wanted.kind == SHARDS else self._of_nodes(now, wanted, deadline)

    def exchanged(self, now: ClusterMap, number: int, address: str, version: int, deadline: Deadline) -> ClusterMap:
        """Return the map in force with a node at another, empty address."""
        _require_newest(now, version)
        places = _places(now.places, self._store.nodes.places)
        if not 0 <= number < now.n_nodes or places[number].said_by == GONE:
            raise InvalidInputError(f"node {number}: is none of the cluster's, which has {now.n_nodes}; nothing was changed")
        _require_new(places, [address])
        self._store.nodes.require_empty(address, deadline)
        self._require_takes_records([address])
        changed = tuple(NodePlace(address, BY_COMMAND) if at == number else place for at, place in enumerate(places))
        return replace(now, version=now.version + 1, places=changed)

    def _of_nodes(self, now: ClusterMap, wanted: WantedMove, deadline: Deadline) -> ClusterMap:
        places = _places(now.places, self._store.nodes.places)
        joining = tuple(range(now.n_nodes, now.n_nodes + len(wanted.join)))
        _require_new(places, wanted.join)
        _require_there(wanted, {at for at, place in enumerate(places) if place.said_by != GONE} | set(joining))
        try:
            self._require_takes_records(wanted.join)
            for number, address in zip(joining, wanted.join, strict=True):
                self._store.nodes.prepare(address, number, self._metas(), deadline)
        except NodeUnavailableError as error:
            raise NodeUnavailableError(f"{error} Nothing was changed.") from error
        plan = MovePlan(NODES, MOVING, wanted.slot_owners, wanted.leave, joining, wanted.max_bytes_per_s)
        places = (*places, *(NodePlace(address, BY_COMMAND) for address in wanted.join))
        return replace(now, version=now.version + 1, n_nodes=len(places), places=places, plan=plan)

    def _metas(self) -> dict[str, bytes]:
        """The small values that a node which joins gets copies of."""
        found = {META_NAME: self._registry.encoded}
        for shard in range(self._store.nodes.cluster_map.n_shards):
            name = owner_name(shard)
            copies = self._store.values.get(name, Deadline.after(self._timeout_s))
            if (owner := newest_owner(copies, shard, self._store.values.copies_on(name))) is not None:
                found[name] = owner.encode()
        return found

    def _require_takes_records(self, addresses: Sequence[str]) -> None:
        require_records_fit(self._store, addresses, [*self._registry.tables, *self._registry.dropping], self._timeout_s)

    def _of_shards(self, now: ClusterMap, wanted: WantedMove) -> ClusterMap:
        if unfinished := self._registry.unfinished:  # a shard that has erased its rows would get others
            raise MoveRefusedError(f"{unfinished}. Nothing was changed; ask again when that is done.")
        places = _places(now.shards, now.shard_places(self._in_file))
        joining = now.free_shards(len(wanted.join))
        there = set(now.shard_numbers) | set(joining)
        _require_there(wanted, there)
        if 0 in wanted.leave:
            raise InvalidInputError("shard 0 stays, since it carries moves; nothing was changed")
        _require_new(places, wanted.join, "shard")
        plan = MovePlan(SHARDS, MOVING, wanted.slot_owners, wanted.leave, joining)
        after = dict(enumerate(places)) | {at: NodePlace(to, BY_COMMAND) for at, to in zip(joining, wanted.join, strict=True)}
        places = tuple(after[number] for number in sorted(after))
        planned = replace(now, version=now.version + 1, n_shards=len(places), shards=places, plan=plan)
        if both := [shard for shard in there if planned.gives(shard).any() and planned.takes(shard).any()]:
            raise InvalidInputError(f"shards {both} would give slots and take others in one move; nothing was changed. Ask for two moves.")
        return planned


def _places(kept: Sequence[NodePlace], known: Sequence[str]) -> tuple[NodePlace, ...]:
    """Where nodes, or shards, are as this process knows it: kvemb.yaml may say something newer than the map."""
    places = zip(kept or [NodePlace("", IN_FILE)] * len(known), known, strict=True)
    return tuple(place if place.said_by == GONE else place._replace(address=address) for place, address in places)


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


def _require_there(wanted: WantedMove, there: Set[int]) -> None:
    named, leave, kind = set(np.unique(wanted.slot_owners).tolist()), set(wanted.leave), wanted.kind
    if not named <= there - leave or not leave <= there:
        raise InvalidInputError(f"slots for {kind} {sorted(named - there)}, and {kind} {sorted(leave)} to leave: there are {sorted(there)}")


def _require_new(places: Sequence[NodePlace], addresses: Sequence[str], what: str = "node") -> None:
    known = {place.address for place in places}
    for address in addresses:
        if address in known or list(addresses).count(address) > 1:
            raise InvalidInputError(f"{what} {address} is one of the cluster's already, or stands twice; nothing was changed")
