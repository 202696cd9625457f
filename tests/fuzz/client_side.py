"""Targets: clients, by what a storage server or a shard answers. The answers are the true ones, changed; or others in their place."""

import os
import random
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

import kvemb
from kvemb.config import StorageConfig
from kvemb.errors import KvembError
from kvemb.local_cluster.launcher import LocalCluster
from kvemb.local_cluster.storage_servers import start_servers
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import Reply
from tests.fuzz.http2 import odd_connection
from tests.fuzz.mutation import corpus, mutated, odd_message, with_odd_digits
from tests.fuzz.target import Target
from tests.integration.lying_server import ANSWERS, Liar, everything

_LONGEST_S = 90.0
_TIMEOUT_S = 0.4


class _StorageAnswers(Target):
    """Requests to storage, by a shard and by trainers, where one answer is not the true one."""

    def start(self) -> None:
        """See `Target`."""
        os.chmod(self.folder, 0o755)  # memcached gives up root for nobody
        local = self.stack.enter_context(LocalCluster("redis", 1, shards=1))
        self.beside(local.url)
        (server,) = start_servers(self.name, 1, self.folder, 64)
        self.stack.callback(server.process.kill)
        self._server = server
        self._liar = Liar(server.port)
        self.stack.callback(self._liar.close)
        self._config = StorageConfig(self.name, (self._liar.address,), on_lost_node="fail")
        self.pids = {"client": os.getpid(), "shard": local.shards[0].pid}
        everything(self._config)
        self._n_answers, self._n = self._liar.n_answers, 0

    def seeds(self) -> list[bytes]:
        """See `Target`; the empty one stands for the true answer."""
        return [b"", b"", *ANSWERS.values(), *corpus(self.name)]

    def change(self, seed: bytes) -> bytes:
        """See `Target`."""
        if not seed:
            return seed
        return self.chance.choice((mutated, with_odd_digits))(self.chance, seed)

    def attack(self, data: bytes) -> None:
        """See `Target`."""
        self._n += 1
        if self._n % 500 == 0:  # what lies have led it to write must not be all that is looked at
            self._server.restart()
        goes_on = self.chance.random() < 0.5

        def lie(sock: socket.socket, truth: bytes) -> bool:
            sock.sendall(data or self.chance.choice((mutated, with_odd_digits))(self.chance, truth))
            return goes_on

        self._liar.tell(lie, self.chance.randrange(self._n_answers))
        begun_s = time.monotonic()
        with suppress(KvembError):
            everything(self._config)
        assert time.monotonic() - begun_s < _LONGEST_S, "what asks of storage has no end"


class RedisAnswers(_StorageAnswers):
    """A Redis server's."""

    name = "redis"


class MemcachedAnswers(_StorageAnswers):
    """A memcached server's."""

    name = "memcached"


class _Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A shard that hands every call on to a real one, and at times changes what that answers."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.change: Any = None

    def service(self, details: Any) -> Any:
        """gRPC asks for a handler."""
        method = details.method
        if method.endswith("/Push"):
            return grpc.stream_stream_rpc_method_handler(lambda parts, context: self._push(method, parts, context))
        return grpc.unary_unary_rpc_method_handler(lambda data, context: self._unary(method, data))

    def _unary(self, method: str, data: bytes) -> bytes:
        reply: bytes = self._channel.unary_unary(method)(data, timeout=_TIMEOUT_S)
        return self.change(reply) if self.change else reply

    def _push(self, method: str, parts: Any, context: Any) -> Any:
        call = self._channel.stream_stream(method)(parts, timeout=_TIMEOUT_S)
        context.add_callback(call.cancel)
        for reply in call:
            yield self.change(reply) if self.change else reply


