"""The news that a shard sends others when the cluster map has changed."""

import gc
import weakref
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from paramserver.scaling.map_follower import MapFollower


def test_a_shard_goes_on_following_the_map_after_an_error_that_nobody_expected(caplog: pytest.LogCaptureFixture) -> None:
    looked = Event()

    def refresh_map(deadline: Deadline) -> bool:
        if not follower._waiting.why:
            raise IndexError("tuple index out of range")
        looked.set()
        return False

    nodes = SimpleNamespace(refresh_map=refresh_map, cluster_map=ClusterMap.first(1, 1), addresses=("a:1",), repairs={})
    store: Any = SimpleNamespace(nodes=nodes)
    nothing: Any = None
    parts: Any = SimpleNamespace(store=store, shard=1, timeout_s=1.0)
    follower = MapFollower(parts, nothing, None, shards=nothing, look=Event(), wake=print)
    follower.thread.start()
    assert looked.wait(20)
    assert follower.thread.stop(20)
    assert "IndexError" in caplog.text


class _Call:
    """As gRPC's future: it is cancelled when nobody holds it."""


def test_news_to_other_shards_are_held_until_the_next_ones() -> None:
    calls: list[weakref.ref[_Call]] = []

    def start(*_: Any) -> _Call:
        call = _Call()
        calls.append(weakref.ref(call))
        return call

    shards: Any = SimpleNamespace(channels={number: SimpleNamespace(start=start) for number in (1, 2)})
    parts: Any = SimpleNamespace(store=None, shard=0, timeout_s=1.0)
    nothing: Any = None
    follower = MapFollower(parts, nothing, nothing, shards=shards, look=Event(), wake=print)
    for _ in range(2):
        follower._tell([1, 2])
        gc.collect()
        assert [call() is not None for call in calls[-2:]] == [True, True]
    assert [call() is None for call in calls[:2]] == [True, True], "of each shard the last ones are kept"
