"""Administration of Redis and Valkey: INFO, settings that may lose rows, and what operators see of a server."""

from collections.abc import Mapping

from kvemb.config import StorageConfig
from kvemb.errors import ProtocolError, UnsafeNodeError
from kvemb.net.deadline import Deadline
from kvemb.stores.redis_server.acl_users import SHARD, TRAINER, require_commands, unknown_commands
from kvemb.stores.redis_server.redis_commands import ask, ask_all, number_of
from kvemb.stores.redis_server.redis_login import RedisAccess, fields_of, logged_in
from kvemb.stores.store_nodes import NodeStats

CLIENT_LIMITS = ("client-output-buffer-limit", "maxmemory-clients")
"""Settings by which a server closes the connections of clients that have much to read."""
LACKS = "commands that it does not know"
"""Of `settings`: those that shards need."""


def info(address: str, access: RedisAccess, deadline: Deadline) -> dict[str, str]:
    """Return the server's INFO, and its number of keys as "n_keys"."""
    with logged_in(address, access, deadline) as link:
        fields = fields_of(link, deadline, "everything")
        fields["n_keys"] = str(number_of(link, ask(link, deadline, "DBSIZE"), "DBSIZE"))
    for name in ("run_id", "redis_version", "used_memory"):
        if name not in fields:
            raise ProtocolError(f"node {address}: INFO without {name}; is this a Redis or Valkey server?")
    return fields


def settings(address: str, access: RedisAccess, deadline: Deadline) -> dict[str, str]:
    """Return the server's INFO with some of its configuration beside it, by its names; without that where CONFIG is not for us."""
    fields = info(address, access, deadline)
    with logged_in(address, access, deadline) as link:
        answers = ask_all(link, [("CONFIG", "GET", name) for name in ("save", *CLIENT_LIMITS)], deadline)
        fields[LACKS] = unknown_commands(link, deadline)
    for answer in answers:
        if isinstance(answer, list) and len(answer) == 2 and isinstance(answer[0], bytes) and isinstance(answer[1], bytes):
            fields[answer[0].decode(errors="replace")] = answer[1].decode(errors="replace")
    return fields


class CommandsAsked:
    """Asks each server process once whether it knows and permits every command that some path of this process needs."""

    def __init__(self, access: RedisAccess, role: str) -> None:
        self._access, self._wanted = access, TRAINER if role == "trainer" else SHARD
        self._good: set[str] = set()  # processes, by run id

    def require(self, address: str, run_id: str, deadline: Deadline) -> None:
        """Raise NodeRefusesError where one is missing, so that it is found at the start and not at the first fault."""
        if run_id not in self._good:
            with logged_in(address, self._access, deadline) as link:
                require_commands(link, self._wanted, deadline)
            self._good.add(run_id)


def require_safe(address: str, fields: Mapping[str, str], config: StorageConfig) -> None:
    """Refuse a server that may evict rows, unless the configuration allows it."""
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and not config.allow_row_loss:
        raise UnsafeNodeError(
            f"node {address}: maxmemory-policy is {policy}: rows would be evicted when memory is full. Set it to noeviction (CONFIG SET "
            "maxmemory-policy noeviction, and in redis.conf), or set storage.allow_row_loss: true if rows may be lost."
        )


def node_stats(address: str, fields: Mapping[str, str], config: StorageConfig) -> NodeStats:
    """Describe a server to operators from its INFO."""
    name, unsafe = "valkey" if "valkey_version" in fields else "redis", ""
    try:
        require_safe(address, fields, config)
    except UnsafeNodeError as error:
        unsafe = str(error)
    return NodeStats(
        address=address,
        server=f"{name} {fields.get('valkey_version') or fields['redis_version']}",
        n_keys=number_in(address, fields, "n_keys"),
        used_bytes=number_in(address, fields, "used_memory"),
        limit_bytes=number_in(address, fields, "maxmemory"),
        evicted=number_in(address, fields, "evicted_keys"),
        role="primary" if fields.get("role") == "master" else str(fields.get("role")),
        traffic_bytes=traffic_bytes(address, fields),
        unsafe=unsafe,
    )


def traffic_bytes(address: str, fields: Mapping[str, str]) -> int:
    """Return the bytes that a server has received and sent since it started."""
    return sum(number_in(address, fields, f"total_net_{way}_bytes") for way in ("input", "output"))


def number_in(address: str, fields: Mapping[str, str], name: str) -> int:
    """Return a number that a server tells of itself; 0 for one that it does not tell."""
    text = fields.get(name, "0")
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ProtocolError(f"node {address}: says {name} {text[:40]!r}, expected a number")
    return int(text)
