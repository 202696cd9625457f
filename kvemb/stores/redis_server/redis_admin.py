"""Administration of Redis and Valkey: INFO, safety of settings, the list of clients, killing connections, listing keys.

Rows never pass here: a data link is authenticated and checked, and then handed to the exchange.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Set

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, DeadlineExceededError, NodeUnavailableError, ProtocolError, UnsafeNodeError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.stores.redis_server.redis_commands import RedisAccess, admin, ask, ask_all, number_of, open_admin, shown, text_of
from kvemb.stores.store_nodes import NodeStats

log = logging.getLogger("kvemb")
_SCAN_KEYS = 10_000

ConnectionId = tuple[str, str]
"""A server process's run id and its number of a connection. The numbers start again with the process, and then mean strangers."""


def open_link(address: str, access: RedisAccess, role: str, kill: set[ConnectionId], deadline: Deadline) -> Link:
    """Open an authenticated data link.

    Args:
        address: "host:port".
        access: credentials, and how to connect.
        role: becomes the connection's name on the server, so that operators and a successor can tell which process writes.
        kill: older connections of this process on which a write may still be in flight. Each is confirmed dead before the link is returned,
            because a write that lands late would overwrite a newer one. Taken out of the set here; those of another server process stay in
            it: they died with it, or the address leads elsewhere for a while.
        deadline: of the connection's set-up.
    """
    link = open_admin(address, access, deadline, client_name(role))
    try:
        link.connection_id = str(number_of(link, ask(link, deadline, "CLIENT", "ID"), "CLIENT ID"))
        link.run_id = run_id_of(link, deadline)
        for old in sorted(kill):
            if old[0] == link.run_id:
                try:
                    _kill(link, old[1], deadline)
                except ConfigError:  # a trainer's user that may not end connections may not write either (`acl_users`): nothing is in doubt
                    if role != "trainer":
                        raise
                kill.discard(old)
    except BaseException:
        link.close()
        raise
    return link


def kill_writers(address: str, access: RedisAccess, role: str, spare: Set[ConnectionId], deadline: Deadline) -> int:
    """End a role's connections on one server, and on its replicas, which a failover may have made primaries.

    Args:
        address: "host:port" of a primary.
        access: credentials, and how to connect.
        role: as of `open_link`.
        spare: connections that are not killed: our own.
        deadline: of the call.

    Returns:
        How many were ended; none of them remains, on the primary for certain. A replica that does not answer is logged.
    """
    killed = _kill_named(address, access, role, spare, deadline)
    for replica in replicas_of(info(address, access, deadline)):
        try:
            killed += _kill_named(replica, access, role, spare, deadline)
        except NodeUnavailableError as error:
            log.warning("older connections of %s on the replica %s of %s were not ended: %s", role, replica, address, error)
    return killed


def scan(address: str, access: RedisAccess, deadline: Deadline) -> Iterator[list[bytes]]:
    """Yield all keys of a server in blocks; one may come twice, and one that comes or goes meanwhile may be missed.

    Args:
        address: "host:port".
        access: credentials, and how to connect.
        deadline: its length is that of each block: a whole listing takes as long as there are keys.
    """
    with admin(address, access, deadline) as link:
        cursor = "0"
        while True:
            answer = ask(link, Deadline.after(deadline.timeout_s), "SCAN", cursor, "COUNT", _SCAN_KEYS)
            if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], list):
                raise ProtocolError(f"node {address}: SCAN answered {shown(answer)}, expected a cursor and keys")
            yield [key for key in answer[1] if isinstance(key, bytes)]
            cursor = text_of(link, answer[0], "SCAN")
            if cursor == "0":
                return


