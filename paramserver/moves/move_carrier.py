"""Shard 0's part in a plan: it begins one, carries it from phase to phase, and ends it. docs/adr/0060 says why it may be one process.

What decides is the map in this shard's data folder: a phase is written there first, then followed, then given to the nodes. So a phase that
anybody has seen outlives the death of any process and any node. The next process of shard 0 goes on with the newest map that its folder and
the nodes have.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.move_report import MoveReport, newest_report, report_name
from kvemb.coordination.shard_owners import newest_owner, owner_name
from kvemb.errors import InvalidInputError, KvembError, MapChangedError, MoveRefusedError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import BY_COMMAND, GONE, IN_FILE, ClusterMap, NodePlace
from kvemb.schema.move_plan import ABORTING, CLEANING, DRAINING, FLIPPED, MAX_WHY, MOVING, NODES, SERVING, SHARDS, MovePlan
from kvemb.stores.store import Store

from .left_sessions import LeftSessions

_LOOK_TIMEOUT_S = 2.0  # of what is asked again soon
_AFTER = {
    NODES: {MOVING: FLIPPED, FLIPPED: CLEANING},
    SHARDS: {MOVING: DRAINING, DRAINING: FLIPPED, FLIPPED: SERVING},
}
"""Of each phase the next one; of the others the end of the plan."""
log = logging.getLogger("paramserver")


@dataclass(frozen=True, eq=False)
class WantedMove:
    """What an operator asks for: a move between nodes, or one between shards.

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


