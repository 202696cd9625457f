"""The replies of one push stream on their way back, in the order in which things happen; and how long nothing went through it."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from kvemb.protocol.message_format import MAX_MESSAGE_BYTES
from kvemb.protocol.messages import PushReply

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
    return sum(rows.size_bytes for rows in reply.changed_rows)
