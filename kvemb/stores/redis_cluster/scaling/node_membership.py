"""How a server becomes a node of a cluster, and how it stops being one. No slots are moved here."""

import time
from collections.abc import Sequence

from kvemb.errors import ConfigError, DeadlineExceededError, KvembError, NodeUnavailableError, WrongNodeError, n_of
from kvemb.net.deadline import Deadline
from kvemb.stores.redis_cluster.scaling.admin_links import AdminLinks
from kvemb.stores.redis_cluster.scaling.cluster_nodes import ClusterNode, ClusterView, parse_nodes
from kvemb.stores.redis_cluster.whole_primaries import WholePrimaries, process_of
from kvemb.stores.redis_server import redis_admin
from kvemb.stores.redis_server.redis_login import RedisAccess
from kvemb.stores.redis_server.stored_rows import read_limits, set_limits

_MEET_S = 30.0  # gossip takes seconds
_PAUSE_S = 0.05


class NodeMembership:
    """Lets nodes join and leave."""

    def __init__(self, links: AdminLinks, access: RedisAccess, whole: WholePrimaries) -> None:
        self._links, self._access, self._whole = links, access, whole

    def require_fit(self, address: str, view: ClusterView) -> None:
        """Refuse a server that cannot join as it is; nothing is changed."""
        fields = redis_admin.info(address, self._access, self._deadline())
        if fields.get("cluster_enabled") != "1":
            raise ConfigError(f"node {address}: is a server of its own; start it with cluster-enabled yes")
        redis_admin.require_safe(address, fields, self._access.config)
        told = self._told(address)
        (itself,) = [node for node in told if "myself" in node.flags]
        member = itself.name in view.nodes
        if not itself.is_primary:
            raise ConfigError(f"node {address}: is a replica; only a primary can be given slots")
        if not member and (len(told) > 1 or itself.slots.any()):
            others = ", ".join(node.address for node in told if node is not itself) or "itself alone"
            n_keys, n_slots = redis_admin.number_in(address, fields, "n_keys"), int(itself.slots.sum())
            has = f"{n_of(n_slots, 'slot')} and {n_of(n_keys, 'key')}"
            raise WrongNodeError(
                f"node {address}: is in a Redis Cluster with {others}, with {has}. Nothing was changed. "
                f"{'Give another server.' if n_slots or n_keys else 'CLUSTER RESET there takes it out of that one.'}"
            )
        if not view.n_slots(itself.name) and redis_admin.number_in(address, fields, "n_keys"):
            holds = n_of(int(fields["n_keys"]), "key")
            raise ConfigError(f"node {address}: holds {holds}. Nothing was changed. Only an empty server can join: give another")

    def name_at(self, address: str) -> str:
        """The name of the node at an address."""
        (itself,) = [node for node in self._told(address) if "myself" in node.flags]
        return itself.name

    def join(self, address: str, view: ClusterView) -> str:
        """Make a server a node that all others know, before it is given slots; return its name. May be called again."""
        name = self.name_at(address)
        there = [node for node in view.primaries if not node.failed and node.name != name]
        for node in there:  # each introduced to all others, instead of the seconds that gossip would take
            self._links.ask(address, "CLUSTER", "MEET", node.host, node.port, node.bus_port)
        deadline = Deadline.after(_MEET_S)
        all_well = not any(node.failed for node in view.primaries)
        everybody = {node.name for node in there} | {name}
        for one in [address, *(node.address for node in there)]:
            while not self._ready(one, everybody, all_well):
                if deadline.expired:
                    raise DeadlineExceededError(
                        f"node {address}: the cluster's nodes did not come to know it in {_MEET_S:g} s (node {one} does not). Are the "
                        "ports of their bus open? No slot was moved. Try again, or CLUSTER RESET on it undoes the meeting."
                    )
                time.sleep(_PAUSE_S)
        if there:
            limits = read_limits(there[0].address, self._access, self._deadline())
            if limits != read_limits(address, self._access, self._deadline()):
                set_limits(address, self._access, limits, self._deadline())
        return name

    def admit(self, address: str) -> None:
        """Note that an empty node has lost nothing: without, trainers would wait for the shards to compare the rows that it is given."""
        fields = redis_admin.info(address, self._access, self._deadline())
        self._whole.admit({process_of(fields)}, self._deadline())

    def leave(self, name: str, view: ClusterView) -> list[str]:
        """Let a node without slots and all others forget each other; return failures, in words.

        A node that does not answer is forgotten all the same; of one that the cluster calls failed no answer is expected.
        """
        trouble = []
        leaving = view.nodes.get(name)
        if leaving is not None and not leaving.failed:
            trouble += self._tried(leaving.address, "CLUSTER", "RESET", "SOFT")
        for node in view.nodes.values():
            if node.name != name and not node.failed:
                trouble += self._tried(node.address, "CLUSTER", "FORGET", name)
        return trouble

    def _tried(self, address: str, *words: str) -> list[str]:
        try:
            self._links.ask(address, *words)
        except KvembError as error:
            if "Unknown node" not in str(error):
                return [f"{' '.join(words[:2])} on node {address}: {error}"]
        return []

    def _ready(self, address: str, names: set[str], all_well: bool) -> bool:
        try:
            told = self._told(address)
        except NodeUnavailableError:
            return False
        if not names <= {node.name for node in told if node.known and not {"fail?", "fail"} & node.flags}:
            return False
        state = self._links.ask(address, "CLUSTER", "INFO")  # until then it refuses keys
        return not all_well or (isinstance(state, bytes) and b"cluster_state:ok" in state)

    def _told(self, address: str) -> Sequence[ClusterNode]:
        answer = self._links.ask(address, "CLUSTER", "NODES")
        return parse_nodes(answer.decode("utf-8", "replace") if isinstance(answer, bytes) else "?", address)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._access.config.timeout_s)
