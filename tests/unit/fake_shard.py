"""A scripted shard for tests of the client: real gRPC on loopback, and a test decides its answers."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from kvemb.client.all_shards import AllShards
from kvemb.client.push_session import PushSession
from kvemb.errors import KvembError, PushRejectedError, to_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import SERVICE, ByeRequest, Empty, HelloReply, HelloRequest, PushPart, PushReply, Reply
from tests.owners import shard_of

CLUSTER = b"c" * 16
WAIT_S = 90.0  # of waits that end by what the test does; never reached
Script = Callable[["FakeShard", PushPart], Iterable[PushReply]]


def soon() -> Deadline:
    return Deadline.after(WAIT_S)


def apply(shard: "FakeShard", part: PushPart) -> Iterator[PushReply]:
    """What a healthy shard does."""
    yield from accept(shard, part)
    yield PushReply(part.sequence, "applied", k=part.sequence)


def accept(shard: "FakeShard", part: PushPart) -> Iterator[PushReply]:
    if part.sequence > shard.last + 1:
        yield PushReply(part.sequence, "failed", error=to_wire(PushRejectedError("gap")))
        return
    shard.last = max(shard.last, part.sequence)
    yield PushReply(part.sequence, "accepted")


def silent(shard: "FakeShard", part: PushPart) -> Iterator[PushReply]:
    return iter(())


class FakeShard:
    """One shard; `script` answers its parts, `parts` are those it got."""

    def __init__(self, script: Script = apply) -> None:
        self.script = script
        self.last = 0
        self.parts: list[PushPart] = []
        self.hellos: list[HelloRequest] = []
        self.byes: list[ByeRequest] = []
        self.hello_error: KvembError | None = None
        self.ends_streams = False  # after what it has answered, as one that was idle for long
        self.first_step = 0  # as a shard of a sync job tells it
        self.mode = "async"
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        unary = {"Hello": self._hello, "Bye": self._bye}
        handlers = {name: grpc.unary_unary_rpc_method_handler(verb) for name, verb in unary.items()}
        handlers["Push"] = grpc.stream_stream_rpc_method_handler(self._push)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    @property
    def sequences(self) -> list[int]:
        return [part.sequence for part in self.parts]

    def _hello(self, data: bytes, context: Any) -> bytes:
        self.hellos.append(HelloRequest.decode(data))
        if self.hello_error is not None:
            return Reply(to_wire(self.hello_error), b"").encode()
        return Reply({}, HelloReply(self.hellos[-1].incarnation or 41, self.last, self.mode, self.first_step).encode()).encode()

    def _bye(self, data: bytes, context: Any) -> bytes:
        self.byes.append(ByeRequest.decode(data))
        return Reply({}, Empty().encode()).encode()

    def _push(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for data in requests:
            self.parts.append(PushPart.decode(data))
            for reply in self.script(self, self.parts[-1]):
                yield reply.encode()
            if self.ends_streams:
                return


def refuse_once(sequence: int, error: KvembError) -> Script:
    """Refuse a part before it is accepted, once, as a shard does whose check it fails."""
    refused: list[int] = []

    def script(shard: FakeShard, part: PushPart) -> Iterator[PushReply]:
        if part.sequence == sequence and not refused:
            refused.append(sequence)
            return iter([PushReply(sequence, "failed", error=to_wire(error))])
        return apply(shard, part)

    return script


def rows_of(*ids: int, dim: int = 2) -> list[TableRows]:
    array = np.array(ids, np.uint64)
    return [TableRows("user", 5, array, np.ones((len(ids), dim), np.float32))]


def owned(shard: int, n: int) -> list[int]:
    ids = np.arange(1000, dtype=np.uint64)
    return ids[shard_of(ids, 2) == shard][:n].tolist()


class Connections:
    """Opens sessions to the first shards of a test, and closes them at its end."""

    def __init__(self, shards: list[FakeShard]) -> None:
        self._shards = shards
        self._opened: list[tuple[PushSession, AllShards]] = []

    def __call__(self, n_shards: int = 1, *, sync: bool = False) -> PushSession:
        servers = AllShards([f"127.0.0.1:{shard.port}" for shard in self._shards[:n_shards]])
        self._opened.append((PushSession(servers, CLUSTER, "trainer-a", sync=sync), servers))
        return self._opened[-1][0]

    def close(self) -> None:
        for session, servers in self._opened:
            session.close(None)
            servers.close()
        for shard in self._shards:
            shard.stop()
