"""Checkpoints over WebHDFS: a double of its two nodes on loopback, fsspec's client. Skipped where `requests` is not installed."""

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("requests")

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import BaseCheckpoint
from kvemb.checkpoint.listing import list_checkpoints, prune
from kvemb.checkpoint.verify import verify
from kvemb.errors import CheckpointError
from tests.integration.webhdfs_server import Hdfs, webhdfs
from tests.unit.checkpoint_files import USER, save

LARGE = bytes(range(256)) * (12 << 12)  # of several blocks of the client


@pytest.fixture
def hadoop() -> Iterator[tuple[Hdfs, str]]:
    import fsspec.implementations.webhdfs

    fsspec.implementations.webhdfs.WebHDFS.clear_instance_cache()
    with webhdfs() as (hdfs, port):
        yield hdfs, f"webhdfs://127.0.0.1:{port}/models/run"


def test_a_chain_is_saved_listed_verified_read_and_pruned(hadoop: tuple[Hdfs, str]) -> None:
    hdfs, url = hadoop
    first = save(url + "/a", range(5000), k=1, part_bytes=30_000, step_rows=500)
    save(url + "/b", range(100, 200), k=2, base=BaseCheckpoint("a", first.save_id), erased=[7])
    assert [one.name for one in list_checkpoints(url)] == ["a", "b"]
    assert verify(url + "/b").require_good().n_checkpoints == 2
    chain = open_chain(url + "/b")
    ids = np.concatenate([block.ids for shard in range(2) for block in chain.rows(USER, shard)])
    assert sorted(ids.tolist()) == [i for i in range(5000) if i != 7]
    save(url + "/c", range(10), k=3)
    assert prune(url, keep=1) == ["b", "a"]
    assert [one.name for one in list_checkpoints(url)] == ["c"]
    assert all(path.startswith("/models/run/c/") for path in hdfs.files)


def test_a_file_is_replaced_whole_whatever_a_data_node_does_in_the_middle(hadoop: tuple[Hdfs, str]) -> None:
    hdfs, url = hadoop
    storage = CheckpointStorage(url, pause=lambda _: None)
    storage.write("x", b"old")
    hdfs.drops_writes = 1
    storage.write("x", LARGE[:1000], LARGE[1000:])
    assert hdfs.files == {"/models/run/x": LARGE}
    hdfs.refuses_renames = 1
    storage.write("x", b"new")
    assert hdfs.files == {"/models/run/x": b"new"}


@pytest.mark.parametrize("fault", ["drops_reads", "read_errors"])
def test_what_a_data_node_answers_in_the_place_of_a_files_bytes_is_not_taken_for_them(hadoop: tuple[Hdfs, str], fault: str) -> None:
    hdfs, url = hadoop
    storage = CheckpointStorage(url, pause=lambda _: None)
    storage.write("x", LARGE)
    setattr(hdfs, fault, 1)
    assert storage.read("x", len(LARGE)) == LARGE


def test_a_name_node_in_safe_mode_is_named_and_waited_for(hadoop: tuple[Hdfs, str]) -> None:
    hdfs, url = hadoop
    hdfs.safe_mode = True
    with pytest.raises(CheckpointError, match=r"run/x: cannot write it: .*Name node is in safe mode"):
        CheckpointStorage(url, pause=lambda _: None).write("x", b"1")

    def pause(_: float) -> None:
        hdfs.safe_mode = False

    CheckpointStorage(url, pause=pause).write("x", b"1")
    assert hdfs.files == {"/models/run/x": b"1"}


def test_a_cluster_without_append_and_one_that_is_not_there_are_named(hadoop: tuple[Hdfs, str]) -> None:
    hdfs, url = hadoop
    hdfs.refuses_append = True
    with pytest.raises(CheckpointError, match=r"run/x: cannot write it: .*Append is not supported"):
        CheckpointStorage(url, pause=lambda _: None).write("x", b"1")
    with pytest.raises(CheckpointError, match=r"cannot look at it: ConnectionError"):
        CheckpointStorage("webhdfs://127.0.0.1:1/run", pause=lambda _: None).size("x")
