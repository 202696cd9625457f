"""memcached nodes: rows by the meta protocol, and the server's statistics and settings.

memcached may lose rows in silence, by eviction and by moving slab pages, and may start with older content after a warm restart. A node
whose settings allow any of that is refused. One that keeps rows on flash (`-o ext_path=…`) has in memory what finds them there; how full it
is says the fuller of both.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvemb.config import StorageConfig
from kvemb.errors import NodeUnavailableError, ProtocolError, UnsafeNodeError
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
# Rows that went with the oldest page of a flash file that was full, that were not written over to another one, or could not be read.
_LOST_ON_FLASH = ("extstore_objects_evicted", "extstore_compact_lost", "miss_from_extstore")
# Of a flash file, which rows that are written again fill until they are compacted: shares that count as full, and at which no more is
# written. With half of it rows none was lost, of the busiest training; with two thirds a few were, and with four fifths many (ADR 0121).
_FULL, _MOST = 0.5, 0.6
_PAGE_BYTES = 1 << 20  # of memory, that memcached deals out to one size of items at a time


class MemcachedServer(NodeServer):
    """The operations special to memcached; see `NodeServer`."""

    capabilities = Capabilities(cas=True)

    def __init__(self, config: StorageConfig, connect: Connect) -> None:
        self._config, self._connect = config, connect

    def open_link(self, address: str, deadline: Deadline) -> Link:
        return self._connect(address, deadline)

    # `dropped` need do nothing: every write carries a condition, and one that lands late finds it false.

    def inspect(self, address: str, deadline: Deadline) -> tuple[str, int]:
        settings = self.settings(address, deadline)
        stats = self._counted(address, deadline)
        if not self._config.allow_row_loss:
            _require_safe(address, settings)
            _require_room_on_flash(address, stats)
        return "", _number(address, stats, "curr_items")

    def max_record_bytes(self, address: str, deadline: Deadline) -> int:
        return _number(address, self.settings(address, deadline), "item_size_max") - KEY_SIZE - _ITEM_OVERHEAD_BYTES

    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        settings = _ask(self._connect, address, deadline, "settings")
        if "ext_item_age" in settings and "extstore_limit_maxbytes" not in _ask(self._connect, address, deadline):
            return {name: value for name, value in settings.items() if not name.startswith("ext_")}  # built for flash, started without
        return settings

    def _counted(self, address: str, deadline: Deadline) -> dict[str, str]:
        return _ask(self._connect, address, deadline)

    def stats(self, address: str, deadline: Deadline) -> NodeStats:
        stats = self._counted(address, deadline)
        counters = (f"slab_reassign_{why}" for why in ("evictions_nomem", "busy_deletes"))
        moved = sum(_number(address, stats, name) for name in counters if name in stats)
        lost = sum(_number(address, stats, name) for name in _LOST_ON_FLASH if name in stats)
        used_bytes, limit_bytes = _fullest(address, stats)
        unsafe = ""
        try:
            _require_room_on_flash(address, stats)
        except UnsafeNodeError as error:
            unsafe = "" if self._config.allow_row_loss else str(error)
        return NodeStats(
            address=address,
            server=f"memcached {stats.get('version', '?')}",
            n_keys=_number(address, stats, "curr_items"),
            used_bytes=used_bytes,
            limit_bytes=limit_bytes,
            evicted=_number(address, stats, "evictions") + moved + lost,
            moved=moved,
            unsafe=unsafe,
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
        "ext_drop_unread": (settings.get("ext_drop_unread") == "yes", "it throws rows on flash away that were not read for long"),
    }
    for setting, (unsafe, why) in dangers.items():
        if unsafe:
            raise UnsafeNodeError(
                f"node {address}: memcached runs with {setting}={settings.get(setting)}: {why}. Start it with `{SAFE_OPTIONS}` and "
                "without -C, -e and ext_drop_unread (or set storage.allow_row_loss: true, if rows may be lost)."
            )


def _on_flash(address: str, stats: dict[str, str]) -> tuple[int, int]:
    """Bytes of rows in a node's flash file, and its size; 0 and 0: it has none."""
    if "extstore_limit_maxbytes" not in stats:
        return 0, 0
    return _number(address, stats, "extstore_bytes_used"), _number(address, stats, "extstore_limit_maxbytes")


def _fullest(address: str, stats: dict[str, str]) -> tuple[int, int]:
    """Bytes used, and their limit: of memory, or of a flash file that is nearer to its end.

    With a flash file, `bytes` counts the rows there, too. Memory is then what is dealt out to sizes of items: none comes back from there,
    and when there is no page left for what finds rows on flash, none can go there.
    """
    used, limit = _number(address, stats, "bytes"), _number(address, stats, "limit_maxbytes")
    on_flash, room = _on_flash(address, stats)
    if not room:
        return used, limit
    used = max(0, limit - _number(address, stats, "slab_global_page_pool") * _PAGE_BYTES)
    return (on_flash, int(room * _FULL)) if on_flash * limit > used * room * _FULL else (used, limit)


def _require_room_on_flash(address: str, stats: dict[str, str]) -> None:
    used, size = _on_flash(address, stats)
    if used > _MOST * size:
        raise UnsafeNodeError(
            f"node {address}: {used / 1e6:,.0f} MB of rows lie in its flash file of {size / 1e6:,.0f} MB: memcached throws the oldest away "
            "when it is full. Start it with a larger file (-o ext_path), twice the size of its rows: the shards bring its rows back."
        )


def _ask(connect: Connect, address: str, deadline: Deadline, arguments: str = "") -> dict[str, str]:
    """The server's `stats` as text."""
    reply = StatsReply()
    with _connected(connect, address, deadline) as link:
        try:  # of 24 bytes and more: one that takes the binary protocol alone waits for so many before it refuses them
            round_trip(link, f"stats {arguments:24}\r\n".encode(), [reply], deadline)
        except NodeUnavailableError as error:
            raise NodeUnavailableError(f"{error} A memcached that was started with -B binary ends so, too: use -B auto") from error
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
