"""A shard and a push stream, spoken to message by message: what no client of ours would send can be sent."""

import queue
from typing import TypeVar

import grpc

from kvemb.errors import KvembError, from_wire
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES, Message
from kvemb.protocol.messages import SERVICE, DescribeReply, Empty, HelloReply, HelloRequest, PushPart, PushReply, Reply, StatusReply

PATIENCE_S = 90.0
M = TypeVar("M", bound=Message)


class RawShard:
    """A running shard, at its address."""

    def __init__(self, address: str) -> None:
        self.address = address
        # The client may send more than the server takes: the server must be the one that refuses.
        limits = [("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        self.channel = grpc.insecure_channel(address, options=limits)

    def call(self, method: str, request: Message, reply_type: type[M]) -> M:
        """One call; raises what the shard answers."""
        reply = self.raw(method, request.encode())
        if reply.error:
            raise from_wire(reply.error)
        return reply_type.decode(reply.body)

    def raw(self, method: str, data: bytes) -> Reply:
        """Any bytes as a request."""
        return Reply.decode(self.channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=PATIENCE_S, wait_for_ready=True))

    def hello(self, trainer: str = "a", incarnation: int = 0) -> HelloReply:
        """Introduce a trainer."""
        about = self.call("Describe", Empty(), DescribeReply)
        return self.call("Hello", HelloRequest(trainer, incarnation, about.cluster_id, 1), HelloReply)

    def status(self) -> StatusReply:
        """What operators see."""
        return self.call("Status", Empty(), StatusReply)

    def close(self) -> None:
        """End the channel."""
        self.channel.close()

    def __enter__(self) -> "RawShard":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawStream:
    """A push stream, part by part; replies are taken in order. `stream` is gRPC's own object of it."""

    def __init__(self, shard: RawShard) -> None:
        self._parts: queue.Queue[bytes | None] = queue.Queue()
        self.stream = shard.channel.stream_stream(f"/{SERVICE}/Push")(iter(self._parts.get, None), timeout=PATIENCE_S)

    def send(self, part: PushPart | bytes) -> None:
        """Send a part, or any bytes."""
        self._parts.put(part if isinstance(part, bytes) else part.encode())

    def next(self) -> PushReply:
        """The next reply."""
        return PushReply.decode(next(self.stream))

    def outcome(self) -> PushReply:
        """The next reply that is no mere acceptance."""
        while True:
            reply = self.next()
            if reply.state != "accepted":
                return reply

    def applied(self, part: PushPart) -> PushReply:
        """Send a part and see it through."""
        self.send(part)
        assert self.next().state == "accepted"
        return self.next()

    def error(self) -> KvembError:
        """The next reply but acceptances, which must be a refusal."""
        reply = self.outcome()
        assert reply.state == "failed", reply
        return from_wire(reply.error)

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended it."""
        return bool(self.stream.is_active())

    def end(self) -> None:
        """Send nothing more."""
        self._parts.put(None)

    def rest(self) -> list[PushReply]:
        """Send nothing more, and take all replies that are left."""
        self.end()
        return [PushReply.decode(data) for data in self.stream]

    def close(self) -> None:
        """End the stream."""
        self._parts.put(None)
        self.stream.cancel()

    def __enter__(self) -> "RawStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
