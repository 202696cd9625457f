"""One trainer's push stream: a thread that reads its parts, and the replies that go back, in the order in which things happen.

The reader stops reading while ingest has no room or the trainer does not take its replies; gRPC's flow control does the rest. The apply
thread only ever appends to the outbox. A part that is refused gets a "failed" reply and the stream goes on; a malformed one ends it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvemb.errors import (
    DeadlineExceededError,
    KvembError,
    MessageError,
    NodeUnavailableError,
    ShardUnavailableError,
    TableDroppedError,
    to_wire,
)
from kvemb.protocol.message_format import MAX_MESSAGE_BYTES
from kvemb.protocol.messages import PushPart, PushReply

from ..ingest.ingest import Ingest
from ..model.batch import CheckedRows
from .stream_limits import BytesInHand

_MAX_UNSENT = 1024
# Of updated rows in replies that the trainer does not take; further replies leave them out. One reply with as many is still a message.
_MAX_ROW_BYTES = MAX_MESSAGE_BYTES - (4 << 20)
_JOIN_S = 5.0
_LONGEST_IDLE_S = 60.0  # then a stream is ended: it holds two threads
_FINAL = ("applied", "failed")
log = logging.getLogger("paramserver")

Check = Callable[[PushPart], tuple[tuple[CheckedRows, ...], tuple[CheckedRows, ...]]]
"""Returns the rows to apply, and those prefetched, or raises PushRejectedError."""


class _AnswerQueue:
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
                reply = replace(reply, rows=[], changed_rows=[])
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
            return self._idle_s()

    def end_if_idle(self, after_s: float = 0.0) -> None:
        """Close the stream, unless something goes through it, or has in so many seconds."""
        with self._changed:
            if self._idle_s() > after_s and not self.closed:
                self.closed = self.ended_idle = True
                self._changed.notify_all()

    def _idle_s(self) -> float:
        return 0.0 if self._n_open or self._replies else time.monotonic() - self._quiet_since_s

    def close(self) -> None:
        """The stream is gone."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[PushReply]:
        while True:
            with self._changed:
                while not self._changed.wait_for(self._has_news, max(0.0, _LONGEST_IDLE_S - self._idle_s())):
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
    return sum(map(len, reply.rows)) + sum(rows.size_bytes for rows in reply.changed_rows)


class PushReceiver:
    """Reads the parts of one push stream, passes them on to ingest, and yields the replies.

    Args:
        ingest: of the shard.
        check: validates a decoded part.
        requests: encoded parts; iterating ends or raises when the stream does.
        in_hand: what all streams together have received and not yet passed on.
    """

    def __init__(self, ingest: Ingest, check: Check, requests: Iterator[bytes], in_hand: BytesInHand) -> None:
        self._ingest, self._check, self._requests, self._in_hand = ingest, check, requests, in_hand
        self._outbox = _AnswerQueue()
        self._reader = threading.Thread(target=self._read, name="kvemb-push-reader", daemon=True)
        self.unavailable = ""  # why the shard took no more parts from this stream

    def replies(self) -> Iterator[bytes]:
        """Yield encoded replies until every part that was taken has its outcome, or the stream is cancelled."""
        self._reader.start()
        try:
            for reply in self._outbox:
                yield reply.encode()
        finally:
            self.cancel()
            if not self._outbox.ended_idle:  # else it waits for a part until the call is over, which is when we return
                self._reader.join(_JOIN_S)

    def idle_s(self) -> float:
        """See `stream_limits.Stream`."""
        return self._outbox.idle_s()

    def end(self) -> None:
        """See `stream_limits.Stream`. A part that comes at this moment is not answered here: its trainer sends it again on another."""
        self._outbox.end_if_idle()

    def cancel(self) -> None:
        """End the stream; what was taken is applied all the same. Any thread may call this."""
        self._outbox.close()
        self._ingest.wake()

    def _read(self) -> None:
        try:
            for data in self._requests:
                size = len(data)
                if not self._outbox.wait_for_room():
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
            self._outbox.end_input()

    def _take(self, data: bytes) -> bool:
        """Submit one part; return whether to read on."""
        self._outbox.expect()
        try:
            part = PushPart.decode(data)
        except MessageError as error:
            self._outbox.refuse(PushReply(0, "failed", error=to_wire(error)))
            return False
        try:
            try:
                tables, prefetched = self._check(part)
            except TableDroppedError:
                if self._ingest.answer_known(part, self._outbox.put):
                    return True
                raise
            self._ingest.submit(part, tables, self._outbox.put, lambda: self._outbox.closed, prefetched)
        except (ShardUnavailableError, NodeUnavailableError, DeadlineExceededError) as error:
            # (Storage errors: of the look-up of a table that this shard has not met.) Not the part's fault. The call ends as UNAVAILABLE,
            # and the trainer sends the part again over a new one.
            self.unavailable = str(error)
            self._outbox.refuse(None)
            return False
        except KvembError as error:
            self._ingest.give_up(part, error)
            self._outbox.refuse(PushReply(part.sequence, "failed", error=to_wire(error)))
        except Exception as error:
            log.exception("a part could not be taken")
            self._outbox.refuse(PushReply(part.sequence, "failed", error=to_wire(error)))
        return True
