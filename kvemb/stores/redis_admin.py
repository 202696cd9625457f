"""Connections and administration of Redis and Valkey through redis-py: authentication, INFO, safety of settings, killing connections.

Rows never pass here: a data link is authenticated by redis-py and then handed to the exchange as a bare socket.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.retry import Retry

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, NodeUnavailableError, ProtocolError, StorageError, UnsafeNodeError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.stores.base import NodeStats


def open_link(address: str, config: StorageConfig, role: str, kill: set[str], deadline: Deadline) -> Link:
    """Open an authenticated data link.

    Args:
        address: "host:port".
        config: credentials.
        role: becomes the connection's name on the server, so that operators and a successor can tell who writes.
        kill: ids of older connections of this process on which a write may still be in flight; each is confirmed dead before the link is
            returned, because a write that lands late would overwrite a newer one. Emptied here.
        deadline: of the connection's set-up.
    """
    with translated(address):
        connection = _connection(address, config, role, deadline)
        try:
            connection.connect()
            connection_id = str(_ask(connection, "CLIENT", "ID"))
            for old in sorted(kill):
                # "No such client": it is dead already, which is what was wanted.
                with suppress(redis.ResponseError):
                    _ask(connection, "CLIENT", "KILL", "ID", old)
                kill.discard(old)  # not clear(): another thread may have added one meanwhile
            # Take the socket out of the authenticated connection, which then forgets it without shutting it down.
            sock, connection._sock = connection._sock, None
            assert sock is not None, "connect() returned without a socket"
            return Link(sock, address, connection_id)
        finally:
            connection.disconnect()


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
def client(address: str, config: StorageConfig, deadline: Deadline) -> Iterator["redis.Redis"]:
    """A redis-py client for a few administrative commands; its errors are translated."""
    host, _, port = address.rpartition(":")
    wait_s = max(0.001, deadline.remaining_s())
    with translated(address):
        made = redis.Redis(
            host=host.strip("[]"),
            port=int(port),
            username=config.username,
            password=config.password,
            socket_timeout=wait_s,
            socket_connect_timeout=wait_s,
            protocol=2,
            decode_responses=True,
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
    except redis.RedisError as error:
        raise ProtocolError(f"node {address}: the server answered {error}; is this a Redis or Valkey server?") from error


def _connection(address: str, config: StorageConfig, role: str, deadline: Deadline) -> Connection:
    host, _, port = address.rpartition(":")
    wait_s = max(0.001, deadline.remaining_s())
    return Connection(
        host=host.strip("[]"),
        port=int(port),
        username=config.username,
        password=config.password,
        client_name=f"kvemb-{role.replace(':', '-')}",
        socket_timeout=wait_s,
        socket_connect_timeout=wait_s,
        socket_keepalive=True,
        protocol=2,
        retry=None,
    )


def _ask(connection: Connection, *words: str) -> Any:
    connection.send_command(*words)
    return connection.read_response()
