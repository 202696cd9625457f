"""The news that a shard sends others when the cluster map has changed."""

import gc
import weakref
from threading import Event
from types import SimpleNamespace
from typing import Any

from paramserver.moves.map_follower import MapFollower


class _Call:
    """As gRPC's future: it is cancelled when nobody holds it."""


def test_news_to_other_shards_are_held_until_the_next_ones() -> None:
    calls: list[weakref.ref[_Call]] = []

    def start(*_: Any) -> _Call:
        call = _Call()
        calls.append(weakref.ref(call))
        return call

    shards: Any = SimpleNamespace(channels={number: SimpleNamespace(start=start) for number in (1, 2)})
    nothing: Any = None
    follower = MapFollower(nothing, 0, lambda: 1, nothing, keep=print, wake=print, look=Event(), shards=shards, carry=print, timeout_s=1.0)
    for _ in range(2):
        follower._tell([1, 2])
        gc.collect()
        assert [call() is not None for call in calls[-2:]] == [True, True]
    assert [call() is None for call in calls[:2]] == [True, True], "of each shard the last ones are kept"
