"""One trainer's push stream: a thread that reads its parts, and replies in the order of events; and the number of streams of a shard.

The reader stops reading while ingest has no room or the trainer does not take its replies; gRPC's flow control does the rest. The apply
thread only ever appends to the queue of answers. A part that is refused gets a "failed" reply and the stream goes on; a malformed one ends
it. Each stream holds two threads. An idle one is ended after a while, and soon where its place is needed: its trainer opens another one
with its next push.
"""

import logging
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc

from kvemb.errors import (
    AccessDeniedError,
    KvembError,
    MessageError,
    ShardUnavailableError,
    to_wire,
)
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES
from kvemb.protocol.messages import PushPart, PushReply

from ..engine.storage_pace import PASSING
from ..ingest.ingest import Ingest
from ..model.batch import CheckedRows

_MAX_UNSENT = 1024
# Of changed rows in replies that the trainer does not take; further replies leave them out. One reply with as many is still a message.
_MAX_ROW_BYTES = MAX_MESSAGE_BYTES - (4 << 20)
_LONGEST_IDLE_S = 60.0  # then a stream is ended: it holds two threads
_FINAL = ("applied", "failed")


class AnswerQueue:
    """Replies on their way back. Bounded: the reader waits while it is full, and only parts that were taken add to it besides."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._replies: deque[PushReply] = deque()
        self._row_bytes = 0
        self._n_open = 0  # parts whose outcome is still to come
        self._input_over = False
        self._quiet_since_s = time.monotonic()
        self.closed = self.ended_idle = False

    def expect(self) -> None:
        """One more part is being taken; its outcome comes through `put`, or `refuse` says that it was not taken."""
        with self._changed:
            self._n_open += 1
            self._quiet_since_s = time.monotonic()

    def put(self, reply: PushReply) -> None:
        """Append a reply about a part. Never blocks."""
        with self._changed:
            self._n_open -= reply.state in _FINAL
            self._quiet_since_s = time.monotonic()
            if self._row_bytes + _row_bytes(reply) > _MAX_ROW_BYTES:
                reply = replace(reply, changed_rows=[])
            self._row_bytes += _row_bytes(reply)
            self._replies.append(reply)
            self._changed.notify_all()

    def refuse(self, reply: PushReply | None) -> None:
        """Append the reply to a part that was not taken, if it gets one."""
        with self._changed:
            self._n_open -= 1
            if reply is not None:
                self._replies.append(reply)
            self._changed.notify_all()

    def wait_for_room(self) -> bool:
        """Wait while too many replies are unsent; return whether the stream is still there."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._replies) < _MAX_UNSENT)
            return not self.closed

    def end_input(self) -> None:
        """Nothing more comes in: the stream ends after the last outcome."""
        with self._changed:
            self._input_over = True
            self._changed.notify_all()

    def idle_s(self) -> float:
        """Seconds since something last went through; 0 while outcomes or replies are on their way."""
        with self._changed:
            return 0.0 if self._n_open or self._replies else time.monotonic() - self._quiet_since_s

    def end_if_idle(self, after_s: float = 0.0) -> None:
        """Close the stream, unless something goes through it, or has in so many seconds."""
        with self._changed:
            if self.idle_s() > after_s and not self.closed:
                self.closed = self.ended_idle = True
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[PushReply]:
        while True:
            with self._changed:
                while not self._changed.wait_for(self._has_news, max(0.0, _LONGEST_IDLE_S - self.idle_s())):
                    self.end_if_idle(_LONGEST_IDLE_S)
                if self.closed or not self._replies:
                    return
                reply = self._replies.popleft()
                self._row_bytes -= _row_bytes(reply)
                self._changed.notify_all()
            yield reply

    def _has_news(self) -> bool:
        return bool(self.closed or self._replies or (self._input_over and not self._n_open))


def _row_bytes(reply: PushReply) -> int:
    return sum(rows.size_bytes for rows in reply.changed_rows)


MAX_STREAMS = 256
MAX_STREAMS_OF_PEER = 64  # of a connection: a trainer opens one, a proxy may bring many trainers over one
MAX_CONNECTIONS = 4096
HANDSHAKE_S = 10
IDLE_CONNECTION_S = 600  # trainers open a new one with the next call
MAX_BYTES_IN_HAND = 256 << 20
_SEND_AGAIN_AFTER_S = 5.0  # where there is no room before
_MAY_LEAVE_AFTER_S = 1.0


