"""memcached nodes: rows by the meta protocol, and the server's statistics and settings.

memcached may lose rows in silence, by eviction and by moving slab pages, and may start with older content after a warm restart. A node
whose settings allow any of that is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvemb.config import StorageConfig
from kvemb.errors import ProtocolError, UnsafeNodeError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import round_trip
from kvemb.net.link import Connect, Link
from kvemb.net.tls_link import connector_of
from kvemb.schema.keys import KEY_SIZE
from kvemb.stores.server_errors import server_error
from kvemb.stores.standalone.node_links import NodeServer
from kvemb.stores.standalone.node_store import NodeStore
from kvemb.stores.store import Capabilities
from kvemb.stores.store_nodes import NodeStats
from kvemb.wire.memcached.memcached_replies import ClassicWriteReply, StatsReply
from kvemb.wire.memcached.meta_codec import MetaCodec
from kvemb.wire.replies import BlobReply

_ITEM_OVERHEAD_BYTES = 64  # item header, token, flags and line end (memcached.h: sizeof(item) 48 + 8 + 2, rounded up)
SAFE_OPTIONS = "-M -o no_slab_reassign"


class MemcachedServer(NodeServer):
    """The operations special to memcached; see `NodeServer`.

    Args:
        config: the storage section.
        connect: opens connections.

    Attributes:
        item_limit: the largest item a server takes, in bytes; None before one was asked.
    """

    def __init__(self, config: StorageConfig, connect: Connect) -> None:
        self._config, self._connect = config, connect
        self.item_limit: int | None = None

    @property
    def capabilities(self) -> Capabilities:
        limit = None if self.item_limit is None else self.item_limit - KEY_SIZE - _ITEM_OVERHEAD_BYTES
        return Capabilities(cas=True, max_record_bytes=limit)

    def open_link(self, address: str, deadline: Deadline) -> Link:
        return self._connect(address, deadline)

    # `dropped` need do nothing: every write carries a condition, and one that lands late finds it false.

    def inspect(self, address: str, deadline: Deadline) -> tuple[str, int]:
        settings = self.settings(address, deadline)
        self.item_limit = _number(address, settings, "item_size_max")
        if not self._config.allow_row_loss:
            _require_safe(address, settings)
        return "", _number(address, self._counted(address, deadline), "curr_items")

    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        return _ask(self._connect, address, deadline, "settings")

    def _counted(self, address: str, deadline: Deadline) -> dict[str, str]:
        return _ask(self._connect, address, deadline)

    def stats(self, address: str, deadline: Deadline) -> NodeStats:
        stats = self._counted(address, deadline)
        counters = (f"slab_reassign_{why}" for why in ("evictions_nomem", "busy_deletes"))
        moved = sum(_number(address, stats, name) for name in counters if name in stats)
        return NodeStats(
            address=address,
            server=f"memcached {stats.get('version', '?')}",
            n_keys=_number(address, stats, "curr_items"),
            used_bytes=_number(address, stats, "bytes"),
            limit_bytes=_number(address, stats, "limit_maxbytes"),
            evicted=_number(address, stats, "evictions") + moved,
            moved=moved,
            traffic_bytes=_number(address, stats, "bytes_read") + _number(address, stats, "bytes_written"),
        )

    def swap(self, address: str, key: bytes, old: bytes | None, new: bytes, run_id: str, deadline: Deadline) -> bool:
        with _connected(self._connect, address, deadline) as link:
            request = b"add %s 0 0 %d\r\n%s\r\n" % (key, len(new), new)
            if old is not None:
                found = BlobReply(miss=b"EN")
                round_trip(link, b"mg %s c v\r\n" % key, [found], deadline)
                token = found.line.rpartition(b" c")[2]
                if found.value != old or not token.isdigit():
                    return False
                request = b"cas %s 0 0 %d %s\r\n%s\r\n" % (key, len(new), token, new)
            answer = ClassicWriteReply(np.zeros(1, bool))
            round_trip(link, request, [answer], deadline)
        for _, line in answer.errors:
            raise server_error(address, line)
        return bool(answer.stored[0])


class MemcachedStore(NodeStore):
    """The store over nodes of memcached >= 1.6."""

    def __init__(self, config: StorageConfig, role: str) -> None:
        super().__init__(config, role, MetaCodec(), MemcachedServer(config, connector_of(config.tls)))


def _require_safe(address: str, settings: dict[str, str]) -> None:
    dangers = {
        "evictions": (settings.get("evictions") != "off", "it evicts rows when memory is full"),
        "slab_reassign": (settings.get("slab_reassign") != "no", "moving a slab page throws rows away"),
        "cas_enabled": (settings.get("cas_enabled") != "yes", "writes cannot be made conditional"),
        "memory_file": (settings.get("memory_file", "") not in ("", "(null)"), "a warm restart may come back empty or old"),
    }
    for setting, (unsafe, why) in dangers.items():
        if unsafe:
            raise UnsafeNodeError(
                f"node {address}: memcached runs with {setting}={settings.get(setting)}: {why}. Start it with `{SAFE_OPTIONS}` and "
                "without -C and -e (or set storage.allow_row_loss: true, if rows may be lost)."
            )


def _ask(connect: Connect, address: str, deadline: Deadline, arguments: str = "") -> dict[str, str]:
    """The server's `stats` as text."""
    reply = StatsReply()
    with _connected(connect, address, deadline) as link:
        round_trip(link, f"stats {arguments}".strip().encode() + b"\r\n", [reply], deadline)
    if reply.error is not None:
        raise server_error(address, reply.error)
    return reply.fields


def _number(address: str, fields: dict[str, str], name: str) -> int:
    """A number that every memcached tells of itself."""
    text = fields.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ProtocolError(f"node {address}: says {name} {text[:40]!r}, expected a number; is this a memcached server?")
    return int(text)


@contextmanager
def _connected(connect: Connect, address: str, deadline: Deadline) -> Iterator[Link]:
    """A connection for a few administrative commands."""
    link = connect(address, deadline)
    try:
        yield link
    finally:
        link.close()
