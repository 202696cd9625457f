"""The feed as its caller sees it, on shards that are fakes."""

from typing import Any

import numpy as np

from kvemb.feed.cluster_feed import ClusterFeed
from kvemb.feed.feed_messages import FeedPosition, FeedReply

SLOTS = np.arange(4, dtype="<u2").tobytes()


class FakeChanges:
    """Shards 0 and 1, and what they tell."""

    closed = False

    def __init__(self, *replies: tuple[int, FeedReply]) -> None:
        self.begun, self._replies = {0: FeedPosition(1, 5, 1), 1: FeedPosition(1, 9, 1)}, [*replies]

    def take(self, timeout_s: float | None) -> tuple[int, FeedReply] | None:
        return self._replies.pop(0) if self._replies else None


def test_a_feed_has_told_all_up_to_where_shards_were_also_one_that_has_joined_or_left_since() -> None:
    came = FeedReply("moved", True, 2, 0, 2, 1, 0, details={"gone": [], "came": [[1, SLOTS]]})
    gone = FeedReply("moved", True, 1, 9, 2, 1, 0, details={"gone": [[2, SLOTS]], "came": [], "left": True})
    batch = FeedReply("apply", True, 2, 3, 2, 1, 0)
    changes: Any = FakeChanges((1, gone), (2, came), (2, batch))
    feed, table = ClusterFeed(changes, lambda name: None), {0: 5, 1: 9}  # type: ignore[arg-type, return-value]
    assert feed.has_told(table)
    assert not feed.has_told({0: 6, 1: 9})
    assert not feed.has_told({0: 5, 2: 3})  # shard 2 has joined; nothing of that was told yet
    feed.take(0)
    assert feed.has_told({0: 5, 1: 9})  # shard 1 has left, and was told to its end
    assert not feed.has_told({0: 5, 2: 3})
    feed.take(0)
    feed.take(0)
    assert feed.has_told({0: 5, 2: 3})
