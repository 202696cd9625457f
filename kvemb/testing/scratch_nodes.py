"""Two nodes inside one Redis or Valkey server that other programs may use, too: each has a prefix for its keys and its connections' names.

Nothing is forwarded by a process of its own: the links themselves put the prefix in front of every key that leaves, and take it away from
keys and names that come back. So the server sees kvemb's own requests, in kvemb's own batches, and the contract of a store runs unchanged.
The keys that were written are known, and deleted at the end; the server is never flushed, paused or reconfigured.

What a link does for a hung node: it keeps requests back. They reach the server after the next write by another connection was answered, as
bytes do that a network has delayed, unless the server has ended their connection by then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from kvemb.config import StorageConfig
from kvemb.coordination.markers import MARKER_KEY
from kvemb.errors import NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link, connect_link
from kvemb.stores.redis_server.redis_commands import Word, ask
from kvemb.stores.redis_server.redis_login import RedisAccess, logged_in
from kvemb.stores.standalone.node_store import NodeStore
from kvemb.stores.standalone.redis_store import RedisServer
from kvemb.stores.store import Store
from kvemb.testing.contract_nodes import Nodes, own_node_of
from kvemb.wire.buffer_scan import EOL
from kvemb.wire.request_arrays import chunks
from kvemb.wire.resp.resp_codec import RespCodec, command
from kvemb.wire.resp.resp_value import ErrorLine, Value, ValueReply

PREFIX = "kvemb:conformance:"
"""Of all scratch keys: a user with the rights of `kvemb acl` may write them."""
_WRITES = frozenset((b"SET", b"HSET", b"HDEL", b"SETRANGE", b"DEL", b"UNLINK", b"EVAL"))
_OF_ONE_KEY = _WRITES - {b"EVAL"} | {b"GET", b"HMGET", b"HLEN", b"HKEYS", b"HSCAN", b"GETRANGE", b"STRLEN", b"TYPE"}
_WITHOUT_KEYS = frozenset((b"ACL", b"AUTH", b"PING", b"INFO", b"CLIENT"))
# DBSIZE of the scratch keys. TYPE, and not EXISTS, which a shard's user need not be allowed.
_COUNT = b"local n = 0 for _, key in ipairs(KEYS) do if redis.call('TYPE', key).ok ~= 'none' then n = n + 1 end end return n"
_AT_ONCE = 1000
_TIMEOUT_S = 10.0


class ScratchNode:
    """One of the nodes: its prefix, and whether it is there."""

    def __init__(self, prefix: bytes, server: str) -> None:
        self.prefix, self.server = prefix, server
        self.keys: set[bytes] = set()  # every one that may have been written, with the prefix
        self.stopped = self.paused = False
        self.late: list[tuple[Link, bytes]] = []

    def connect(self, address: str, deadline: Deadline) -> Link:
        """Open a link; a `Connect`."""
        if self.stopped:
            raise NodeUnavailableError(f"node {address}: cannot connect: the contract has stopped it")
        return ScratchLink(connect_link(self.server, deadline), address, self)

    def deliver_late(self) -> None:
        """Let requests arrive that a connection left behind when it was closed."""
        while self.late:
            link, data = self.late.pop()
            with suppress(OSError):
                link.sock.settimeout(_TIMEOUT_S)
                link.sock.sendall(data)
            link.close()

    def request(self, words: list[bytes]) -> list[bytes]:
        """Return a command as the server is to see it."""
        name = words[0].upper()
        if name == b"DBSIZE":
            return [b"EVAL", _COUNT, b"%d" % len(self.keys), *self.keys]
        if name == b"SCAN":
            return [*words[:2], b"MATCH", self.prefix + b"*", *words[2:]]
        if name == b"CLIENT" and words[1].upper() == b"SETNAME":
            return [*words[:2], self.prefix + words[2]]
        if name in _WITHOUT_KEYS:
            return words
        at = 3 if name == b"EVAL" else 1
        if words[2] != b"1" if name == b"EVAL" else name not in _OF_ONE_KEY:
            raise AssertionError(f"{words[:3]}: say here where its keys are")
        key = self.prefix + words[at]
        if name in _WRITES:
            self.keys.add(key)
        return [*words[:at], key, *words[at + 1 :]]

    def reply_to(self, words: list[bytes]) -> Callable[[Value], Value] | None:
        """Return how the reply to a command is to be changed; None for most."""
        name = words[0].upper()
        if name == b"SCAN":
            return lambda value: [value[0], [_bare(key, self.prefix) for key in value[1]]] if isinstance(value, list) else value  # type: ignore[union-attr]
        if name == b"CLIENT" and words[1].upper() == b"LIST":
            mine = b"name=" + self.prefix
            return lambda value: _lines_with(value, mine) if isinstance(value, bytes) else value
        return None


def _bare(key: Value, prefix: bytes) -> Value:
    return key.removeprefix(prefix) if isinstance(key, bytes) else key


def _lines_with(listing: bytes, mine: bytes) -> bytes:
    return b"\n".join(line.replace(mine, b"name=") for line in listing.split(b"\n") if mine in line)


class ScratchLink(Link):
    """A connection, by a link whose socket it takes, on which a node's prefix comes and goes."""

    def __init__(self, link: Link, address: str, node: ScratchNode) -> None:
        super().__init__(link.sock, address)
        self._node, self._held = node, b""
        self._change: Callable[[Value], Value] | None = None
        self._has_written = False

    def send(self, data: memoryview) -> int:
        """See `Link.send`; takes all of it, which is whole commands."""
        self._require_running()
        for words in commands_in(data.tobytes()):
            self._change = self._node.reply_to(words)  # such commands come alone
            self._has_written |= words[0].upper() in _WRITES
            self._held += command(*self._node.request(words))
        self._flush()
        return len(data)

    def receive(self) -> int:
        self._require_running()
        self._flush()
        count = super().receive()
        if count and self._has_written and not self._node.paused:
            self._has_written = False
            self._node.deliver_late()
        if not count or self._change is None:
            return count
        reply = ValueReply()
        reply.feed(self.received)
        if not reply.done:
            return 0
        changed, self._change = np.frombuffer(_encoded(self._change(reply.value)), dtype=np.uint8), None
        self._buffer[: len(changed)] = changed  # it is no longer than what came
        self._start, self._end = 0, len(changed)
        return count

    def close(self) -> None:
        if self._held and self.sock.fileno() >= 0:
            self._node.late.append((Link(self.sock.dup(), self.address), self._held))
            self._held = b""
        super().close()

    def _flush(self) -> None:
        while self._held and not self._node.paused and (sent := super().send(memoryview(self._held))):
            self._held = self._held[sent:]
        self.wants_write = bool(self._held) and not self._node.paused

    def _require_running(self) -> None:
        if self._node.stopped:
            raise NodeUnavailableError(f"node {self.address}: the contract has stopped it")


