"""Pipes, devices and links in the place of a checkpoint's files: a named error at once, never a read without an end."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST
from kvemb.checkpoint.listing import list_checkpoints, prune
from kvemb.checkpoint.verify import verify
from kvemb.errors import CheckpointError
from tests.unit.checkpoint_files import save

ODD: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a pipe": lambda path: (os.mkfifo(path.with_suffix(".pipe")), path.symlink_to(path.with_suffix(".pipe"))),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a folder": Path.mkdir,
}


@pytest.fixture(autouse=True)
def _tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvemb.checkpoint.checkpoint_storage._PAUSES_S", (0.0,))


@pytest.fixture(params=list(ODD))
def replaced(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Path], None]]:
    """A folder with two checkpoints, and what puts something odd in the place of a file."""
    for k, name in ((1, "a"), (2, "b")):
        save(str(tmp_path / name), range(100), k=k)

    def replace(path: Path) -> None:
        path.unlink()
        ODD[request.param](path)

    return tmp_path, replace


def test_what_is_no_file_in_a_checkpoint_is_named_by_verify(replaced: tuple[Path, Callable[[Path], None]]) -> None:
    folder, replace = replaced
    manifest = open_chain(str(folder / "b")).newest
    odd = manifest.files[1].path
    replace(folder / "b" / odd)
    report = verify(str(folder / "b"))
    assert len(report.faults) == 1
    assert odd in report.faults[0]


def test_what_is_no_manifest_is_listed_as_damaged_and_never_pruned(replaced: tuple[Path, Callable[[Path], None]]) -> None:
    folder, replace = replaced
    replace(folder / "a" / MANIFEST)
    listed = {one.name: one.problem for one in list_checkpoints(str(folder))}
    assert listed["b"] == ""
    assert listed["a"]
    assert prune(str(folder), keep=1) == []
    with pytest.raises(CheckpointError, match=MANIFEST):
        verify(str(folder / "a"))
    with pytest.raises(CheckpointError):
        open_chain(str(folder / "a"))
    replace(folder / "b" / MANIFEST)
    with pytest.raises(CheckpointError, match=MANIFEST):
        prune(str(folder / "b"), keep=1)


def test_links_that_lead_back_are_listed_once(tmp_path: Path) -> None:
    save(str(tmp_path / "a"), range(100), k=1)
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert verify(str(tmp_path / "a")).faults == ()
    assert [one.name for one in list_checkpoints(str(tmp_path))] == ["a"]
    (tmp_path / "a" / MANIFEST).unlink()
    assert [one.problem for one in list_checkpoints(str(tmp_path))] == ["not finished"]


def test_a_pipe_is_never_opened_for_reading(tmp_path: Path) -> None:
    save(str(tmp_path / "a"), range(100), k=1)
    os.mkfifo(tmp_path / "a" / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        CheckpointStorage(str(tmp_path / "a")).read("pipe", 1000)


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to], ids=["link", "hard link"])
def test_a_file_is_never_written_through_a_link_that_lies_under_its_temporary_name(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    """A user with the right to write into a folder of checkpoints must not make a saver write elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not yours")
    (tmp_path / "a").mkdir()
    link(tmp_path / "a" / "_tmp.file", elsewhere)
    CheckpointStorage(str(tmp_path / "a")).write("file", b"data")
    assert elsewhere.read_text() == "not yours"
    assert {path.name: path.read_text() for path in (tmp_path / "a").iterdir()} == {"file": "data"}


def test_prune_deletes_links_and_nothing_that_they_lead_to(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "checkpoints"
    save(str(elsewhere), range(10), k=1)
    for k, name in ((1, "a"), (2, "b")):
        save(str(folder / name), range(100), k=k)
    (folder / "a" / "linked").symlink_to(elsewhere)
    (folder / "linked").symlink_to(elsewhere)
    kept = sorted(elsewhere.rglob("*"))
    assert prune(str(folder), keep=1) == ["a"]
    assert sorted(elsewhere.rglob("*")) == kept
