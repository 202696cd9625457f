"""One Redis or Valkey server that holds a projection: its rows, how far they are, and which publisher writes them.

The target's own small values: `kvemb:projection` describes the projection (JSON), `kvemb:projection:1/4` is the record of a share of the
slots (JSON: the feed's position after the rows there), `kvemb:publisher:1/4` names the publisher of that share. A record is replaced only
where there is one: a target that was flushed meanwhile says so. Those of a view (`kvemb.projection.views`) have its prefix for `kvemb:`.

A write without a reply may land later. So a publisher ends its predecessors' connections, and each broken one of its own, before anything
else is written; and every connection looks whether the share is still this publisher's before it carries rows.
"""

import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, FencedError, NodeFullError, NodeUnavailableError, UnsafeNodeError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.net.name_lookup import is_loopback
from kvemb.net.tls_config import TlsConfig
from kvemb.net.tls_link import connector_of
from kvemb.projection.projected_rows import ProjectedTable, SlotShare
from kvemb.schema.buckets import BucketKeys
from kvemb.stores.node_batch import NodeSteps, group_by_node, raise_row_errors
from kvemb.stores.redis_server.redis_admin import info
from kvemb.stores.redis_server.redis_commands import Word, ask, number_of
from kvemb.stores.redis_server.redis_login import RedisAccess, RoleLinks, logged_in
from kvemb.stores.redis_server.stored_rows import rows_in_buckets
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.replies import RowsStep, Step
from kvemb.wire.resp.resp_codec import RespCodec
from kvemb.wire.resp.resp_value import Value

PREFIX = "kvemb:"
_MARKER = "kvemb:marker"  # of a storage node
_TIMEOUT_S = 30.0  # of one exchange
_TLS_FILES = ("ca", "cert", "key")
_READER_OPTIONS = ("view", "password_env", *_TLS_FILES)
log = logging.getLogger("kvemb")


@dataclass(frozen=True)
class TargetUrl:
    """A target as users name it: redis://[USER@]HOST:PORT, or rediss:// with TLS."""

    address: str  # "host:port"
    username: str | None  # None for the default user
    encrypted: bool  # whether it is rediss://
    options: Mapping[str, str]  # of a reader's URL, after "?": `view`, `password_env`, and of rediss:// `ca`, `cert`, `key`

    @staticmethod
    def parse(text: str, allowed: Sequence[str] = _READER_OPTIONS) -> "TargetUrl":
        """Read it."""
        try:
            parts = urlsplit(text)
            port, host = parts.port or 6379, parts.hostname or ""
        except ValueError:  # of what is no port, or no address in brackets
            parts, port, host = urlsplit(""), 0, ""
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.scheme not in ("redis", "rediss") or not host or parts.path.strip("/") or parts.password is not None:
            raise ConfigError(
                "a target is redis://[USER@]HOST:PORT, or rediss:// for TLS, without a path; --password-env names the environment variable "
                "that holds a password, or in a reader's URL ?password_env="
            )
        allowed = [name for name in allowed if parts.scheme == "rediss" or name not in _TLS_FILES]
        if unknown := sorted(options.keys() - set(allowed)):
            raise ConfigError(f"target {host}: its URL has the option {unknown[0]!r}; it may have: {', '.join(allowed) or 'none'}")
        host = f"[{host}]" if ":" in host else host
        return TargetUrl(f"{host}:{port}", parts.username, parts.scheme == "rediss", options)

    def server(self, environ: Mapping[str, str], password_env: str) -> StorageConfig:
        """Return its address and credentials."""
        if password_env and password_env not in environ:
            raise ConfigError(f"target {self.address}: the environment variable {password_env} is not set")
        if self.username and not password_env:
            raise ConfigError(
                f"target {self.address}: user {self.username!r} has no password: --password-env names the variable that holds it"
            )
        return StorageConfig("redis", (self.address,), username=self.username, password=environ.get(password_env))

    def access(self, environ: Mapping[str, str], password_env: str, tls: TlsConfig | None) -> RedisAccess:
        """Return how it is reached."""
        storage = self.server(environ, password_env)
        if not self.encrypted and not is_loopback(self.address):
            log.warning("rows of %s travel in the clear; rediss:// encrypts them", self.address)
        ca, cert, key = map(self.options.get, _TLS_FILES)
        files = TlsConfig(ca, cert, key) if tls is None else tls
        return RedisAccess(storage, connector_of(files if self.encrypted else None))