def info(address: str, access: RedisAccess, deadline: Deadline) -> dict[str, str]:
    """Return the server's INFO, and its number of keys as "n_keys".

    Raises:
        ProtocolError: the answer lacks a field that every Redis and Valkey has.
        KvembError: see `kvemb.stores.redis_server.redis_commands.open_admin`.
    """
    with admin(address, access, deadline) as link:
        fields = _fields(text_of(link, ask(link, deadline, "INFO", "everything"), "INFO"))
        fields["n_keys"] = str(number_of(link, ask(link, deadline, "DBSIZE"), "DBSIZE"))
    for name in ("run_id", "redis_version", "used_memory"):
        if name not in fields:
            raise ProtocolError(f"node {address}: INFO without {name}; is this a Redis or Valkey server?")
    return fields


def settings(address: str, access: RedisAccess, deadline: Deadline) -> dict[str, str]:
    """Return the server's INFO with its schedule of snapshots as "save", "" where there is none; without it where CONFIG is not for us."""
    fields = info(address, access, deadline)
    with admin(address, access, deadline) as link:
        (answer,) = ask_all(link, [("CONFIG", "GET", "save")], deadline)
    if isinstance(answer, list) and len(answer) == 2 and isinstance(answer[1], bytes):
        return {**fields, "save": answer[1].decode(errors="replace")}
    return fields


def require_safe(address: str, fields: Mapping[str, str], config: StorageConfig) -> None:
    """Refuse a server that may evict rows, unless the configuration allows it.

    Raises:
        UnsafeNodeError: with the setting and the mend.
    """
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
    """Return a number that a server tells of itself; 0 for one that it does not tell.

    Raises:
        ProtocolError: it is no number.
    """
    text = fields.get(name, "0")
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ProtocolError(f"node {address}: says {name} {text[:40]!r}, expected a number")
    return int(text)


def client_name(role: str) -> str:
    """The name of a role's connections on the servers."""
    return f"kvemb-{role.replace(':', '-')}"


def run_id_of(link: Link, deadline: Deadline) -> str:
    """Which server process is at the other end."""
    run_id = _fields(text_of(link, ask(link, deadline, "INFO", "server"), "INFO")).get("run_id", "")
    if not re.fullmatch(r"\w{1,64}", run_id):
        raise ProtocolError(f"node {link.address}: INFO without a run_id; is this a Redis or Valkey server?")
    return run_id


def _fields(text: str) -> dict[str, str]:
    """The lines `name:value` of an INFO."""
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in pairs if colon}


def _kill(link: Link, connection_id: str, deadline: Deadline) -> int:
    """End a connection; 0 when it is dead already, which is as good."""
    return number_of(link, ask(link, deadline, "CLIENT", "KILL", "ID", connection_id), "CLIENT KILL")


def _kill_named(address: str, access: RedisAccess, role: str, spare: Set[ConnectionId], deadline: Deadline) -> int:
    killed: set[str] = set()
    with admin(address, access, deadline) as link:
        run_id = run_id_of(link, deadline)
        while True:
            listed = _connections(text_of(link, ask(link, deadline, "CLIENT", "LIST"), "CLIENT LIST"), client_name(role))
            others = {one for one in listed if (run_id, one) not in spare}
            if not others:
                return len(killed)
            if deadline.expired:
                raise DeadlineExceededError(f"node {address}: {len(others)} connections of {role} could not be ended")
            for one in others:
                _kill(link, one, deadline)
            killed |= others


def _connections(listing: str, name: str) -> set[str]:
    """The numbers of the connections of that name."""
    found = set()
    for line in listing.splitlines():
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        if words.get("name") == name and words.get("id", "").isdigit():
            found.add(words["id"])
    return found


def replicas_of(fields: Mapping[str, str]) -> list[str]:
    """The addresses of a primary's replicas, from its INFO."""
    found = []
    for name, value in fields.items():
        if re.fullmatch(r"slave\d+", name):
            words = dict(word.split("=", 1) for word in value.split(",") if "=" in word)
            if words.get("ip") and words.get("port", "").isdigit():
                found.append(f"{words['ip']}:{words['port']}")
    return found
