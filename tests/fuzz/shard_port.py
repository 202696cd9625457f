"""Targets: a shard's port. Frames of any kind, messages of any kind inside calls that are in order, and the same behind TLS."""

import random
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

import kvemb
from kvemb.errors import MessageError
from kvemb.local_cluster.launcher import LocalCluster
from kvemb.net.certificate_authority import Issued
from kvemb.protocol.message_format import TableRows, digest_tables
from kvemb.protocol.messages import SERVICE, DescribeReply, Empty, HelloReply, HelloRequest, PushPart, Reply
from paramserver import capabilities
from tests.fuzz.http2 import odd_connection
from tests.fuzz.mutation import corpus, golden_messages, mutated, odd_message
from tests.fuzz.target import Target
from tests.integration.tls_clusters import TlsCluster, running

_TIMEOUT_S = 0.2
_LISTEN_S = 0.02
_LINGERING = 64
VERBS = tuple(sorted(set(capabilities.VERBS) - {"Push", "Save", "Load"}))  # those two write and read files where a message says
_SOME_IDS = np.array([0, 1, 5, 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
_SOME_GRADS = np.array([0, 1, -1, 1e-45, 3e38, np.inf, np.nan], np.float32)


class _ShardPort(Target):
    """A plain shard on a real server, and what all that attack a shard's port share."""

    def start(self) -> None:
        """See `Target`."""
        local = self.stack.enter_context(LocalCluster("redis", 1, shards=1, memory_mb=256))
        self.address = kvemb.config.load(local.config_path, {}).servers.shards[0]
        self.pids = {"shard": local.shards[0].pid}
        self.logs = [local.shards[0].log]
        self._child: Any = local.shards[0]
        self.beside(local.url)

    def check(self) -> None:
        """See `Target`."""
        assert self._child.poll() is None, f"the shard has ended: {self._child.log.read_text(errors='replace')[-2000:]}"
        super().check()

    def connected(self) -> socket.socket:
        """A connection to the port."""
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), 10)

    def say(self, sock: socket.socket, data: bytes) -> None:
        """Send, perhaps in two halves, and listen for a moment."""
        sock.settimeout(_LISTEN_S)
        at = self.chance.randrange(len(data) + 1) if self.chance.random() < 0.2 else len(data)
        with suppress(OSError):
            sock.sendall(data[:at])
            sock.recv(4096)
            sock.sendall(data[at:])
            sock.recv(4096)


class Frames(_ShardPort):
    """HTTP/2 connections of every kind; some stay open, and say no more."""

    name = "frames"

    def start(self) -> None:
        """See `Target`."""
        super().start()
        self._open: list[socket.socket] = []
        self.stack.callback(lambda: [sock.close() for sock in self._open])

    def seeds(self) -> list[bytes]:
        """See `Target`."""
        return corpus(self.name)

    def change(self, seed: bytes) -> bytes:
        """See `Target`."""
        made = odd_connection(self.chance, seed) if self.chance.random() < 0.8 else seed
        return mutated(self.chance, made) if self.chance.random() < 0.4 else made

    def attack(self, data: bytes) -> None:
        """See `Target`."""
        with suppress(OSError):
            sock = self.connected()
            self.say(sock, data)
            self._open.append(sock)
            while len(self._open) > self.chance.choice((0, _LINGERING)):
                self._open.pop(0).close()


