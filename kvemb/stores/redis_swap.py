"""Small values of Redis and Valkey: changed on a condition; read wherever their slot is. By redis-py.

The condition is a script of two commands: a Redis Cluster has a marker in each of thousands of slots, and WATCH would take a round trip for
each, minutes on a loaded machine. Markers are changed when a node is repaired, never while rows are read and written.
"""

from collections.abc import Sequence
from typing import Any

import redis
from redis.connection import Connection

from kvemb.config import StorageConfig
from kvemb.errors import DeadlineExceededError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.stores.redis_admin import client, connection_to, run_id_of, translated
from kvemb.wire.requests import chunks

Change = tuple[bytes, bytes | None, bytes]
"""(key, what is expected to stand there or None for nothing, what is put in its place)."""

_MAX_HOPS = 8
_PIPELINED = 512
_SWAP = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) return 1 end return 0"


def swap(address: str, config: StorageConfig, changes: Sequence[Change], run_id: str, deadline: Deadline) -> list[bool]:
    """Replace values where they are the ones expected, each in one step, as long as the server is still the same process.

    Args:
        address: "host:port".
        config: credentials.
        changes: of distinct keys.
        run_id: of the server process.
        deadline: of the call.

    Returns:
        Which were replaced; none if the process is another. After an error some may have been.

    Raises:
        NodeUnavailableError: the server does not answer, or does not hold a key's slot (any more).
    """
    if not changes:
        return []
    with translated(address):
        connection = connection_to(address, config, deadline)
        try:
            connection.connect()
            if run_id_of(connection) != run_id:
                return [False] * len(changes)
            return [done for rows in chunks(len(changes), _PIPELINED) for done in _swap_all(connection, changes[rows], deadline)]
        finally:
            connection.disconnect()


def get_following(address: str, config: StorageConfig, key: bytes, deadline: Deadline) -> bytes | None:
    """Read a small value, following redirections of a cluster."""
    asking = False
    for _ in range(_MAX_HOPS):
        with client(address, config, deadline, text=False) as connected:
            try:
                if asking:
                    connected.execute_command("ASKING")
                found = connected.get(key)
                return found if isinstance(found, bytes) else None
            except (redis.exceptions.MovedError, redis.exceptions.AskError) as error:
                asking = isinstance(error, redis.exceptions.AskError) and not isinstance(error, redis.exceptions.MovedError)
                address = f"{error.host or address.rpartition(':')[0]}:{error.port}"
    raise NodeUnavailableError(f"node {address}: redirected {_MAX_HOPS} times without an end")


def _swap_all(connection: Connection, changes: Sequence[Change], deadline: Deadline) -> list[bool]:
    """One round trip for all of them."""
    if deadline.expired:
        raise DeadlineExceededError(f"not all markers were changed in {deadline.timeout_s:g} s; try again to go on")
    commands: list[tuple[Any, ...]] = [
        ("SET", key, new, "NX") if old is None else ("EVAL", _SWAP, 1, key, old, new) for key, old, new in changes
    ]
    connection.send_packed_command(connection.pack_commands(commands))
    return [_reply(connection) not in (None, 0) for _ in changes]


def _reply(connection: Connection) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        raise NodeUnavailableError(f"node {connection.host}:{connection.port}: refused to change a marker: {error}. Try again.") from error
