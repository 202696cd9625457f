"""The feeds of all shards as one: a thread per shard reads its stream ahead, a little; one consumer takes what is next.

A stream that breaks is opened again from the position that it had reached. Slots that move between shards are told by the one that gave
them and by the one that took them; what the taker tells behind that is held back until everything the giver told before is taken. So the
versions of a row never go back. Thread-safe; not fork-safe (`kvemb.client.all_shards`).
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import grpc

from kvemb.client.all_shards import AllShards
from kvemb.errors import ClosedError, FeedBehindError, KvembError, MessageError, ShardUnavailableError, from_wire
from kvemb.feed.feed_messages import BEGIN, MOVE, POSITION, REFUSED, START, FeedPosition, FeedReply, FeedRequest
from kvemb.net.deadline import Deadline, pauses

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_MOVED = "moved"
_LOOK_S = 1.0


class ChangeFeed:
    """What the shards of a cluster tell, as one stream."""

    def __init__(
        self,
        servers: AllShards,
        start: str | Mapping[int, FeedPosition],
        tables: tuple[str, ...],
        *,
        max_bytes: int,
        away_timeout_s: float,
    ) -> None:
        servers.check_usable()
        self._servers, self._tables, self._max_bytes, self._away_timeout_s = servers, tables, max_bytes, away_timeout_s
        self.changed = threading.Condition()
        self._streams: dict[int, _ShardStream] = {}
        self._turn = 0
        self.closed = False
        self.begun: dict[int, FeedPosition] = {}  # where each shard's stream has begun
        try:
            self._begin(start)
        except BaseException:
            self.close()
            raise

    def take(self, timeout_s: float | None = None) -> tuple[int, FeedReply] | None:
        """Return the next reply with its shard; None when there is none within the timeout, or the feed was closed."""
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        while not self.closed:
            if self._servers.forked:  # its threads are those of the parent
                self._servers.check_usable()
            with self.changed:
                found = self._next()
                if found is None:
                    if deadline is not None and deadline.expired:
                        return None
                    self.changed.wait(_LOOK_S if deadline is None else min(_LOOK_S, deadline.remaining_s()))
                    continue
            if found[1].kind == _MOVED:
                self._follow_move(*found)
            return found
        return None

    @property
    def away_since_s(self) -> float | None:
        """Since when, on the monotonic clock, a shard's stream has been broken; None while all go on."""
        with self.changed:
            broken = [stream.broken_s for stream in self._streams.values() if stream.broken_s is not None]
        return min(broken, default=None)

    def close(self) -> None:
        """End every stream; in a forked child do nothing. Idempotent."""
        if self._servers.forked:
            return
        with self.changed:
            self.closed = True
            streams = list(self._streams.values())
            self.changed.notify_all()
        for stream in streams:
            stream.end()
        for stream in streams:
            stream.thread.join()

    # --- one consumer ----------------------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, FeedReply] | None:
        """Take the next reply of the shard whose turn it is. Under the lock."""
        numbers = list(self._streams)
        for at in range(len(numbers)):
            shard = numbers[(self._turn + at) % len(numbers)]
            stream = self._streams[shard]
            if stream.replies and not self._is_held(stream.replies[0]):
                self._turn = (self._turn + at + 1) % len(numbers)
                return shard, stream.take()
            if not stream.replies and stream.error is not None:
                raise stream.error
        return None

    def _is_held(self, reply: FeedReply) -> bool:
        """Whether a shard that slots came from, or went to, has more to tell of before: of the latter, that it had left, perhaps."""
        shards = (shard for name in ("came", "gone") for shard, _ in reply.details.get(name, ()))
        return reply.kind == _MOVED and not all(self._has_told(shard, reply.serial) for shard in shards)

    def _has_told(self, shard: int, serial: int) -> bool:
        """Whether everything was taken that a shard told before a move."""
        stream = self._streams.get(shard)
        if stream is None or stream.serial >= serial or not stream.serial:  # of a position without a serial the order is not known
            return True
        head = stream.replies[0] if stream.replies else None
        return head is not None and head.kind == _MOVED and head.serial >= serial

    def _follow_move(self, shard: int, reply: FeedReply) -> None:
        stream = self._streams[shard]
        stream.serial = max(stream.serial, reply.serial)
        with self.changed:
            for taker, _ in reply.details["gone"]:
                if taker not in self._streams and not self.closed:
                    self._open(taker, FeedRequest(MOVE, list(self._tables), serial=reply.serial), reply.serial - 1)
            if reply.details["left"]:
                stream.end()
                del self._streams[shard]
            self.changed.notify_all()

    # --- the streams -----------------------------------------------------------------------------------------------------------------

    def _begin(self, start: str | Mapping[int, FeedPosition]) -> None:
        if not isinstance(start, str):
            self.begun = dict(start)
            for shard, position in start.items():
                if position.epoch:
                    self._open(shard, FeedRequest(POSITION, list(self._tables), *position), position.serial)
                else:
                    self._open(shard, FeedRequest(MOVE, list(self._tables), serial=position.serial), position.serial - 1)
            return
        deadline, pause_s = Deadline.after(self._away_timeout_s), pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            self._servers.look(deadline)
            for shard in self._servers.numbers:
                self._open(shard, FeedRequest(start, list(self._tables)), 0)
            serials = {self._first(stream, deadline).serial for stream in self._streams.values()}
            if len(serials) == 1 and 0 not in serials:
                for shard, stream in self._streams.items():
                    stream.serial = max(serials)
                    self.begun[shard] = stream.replies[0].position
                return
            for stream in self._streams.values():  # slots move, and the shards have not come to the same map yet
                stream.end()
            self._streams.clear()
            if deadline.expired:
                raise ShardUnavailableError(f"slots moved between shards for {deadline.timeout_s:g} s; `kvemb moves` shows how far that is")
            threading.Event().wait(next(pause_s))

    def _first(self, stream: "_ShardStream", deadline: Deadline) -> FeedReply:
        with self.changed:
            self.changed.wait_for(lambda: stream.replies or stream.error is not None, deadline.remaining_s())
            if stream.error is not None:
                raise stream.error
            if not stream.replies:
                raise ShardUnavailableError(f"shard {stream.shard} did not begin its feed within {deadline.timeout_s:g} s")
            return stream.replies[0]

    def _open(self, shard: int, request: FeedRequest, serial: int) -> None:
        self._streams[shard] = _ShardStream(self, self._servers, shard, request, serial, self._max_bytes, self._away_timeout_s)
        self._streams[shard].thread.start()


