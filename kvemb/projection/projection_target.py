"""One Redis or Valkey server that holds a projection: its rows, how far they are, and which publisher writes them.

The target's own small values: `kvemb:projection` describes the projection (JSON), `kvemb:projection:1/4` is the record of a share of the
slots (JSON: the feed's position behind the rows there), `kvemb:publisher:1/4` names the publisher of that share. A record is replaced only
where there is one: a target that was flushed meanwhile says so.

A write without a reply may land later. So a publisher ends its predecessors' connections, and each broken one of its own, before anything
else is written; and every connection looks whether the share is still this publisher's before it carries rows.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ConfigError, FencedError, NodeFullError, NodeUnavailableError, UnsafeNodeError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.projection.projected_rows import SlotShare
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

ABOUT = "kvemb:projection"
_MARKER = "kvemb:marker"  # of a storage node
_TIMEOUT_S = 30.0  # of one exchange


class ProjectionTarget:
    """A target, as the publisher of a share writes it. One thread.

    Args:
        address: "host:port".
        access: credentials, and how to connect.
        share: of the slots.
    """

    def __init__(self, address: str, access: RedisAccess, share: SlotShare) -> None:
        self.address, self._access, self._share = address, access, share
        self._record_key, self._publisher_key = f"{ABOUT}:{share}", f"kvemb:publisher:{share}"
        self._roles, self._codec = RoleLinks(access, f"publisher:{share}"), RespCodec()
        self._number, self._name = 0, secrets.token_hex(8)  # the number rises from publisher to publisher
        self._link: Link | None = None

    # --- who writes ------------------------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Become the publisher of the share, or see that this one still is. A target that comes back older names an earlier one.

        Raises:
            FencedError: another one has taken over since.
            UnsafeNodeError: the server may evict rows.
            ConfigError: it is a storage node, or part of a Redis Cluster.
            StorageError: it does not answer.
        """
        deadline = Deadline.after(_TIMEOUT_S)
        fields = info(self.address, self._access, deadline)
        if (policy := fields.get("maxmemory_policy", "noeviction")) != "noeviction":
            raise UnsafeNodeError(
                f"target {self.address}: maxmemory-policy is {policy}: rows would go when memory is full. Set it to noeviction "
                "(CONFIG SET maxmemory-policy noeviction, and in redis.conf)"
            )
        if fields.get("cluster_enabled") == "1":
            raise ConfigError(f"target {self.address} is part of a Redis Cluster; a projection is written to one server")
        with logged_in(self.address, self._access, deadline) as link:
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
            return self._json(ABOUT, ask(link, deadline, "GET", ABOUT))

    def record(self) -> dict[str, Any] | None:
        """Return the record of the share; None where there is none."""
        return self._json(self._record_key, self._ask("GET", self._record_key))

    def begin(self, about: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Write the description, and the record of a share that is to be filled."""
        self._ask("SET", ABOUT, json.dumps(about))
        self._ask("SET", self._record_key, json.dumps(record))

    def note(self, record: Mapping[str, Any]) -> bool:
        """Replace the record, behind the rows that were written; return False, and do nothing, where there is none any more."""
        return self._ask("SET", self._record_key, json.dumps(record), "XX") is not None

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
        """Set rows: n keys, uint8 [n, size]. After an error some may be set, or set later.

        Raises:
            NodeFullError: the server is out of memory.
            StorageError: it does not answer, or answered something else.
        """
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

    def remove(self, hash_keys: Sequence[bytes]) -> None:
        """Delete whole hashes."""
        self._ask("UNLINK", *hash_keys)

    def _exchange(self, keys: Any, steps: Sequence[RowsStep]) -> None:
        if not len(keys):
            return
        plain: list[Step] = [*steps]
        try:
            run([Conversation(self._linked(), plain)], Deadline.after(_TIMEOUT_S))
            raise_row_errors([NodeSteps(self.address, keys, [*steps])])
        except NodeFullError as error:
            self.close()
            raise NodeFullError(f"target {self.address}: is out of memory. Give it more (maxmemory); the publisher tries again") from error
        except BaseException:
            self.close()
            raise

    def _ask(self, *words: Word) -> Any:
        try:
            return ask(self._linked(), Deadline.after(_TIMEOUT_S), *words)
        except BaseException:
            self.close()
            raise
