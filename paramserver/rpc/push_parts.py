"""One trainer's push stream: a thread that reads its parts, and the replies that go back, in the order in which things happen.

The reader stops reading while ingest has no room or the trainer does not take its replies; gRPC's flow control does the rest. The apply
thread only ever appends to the outbox. A part that is refused gets a "failed" reply and the stream goes on; a malformed one ends it.
"""

import logging
import threading
from collections.abc import Callable, Iterator

from kvemb.errors import (
    AccessDeniedError,
    DeadlineExceededError,
    KvembError,
    MessageError,
    NodeUnavailableError,
    ShardUnavailableError,
    to_wire,
)
from kvemb.protocol.messages import PushPart, PushReply

from ..ingest.ingest import Ingest
from ..model.batch import CheckedRows
from .answer_queue import AnswerQueue
from .stream_limits import BytesInHand

_JOIN_S = 5.0
log = logging.getLogger("paramserver")

Check = Callable[[PushPart], tuple[tuple[CheckedRows, ...], tuple[CheckedRows, ...]]]
"""Returns the rows to apply, and those prefetched, or raises PushRejectedError."""


class PushReceiver:
    """Reads the parts of one push stream, passes them on to ingest, and yields the replies.

    Args:
        ingest: of the shard.
        check: validates a decoded part.
        requests: encoded parts; iterating ends or raises when the stream does.
        in_hand: what all streams together have received and not yet passed on.
        require_seat: raises unless the stream's caller may push as a trainer of that name.
    """

    def __init__(
        self, ingest: Ingest, check: Check, requests: Iterator[bytes], in_hand: BytesInHand, require_seat: Callable[[str], None]
    ) -> None:
        self._ingest, self._check, self._requests, self._in_hand = ingest, check, requests, in_hand
        self._require_seat = require_seat
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
        """End the stream; what was taken is applied all the same. Any thread may call this."""
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
            self._require_seat(part.trainer)  # before anything is done on behalf of that trainer
        except (AccessDeniedError, MessageError) as error:
            self.answers.refuse(PushReply(0, "failed", error=to_wire(error)))
            return False
        try:
            if self._ingest.admit(part, self.answers.put, lambda: self.answers.closed):
                tables, prefetched = self._check(part)
                self._ingest.submit(part, tables, self.answers.put, lambda: self.answers.closed, prefetched)
        except (ShardUnavailableError, NodeUnavailableError, DeadlineExceededError) as error:
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
