"""Asking the shards to save, without shards, and storage that does not answer."""

import threading
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kvemb.api import Cluster
from kvemb.api.shared_connection import SharedConnection
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.save import Stalled
from kvemb.config import parse
from kvemb.errors import CheckpointError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import SaveReply, SaveRequest
from kvemb.schema.cluster_map import ClusterMap

CONFIG = parse({"cluster": "c", "storage": {"kind": "redis", "nodes": ["a:1"]}, "parameter_servers": {"shards": ["b:2"]}}, {})


class NoShard:
    """One shard, which says its number and then answers no more."""

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
    shared = SharedConnection(None, SimpleNamespace(servers=shards), 5.0)  # type: ignore[arg-type]
    with pytest.raises(ShardUnavailableError):
        Cluster(CONFIG, shared).save(str(tmp_path / "a"), timeout_s=7.0)
    assert shards.asked == [("Save", 7.0, 7.0)]


def test_a_shard_that_saves_nothing_is_named_now_and_then_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    stalled = Stalled()
    for second in range(100):
        stuck, well = SaveReply("running", "", 5, 10, 0), SaveReply("running", "", 5, 10, second)
        stalled.look({0: stuck, 1: well, 2: SaveReply("done", "", 9, 9, 9), 3: ShardUnavailableError("away")}, float(second))
    assert [line.split(" (")[0] for line in caplog.messages] == ["shard 0 has saved nothing for 30 s"] * 3


class Hung(MemoryFileSystem):
    """Storage that takes calls and answers none; one instance each time."""

    protocol = "hung"
    cachable = False
    answers = threading.Event()

    def pipe_file(self, *_: object, **__: object) -> None:
        self.answers.wait(30)
        raise OSError("at last")


def test_storage_that_hangs_is_said_and_given_up(caplog: pytest.LogCaptureFixture) -> None:
    fsspec.register_implementation("hung", Hung, clobber=True)
    storage = CheckpointStorage("hung://bucket/run", give_up_s=0.3, say_every_s=0.05)
    assert storage.size("a") is None
    with pytest.raises(CheckpointError, match=r"hung://bucket/run/a: cannot write it: no answer in 0 s"):
        storage.write("a", b"1")
    assert "hung://bucket/run/a: cannot write it yet: no answer for" in caplog.text
    Hung.answers.set()
