"""The feed's streams of one shard: how many there may be, and the end of those that nobody reads.

A stream holds a thread, and one reply in memory: gRPC takes the next one when the subscriber has taken those before. A subscriber that
takes nothing for long is cut off. It knows its position, and subscribes again from there.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import grpc

from kvemb.errors import KvembError, MessageError
from kvemb.feed.feed_messages import FEED, FeedRequest
from kvemb.protocol.verb import Verb

from ..capability import MAX_SUBSCRIBERS, Capability, ShardKernel, Stream
from .told_changes import ShardChanges

LONGEST_UNREAD_S = 30.0
_LOOK_S = 1.0
log = logging.getLogger("paramserver")


class FeedStreams(Capability):
    """Serves one shard's feed. Thread-safe."""

    streams: ClassVar = (FEED,)

    def __init__(self, kernel: ShardKernel) -> None:
        super().__init__(kernel)
        self._changed = threading.Condition()
        self._open: dict[ShardChanges, tuple[Any, float]] = {}  # each with its call, and since when a reply is not taken (0: it is)
        self._watch: threading.Thread | None = None
        self._closed = False

    @property
    def serving(self) -> Mapping[Verb[Any, Any], Stream]:
        return {FEED: self._replies}

    def _replies(self, data: bytes, context: Any) -> Iterator[bytes]:
        """Yield encoded replies until the call is over; a call that cannot be served ends as UNAVAILABLE."""
        try:
            changes = ShardChanges(self._kernel.parts, self._kernel.mark, self._kernel.events, FeedRequest.decode(data))
        except MessageError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not self._enter(changes, context):
            context.abort(
                grpc.StatusCode.UNAVAILABLE, f"this shard has {MAX_SUBSCRIBERS} subscribers, the most it may, or it stops; try again"
            )
        try:
            if context.add_callback(changes.end):
                for reply in changes.replies():
                    with self._changed:
                        self._open[changes] = context, time.monotonic()
                    yield reply.encode()
                    with self._changed:
                        self._open[changes] = context, 0.0
        except (KvembError, OSError) as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            with self._changed:
                del self._open[changes]
        if self._closed:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the shard stops")

    def close(self) -> None:
        """End every stream, and let none in."""
        with self._changed:
            self._closed = True
            changes, watch = list(self._open), self._watch
            self._changed.notify_all()
        for one in changes:
            one.end()
        if watch is not None:
            watch.join()

    def _enter(self, changes: ShardChanges, context: Any) -> bool:
        with self._changed:
            if self._closed or len(self._open) >= MAX_SUBSCRIBERS:
                return False
            self._open[changes] = context, 0.0
            if self._watch is None:
                self._watch = threading.Thread(target=self._cut_off, name="kvemb-feed-watch", daemon=True)
                self._watch.start()
            return True

    def _cut_off(self) -> None:
        """End the streams whose subscribers take nothing, as long as there are streams."""
        while True:
            with self._changed:
                if self._closed or not self._open:
                    self._watch = None
                    return
                before_s = time.monotonic() - LONGEST_UNREAD_S
                late = [(one, context) for one, (context, since_s) in self._open.items() if 0.0 < since_s < before_s]
                self._changed.wait(_LOOK_S)
            for one, context in late:
                log.warning("a subscriber of the feed took nothing for %g s and is cut off; it may go on where it was", LONGEST_UNREAD_S)
                one.end()
                context.cancel()
