"""Plans of changes of a cluster's nodes: which slots would move, and whether every node has the room. Nothing is changed here.

Slots are dealt to nodes as everywhere (`kvemb.schema.slot_dealing`), by the memory that slots take.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ConfigError, InvalidInputError, NodeFullError, NodeUnavailableError, StorageError, n_of
from kvemb.net.deadline import Deadline
from kvemb.schema.move_plan import NODES
from kvemb.schema.slot_dealing import SlotPlan, SlotSizes, deal, kept_shares, shares_of
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.node_change import CHANGE_NAME, ChangeKind, NodeChange
from kvemb.stores.redis_cluster.scaling.admin_links import AdminLinks, slot_loads
from kvemb.stores.redis_cluster.scaling.cluster_nodes import ClusterNode, ClusterView
from kvemb.stores.redis_cluster.scaling.node_membership import NodeMembership
from kvemb.stores.redis_server import redis_admin
from kvemb.stores.redis_server.redis_login import RedisAccess


@dataclass(frozen=True)
class NodeFigures:
    """A primary as `ScalingPlanner.show` returns it: its address, slots, bytes of rows, memory used and allowed, number of replicas."""

    address: str
    n_slots: int
    row_bytes: int
    used_bytes: int
    limit_bytes: int
    n_replicas: int
    failed: bool


class ScalingPlanner:
    """Plans changes of nodes. One thread."""

    def __init__(self, links: AdminLinks, access: RedisAccess, values: ClusterValues, membership: NodeMembership) -> None:
        self._links, self._access, self._values, self._membership = links, access, values, membership
        self._config = access.config
        self.known: tuple[str, ...] = self._config.nodes

    def show(self) -> list[NodeFigures]:
        """Return the figures of every primary."""
        view = self.view()
        loads = slot_loads(self._links, view, self._config.timeout_s)
        return [self._figures(node, view, loads) for node in view.primaries]

    def traffic_bytes(self) -> dict[str, int]:
        """Return the bytes that each primary has received and sent since it started, for those that answer."""
        found = {}
        for node in self.view().primaries:
            with suppress(StorageError):
                found[node.address] = redis_admin.traffic_bytes(
                    node.address, redis_admin.info(node.address, self._access, self._deadline())
                )
        return found

    def under_way(self) -> NodeChange | None:
        """Return the change that is under way, None for none."""
        data = self._values.one(CHANGE_NAME, self._deadline())
        return None if data is None else NodeChange.decode(data)

    def add(self, address: str) -> SlotPlan[NodeChange]:
        """Plan that a server joins, and gets its part of all others' slots."""
        view, name = self._for_newcomer(address)
        return self._plan("add", view, address, joining=name)

    def remove(self, address: str) -> SlotPlan[NodeChange]:
        """Plan that a node gives its slots away, and leaves."""
        view = self._settled_view()
        node = self._primary(view, address)
        if len(view.primaries) == 1:
            raise InvalidInputError(f"node {address}: is the only one; its rows have nowhere to go")
        self._require_no_replicas(view, node)
        return self._plan("remove", view, leaving=node.name)

    def replace(self, old: str, new: str) -> SlotPlan[NodeChange]:
        """Plan that a server takes the place of a node, which leaves."""
        view, name = self._for_newcomer(new)
        node = self._primary(view, old)
        self._require_no_replicas(view, node)
        if view.n_slots(name):
            raise InvalidInputError(f"node {new}: holds slots already; remove {old} instead: the others take over what it has")
        return self._plan("replace", view, new, joining=name, leaving=node.name)

    def rebalance(self, weights: Mapping[str, float] | None = None) -> SlotPlan[NodeChange]:
        """Plan that every node gets its share of the rows: by weights, 1 for a node without one."""
        view = self._settled_view()
        return self._plan("rebalance", view, shares=shares_of(NODES, dict(enumerate(n.address for n in view.primaries)), {}, (), weights))

    # --- inside: planning -------------------------------------------------------------------------------------------------------

    def _plan(
        self,
        kind: ChangeKind,
        view: ClusterView,
        address: str = "",
        *,
        joining: str = "",
        leaving: str = "",
        shares: Mapping[int, float] | None = None,
    ) -> SlotPlan[NodeChange]:
        names = tuple(dict.fromkeys([*(node.name for node in view.primaries), *([joining] if joining else [])]))
        before, loads = owners_among(view, names).astype(np.uint16), slot_loads(self._links, view, self._config.timeout_s)
        number = {name: index for index, name in enumerate(names)}
        if kind == "replace":
            after = np.where(before == number[leaving], number[joining], before).astype(np.uint16)
        else:
            after = deal(before, loads, shares or kept_shares(before, loads, [*number.values()], number.get(joining), number.get(leaving)))
        owners = before.astype(np.int64), after.astype(np.int64)
        change = NodeChange(kind, joining, leaving, names, *owners, aborting=False, holder=new_holder())
        leave = (view.nodes[leaving].address,) if leaving else ()
        plan = SlotPlan(NODES, change, before, after, SlotSizes(np.zeros_like(loads), loads), (address,) if address else (), leave)
        self._require_room(plan, view)
        return plan

    def _require_room(self, plan: SlotPlan[NodeChange], view: ClusterView) -> None:
        """Refuse a change for which a node has not the memory."""
        for number, name in enumerate(plan.basis.names):
            address = plan.join[0] if name == plan.basis.joining else view.nodes[name].address
            coming = int(plan.sizes.record_bytes[plan.moving & (plan.after == number)].sum())
            if not coming:
                continue
            fields = redis_admin.info(address, self._access, self._deadline())
            used, limit = (redis_admin.number_in(address, fields, field) for field in ("used_memory", "maxmemory"))
            if limit and used + coming > limit:
                raise NodeFullError(
                    f"node {address}: has {(limit - used) / 1e6:,.0f} MB left and would be given about {coming / 1e6:,.0f} MB. Nothing was "
                    "changed. Raise its maxmemory, add another node first, or give it a smaller weight."
                )

    def _for_newcomer(self, address: str) -> tuple[ClusterView, str]:
        view = self._settled_view()
        self._membership.require_fit(address, view)
        name = self._membership.name_at(address)
        if view.n_slots(name):
            raise ConfigError(
                f"node {address}: is in the cluster already, with {n_of(view.n_slots(name), 'slot')}; `rebalance` changes its share"
            )
        return view, name

    def _settled_view(self) -> ClusterView:
        """The cluster, when no change is under way and every slot has an owner."""
        view = self.view()
        if view.open_slots:
            slots = ", ".join(str(state.slot) for state in view.open_slots[:5])
            raise ConfigError(
                f"slots stand open between nodes ({slots}): a change was broken off. Both nodes serve them together, no row is missing. "
                "`kvemb moves resume` goes on with the change, `kvemb moves abort` gives every slot back."
            )
        if "" in view.owners:
            raise NodeUnavailableError(f"slot {view.owners.index('')} has no primary (`CLUSTER INFO` tells more). Nothing was changed.")
        if not any(node.failed for node in view.primaries) and self.under_way() is not None:  # one that is down tells nothing
            raise ConfigError(
                "a change of nodes is under way already; nothing was changed. `kvemb moves` shows it, `kvemb moves resume` goes on with "
                "it, `kvemb moves abort` gives every slot back; either takes it over from a command that still runs."
            )
        return view

    def _primary(self, view: ClusterView, address: str) -> ClusterNode:
        node = view.at(address)
        if node is None or not node.is_primary:
            raise InvalidInputError(f"node {address}: is no primary; those are {', '.join(n.address for n in view.primaries)}")
        return node

    def _require_no_replicas(self, view: ClusterView, node: ClusterNode) -> None:
        if followers := [replica.address for replica in view.replicas_of(node.name)]:
            raise ConfigError(
                f"node {node.address}: is followed by {', '.join(followers)}. Let them follow another (CLUSTER REPLICATE on each), or "
                "take them away, first. Nothing was changed."
            )

    def _figures(self, node: ClusterNode, view: ClusterView, loads: NDArray[np.uint64]) -> NodeFigures:
        used = limit = 0
        failed = node.failed
        try:
            fields = redis_admin.info(node.address, self._access, self._deadline())
            used, limit = (redis_admin.number_in(node.address, fields, field) for field in ("used_memory", "maxmemory"))
        except StorageError:
            failed = True
        mine = np.array([owner == node.name for owner in view.owners])
        return NodeFigures(node.address, int(mine.sum()), int(loads[mine].sum()), used, limit, len(view.replicas_of(node.name)), failed)

    def view(self) -> ClusterView:
        """Return the cluster as it is now."""
        view = self._links.view((*self.known, *self._config.nodes))
        self.known = tuple(node.address for node in view.primaries if not node.failed)
        return view

    def _deadline(self) -> Deadline:
        return Deadline.after(self._config.timeout_s)


def owners_among(view: ClusterView, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the number of each slot's owner among names: int64 [16384], -1 for an owner that is not among them."""
    number = {name: index for index, name in enumerate(names)}
    owners: NDArray[np.int64] = np.array([number.get(owner, -1) for owner in view.owners], dtype=np.int64)
    assert len(owners) == N_SLOTS
    return owners


def new_holder() -> str:
    """Draw the name of a command that carries a change out."""
    return os.urandom(8).hex()
