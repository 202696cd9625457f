"""Checkpoints on an S3 server: moto's, in a process of its own on loopback. Skipped where moto or s3fs is not installed."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import BaseCheckpoint, part_path
from kvemb.checkpoint.listing import list_checkpoints, prune
from kvemb.checkpoint.verify import verify
from kvemb.errors import CheckpointError
from kvemb.local_cluster.processes import free_ports
from tests.unit.checkpoint_files import USER, save


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The URL of a running S3 server."""
    port = free_ports(1)[0]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if "Running on" in line:
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket's URL; where it is, and the credentials, are in the environment, as in production."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs("kvemb-test", exist_ok=True)
    return "s3://kvemb-test/run"


def test_a_chain_is_saved_listed_verified_read_and_pruned_on_s3(bucket: str) -> None:
    first = save(bucket + "/a", range(5000), k=1, part_bytes=30_000, step_rows=500)
    save(bucket + "/b", range(100, 200), k=2, base=BaseCheckpoint("a", first.save_id), erased=[7])
    assert [one.name for one in list_checkpoints(bucket)] == ["a", "b"]
    assert verify(bucket + "/b").require_good().n_checkpoints == 2
    chain = open_chain(bucket + "/b")
    ids = np.concatenate([block.ids for shard in range(2) for block in chain.rows(USER, shard)])
    assert sorted(ids.tolist()) == [i for i in range(5000) if i != 7]
    save(bucket + "/c", range(10), k=3)
    assert prune(bucket, keep=1) == ["b", "a"]
    assert [one.name for one in list_checkpoints(bucket)] == ["c"]
    assert CheckpointStorage(bucket + "/a").names() == []


def test_what_is_missing_or_damaged_on_s3_is_named(bucket: str) -> None:
    save(bucket + "/d", range(100), k=1)
    storage = CheckpointStorage(bucket + "/d")
    data = bytearray(storage.read(part_path("user", 0, 0), 1 << 20))
    data[100] ^= 4
    storage.write(part_path("user", 0, 0), bytes(data))
    storage.delete(part_path("user", 1, 0))
    assert [fault.partition(": ")[2][:9] for fault in verify(bucket + "/d").faults] == ["damaged, ", "not there"]
    with pytest.raises(CheckpointError, match="no-such-bucket"):
        CheckpointStorage("s3://no-such-bucket/x", pause=lambda _: None).write("y", b"z")
