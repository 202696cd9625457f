"""The feeds of all shards as one, on shards that are fakes."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvemb.client.change_feed import ChangeFeed
from kvemb.errors import ShardUnavailableError


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