def connection_options() -> tuple[tuple[str, int], ...]:
    """gRPC's options that bound the cost of strangers: the number of connections, and the time for a handshake.

    Connections take file descriptors, which the journal and storage need too: at most half of those that this process may have.
    """
    of_process = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    half = MAX_CONNECTIONS if of_process == resource.RLIM_INFINITY else of_process // 2
    return (
        ("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, half)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_S * 1000),
    )


class Streams:
    """Which push streams a shard serves at the moment; the one that is idle for longest makes room. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[AnswerQueue, str] = {}

    def serve(self, stream: "PushReceiver", context: Any) -> Iterator[bytes]:
        """Let a stream in, and yield its replies until it is over; a call that cannot be served ends as UNAVAILABLE."""
        try:
            self._enter(stream.answers, context.peer())
        except ShardUnavailableError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        try:
            if context.add_callback(stream.cancel):
                yield from stream.replies()
                if stream.unavailable:
                    context.abort(grpc.StatusCode.UNAVAILABLE, stream.unavailable)
        finally:
            with self._lock:
                self._open.pop(stream.answers, None)

    def _enter(self, stream: AnswerQueue, peer: str) -> None:
        """Let a stream in; where there is no place left, the one that has been idle for longest goes."""
        with self._lock:
            of_peer = [other for other, its_peer in self._open.items() if its_peer == peer]
            if len(of_peer) >= MAX_STREAMS_OF_PEER:
                self._take_place(of_peer, f"this shard serves {MAX_STREAMS_OF_PEER} push streams of this connection, the most of one,")
            elif len(self._open) >= MAX_STREAMS:
                self._take_place(list(self._open), f"this shard serves {MAX_STREAMS} push streams, the most it may,")
            self._open[stream] = peer

    def _take_place(self, streams: list[AnswerQueue], why: str) -> None:
        idle_s, longest = max(((stream.idle_s(), stream) for stream in streams), key=lambda pair: pair[0])
        if idle_s < _MAY_LEAVE_AFTER_S:
            raise ShardUnavailableError(f"{why} and none of them is idle; try again")
        del self._open[longest]
        longest.end_if_idle()  # a part that comes at this moment is not answered here: its trainer sends it again on another stream

    def end_idle(self) -> None:
        """End every stream that nothing goes through: the shard stops."""
        with self._lock:
            for stream in self._open:
                stream.end_if_idle()


class BytesInHand:
    """Bytes of messages that were received and wait for room. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_bytes = 0

    def take(self, n_bytes: int) -> bool:
        """Count a message; return False where there are too many already: it is to be dropped, and sent again later."""
        with self._changed:
            if self._n_bytes and self._n_bytes + n_bytes > MAX_BYTES_IN_HAND:
                return False
            self._n_bytes += n_bytes
            return True

    def give_back(self, n_bytes: int) -> None:
        """The message was taken or refused."""
        with self._changed:
            self._n_bytes -= n_bytes
            self._changed.notify_all()

    def wait_for_room(self, n_bytes: int) -> str:
        """Wait, for a while, until a message that was dropped could be taken; return the text for the trainer, which sends it again."""
        with self._changed:
            text = (
                f"parts of {self._n_bytes} bytes wait for room in this shard, at most {MAX_BYTES_IN_HAND} may; nothing of this one was "
                "taken, it is sent again by itself"
            )
            self._changed.wait_for(lambda: self._n_bytes + n_bytes <= MAX_BYTES_IN_HAND, _SEND_AGAIN_AFTER_S)
        return text


_JOIN_S = 5.0
log = logging.getLogger("paramserver")

Check = Callable[[PushPart], tuple[tuple[CheckedRows, ...], tuple[CheckedRows, ...]]]
"""Returns the rows to apply, and those prefetched, or raises PushRejectedError."""


class PushReceiver:
    """Reads the parts of one push stream, passes them on to ingest, and yields the replies."""

    def __init__(
        self, ingest: Ingest, check: Check, requests: Iterator[bytes], in_hand: BytesInHand, require_seat: Callable[[str], None]
    ) -> None:
        self._ingest, self._check, self._requests, self._in_hand = ingest, check, requests, in_hand
        self._require_seat, self._seated = require_seat, ""
        self.answers = AnswerQueue()
        self._reader = threading.Thread(target=self._read, name="kvemb-push-reader", daemon=True)
        self.unavailable = ""  # why the shard took no more parts from this stream

    def replies(self) -> Iterator[bytes]:
        """Yield encoded replies until every part that was taken has its outcome, or the stream is cancelled."""
        self._reader.start()
        try:
            for reply in self.answers:
                yield reply.encode()
        finally:
            self.cancel()
            if not self.answers.ended_idle:  # else it waits for a part until the call is over, which is when we return
                self._reader.join(_JOIN_S)

    def cancel(self) -> None:
        """End the stream; accepted parts are applied all the same. Any thread may call this."""
        self.answers.close()
        self._ingest.wake()

    def _read(self) -> None:
        try:
            for data in self._requests:
                size = len(data)
                if not self.answers.wait_for_room():
                    break
                if not self._in_hand.take(size):
                    del data
                    self.unavailable = self._in_hand.wait_for_room(size)
                    break
                try:
                    if not self._take(data):
                        break
                finally:
                    self._in_hand.give_back(size)
        except Exception as error:  # gRPC's iterator raises when the call is over
            log.debug("a push stream ended: %r", error)
        finally:
            self.answers.end_input()

    def _take(self, data: bytes) -> bool:
        """Submit one part; return whether to read on."""
        self.answers.expect()
        try:
            part = PushPart.decode(data)
            if part.trainer != self._seated:  # before anything is done on behalf of that trainer
                self._require_seat(part.trainer)
                self._seated = part.trainer
        except (AccessDeniedError, MessageError) as error:
            self.answers.refuse(PushReply(0, "failed", error=to_wire(error)))
            return False
        try:
            if self._ingest.admit(part, self.answers.put, lambda: self.answers.closed):
                tables, prefetched = self._check(part)
                self._ingest.submit(part, tables, self.answers.put, lambda: self.answers.closed, prefetched)
        except (ShardUnavailableError, *PASSING) as error:
            # (Storage errors: of the look-up of a table that this shard has not met.) Not the part's fault. The call ends as UNAVAILABLE,
            # and the trainer sends the part again over a new one.
            self.unavailable = str(error)
            self.answers.refuse(None)
            return False
        except KvembError as error:
            self._ingest.give_up(part, error)
            self.answers.refuse(PushReply(part.sequence, "failed", error=to_wire(error)))
        except Exception as error:
            log.exception("a part could not be taken")
            self.answers.refuse(PushReply(part.sequence, "failed", error=to_wire(error)))
        return True
