"""Asking the shards to save, without shards, and storage that does not answer."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kvemb.api import Cluster
from kvemb.checkpoint.checkpoint_messages import SaveReply, SaveRequest
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST, Cut, fragment_path
from kvemb.checkpoint.format.strict_json import encode
from kvemb.checkpoint.listing import list_checkpoints
from kvemb.checkpoint.save import Stalled
from kvemb.checkpoint.verify import verify
from kvemb.checkpoint.writer import ShardWriter
from kvemb.config import parse
from kvemb.connection import Connection
from kvemb.errors import CheckpointError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.verb import Verb
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.record import make_version
from tests.unit.checkpoint_files import CLUSTER_ID, USER, block_of, in_order

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
        return SimpleNamespace(cluster_id=bytes.fromhex(CLUSTER_ID))

    def call_each(self, verb: Verb[Any, Any], requests: dict[int, SaveRequest], deadline: Deadline) -> None:
        self.asked.append((verb.name, requests[0].timeout_s, deadline.timeout_s))
        raise ShardUnavailableError("shard 0: no answer")


def cluster_of(shards: object) -> Cluster:
    return Cluster(CONFIG, Connection(None, SimpleNamespace(servers=shards), 5.0))  # type: ignore[arg-type]


def test_shards_and_caller_have_the_same_time_for_the_cut(tmp_path: Path) -> None:
    shards = NoShard()
    with pytest.raises(ShardUnavailableError):
        cluster_of(shards).save(str(tmp_path / "a"), timeout_s=7.0)
    assert shards.asked == [("Save", 7.0, 7.0)]


class QuickShard(NoShard):
    """One shard that saves at once, and notes its share in this format."""

    def __init__(self, fragment_format: str) -> None:
        super().__init__()
        self._format = fragment_format

    def call_each(self, verb: Verb[Any, Any], requests: dict[int, SaveRequest], deadline: Deadline) -> None:
        request = requests[0]
        storage = CheckpointStorage(request.url)
        with ShardWriter(storage, request.save_id, Cut(0, 1, 5), weights_only=False) as writer:
            writer.add_rows(USER, [block_of(USER, in_order(range(100)), make_version(1, 5))])
            writer.finish([(USER, 1)])
        tree = json.loads(storage.read(fragment_path(0), 1 << 20))
        del tree["checksum"]
        storage.write(fragment_path(0), encode(tree | {"format": self._format}))

    def try_each(self, verb: object, requests: object, deadline: Deadline) -> dict[int, SaveReply]:
        return {0: SaveReply("done", "", 100, 100, 1)}


def test_a_share_that_a_shard_of_an_earlier_release_has_saved_is_in_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shard 0 says that it is done, but nothing is here; .* all must be of one minor version"):
        cluster_of(QuickShard("kvemb-checkpoint-shard")).save(str(tmp_path / "a"))
    assert not (tmp_path / "a" / MANIFEST).exists()
    assert [one.problem for one in list_checkpoints(str(tmp_path))] == ["not finished"]
    cluster_of(QuickShard("kvemb-checkpoint-shard-2")).save(str(tmp_path / "b"))
    assert verify(str(tmp_path / "b")).require_good().n_rows == 100


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
