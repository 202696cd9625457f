"""The feeds of all shards as one, on shards that are fakes."""

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvemb.errors import ShardUnavailableError
from kvemb.feed.change_feed import ChangeFeed
from kvemb.feed.feed_messages import MOVE, FeedPosition, FeedReply, FeedRequest


class SilentCall:
    """A stream that tells nothing until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        assert self.cancelled.wait(10), "the stream goes on after its feed has ended"
        return iter(())

    def cancel(self) -> None:
        self.cancelled.set()


class LateShards:
    """One shard, whose stream is opened only when the feed has given up waiting for it."""

    numbers, forked = (0,), False

    def __init__(self) -> None:
        self.channels, self.call = {0: self}, SilentCall()

    def feed_stream(self, request: bytes) -> SilentCall:
        stream: Any = threading.current_thread()._target.__self__  # type: ignore[attr-defined]
        while not stream._ended:
            threading.Event().wait(0.001)
        return self.call

    def check_usable(self) -> None: ...

    def look(self, deadline: object) -> None: ...


def test_a_stream_that_opens_while_its_feed_ends_is_ended_too() -> None:
    shards: Any = LateShards()
    with pytest.raises(ShardUnavailableError, match="did not begin"):
        ChangeFeed(shards, "now", (), max_bytes=1 << 20, away_timeout_s=0.05)
    assert shards.call.cancelled.is_set()


class TellingCall:
    """A stream that tells what it is given, until it is cancelled."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def tell(self, *replies: FeedReply) -> None:
        for reply in replies:
            self._told.put(reply.encode())

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._told.get, None)

    def cancel(self) -> None:
        self._told.put(None)


class TellingShard:
    """A shard whose streams a test tells what they tell."""

    def __init__(self) -> None:
        self.asked, self.calls = list[FeedRequest](), [TellingCall(), TellingCall()]

    def feed_stream(self, request: bytes) -> TellingCall:
        self.asked.append(FeedRequest.decode(request))
        return self.calls[len(self.asked) - 1]


class TellingShards:
    forked = False

    def __init__(self, n_shards: int) -> None:
        self.numbers, self.channels = range(n_shards), {shard: TellingShard() for shard in range(n_shards)}

    def check_usable(self) -> None: ...

    def look(self, deadline: object) -> None: ...


def moved(k: int, serial: int, *, gone: Sequence[int] = (), came: Sequence[int] = ()) -> FeedReply:
    """All of a shard's slots go, or some come."""
    slots = {name: [[shard, b"\0\0"] for shard in shards] for name, shards in (("gone", gone), ("came", came))}
    return FeedReply("moved", True, 1, k, serial, 1, k, details={**slots, "left": bool(gone) and serial == 2})


def test_shards_that_leave_together_and_come_back_are_followed_on_by_a_reader_that_is_behind() -> None:
    shards: Any = TellingShards(3)
    feed = ChangeFeed(shards, dict.fromkeys(range(3), FeedPosition(1, 1, 1, 1, 1)), (), max_bytes=1 << 20, away_timeout_s=10)
    try:
        shards.channels[1].calls[0].tell(FeedReply("apply", True, 1, 2, 1, 1, 2))
        assert feed.take(10) is not None  # so that it is shard 2's turn
        goes_and_comes = [moved(2, 2, came=[0, 1]), moved(3, 3, gone=[0, 1])]
        for shard, told in enumerate(([moved(2, 2, gone=[2])], [moved(3, 2, gone=[2])], goes_and_comes)):
            shards.channels[shard].calls[0].tell(*told)
            with feed.changed:
                assert feed.changed.wait_for(lambda shard=shard, told=told: len(feed._streams[shard].replies) == len(told), 10)  # type: ignore[misc]
        for _ in range(4):
            assert feed.take(10) is not None
        for shard in (0, 1):
            shards.channels[shard].calls[1].tell(FeedReply("apply", True, 1, 9, 3, 1, 9))
        told_by = [found[0] if (found := feed.take(10)) else None for _ in range(2)]
        assert sorted(told_by) == [0, 1]  # type: ignore[type-var]
        assert [(one.start, one.serial) for shard in (0, 1) for one in shards.channels[shard].asked[1:]] == [(MOVE, 3)] * 2
    finally:
        feed.close()
