"""Connections and administration of Redis and Valkey through redis-py: authentication, INFO, safety of settings, killing connections.

Rows never pass here: a data link is authenticated by redis-py and then handed to the exchange as a bare socket.
"""

import logging
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.retry import Retry

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, DeadlineExceededError, NodeUnavailableError, ProtocolError, StorageError, UnsafeNodeError
from kvemb.net.connecting import connect_timeout_s, host_and_port
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.stores.base import NodeStats

log = logging.getLogger("kvemb")
_SCAN_KEYS = 10_000
_NOT_READY = (
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ReadOnlyError,
)

ConnectionId = tuple[str, str]
"""A server process's run id and its number of a connection. The numbers start again with the process, and then mean strangers."""


def open_link(address: str, config: StorageConfig, role: str, kill: set[ConnectionId], deadline: Deadline) -> Link:
    """Open an authenticated data link.

    Args:
        address: "host:port".
        config: credentials.
        role: becomes the connection's name on the server, so that operators and a successor can tell who writes.
        kill: older connections of this process on which a write may still be in flight; each is confirmed dead before the link is
            returned, because a write that lands late would overwrite a newer one. Taken out of the set here; those of another server
            process stay in it: they died with it, or the address leads elsewhere for a while.
        deadline: of the connection's set-up.
    """
    with translated(address):
        connection = connection_to(address, config, deadline, role)
        try:
            connection.connect()
            connection_id, run_id = str(_ask(connection, "CLIENT", "ID")), run_id_of(connection)
            for old in sorted(kill):
                if old[0] == run_id:
                    _kill(connection, old[1])
                    kill.discard(old)
            # Take the socket out of the authenticated connection, which then forgets it without shutting it down.
            sock, connection._sock = connection._sock, None
            assert sock is not None, "connect() returned without a socket"
            return Link(sock, address, connection_id, run_id)
        finally:
            connection.disconnect()


def kill_writers(address: str, config: StorageConfig, role: str, spare: Set[ConnectionId], deadline: Deadline) -> int:
    """End a role's connections on one server, and on its replicas, which a failover may have made primaries.

    Args:
        address: "host:port" of a primary.
        config: credentials.
        role: as of `open_link`.
        spare: connections that are left alone: our own.
        deadline: of the call.

    Returns:
        How many were ended; none of them is left, on the primary for certain. A replica that does not answer is logged.
    """
    killed = _kill_named(address, config, role, spare, deadline)
    for replica in _replicas(info(address, config, deadline)):
        try:
            killed += _kill_named(replica, config, role, spare, deadline)
        except NodeUnavailableError as error:
            log.warning("older connections of %s on the replica %s of %s were not ended: %s", role, replica, address, error)
    return killed


def scan(address: str, config: StorageConfig, deadline: Deadline) -> Iterator[list[bytes]]:
    """Yield all keys of a server in blocks; one may come twice, and one that comes or goes meanwhile may be missed.

    Args:
        address: "host:port".
        config: credentials.
        deadline: of each block: a whole listing takes as long as there are keys.
    """
    with client(address, config, deadline, text=False) as connected:
        cursor = 0
        while True:
            cursor, keys = connected.scan(cursor, count=_SCAN_KEYS)
            yield [key for key in keys if isinstance(key, bytes)]
            if cursor == 0:
                return


def info(address: str, config: StorageConfig, deadline: Deadline) -> dict[str, Any]:
    """Return the server's INFO as redis-py parses it, and its number of keys as "n_keys"."""
    with client(address, config, deadline) as connected:
        fields: dict[str, Any] = connected.info("everything")
        fields["n_keys"] = connected.dbsize()
    return fields


def require_safe(address: str, fields: dict[str, Any], config: StorageConfig) -> None:
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


