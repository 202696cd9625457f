"""Which server processes of a Redis Cluster are known to hold all of their rows.

Markers of slots move with their slots, so they cannot say which process they were written for. Instead the cluster keeps a list of its
whole primaries as a small value: those that were empty when it was provisioned, and those whose rows the shards have compared since. A
primary that is not on it was restarted from a snapshot, or was a replica that may have lagged behind: its rows are suspect.

A process is named by its run id and by the replication history that it took over when it was promoted. The same process may be demoted, and
promoted again with other rows. (A server forgets that history an hour after its last replica has left, which changes nothing here: the run
id alone then stands for it.)
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack

from kvemb.errors import NodeSuspectError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_server import redis_admin
from kvemb.stores.redis_server.redis_login import RedisAccess

log = logging.getLogger("kvemb")
MEMBERS = "kvemb:primaries"
_HISTORY_CHARACTERS = 16


class WholePrimaries:
    """Knows the whole primaries; connections for rows lead to no others."""

    def __init__(self, access: RedisAccess, values: ClusterValues) -> None:
        self._access, self._values = access, values
        self._checks = False
        self.known: frozenset[str] = frozenset()

    def check_from_now_on(self) -> None:
        """New connections are checked: the store knows which cluster it is to see."""
        self._checks = True

    def read(self, deadline: Deadline) -> frozenset[str]:
        """Return the list as it stands in the cluster."""
        return decode_members(self._values.one(MEMBERS, deadline))

    def has(self, process: str, deadline: Deadline) -> bool:
        """Whether a primary, whose markers were read just now, is on the list.

        That is read after its markers, since a repair that ends puts it on the list before it renews them.
        """
        if process not in self.known:
            self.known |= self.read(deadline)
        return process in self.known

    def admit(self, processes: set[str], deadline: Deadline) -> None:
        """Put processes on the list."""
        self.known |= processes
        self._values.cell(MEMBERS, deadline).update(lambda data: _with_members(data, processes))

    def require(self, address: str, fields: Mapping[str, Any], deadline: Deadline) -> None:
        """Refuse a primary that is not on the list, by its INFO. A replica holds no rows: it answers MOVED."""
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


def process_of(info: Mapping[str, object]) -> str:
    """Name a server process, from its INFO."""
    history = str(info.get("master_replid2", "0"))[:_HISTORY_CHARACTERS]
    return str(info["run_id"]) + (f":{history}" if history.strip("0") else "")


def run_id_in(process: str) -> str:
    """The run id in a process's name."""
    return process.partition(":")[0]


def encode_members(processes: Iterable[str]) -> bytes:
    """The bytes of the list."""
    packed: bytes = msgpack.packb(sorted(processes))
    return packed


def decode_members(data: bytes | None) -> frozenset[str]:
    """Read the list; one that is missing or damaged is empty: every primary is compared then, and put on a new list."""
    if data is None:
        return frozenset()
    try:
        processes = msgpack.unpackb(data, max_array_len=1 << 16, max_map_len=0, max_str_len=64)
        if not isinstance(processes, list) or not all(isinstance(process, str) for process in processes):
            raise ValueError("no list of texts")
    except Exception as error:
        log.error("the value under the key %s is damaged, or another program's: %s; got %r", MEMBERS, error, data[:40])
        return frozenset()
    return frozenset(processes)


def _with_members(data: bytes | None, processes: set[str]) -> bytes | None:
    """The list with these on it; None where they are."""
    members = decode_members(data)
    return None if processes <= members else encode_members(members | processes)
