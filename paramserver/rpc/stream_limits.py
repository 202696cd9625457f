"""How many push streams a shard serves, and who leaves when another wants in. Each holds two threads; trainers open theirs anew at will.

A stream that nothing goes through is ended after a while, and soon where its place is wanted. Its trainer opens another one with its next
push and hardly notices. What must not live here: what goes through a stream (`push_parts`).
"""

import resource
import threading

from kvemb.errors import ShardUnavailableError

from .answer_queue import AnswerQueue

MAX_STREAMS = 256
MAX_STREAMS_OF_PEER = 64  # of a connection: a trainer opens one, a proxy may bring many trainers over one
MAX_CONNECTIONS = 4096
HANDSHAKE_S = 10
IDLE_CONNECTION_S = 600  # trainers open theirs anew with the next call
MAX_BYTES_IN_HAND = 256 << 20
_SEND_AGAIN_AFTER_S = 5.0  # where there is no room before
_MAY_LEAVE_AFTER_S = 1.0


def connection_options() -> tuple[tuple[str, int], ...]:
    """gRPC's options that bound what strangers cost: connections of which a shard keeps only so many, and time to say who they are.

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

    def enter(self, stream: AnswerQueue, peer: str) -> None:
        """Let a stream in; where there is no place left, the one that has been idle for longest goes.

        Args:
            stream: that wants in, by its answers.
            peer: the connection that it comes over.

        Raises:
            ShardUnavailableError: none is idle; to be tried again later.
        """
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

    def leave(self, stream: AnswerQueue) -> None:
        """A stream is over."""
        with self._lock:
            self._open.pop(stream, None)

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
        """Wait, for a while, until a message that was dropped could be taken; return what to tell the trainer, who sends it again."""
        with self._changed:
            text = (
                f"parts of {self._n_bytes} bytes wait for room in this shard, at most {MAX_BYTES_IN_HAND} may; nothing of this one was "
                "taken, it is sent again by itself"
            )
            self._changed.wait_for(lambda: self._n_bytes + n_bytes <= MAX_BYTES_IN_HAND, _SEND_AGAIN_AFTER_S)
        return text
