"""Nodes of a Redis Cluster or Valkey Cluster join, leave, are replaced and given other shares, while training goes on.

The change that is under way is kept in the cluster itself (`node_change`). So if a command is killed, the next one can finish its
change (`resume`) or take it back (`abort`). One change at a time. A few slots move at once (`redis_slot_mover`); before each group, a
command looks whether another has taken its change over. Replicas are the operator's: they follow the slots of their primary.

Example:
    >>> from kvemb.config import StorageConfig
    >>> from kvemb.stores.redis_cluster.scaling.node_scaling import NodeScaling
    >>> with NodeScaling(StorageConfig("redis-cluster", ("10.0.0.1:6379",))) as nodes:  # doctest: +SKIP
    ...     plan = nodes.plans.add("10.0.0.4:6379")
    ...     nodes.carry_out(plan, progress=print)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import ConfigError, InvalidInputError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.pool import Doubts, LinkPool
from kvemb.net.tls_link import connector_of
from kvemb.schema.slot_dealing import SlotPlan
from kvemb.stores.read_retry import ReadRetry
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.node_change import CHANGE_NAME, NodeChange
from kvemb.stores.redis_cluster.primary_links import PrimaryConnector
from kvemb.stores.redis_cluster.scaling.admin_links import LEAST_LOAD, AdminLinks, slot_loads
from kvemb.stores.redis_cluster.scaling.cluster_nodes import ClusterNode, ClusterView, OpenSlot
from kvemb.stores.redis_cluster.scaling.key_migration import MigrationPace
from kvemb.stores.redis_cluster.scaling.node_membership import NodeMembership
from kvemb.stores.redis_cluster.scaling.redis_slot_mover import RedisSlotMover
from kvemb.stores.redis_cluster.scaling.scaling_plans import ScalingPlanner, new_holder
from kvemb.stores.redis_cluster.slot_map import ClusterTopology
from kvemb.stores.redis_cluster.whole_primaries import WholePrimaries
from kvemb.stores.redis_server.redis_login import RedisAccess

_ROLE = "nodes"
_PATIENCE_S = 30.0  # of a person, while the cluster has other things to do
_LEAST_TIMEOUT_S = 10.0  # of one answer: a batch of training gives a busy node up sooner than a command need
_AT_ONCE = 16  # slots with rows that stand open together
_EMPTY_AT_ONCE = 256  # empty slots: only their marker is asked for, and each group waits for servers' disks
Progress = Callable[[str, int, int], None]
"""Told what is going on, and how many bytes of how many have moved, about."""


class NodeScaling:
    """Changes the nodes of a cluster; a context manager. One thread.

    Attributes:
        plans: plans changes, and reads the cluster as it is.
    """

    def __init__(self, config: StorageConfig, *, max_mb_per_s: float | None = None) -> None:
        if max_mb_per_s is not None and not max_mb_per_s > 0:
            raise InvalidInputError(f"max_mb_per_s is {max_mb_per_s!r}; give a number above 0")
        config = replace(config, timeout_s=max(config.timeout_s, _LEAST_TIMEOUT_S))
        self._config, self._access = config, RedisAccess(config, connector_of(config.tls))
        connector = PrimaryConnector(self._access, _ROLE, OwnerFence())
        self._pool = LinkPool(connector.connect, connector.dropped, Doubts())
        self._values = ClusterValues(ClusterTopology(self._access), self._pool, ReadRetry(_ROLE, "wait"))
        self._links = AdminLinks(self._access)
        self._membership = NodeMembership(self._links, self._access, WholePrimaries(self._access, self._values))
        self._pace = MigrationPace(None if max_mb_per_s is None else max_mb_per_s * 1e6)
        self._mover = RedisSlotMover(self._links, self._access, self._pace)
        self.plans = ScalingPlanner(self._links, self._access, self._values, self._membership)

    def __enter__(self) -> "NodeScaling":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._links.__exit__(kind, error, trace)
        self._pool.close()

    def n_left(self, change: NodeChange) -> int:
        """Return how many slots still have to move for a change."""
        return change.left(self.plans.view().owners)

    def carry_out(self, plan: SlotPlan[NodeChange], progress: Progress | None = None) -> list[str]:
        """Carry a plan out. It is done when this returns. Returns advice for the operator, in words.

        Raises:
            ConfigError: a change is under way already; nothing was changed.
        """
        change = plan.basis
        for address in plan.join:
            joined = self._membership.join(address, self.plans.view())
            assert joined == change.joining
            view = self.plans.view()
            if change.kind == "replace" and view.nodes[change.leaving].failed:
                return self._replace_dead(change, view)
            self._membership.admit(address)
        if not self._values.swap(CHANGE_NAME, None, change.encode(), self._deadline()):
            raise ConfigError("a change of nodes is under way already: `kvemb moves` shows it. This one was not begun.")
        return self._go_on(change, progress, plan.sizes.record_bytes)

    def resume(self, progress: Progress | None = None) -> list[str]:
        """Go on with the change that is under way, of any command; without one, close slots that stand open. As `carry_out`."""
        return self._take_over(progress, abort=False)

    def abort(self, progress: Progress | None = None) -> list[str]:
        """Take the change back: every slot returns to its former node, and a node that was to join leaves. As `carry_out`."""
        return self._take_over(progress, abort=True)

    # --- inside: carrying out ---------------------------------------------------------------------------------------------------

    def _replace_dead(self, change: NodeChange, view: ClusterView) -> list[str]:
        """Give a dead node's slots to another without keys: the shards bring its rows back there, as they do for one that came back empty.

        Nothing of it is kept in the cluster, which takes no value while slots have no owner: the newcomer has all slots at once.
        """
        newcomer, slots = view.nodes[change.joining], np.flatnonzero(change.before != change.after).tolist()
        self._mover.claim(slots, newcomer, [node for node in view.primaries if not node.failed])
        return [
            *self._membership.leave(change.leaving, view),
            "the shards are bringing the rows of the dead node back on the new one; `kvemb status` shows how far they are",
        ]

    def _take_over(self, progress: Progress | None, *, abort: bool) -> list[str]:
        data = self._values.one(CHANGE_NAME, self._deadline())
        if data is None:
            return self._close_strays()
        change = NodeChange.decode(data)
        change = replace(change, holder=new_holder(), aborting=abort or change.aborting)
        if not self._values.swap(CHANGE_NAME, data, change.encode(), self._deadline()):
            raise ConfigError("another command has just taken the change of nodes over. This one has changed nothing.")
        return self._go_on(change, progress)

    def _close_strays(self) -> list[str]:
        """Close open slots that are of no change of ours."""
        view = self.plans.view()
        loads = slot_loads(self._links, view, self._config.timeout_s)
        for states in _alike({state.slot: state for state in view.open_slots}, view, loads):
            for holder, slots in self._close(states, view):
                self._mover.drop_witnesses(slots, holder)
        return [f"{len(view.open_slots)} slots stood open; no change of nodes was under way"] if view.open_slots else []

    def _go_on(self, change: NodeChange, progress: Progress | None, loads: NDArray[np.uint64] | None = None) -> list[str]:
        view = self.plans.view()
        if loads is None:
            loads = slot_loads(self._links, view, self._config.timeout_s)
        going, total = np.flatnonzero(change.before != change.after), float(loads[change.before != change.after].sum())
        leaver = view.nodes.get(change.joining if change.aborting else change.leaving)
        if leaver is not None and not leaver.failed:
            # Without its last slot it would follow that slot's new node, and copy all of its rows, a moment before it leaves.
            self._links.run(leaver.address, [("CONFIG", "SET", "cluster-allow-replica-migration", "no")], self._config.timeout_s)
        done, what = 0.0, "moving back" if change.aborting else "moving"
        for group in self._groups(going, change, view, loads):
            self._require_ours(change)
            self._bring_home(group, change, view)
            done += float(loads[group].sum())
            if progress is not None:
                progress(what, int(done), int(total))
        return self._end(change, going)

    def _groups(self, going: NDArray[np.int64], change: NodeChange, view: ClusterView, loads: NDArray[np.uint64]) -> Iterator[list[int]]:
        """Slots that can be moved at once: a few, from one node to another. Those that stand open come first, in the same way."""
        standing = {state.slot: state for state in view.open_slots if change.before[state.slot] != change.after[state.slot]}
        yield from ([state.slot for state in states] for states in _alike(standing, view, loads, change))
        alike: dict[tuple[str, str, int], list[int]] = {}
        for slot in going.tolist():
            if slot not in standing:
                alike.setdefault((view.owners[slot], change.names[int(change.goal[slot])], _at_once(slot, loads)), []).append(slot)
        while alike:  # in turns, so that no node's clients have all of it at once
            for kind, slots in list(alike.items()):
                yield slots[: kind[2]]
                alike[kind] = slots[kind[2] :]
                if not alike[kind]:
                    del alike[kind]

    def _bring_home(self, slots: list[int], change: NodeChange, view: ClusterView) -> None:
        """Bring slots to the nodes that the change gives them, from any state of their move."""
        goal, owner_name = change.names[int(change.goal[slots[0]])], view.owners[slots[0]]
        owner, target = view.nodes.get(owner_name), view.nodes.get(goal)
        if owner is None or target is None:
            missing = goal if target is None else owner_name or "nobody"
            raise NodeUnavailableError(f"slot {slots[0]}: its node {missing} is not in the cluster any more; abort the change, or mend it")
        states = {state.slot: state for state in view.open_slots}
        standing = [states[slot] for slot in slots if slot in states]
        for holder, held in self._close(standing, view) if standing else [(owner, slots)]:
            if holder.name != goal:
                self._mover.move(held, holder, target, view.primaries)

    def _close(self, states: Sequence[OpenSlot], view: ClusterView) -> list[tuple[ClusterNode, list[int]]]:
        """Close open slots that are alike, so that one node alone has each; return which node has which."""
        slots, one = [state.slot for state in states], states[0]
        owner, target = view.nodes.get(view.owners[one.slot]), view.nodes.get(one.target)
        if owner is None:
            raise NodeUnavailableError(f"slot {one.slot} stands open, and no node holds it; CLUSTER NODES tells more")
        if target is None or target.failed:
            self._mover.give_up(slots, owner)
            return [(owner, slots)]
        if target.name == owner.name:  # only some nodes had not been told
            self._mover.settle(slots, owner, view.primaries)
            return [(owner, slots)]
        unused = [] if one.leaving else [slot for slot in slots if self._mover.close_unused(slot, owner, target)]
        used = [slot for slot in slots if slot not in unused]
        if used:
            self._mover.move(used, owner, target, view.primaries, one)
        return [(node, held) for node, held in ((owner, unused), (target, used)) if held]

    def _end(self, change: NodeChange, going: NDArray[np.int64]) -> list[str]:
        view, trouble = self.plans.view(), []
        for node in view.primaries:
            self._mover.drop_witnesses([slot for slot in going.tolist() if view.owners[slot] == node.name], node)
        leaver = change.joining if change.aborting else change.leaving
        if leaver and not view.n_slots(leaver):
            trouble = self._membership.leave(leaver, view)
        self.plans.known = tuple(node.address for node in view.primaries if node.name != leaver)
        self._values.drop(CHANGE_NAME, self._deadline())
        return trouble

    def _require_ours(self, change: NodeChange) -> None:
        found = self.plans.under_way()
        if found is None or found.holder != change.holder:
            raise ConfigError("another command has taken this change of nodes over, or ended it; this one has stopped.")

    def _deadline(self) -> Deadline:
        return Deadline.after(max(_PATIENCE_S, self._config.timeout_s))


def _at_once(slot: int, loads: NDArray[np.uint64]) -> int:
    return _AT_ONCE if loads[slot] > LEAST_LOAD else _EMPTY_AT_ONCE


def _alike(
    standing: Mapping[int, OpenSlot], view: ClusterView, loads: NDArray[np.uint64], change: NodeChange | None = None
) -> Iterator[list[OpenSlot]]:
    """Group slots that stand open, by their numbers: those between the same nodes, in the same way and with the same goal."""
    groups: dict[tuple[int, str, str, str, bool, int], list[OpenSlot]] = {}
    for slot, state in standing.items():
        goal = -1 if change is None else int(change.goal[slot])
        kind = _at_once(slot, loads), view.owners[slot], state.source, state.target, state.leaving, goal
        groups.setdefault(kind, []).append(state)
    for (at_once, *_), states in groups.items():
        yield from (states[first : first + at_once] for first in range(0, len(states), at_once))