class _Calls:
    """Calls of every verb with messages of any kind, and pushes of a trainer that knows the protocol and sends what it likes.

    Args:
        channel: to the shard.
        chance: where every choice comes from.
        trainer: the name it pushes under.
    """

    def __init__(self, channel: grpc.Channel, chance: random.Random, trainer: str) -> None:
        self._channel, self._chance, self._trainer = channel, chance, trainer

    def change(self, seed: bytes) -> bytes:
        """Return a message of any kind."""
        made = odd_message(self._chance, seed) if self._chance.random() < 0.7 else seed
        return mutated(self._chance, made) if self._chance.random() < 0.4 else made

    def attack(self, data: bytes) -> None:
        """Send a message to where it belongs, and elsewhere."""
        with suppress(grpc.RpcError):
            self._unary(self._verb_of(data), data)
        with suppress(grpc.RpcError):
            list(self._channel.stream_stream(f"/{SERVICE}/Push")(iter([data]), timeout=_TIMEOUT_S))
        with suppress(grpc.RpcError, MessageError):
            self._push(data)

    def _unary(self, verb: str, data: bytes) -> bytes:
        reply: bytes = self._channel.unary_unary(f"/{SERVICE}/{verb}")(data, timeout=_TIMEOUT_S)
        return reply

    def _verb_of(self, data: bytes) -> str:
        fitting = [verb for verb in VERBS if verb.encode() in data]
        return self._chance.choice(fitting or VERBS) if self._chance.random() < 0.8 else self._chance.choice(VERBS)

    def _push(self, data: bytes) -> None:
        """Say hello in due form, then send parts in sequence: of any content, and at last the bytes."""
        about = DescribeReply.decode(Reply.decode(self._unary("Describe", Empty().encode())).body)
        request = HelloRequest(self._trainer, 0, about.cluster_id, 1)
        reply = Reply.decode(self._unary("Hello", request.encode()))
        if reply.error:
            return
        hello = HelloReply.decode(reply.body)

        def parts() -> Iterator[bytes]:
            for sequence in range(1, self._chance.choice((2, 4))):
                rows = [self._rows(self._chance.choice(about.tables)) for _ in range(self._chance.randrange(3))] if about.tables else []
                more, steps = self._chance.random() < 0.2, self._chance.choice((sequence, sequence, 0, 2**62))
                yield PushPart(self._trainer, hello.incarnation, sequence, steps, more, rows, digest_tables(rows)).encode()
            yield data

        list(self._channel.stream_stream(f"/{SERVICE}/Push")(parts(), timeout=_TIMEOUT_S))

    def _rows(self, table: dict[str, Any]) -> TableRows:
        chance, dim, n = self._chance, int(table.get("dim", 4)), self._chance.choice((0, 1, 3, 200))
        ids = np.array([chance.choice((int(chance.choice(_SOME_IDS)), chance.getrandbits(64))) for _ in range(n)], np.uint64)
        other = chance.choice((dim, dim, dim, 0, dim + 1))
        grads = np.array([chance.choice(_SOME_GRADS) for _ in range(n * other)], np.float32).reshape(n, other)
        versions = chance.choice((np.empty(0, np.uint64), np.full(n, chance.getrandbits(64), np.uint64)))
        hyper = chance.choice(({}, {}, {"lr": chance.choice((0.0, float("nan"), -1.0, 1e300))}, {"other": 1.0}))
        name = str(table.get("name")) if table.get("name") != "honest" else chance.choice(("none", "fuzz"))
        return TableRows(name, chance.choice((0, chance.randrange(256))), ids, grads, versions, hyper)


class Messages(_ShardPort):
    """Messages of any kind inside calls that are in order."""

    name = "messages"

    def start(self) -> None:
        """See `Target`."""
        super().start()
        channel = self.stack.enter_context(grpc.insecure_channel(self.address))
        self._calls = _Calls(channel, self.chance, "fuzz")

    def seeds(self) -> list[bytes]:
        """See `Target`."""
        return [*golden_messages().values(), *corpus(self.name)]

    def change(self, seed: bytes) -> bytes:
        """See `Target`."""
        return self._calls.change(seed)

    def attack(self, data: bytes) -> None:
        """See `Target`."""
        self._calls.attack(data)


class OverTls(_ShardPort):
    """A shard that asks for certificates: bytes in the place of a handshake; frames and messages of a trainer that has one."""

    name = "tls"

    def start(self) -> None:
        """See `Target`."""
        made = self.stack.enter_context(running(TlsCluster(self.folder)))
        self.address, process = made.tree["parameter_servers"]["shards"][0], made.shards[0]
        self._child = process.child
        self._child.log = process.log
        self.pids, self.logs = {"shard": process.child.pid}, [process.log]
        honest, mine = made.issue("trainer/honest", name="honest"), made.issue("trainer/fuzz", name="fuzz")
        self.beside(made.as_seen_by(honest))
        self._context = ssl.create_default_context(cafile=str(made.authority.ca))
        self._context.load_cert_chain(mine.cert, mine.key)
        self._context.set_alpn_protocols(["h2"])
        channel = self.stack.enter_context(grpc.secure_channel(self.address, _credentials(made, mine)))
        self._calls = _Calls(channel, self.chance, "fuzz")
        self._handshakes, self._connections = corpus(self.name), corpus(Frames.name)
        self._messages = set(golden_messages().values())

    def seeds(self) -> list[bytes]:
        """See `Target`."""
        return [*self._handshakes, *self._connections, *self._messages]

    def change(self, seed: bytes) -> bytes:
        """See `Target`; the first byte of an input tells its kind: a handshake, a connection behind one, or a message."""
        if seed in self._messages:
            return self._calls.change(seed)
        if seed in self._connections:
            return odd_connection(self.chance, seed)
        made = mutated(self.chance, seed)
        if self.chance.random() < 0.3 and len(made) > 5:  # records with a length that is not theirs
            made = made[:3] + struct.pack(">H", self.chance.randrange(65_536)) + made[5:]
        return made

    def attack(self, data: bytes) -> None:
        """See `Target`."""
        if data[:1] == b"P":
            with suppress(OSError), self.connected() as plain, self._context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
                self.say(sock, data)
        elif data[:1] in (b"\x16", b"\x15", b"\x17", b"\x80"):
            with suppress(OSError), self.connected() as plain:
                self.say(plain, data)
        else:
            self._calls.attack(data)


def _credentials(made: TlsCluster, mine: Issued) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(made.authority.ca.read_bytes(), mine.key.read_bytes(), mine.cert.read_bytes())