class ProjectionTarget:
    """A target, as the publisher of a share writes it. One thread.

    One class of many methods: they are the commands of one connection, which is one attribute.
    """

    def __init__(self, address: str, access: RedisAccess, share: SlotShare, prefix: str = PREFIX) -> None:
        self.address, self._access, self._share = address, access, share
        self._about_key, self._record_key = f"{prefix}projection", f"{prefix}projection:{share}"
        self._publisher_key = f"{prefix}publisher:{share}"
        self._roles, self._codec = RoleLinks(access, self._publisher_key.removeprefix(PREFIX)), RespCodec()
        self.hash_prefix = "" if prefix == PREFIX else prefix
        """Of the names of hashes."""
        self._number, self._name = 0, secrets.token_hex(8)  # the number rises from publisher to publisher
        self._link: Link | None = None

    # --- who writes ------------------------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Become the publisher of the share, or see that this one still is. A target that comes back older names an earlier one."""
        deadline = Deadline.after(_TIMEOUT_S)
        fields = info(self.address, self._access, deadline)
        if (policy := fields.get("maxmemory_policy", "noeviction")) != "noeviction":
            raise UnsafeNodeError(
                f"target {self.address}: maxmemory-policy is {policy}: rows would go when memory is full. Set it to noeviction "
                "(CONFIG SET maxmemory-policy noeviction, and in redis.conf)"
            )
        if fields.get("cluster_enabled") == "1":
            raise ConfigError(f"target {self.address} is part of a Redis Cluster; a projection is written to one server")
        with _room_named(self.address), logged_in(self.address, self._access, deadline) as link:
            if ask(link, deadline, "EXISTS", _MARKER):
                raise ConfigError(f"target {self.address} is a storage node of a kvemb cluster; give another server")
            number, name = self._publisher(link, deadline)
            if name == self._name:
                return
            self._require_newer(number)
            self._number = self._number or number + 1
            ask(link, deadline, "SET", self._publisher_key, f"{self._number} {self._name}")
        self._roles.kill_others([self.address], deadline)

    def _publisher(self, link: Link, deadline: Deadline) -> tuple[int, str]:
        """Number and name of the share's publisher; 0 and "" where there is none."""
        found = ask(link, deadline, "GET", self._publisher_key)
        number, _, name = found.decode(errors="replace").partition(" ") if isinstance(found, bytes) else ("0", "", "")
        return int(number) if number.isdecimal() else 0, name

    def _require_newer(self, number: int) -> None:
        if 0 < self._number <= number:
            raise FencedError(f"target {self.address}: another publisher has taken share {self._share} over; this one ends")

    def close(self) -> None:
        """Give the connection up; a write on it may still land, and is ended before the next one begins. Idempotent."""
        if self._link is not None:
            self._roles.dropped(self._link)
            self._link.close()
            self._link = None

    def _linked(self) -> Link:
        if self._link is None:
            deadline = Deadline.after(_TIMEOUT_S)
            link = self._roles.open(self.address, deadline)
            try:
                number, name = self._publisher(link, deadline)
                if name != self._name:
                    self._require_newer(number)
                    raise NodeUnavailableError(f"target {self.address}: was emptied, or came back older, just now")
            except BaseException:
                link.close()
                raise
            self._link = link
        return self._link

    # --- small values ----------------------------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any] | None:
        """Return the description of the projection there, whoever writes it; None where there is none."""
        deadline = Deadline.after(_TIMEOUT_S)
        with logged_in(self.address, self._access, deadline) as link:
            return self._json(self._about_key, ask(link, deadline, "GET", self._about_key))

    def record(self) -> dict[str, Any] | None:
        """Return the record of the share; None where there is none."""
        return self._json(self._record_key, self._ask("GET", self._record_key))

    def begin(self, about: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Write the description, and the record of a share that is to be filled."""
        self._ask("SET", self._about_key, json.dumps(about))
        self._ask("SET", self._record_key, json.dumps(record))

    def note(self, record: Mapping[str, Any]) -> bool:
        """Replace the record, after the rows that were written; return False, and do nothing, where there is none any more."""
        return self._ask("SET", self._record_key, json.dumps(record), "XX") is not None

    def put(self, key: bytes, value: bytes) -> None:
        """Set another value, as a publisher writes rows. Raises as `write`."""
        self._ask("SET", key, value)

    def _json(self, key: str, raw: Value) -> dict[str, Any] | None:
        try:
            found = json.loads(raw) if isinstance(raw, bytes) else None
        except ValueError:
            found = ""
        if found is not None and not isinstance(found, dict):
            raise ConfigError(f"target {self.address}: {key} is no JSON object: another program wrote it, or wrote over it. Delete it")
        return found

    # --- rows ------------------------------------------------------------------------------------------------------------------------

    def write(self, keys: BucketKeys, values: NDArray[np.uint8]) -> None:
        """Set rows: n keys, uint8 [n, size]. After an error some may be set, or set later."""
        grouped, out = group_by_node(keys, None), np.zeros(len(keys), np.uint8)
        self._exchange(grouped.keys, self._codec.write_steps(grouped.keys, RecordsToWrite(values, grouped.order), None, out))

    def erase(self, keys: BucketKeys) -> None:
        """Delete rows; missing ones are fine. Raises as `write`."""
        grouped = group_by_node(keys, None)
        self._exchange(grouped.keys, self._codec.erase_steps(grouped.keys, np.zeros(len(keys), np.uint8)))

    def ids(self, hash_keys: Sequence[bytes]) -> Iterator[NDArray[np.uint64]]:
        """Yield the ids of the rows in these hashes, in blocks. Other calls may come in between."""
        for rows in rows_in_buckets(self._linked(), hash_keys, Deadline.after(_TIMEOUT_S)):
            yield rows.ids

    def count_hashes(self, hash_keys: Sequence[bytes]) -> int:
        """Return how many of these there are."""
        return number_of(self._linked(), self._ask("EXISTS", *hash_keys), "EXISTS")

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete whole hashes, or other values."""
        self._ask("UNLINK", *keys)

    def remove_all(self, more: Sequence[bytes]) -> None:
        """Delete the rows and the small values of a target with one publisher, and other values, after `take_over`."""
        for fields in (self.record() or {"tables": {}})["tables"].values():
            for keys in ProjectedTable(**fields).hash_keys(self._share):
                self.remove(keys)
        self.remove([*more, *(key.encode() for key in (self._record_key, self._about_key, self._publisher_key))])

    def _exchange(self, keys: Any, steps: Sequence[RowsStep]) -> None:
        if not len(keys):
            return
        plain: list[Step] = [*steps]
        with self._closed_on_error():
            run([Conversation(self._linked(), plain)], Deadline.after(_TIMEOUT_S))
            raise_row_errors([NodeSteps(self.address, keys, [*steps])])

    def _ask(self, *words: Word) -> Any:
        with self._closed_on_error():
            return ask(self._linked(), Deadline.after(_TIMEOUT_S), *words)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            with _room_named(self.address):
                yield
        except BaseException:
            self.close()
            raise


@contextmanager
def _room_named(address: str) -> Iterator[None]:
    """Translate the error of a full target, which says what shards do about a full node."""
    try:
        yield
    except NodeFullError as error:
        raise NodeFullError(f"target {address}: is out of memory. Give it more (maxmemory); a publisher tries again") from error
