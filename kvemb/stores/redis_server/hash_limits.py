"""Reads and sets up to where a Redis or Valkey server keeps hashes as compact strings (`kvemb.schema.bucket_limits`)."""

import logging

from kvemb.errors import ConfigError, KvembError
from kvemb.net.deadline import Deadline
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.stores.redis_server.redis_admin import info, replicas_of
from kvemb.stores.redis_server.redis_commands import RedisAccess, admin, ask

log = logging.getLogger("kvemb")
_ENTRIES, _VALUE = "hash-max-listpack-entries", "hash-max-listpack-value"


def read_limits(address: str, access: RedisAccess, deadline: Deadline) -> BucketLimits:
    """Return a server's limits.

    Raises:
        ConfigError: it does not tell: CONFIG is not allowed.
        StorageError: it does not answer.
    """
    with admin(address, access, deadline) as link:
        answer = ask(link, deadline, "CONFIG", "GET", "hash-max-*")
    words = [word.decode("ascii", "replace") for word in answer if isinstance(word, bytes)] if isinstance(answer, list) else []
    told = {name.replace("ziplist", "listpack"): value for name, value in zip(words[::2], words[1::2], strict=False)}
    entries, value = told.get(_ENTRIES, ""), told.get(_VALUE, "")
    if not all(text.isdigit() and len(text) < 20 for text in (entries, value)):
        raise ConfigError(f"node {address}: CONFIG GET hash-max-* answered {words}, expected {_ENTRIES} and {_VALUE}")
    return BucketLimits(int(entries), int(value))


def set_limits(address: str, access: RedisAccess, limits: BucketLimits, deadline: Deadline) -> None:
    """Change a server's limits until it is started again, and its replicas', which may take its place. Raises as `read_limits`."""
    for replica in replicas_of(info(address, access, deadline)):
        try:
            _set(replica, access, limits, deadline)
        except KvembError as error:
            log.warning("the replica %s of %s keeps its limits of hashes: %s", replica, address, error)
    _set(address, access, limits, deadline)


def _set(address: str, access: RedisAccess, limits: BucketLimits, deadline: Deadline) -> None:
    with admin(address, access, deadline) as link:
        for name, value in ((_ENTRIES, limits.entries), (_VALUE, limits.value_bytes)):
            ask(link, deadline, "CONFIG", "SET", name.replace("listpack", "ziplist"), value)
