"""Files of a checkpoint are written whole, once, and tried again; what cannot be written or read is named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage, absolute_url, shown
from kvemb.checkpoint.format.checkpoint_manifest import (
    Cut,
    fragment_path,
    part_path,
)
from kvemb.checkpoint.format.manifest_json import encode_manifest
from kvemb.checkpoint.format.parquet_blocks import RowBlock
from kvemb.checkpoint.format.strict_json import encode
from kvemb.checkpoint.writer import SaveInfo, ShardWriter, assemble, read_fragment
from kvemb.errors import CheckpointError, ConfigError
from tests.unit.checkpoint_files import USER, block_of, ids_of, in_order, memory

__all__ = ["memory"]  # the fixture


def write(storage: CheckpointStorage, save_id: str, value: float) -> ShardWriter:
    ids = in_order(range(90))
    with ShardWriter(storage, save_id, Cut(0, 1, 5), weights_only=False) as writer:
        writer.add_rows(USER, [block_of(USER, ids[:50], 1)])
        writer.add_rows(USER, [block_of(USER, ids[50:], 1, value)])
        writer.finish([(USER, 1)])
    return writer


def test_files_that_are_there_already_are_not_written_again_by_the_same_save(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path))
    assert write(storage, "1" * 32, 1.0).n_skipped == 0
    assert write(storage, "1" * 32, 1.0).n_skipped == 2
    assert write(storage, "1" * 32, 2.0).n_skipped == 1  # the rows of one file have changed
    assert write(storage, "2" * 32, 2.0).n_skipped == 0
    (tmp_path / part_path("user", 0, 0)).unlink()
    assert write(storage, "2" * 32, 2.0).n_skipped == 1
    fragment = read_fragment(storage, 0)
    assert fragment is not None
    assert (fragment.done, len(fragment.files)) == (True, 2)


def test_a_broken_fragment_is_as_good_as_none(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path))
    write(storage, "1" * 32, 1.0)
    storage.write(fragment_path(0), b"{half")
    assert read_fragment(storage, 0) is None
    assert write(storage, "1" * 32, 1.0).n_skipped == 0


def test_files_of_a_save_that_an_earlier_release_began_are_written_again_since_their_rows_have_another_order(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path))
    write(storage, "1" * 32, 1.0)
    tree = json.loads((tmp_path / fragment_path(0)).read_bytes())
    del tree["checksum"]
    storage.write(fragment_path(0), encode(tree))
    assert read_fragment(storage, 0) is not None
    storage.write(fragment_path(0), encode(tree | {"format": "kvemb-checkpoint-shard"}))
    assert read_fragment(storage, 0) is None
    assert write(storage, "1" * 32, 1.0).n_skipped == 0
    assert write(storage, "1" * 32, 1.0).n_skipped == 2


def test_what_is_written_now_has_its_rows_in_the_order_of_their_keys(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path))
    write(storage, "1" * 32, 1.0)
    share = read_fragment(storage, 0)
    assert share is not None
    manifest = assemble(SaveInfo("1" * 32, "demo", "c" * 32, 1, False), [share])
    assert json.loads(encode_manifest(manifest))["format_version"] == 3


def test_a_save_with_a_missing_shard_has_no_manifest(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path))
    write(storage, "1" * 32, 1.0)
    share = read_fragment(storage, 0)
    assert share is not None
    info = SaveInfo("1" * 32, "demo", "c" * 32, 1, False)
    for shares in ([replace(share, done=False)], [replace(share, cut=Cut(1, 1, 1))], [replace(share, save_id="2" * 32)]):
        with pytest.raises(CheckpointError, match="is not done"):
            assemble(info, shares)
    with pytest.raises(CheckpointError, match="did not know table"):
        assemble(info, [share, replace(share, cut=Cut(1, 1, 1), tables=())])


# --- storage ----------------------------------------------------------------------------------------------------------------------


class Flaky:
    """Fails so many times before it lets a call through."""

    def __init__(self, storage: CheckpointStorage, failures: int, error: Exception) -> None:
        self._inner, self.left, self._error = storage._fs, failures, error
        storage._fs = self

    def __getattr__(self, name: str) -> object:
        real = getattr(self._inner, name)
        if name not in {"pipe_file", "cat_file"}:
            return real

        def call(*args: object) -> object:
            if self.left:
                self.left -= 1
                raise self._error
            return real(*args)

        return call


def test_a_write_is_tried_again_with_longer_and_longer_pauses(memory: str) -> None:
    pauses: list[float] = []
    storage = CheckpointStorage(memory, pause=pauses.append)
    Flaky(storage, 3, OSError("reset"))
    storage.write("x", b"data")
    assert storage.read("x", 10) == b"data"
    assert pauses == [0.2, 0.4, 0.8]


@pytest.mark.parametrize(("error", "n_pauses"), [(OSError(28, "No space left on device"), 4), (PermissionError("no"), 1)])
def test_a_write_that_goes_on_failing_is_an_error_with_its_url(memory: str, error: Exception, n_pauses: int) -> None:
    # A refusal is tried once more, with credentials that are read anew.
    pauses: list[float] = []
    storage = CheckpointStorage(memory, pause=pauses.append)
    Flaky(storage, 100, error)
    with pytest.raises(CheckpointError, match="memory://checkpoints/x: cannot write it"):
        storage.write("x", b"data")
    assert len(pauses) == n_pauses


def test_a_local_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = CheckpointStorage(str(tmp_path), pause=lambda _: None)
    storage.write("a/x", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        storage.write("a/x", b"new")
    assert storage.names() == ["a/x"]
    assert storage.read("a/x", 3) == b"old"


def test_an_object_larger_than_expected_is_not_read(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path))
    storage.write("x", b"12345")
    with pytest.raises(CheckpointError, match="5 bytes, expected at most 4"):
        storage.read("x", 4)


@pytest.mark.parametrize(("url", "error"), [("", CheckpointError), ("nosuch://x/y", CheckpointError), ("gs://bucket/x", ConfigError)])
def test_an_unusable_url_is_named(url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        CheckpointStorage(url)


def test_urls_are_absolute_and_shown_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_url("run/a") == f"{tmp_path}/run/a"
    assert absolute_url((tmp_path / "my run %20").as_uri()) == absolute_url(f"{tmp_path}/my run %20") == f"{tmp_path}/my run %20"
    assert shown("hdfs://user:secret@host:1/x@y") == "hdfs://***@host:1/x@y"
    assert "secret" not in repr(CheckpointStorage("memory://u:secret@x/y"))


@pytest.mark.parametrize("name", ["sweep::lr=0.1", "memory::x", "a?b=1#c", "%20", "a*[b]"])
def test_a_path_is_one_folder_whatever_stands_in_its_name(tmp_path: Path, name: str) -> None:
    """fsspec would take what stands before '::' alone."""
    for url in (f"{tmp_path}/{name}", (tmp_path / name).as_uri()):
        CheckpointStorage(url).write("x/y", url.encode())
        assert (tmp_path / name / "x" / "y").read_bytes() == CheckpointStorage(url).read("x/y", 1000) == url.encode()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert CheckpointStorage(str(tmp_path)).folders() == [name]
    assert CheckpointStorage(f"{tmp_path}/{name}::never saved").size("x/y") is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://sweep::lr=0.1", "'::' chains file systems"),
        ("memory://run?versionId=7", r"memory://run\?\*\*\*: a query string \('\?'\) is no part of a folder's name"),
        ("file://data/run", "names a file of this machine, from its root on"),
        ("file://", "names a file of this machine"),
    ],
)
def test_a_url_that_is_more_than_a_folder_is_refused(url: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CheckpointStorage(url)


def test_a_block_of_records_is_a_copy() -> None:
    ids = ids_of([1, 2])
    records = np.zeros((2, USER.record.size_bytes), np.uint8)
    block = RowBlock.of_records(USER, ids, records, False)
    records[:] = 255
    assert not block.weights.any()
