"""Asking the shards to save, without shards."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvemb.cluster import Cluster
from kvemb.config import parse
from kvemb.connection.access import Access
from kvemb.errors import ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import SaveRequest
from kvemb.schema.cluster_map import ClusterMap

CONFIG = parse({"cluster": "c", "storage": {"kind": "redis", "nodes": ["a:1"]}, "parameter_servers": {"shards": ["b:2"]}}, {})


class NoShard:
    """One shard, which says who it is and then answers no more."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, float]] = []

    cluster_map = ClusterMap.first(1, 1)

    numbers = (0,)

    def refresh_map(self, deadline: Deadline) -> None:
        pass

    def describe(self, config: object, deadline: Deadline) -> SimpleNamespace:
        return SimpleNamespace(cluster_id=bytes(16))

    def call_each(self, method: str, requests: dict[int, SaveRequest], reply_type: object, deadline: Deadline) -> None:
        self.asked.append((method, requests[0].timeout_s, deadline.timeout_s))
        raise ShardUnavailableError("shard 0: no answer")


def test_shards_and_caller_have_the_same_time_for_the_cut(tmp_path: Path) -> None:
    shards = NoShard()
    access = Access(None, SimpleNamespace(servers=shards), 5.0)  # type: ignore[arg-type]
    with pytest.raises(ShardUnavailableError):
        Cluster(CONFIG, access).save(str(tmp_path / "a"), timeout_s=7.0)
    assert shards.asked == [("Save", 7.0, 7.0)]