def node_stats(address: str, fields: dict[str, Any]) -> NodeStats:
    """Describe a server to operators from its INFO."""
    name = "valkey" if "valkey_version" in fields else "redis"
    return NodeStats(
        address=address,
        server=f"{name} {fields.get('valkey_version') or fields['redis_version']}",
        n_keys=int(fields["n_keys"]),
        used_bytes=int(fields["used_memory"]),
        limit_bytes=int(fields.get("maxmemory", 0)),
        evicted=int(fields.get("evicted_keys", 0)),
        role="primary" if fields.get("role") == "master" else str(fields.get("role")),
    )


@contextmanager
def client(address: str, config: StorageConfig, deadline: Deadline, *, text: bool = True) -> Iterator["redis.Redis"]:
    """A redis-py client for a few administrative commands; its errors are translated. Without `text` replies stay bytes."""
    host, port = host_and_port(address, deadline)
    wait_s = max(0.001, deadline.remaining_s())
    with translated(address):
        made = redis.Redis(
            host=host,
            port=port,
            username=config.username,
            password=config.password,
            socket_timeout=wait_s,
            socket_connect_timeout=connect_timeout_s(deadline),
            protocol=2,
            decode_responses=text,
            retry=Retry(NoBackoff(), 0),
            single_connection_client=True,
        )
        with made:
            yield made


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Turn redis-py's exceptions into ours."""
    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise ConfigError(
            f"storage.password_env: node {address} refused the credentials: {error}. Check username_env and password_env."
        ) from error
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        if isinstance(error, StorageError):
            raise
        raise NodeUnavailableError(f"node {address}: {error}. Is the server running, and the address right?") from error
    except _NOT_READY as error:
        raise NodeUnavailableError(f"node {address}: does not serve now ({error}). Wait until it does.") from error
    except redis.RedisError as error:
        raise ProtocolError(f"node {address}: the server answered {error}; is this a Redis or Valkey server?") from error


def client_name(role: str) -> str:
    """The name of a role's connections on the servers."""
    return f"kvemb-{role.replace(':', '-')}"


def connection_to(address: str, config: StorageConfig, deadline: Deadline, role: str | None = None) -> Connection:
    """A redis-py connection that is not connected yet, under the name of a role if it has one."""
    host, port = host_and_port(address, deadline)
    wait_s = max(0.001, deadline.remaining_s())
    return Connection(
        host=host,
        port=port,
        username=config.username,
        password=config.password,
        client_name=None if role is None else client_name(role),
        socket_timeout=wait_s,
        socket_connect_timeout=connect_timeout_s(deadline),
        socket_keepalive=True,
        protocol=2,
        retry=None,
    )


def _ask(connection: Connection, *words: str) -> Any:
    connection.send_command(*words)
    return connection.read_response()


def run_id_of(connection: Connection) -> str:
    """Which server process is at the other end."""
    reply = _ask(connection, "INFO", "server")
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)
    found = re.search(r"^run_id:(\w+)", text, re.MULTILINE)
    if found is None:
        raise redis.ResponseError("INFO without a run_id")
    return found.group(1)


def _kill(connection: Connection, connection_id: str) -> None:
    # "No such client": it is dead already, which is what was wanted.
    with suppress(redis.ResponseError):
        _ask(connection, "CLIENT", "KILL", "ID", connection_id)


def _kill_named(address: str, config: StorageConfig, role: str, spare: Set[ConnectionId], deadline: Deadline) -> int:
    killed: set[str] = set()
    with client(address, config, deadline) as connected:
        run_id = connected.info("server")["run_id"]
        while True:
            listed = {str(entry["id"]) for entry in connected.client_list() if entry["name"] == client_name(role)}
            others = {one for one in listed if (run_id, one) not in spare}
            if not others:
                return len(killed)
            if deadline.expired:
                raise DeadlineExceededError(f"node {address}: {len(others)} connections of {role} could not be ended")
            for one in others:
                with suppress(redis.ResponseError):
                    connected.client_kill_filter(_id=one)
            killed |= others


def _replicas(fields: dict[str, Any]) -> list[str]:
    found = [value for key, value in fields.items() if re.fullmatch(r"slave\d+", key) and isinstance(value, dict)]
    return [f"{replica['ip']}:{replica['port']}" for replica in found]