def commands_in(data: bytes) -> Iterator[list[bytes]]:
    """Yield the words of each command."""
    at = 0

    def number() -> int:
        nonlocal at
        begin, at = at + 1, data.index(EOL, at) + len(EOL)
        return int(data[begin : at - len(EOL)])

    while at < len(data):
        words = []
        for _ in range(number()):
            size = number()
            words.append(data[at : at + size])
            at += size + len(EOL)
        yield words


def _encoded(value: Value) -> bytes:
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(_encoded(item) for item in value)
    if isinstance(value, ErrorLine):
        return value.line + EOL
    if isinstance(value, int):
        return b":%d\r\n" % value
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


class ScratchNodes(Nodes):
    """Nodes of a store under the contract, all in one server; methods without a docstring are those of `Nodes`."""

    def __init__(self, config: StorageConfig, prefix: str, n: int = 2) -> None:
        self._access = RedisAccess(config, lambda address, deadline: self._by_address[address].connect(address, deadline))
        self._server = config.nodes[0]
        self._by_address = {f"scratch-{at}:{at + 1}": ScratchNode(f"{prefix}{at}:".encode(), self._server) for at in range(n)}
        self._nodes = list(self._by_address.values())
        self._outside = RedisAccess(config)
        super().__init__(replace(config, nodes=tuple(self._by_address)))

    def store(self, *, nodes: Sequence[str] | None = None, role: str = "shard:0") -> Store:
        config = StorageConfig(
            self.config.kind, tuple(nodes or self.config.nodes), username=self.config.username, password=self.config.password
        )
        return NodeStore(config, role, RespCodec(), RedisServer(RedisAccess(config, self._access.connect), role))

    def close(self) -> None:
        """Delete every scratch key; after a KvembError (no answer, or forbidden) keys remain."""
        for node in self._nodes:
            for link, _ in node.late:
                link.close()
        for at, node in enumerate(self._nodes):
            self.flush(at)
            node.keys.clear()

    def scratch_key(self, name: str) -> bytes:
        """Return a key for use without a store; it is deleted with the others."""
        key = self._nodes[0].prefix + name.encode()
        self._nodes[0].keys.add(key)
        return key

    def put_foreign(self, key: bytes, value: bytes) -> None:
        self._put(own_node_of(key, len(self._nodes)), key, value)

    def delete(self, key: bytes) -> None:
        self._ask("DEL", self._nodes[own_node_of(key, len(self._nodes))].prefix + key)

    def put_markers(self, values: Sequence[bytes]) -> None:
        for at, value in enumerate(values):
            self._put(at, MARKER_KEY, value)

    def flush(self, index: int) -> None:
        keys = list(self._nodes[index].keys)
        for some in chunks(len(keys), _AT_ONCE):
            self._ask("DEL", *keys[some])

    def stop(self, index: int) -> None:
        self._nodes[index].stopped = True

    def pause(self, index: int) -> None:
        self._nodes[index].paused = True

    def resume(self, index: int) -> None:
        self._nodes[index].paused = False

    def _put(self, index: int, key: bytes, value: bytes) -> None:
        node = self._nodes[index]
        node.keys.add(node.prefix + key)
        self._ask("SET", node.prefix + key, value)

    def _ask(self, *words: Word) -> None:
        deadline = Deadline.after(_TIMEOUT_S)
        with logged_in(self._server, self._outside, deadline) as link:
            ask(link, deadline, *words)