class _ShardStream:
    """One shard's replies, read ahead by a thread of its own."""

    def __init__(
        self, feed: ChangeFeed, servers: AllShards, shard: int, request: FeedRequest, serial: int, max_bytes: int, away_timeout_s: float
    ) -> None:
        self._feed, self._servers, self.shard, self._request = feed, servers, shard, request
        self._max_bytes, self._away_timeout_s, self.serial = max_bytes, away_timeout_s, serial
        self.replies: deque[FeedReply] = deque()
        self.error: KvembError | None = None
        self._n_bytes, self._ended, self._heard = 0, False, False
        self.broken_s: float | None = time.monotonic()  # since when nothing was heard; None while the stream goes on
        self._call: Any = None
        self._begun: FeedReply | None = None
        self._last: FeedReply | None = None  # the last reply whose position holds
        self.thread = threading.Thread(target=self._run, name=f"kvemb-feed-{shard}", daemon=True)

    def take(self) -> FeedReply:
        """Take the first reply. Under the feed's lock."""
        reply = self.replies.popleft()
        self._n_bytes -= reply.size_bytes
        self._feed.changed.notify_all()
        return reply

    def end(self) -> None:
        """End the stream, soon. Any thread."""
        with self._feed.changed:
            self._ended = True
            call = self._call
            self._feed.changed.notify_all()
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        try:
            self._read()
        except KvembError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ShardUnavailableError(f"shard {self.shard}: the feed ended: {type(error).__name__}: {error}"))

    def _fail(self, error: KvembError) -> None:
        with self._feed.changed:
            self.error = error
            self._feed.changed.notify_all()

    def _read(self) -> None:
        """Read the shard's replies, over as many calls as it takes."""
        while not self._ended:
            deadline, heard = Deadline.after(self._away_timeout_s), False
            for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
                if self._ended:
                    return
                try:
                    heard = self._read_call()
                    error: KvembError = ShardUnavailableError(f"shard {self.shard}: Feed: the shard ended the stream")
                except ShardUnavailableError as unavailable:
                    error, heard = unavailable, self._heard
                if self.broken_s is None:
                    self.broken_s = time.monotonic()
                if heard:
                    break
                if deadline.expired:
                    raise error
                self._wait(pause_s)
                self._servers.look(Deadline.after(self._away_timeout_s))

    def _read_call(self) -> bool:
        """Read one call's replies to its end; return whether there were any. ShardUnavailableError: call again."""
        self._heard = False
        channel = self._servers.channels.get(self.shard)
        if channel is None and self._request.start == MOVE and self._last is None:
            raise ShardUnavailableError(f"shard {self.shard}: Feed: slots have come to it, and its address is not known yet")
        if channel is None:
            raise FeedBehindError(
                f'shard {self.shard} has left the cluster, and not all that it changed was told. Begin again with from_="start".'
            )
        call = channel.feed_stream(self._now().encode())
        with self._feed.changed:
            self._call = call
            if self._ended:  # meanwhile, with no call to cancel
                call.cancel()
        try:
            for data in call:
                self._put(FeedReply.decode(data))
                self._heard = True
        except grpc.RpcError as error:
            if self._ended:
                return self._heard
            raise channel.translate(error, "Feed") from error
        except ValueError as error:  # the channel was closed
            raise ClosedError("this cluster was closed") from error
        return self._heard

    def _now(self) -> FeedRequest:
        """The request that goes on where the last reply was."""
        if self._last is None:
            return self._request
        return FeedRequest(POSITION, self._request.tables, *self._last.position)

    def _put(self, reply: FeedReply) -> None:
        """Append a reply, when there is room."""
        self.broken_s = None
        if reply.kind == REFUSED:
            raise from_wire({"type": str(reply.details.get("type")), "message": str(reply.details.get("message"))})
        if reply.kind == BEGIN:
            if self._begun is not None:
                if self._last is None and reply.serial != self._begun.serial:
                    raise FeedBehindError(f"shard {self.shard}: slots moved while the feed began. Begin it again.")
                return
            self._begun = reply
        elif self._last is not None and reply.kind in ("apply", "assign", "erase") and not _follows(self._last, reply):
            raise MessageError(f"shard {self.shard}: its feed goes from batch {self._last.k} to {reply.k}; report this")
        with self._feed.changed:
            self._feed.changed.wait_for(lambda: self._ended or not self.replies or self._n_bytes < self._max_bytes)
            if self._ended:
                return
            self.replies.append(reply)
            self._n_bytes += reply.size_bytes
            if reply.whole and not (reply.kind == BEGIN and self._request.start == START):
                self._last = reply
            self._feed.changed.notify_all()

    def _wait(self, pause_s: float) -> None:
        with self._feed.changed:
            self._feed.changed.wait_for(lambda: self._ended, pause_s)


def _follows(last: FeedReply, reply: FeedReply) -> bool:
    return bool(len(reply.tables) and len(reply.tables[0].versions)) or reply.k == last.k + 1