class MoveCarrier:
    """Begins, carries on and ends plans; on shard 0 only. Any thread, one at a time.

    Args:
        store: open.
        keep: keeps a map in the data folder; raises once another process owns the shard.
        metas: small values of which every node has a copy, by name.
        in_file: the shards' addresses by kvemb.yaml.
        left: keeps what shards that leave had taken of trainers.
        timeout_s: of one storage call.
    """

    def __init__(
        self,
        store: Store,
        *,
        keep: Callable[[ClusterMap], None],
        metas: Callable[[], Mapping[str, bytes]],
        in_file: Sequence[str],
        left: LeftSessions,
        timeout_s: float,
    ) -> None:
        self._store, self._keep, self._metas, self._timeout_s = store, keep, metas, timeout_s
        self._in_file, self._left = in_file, left
        self._lock = threading.Lock()
        self._said = ""

    # --- what operators ask for -------------------------------------------------------------------------------------------------

    def begin(self, wanted: WantedMove, deadline: Deadline) -> ClusterMap:
        """Begin a plan; return the map with it.

        Raises:
            MoveRefusedError: another plan is under way.
            MapChangedError: the map is another than the one that the request was worked out from.
            InvalidInputError: the request names nodes that there are not.
            StorageError: a new node cannot be used; nothing was changed.
        """
        with self._lock:
            now = self._store.cluster_map
            _require_quiet(now)
            if now.version != wanted.version:
                raise MapChangedError(
                    f"the cluster map is of version {now.version}, the request was worked out from version {wanted.version}; nothing was "
                    "changed. Ask again."
                )
            nodes = wanted.slot_nodes
            planned = self._of_shards(now, wanted) if nodes is None else self._of_nodes(now, wanted, nodes, deadline)
            self._follow(planned)
            log.info("a move of slots begins (map version %d)", planned.version)
            return planned

    def _of_nodes(self, now: ClusterMap, wanted: WantedMove, slot_nodes: NDArray[np.uint16], deadline: Deadline) -> ClusterMap:
        places = self._places(now)
        joining = tuple(range(now.n_nodes, now.n_nodes + len(wanted.join)))
        _check(now, places, wanted, slot_nodes)
        for number, address in zip(joining, wanted.join, strict=True):
            self._store.prepare_node(address, number, self._metas(), deadline)
        plan = MovePlan(NODES, MOVING, slot_nodes, wanted.leave, joining, wanted.max_bytes_per_s)
        places = (*places, *(NodePlace(address, BY_COMMAND) for address in wanted.join))
        return replace(now, version=now.version + 1, n_nodes=len(places), places=places, plan=plan)

    def _of_shards(self, now: ClusterMap, wanted: WantedMove) -> ClusterMap:
        slot_shards = wanted.slot_shards
        assert slot_shards is not None
        if not now.n_nodes:
            raise MoveRefusedError(
                "on a Redis Cluster or Valkey Cluster shards do not join or leave while training goes on yet: save, make a cluster of "
                "another number of shards, load (docs/checkpoints.md); nothing was changed"
            )
        noted = now.shards or [NodePlace("", IN_FILE)] * now.n_shards
        places = tuple(place._replace(address=at) for place, at in zip(noted, now.shard_places(self._in_file), strict=True))
        joining = tuple(range(now.n_shards, now.n_shards + len(wanted.join_shards)))
        there, named = set(now.shard_numbers) | set(joining), set(np.unique(slot_shards).tolist())
        if not named <= there - set(wanted.leave_shards) or not set(wanted.leave_shards) <= there - {0}:
            raise InvalidInputError(
                f"slots for shards {sorted(named - there)}, and shards {sorted(wanted.leave_shards)} to leave: there are {sorted(there)}, "
                "and shard 0 stays, since it carries moves"
            )
        if again := {place.address for place in places} & set(wanted.join_shards) or len(set(wanted.join_shards)) < len(joining):
            raise InvalidInputError(f"shard {', '.join(wanted.join_shards)}: is one of the cluster's already, or stands twice ({again})")
        plan = MovePlan(SHARDS, MOVING, slot_shards, wanted.leave_shards, joining)
        places = (*places, *(NodePlace(address, BY_COMMAND) for address in wanted.join_shards))
        planned = replace(now, version=now.version + 1, n_shards=len(places), shards=places, plan=plan)
        if both := [shard for shard in there if planned.gives(shard).any() and planned.takes(shard).any()]:
            raise InvalidInputError(f"shards {both} would give slots and take others in one move; do it in two")
        return planned

    def abort(self, why: str) -> ClusterMap:
        """Take a plan back that is not flipped yet; return the map. Calling it again changes nothing.

        Raises:
            MoveRefusedError: there is none, or it is past the point from which it can only go on.
        """
        with self._lock:
            now = self._store.cluster_map
            if now.plan is None:
                raise MoveRefusedError("no move is under way")
            if now.plan.phase in (MOVING, DRAINING):
                self._abort(now, now.plan, why)
            elif now.plan.phase != ABORTING:
                raise MoveRefusedError(
                    "the slots have new nodes already: the move can only be brought to its end, which it does by itself. Move them back "
                    "then, if need be."
                )
            return self._store.cluster_map

    def replace_address(self, number: int, address: str, version: int, deadline: Deadline) -> ClusterMap:
        """Let a node that is gone for good be at another, empty address; the shards bring its rows back there, as after any loss.

        Raises:
            MoveRefusedError, MapChangedError, InvalidInputError: as `begin`.
            StorageError: the new one cannot be used; nothing was changed.
        """
        with self._lock:
            now = self._store.cluster_map
            _require_quiet(now)
            places = self._places(now)
            if now.version != version or not 0 <= number < now.n_nodes or places[number].said_by == GONE:
                raise MapChangedError(f"the cluster map is of version {now.version}; nothing was changed. Ask again.")
            _require_new(places, [address])
            self._store.require_empty(address, deadline)
            changed = tuple(NodePlace(address, BY_COMMAND) if at == number else place for at, place in enumerate(places))
            self._follow(replace(now, version=now.version + 1, places=changed))
            log.warning("node %d, which was at %s, is now at %s: its rows are brought back there", number, places[number].address, address)
            return self._store.cluster_map

    def left_session(self, shard: int, trainer: str, incarnation: int) -> int:
        """See `LeftSessions.find`."""
        return self._left.find(shard, trainer, incarnation)

    def reports(self, n_shards: int) -> list[MoveReport | None]:
        """Return what each shard said last of the map in force; None where its present process has said nothing."""
        version = self._store.cluster_map.version
        return [self._report(shard, version) for shard in range(n_shards)]

    # --- from phase to phase ----------------------------------------------------------------------------------------------------

    def carry(self) -> None:
        """Take the next step of the plan under way, if it can be taken."""
        with self._lock:
            now = self._store.cluster_map
            if now.plan is None:
                return
            self._publish(now)
            reports = self.reports(now.n_shards)
            troubles = [f"shard {shard}: {one.trouble}" for shard, one in enumerate(reports) if one is not None and one.trouble]
            if now.plan.phase in (MOVING, DRAINING) and troubles:
                self._abort(now, now.plan, troubles[0])
            elif all((one := reports[shard]) is not None and one.done for shard in _who_reports(now, now.plan)):
                self._next(now, now.plan)

    def _next(self, now: ClusterMap, plan: MovePlan) -> None:
        """Everybody whose report the phase takes has done his part."""
        after = _AFTER[plan.kind].get(plan.phase)
        renews = plan.renews_markers and after != SERVING  # no shard writes a marker of before the flip any more
        if renews and (missed := self._store.renew_markers(Deadline.after(self._timeout_s))):
            self._say(f"a move waits until every node's marker names the new map: {'; '.join(missed)}")
            return
        if plan.phase == DRAINING and not self._left.keep(plan.leaving, now.version, self._deadline()):
            return
        if after is None:
            self._end(now, plan)
        elif after == FLIPPED:
            self._flip(now, plan)
        else:
            self._follow(replace(now, version=now.version + 1, plan=replace(plan, phase=after)))

    def _flip(self, now: ClusterMap, plan: MovePlan) -> None:
        flipped = replace(now, version=now.version + 1, serial=now.serial + 1)
        if plan.kind == NODES:
            self._follow(replace(flipped, slot_nodes=plan.slot_owners, plan=replace(plan, phase=FLIPPED, slot_owners=now.slot_nodes)))
        else:
            self._follow(replace(flipped, slot_shards=plan.slot_owners, plan=replace(plan, phase=FLIPPED, slot_owners=now.slot_shards)))

    def _end(self, now: ClusterMap, plan: MovePlan) -> None:
        version, done = now.version + 1, plan.phase not in (MOVING, ABORTING)
        gone = plan.leaving if done else plan.joining
        places = _without(now.places, gone if plan.kind == NODES else ())
        shards = _without(now.shards, gone if plan.kind == SHARDS else ())
        self._follow(replace(now, version=version, places=places, shards=shards, plan=None))
        log.info("the move is %s (map version %d)", "done" if done else "taken back", version)

    def _abort(self, now: ClusterMap, plan: MovePlan, why: str) -> None:
        log.warning("the move is taken back: %s", why)
        if plan.kind == SHARDS and plan.phase == MOVING:  # nothing was taken over yet, and nobody waits
            self._end(now, plan)
            return
        self._follow(replace(now, version=now.version + 1, plan=replace(plan, phase=ABORTING, why=why[:MAX_WHY])))

    def _follow(self, cluster_map: ClusterMap) -> None:
        self._keep(cluster_map)
        self._publish(cluster_map)

    def _publish(self, cluster_map: ClusterMap) -> None:
        if missed := self._store.publish_map(cluster_map, Deadline.after(self._timeout_s)):
            self._say(f"nodes do not have the newest map yet: {'; '.join(missed)}")

    def _say(self, text: str) -> None:
        if text != self._said:
            log.warning("%s", text)
        self._said = text

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _report(self, shard: int, version: int) -> MoveReport | None:
        name = report_name(shard)
        try:
            report = newest_report(self._store.get_meta_where_possible(name, self._deadline()))
            if report is None or report.version != version:
                return None
            # Whoever claims a shard puts his record on every node before he begins: any of them will do.
            owner = newest_owner(self._store.get_meta_where_possible(owner_name(shard), self._deadline()), shard)
            return report if owner is not None and report.epoch == owner.epoch else None
        except KvembError as error:
            self._say(f"the reports of the shards cannot be read: {error}")
            return None

    def _deadline(self) -> Deadline:
        return Deadline.after(min(self._timeout_s, _LOOK_TIMEOUT_S))

    def _places(self, now: ClusterMap) -> tuple[NodePlace, ...]:
        """Where the nodes are, as this process knows it: kvemb.yaml may say something newer than the map."""
        known = self._store.places
        kept = now.places or tuple(NodePlace(address, IN_FILE) for address in known)
        return tuple(place if place.said_by == GONE else place._replace(address=known[at]) for at, place in enumerate(kept))


def _without(places: Sequence[NodePlace], gone: Sequence[int]) -> tuple[NodePlace, ...]:
    return tuple(NodePlace("", GONE) if at in gone else place for at, place in enumerate(places))


def _who_reports(now: ClusterMap, plan: MovePlan) -> list[int]:
    """The shards that must have done their part of the phase before it may end."""
    shards = now.shard_numbers
    if plan.kind == NODES or plan.phase in (MOVING, SERVING):
        return list(shards)
    judge = now.gives if plan.phase == FLIPPED else now.takes
    return [shard for shard in shards if judge(shard).any()]


def _require_quiet(now: ClusterMap) -> None:
    if now.plan is not None:
        raise MoveRefusedError(
            f"a move of {now.plan.kind} is under way (phase {now.plan.phase}); nothing was changed. `kvemb moves` shows how far it is, "
            "`kvemb moves abort` takes it back."
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
