"""The storage nodes' figures, as one shard saw them last: every shard reports them, so that no one shard need be up."""

from typing import get_args

from kvemb.coordination.markers import Why
from kvemb.metrics import MetricFamilies
from kvemb.stores.store import NodeStats

from ..repair.node_watch import NodesSeen

MARKER_STATES = ("whole", *get_args(Why), "unknown")


def add_nodes(to: MetricFamilies, seen: NodesSeen) -> None:
    """Add what is known of the nodes; of one that does not answer only that."""
    nodes = [({"node": node.address}, node) for node in seen.stats]
    answered = [(labels, node) for labels, node in nodes if not node.error]
    limited = [(labels, node) for labels, node in answered if node.limit_bytes]
    to.gauge("kvemb_node_up", "Whether the node answered this shard.", [(labels, not node.error) for labels, node in nodes])
    to.gauge("kvemb_node_keys", "Keys that the node holds.", [(labels, node.n_keys) for labels, node in answered])
    to.gauge("kvemb_node_used_bytes", "Memory that the node says it uses.", [(labels, node.used_bytes) for labels, node in answered])
    to.gauge("kvemb_node_limit_bytes", "Memory that it may use.", [(labels, node.limit_bytes) for labels, node in limited])
    free = [(labels, max(0, node.limit_bytes - node.used_bytes)) for labels, node in limited]
    to.gauge("kvemb_node_headroom_bytes", "Memory of it that is free.", free)
    to.counter("kvemb_node_evicted_total", "Keys that the node has thrown away.", [(labels, node.evicted) for labels, node in answered])
    to.counter("kvemb_node_moved_total", "Those that went with slab pages.", [(labels, node.moved) for labels, node in answered])
    text = "Whether the node is set to throw rows away, which is not allowed."
    to.gauge("kvemb_node_unsafe", text, [(labels, bool(node.unsafe)) for labels, node in answered])
    text = "How long the node took, with the connection, to say all this."
    to.gauge("kvemb_node_answer_seconds", text, [(labels, node.answer_s) for labels, node in answered])
    text = "Slots that still have to move for a change of nodes that a command has begun, on a Redis Cluster."
    to.gauge("kvemb_nodes_slots_left", text, seen.slots_left)
    states = [({**labels, "state": state}, state == _marker(node, seen)) for labels, node in nodes for state in MARKER_STATES]
    to.gauge("kvemb_node_marker_state", "1 for the state that the node's marker is in.", states)


def _marker(node: NodeStats, seen: NodesSeen) -> str:
    return seen.lost.get(node.address, "unknown" if node.error or not seen.known else "whole")
