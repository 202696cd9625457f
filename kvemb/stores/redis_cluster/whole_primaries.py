"""The list of primaries that are known to hold all of their rows, as one store knows it; `cluster_members` says what the list means."""

from collections.abc import Mapping
from typing import Any

from kvemb.errors import NodeSuspectError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.stores.redis_cluster.cluster_members import MEMBERS, decode_members, encode_members, process_of
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_server import redis_admin
from kvemb.stores.redis_server.redis_commands import RedisAccess

_MAX_TRIES = 100


class WholePrimaries:
    """Knows the whole primaries; connections for rows lead to no others.

    Args:
        access: how servers are reached.
        values: where the list lies.
    """

    def __init__(self, access: RedisAccess, values: ClusterValues) -> None:
        self._access, self._values = access, values
        self._checks = False
        self.known: frozenset[str] = frozenset()

    def check_from_now_on(self) -> None:
        """New connections are checked: the store knows which cluster it is to see."""
        self._checks = True

    def read(self, deadline: Deadline) -> frozenset[str]:
        """Return the list as it stands in the cluster."""
        return decode_members(self._values.get(MEMBERS, deadline))

    def has(self, process: str, deadline: Deadline) -> bool:
        """Whether a primary, whose markers were read just now, is on the list.

        That is read after its markers, since a repair that ends puts it on the list before it renews them.
        """
        if process not in self.known:
            self.known |= self.read(deadline)
        return process in self.known

    def admit(self, processes: set[str], deadline: Deadline) -> None:
        """Put processes on the list."""
        for _ in range(_MAX_TRIES):
            data = self._values.get(MEMBERS, deadline)
            members = decode_members(data)
            self.known |= processes
            if processes <= members or self._values.swap(MEMBERS, data, encode_members(members | processes), deadline):
                return
        raise ProtocolError(f"{MEMBERS} changed {_MAX_TRIES} times while it was to be written")

    def require(self, address: str, fields: Mapping[str, Any], deadline: Deadline) -> None:
        """Refuse a primary that is not on the list, by its INFO. A replica holds no rows: it answers MOVED.

        Raises:
            NodeSuspectError: it is not.
        """
        if fields.get("role") == "master" and not self.has(process_of(fields), deadline):
            raise NodeSuspectError(
                f"node {address}: this server process has not held these rows before: it was restarted, or was a replica that may have "
                "lagged behind. Its rows may be old until the parameter servers have compared them."
            )

    def check(self, link: Link, deadline: Deadline) -> None:
        """Look at a new connection: it may lead to a primary that was a replica a moment ago, or was restarted."""
        if not self._checks:
            return
        fields = redis_admin.info(link.address, self._access, deadline)
        if fields["run_id"] != link.run_id:
            raise NodeUnavailableError(f"node {link.address}: was started again while a connection was made. Try again.")
        redis_admin.require_safe(link.address, fields, self._access.config)
        self.require(link.address, fields, deadline)