class ShardAnswers(Target):
    """Trainers of a shard that answers anything: replies changed inside gRPC, or any bytes in a server's place."""

    name = "shard-answers"

    def start(self) -> None:
        """See `Target`."""
        local = self.stack.enter_context(LocalCluster("redis", 1, shards=1))
        config = kvemb.config.load(local.config_path, {})
        self.beside(local.url)
        channel = self.stack.enter_context(grpc.insecure_channel(config.servers.shards[0]))
        self._relay = _Relay(channel)
        self._bytes = b""
        self._tree: dict[str, Any] = {
            "cluster": config.cluster,
            "storage": {"kind": "redis", "nodes": list(config.storage.nodes), "timeout_s": _TIMEOUT_S},
        }
        from concurrent.futures import ThreadPoolExecutor

        server = grpc.server(ThreadPoolExecutor(16, thread_name_prefix="relay"))
        server.add_generic_rpc_handlers((self._relay,))
        self._relayed = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self.stack.callback(lambda: server.stop(0).wait(10))
        self._fake = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=self._answer, name="fake-shard", daemon=True).start()
        self.pids = {"client": os.getpid(), "shard": local.shards[0].pid}
        self.logs = [local.shards[0].log]

    def seeds(self) -> list[bytes]:
        """See `Target`; the empty one stands for the true reply."""
        return [b"", b"", b"", b"", *corpus(self.name)]

    def change(self, seed: bytes) -> bytes:
        """See `Target`."""
        return odd_connection(self.chance, mutated(self.chance, seed) if self.chance.random() < 0.3 else seed) if seed else seed

    def attack(self, data: bytes) -> None:
        """See `Target`."""
        begun_s = time.monotonic()
        self._bytes = data
        after = self.chance.choice((0, 1, 2, 3, 5, 8))
        self._relay.change = None if data else _Change(self.chance, after)
        address = f"127.0.0.1:{self._fake.getsockname()[1]}" if data else self._relayed
        with suppress(KvembError):
            self._train({**self._tree, "parameter_servers": {"shards": [address]}})
        assert time.monotonic() - begun_s < _LONGEST_S, "a trainer waits without an end"

    def _train(self, tree: dict[str, Any]) -> None:
        options: Any = {"optimizer": kvemb.optim.sgd(1.0), "initializer": kvemb.init.zeros()}
        with suppress(KvembError), kvemb.connect(tree, trainer="fuzz", timeout_s=_TIMEOUT_S) as cluster:
            for act in (
                lambda: cluster.create_table("fuzzed", dim=4, exist_ok=True, **options),
                lambda: cluster.push({"fuzzed": ([1, 2], np.ones((2, 4)))}, timeout_s=_TIMEOUT_S).wait_applied(timeout_s=_TIMEOUT_S),
                lambda: cluster.pull({"fuzzed": [1, 2, 3]}, timeout_s=_TIMEOUT_S),
                lambda: len(cluster.table("fuzzed")),
                lambda: cluster.table("fuzzed").erase([1]),
                lambda: cluster.status(timeout_s=_TIMEOUT_S),
            ):
                with suppress(KvembError):
                    act()

    def _answer(self) -> None:
        with suppress(OSError):  # closed at the end
            while True:
                sock, _ = self._fake.accept()
                with suppress(OSError), sock:
                    sock.settimeout(0.2)
                    sock.recv(4096)
                    sock.sendall(self._bytes)
                    over = Deadline.after(0.5)
                    while not over.expired and sock.recv(4096):
                        pass


class _Change:
    """Changes the n-th reply and, at times, those behind it."""

    def __init__(self, chance: random.Random, after: int) -> None:
        self._chance, self._left = chance, after

    def __call__(self, data: bytes) -> bytes:
        self._left -= 1
        if self._left >= 0 or self._chance.random() < 0.3:
            return data
        if self._chance.random() < 0.3:
            return mutated(self._chance, data)
        try:
            reply = Reply.decode(data)
        except KvembError:
            return odd_message(self._chance, data)
        if self._chance.random() < 0.2:
            return odd_message(self._chance, data)
        return Reply(reply.error, odd_message(self._chance, reply.body)).encode()
