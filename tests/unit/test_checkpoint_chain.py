"""Checkpoints on top of each other are read as one; verify finds what is wrong; prune never breaks a chain."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage, absolute_url, shown
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST, BaseCheckpoint, CheckpointManifest, Cut, fragment_path, part_path
from kvemb.checkpoint.format.manifest_json import encode_manifest
from kvemb.checkpoint.format.parquet_blocks import RowBlock
from kvemb.checkpoint.listing import list_checkpoints, prune
from kvemb.checkpoint.verify import verify
from kvemb.checkpoint.writer import SaveInfo, ShardWriter, assemble, read_fragment
from kvemb.errors import CheckpointError, ConfigError, InvalidInputError
from kvemb.optim import sgd
from kvemb.schema.cluster_map import ClusterMap
from tests.unit.checkpoint_files import USER, block_of, ids_of, save


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder of fsspec's in-memory file system."""
    yield "memory://checkpoints"
    fsspec.filesystem("memory").store.clear()


def base_of(manifest: CheckpointManifest, name: str) -> BaseCheckpoint:
    return BaseCheckpoint(name, manifest.save_id)


def contents(url: str) -> dict[int, float]:
    """What a load of this checkpoint would see: the state of every id."""
    chain, found = open_chain(url), {}
    for shard in range(chain.newest.n_shards):
        last = -1
        for block in chain.rows(USER, shard):
            assert int(block.ids[0]) > last, "blocks are not ascending"
            assert (block.ids[1:] > block.ids[:-1]).all()
            last = int(block.ids[-1])
            assert block.state is not None
            found |= dict(zip(block.ids.tolist(), block.state[:, 0].tolist(), strict=True))
    return found


@pytest.mark.parametrize("n_shards", [1, 3])
def test_a_full_checkpoint_holds_its_rows(memory: str, n_shards: int) -> None:
    manifest = save(memory + "/a", range(1000), k=1, n_shards=n_shards, part_bytes=5000, step_rows=64)
    assert len(manifest.files) > n_shards
    assert contents(memory + "/a") == dict.fromkeys(range(1000), 1.0)
    assert verify(memory + "/a").require_good().n_rows == 1000


def test_the_newest_row_wins_and_erased_rows_stay_away(memory: str) -> None:
    first = save(memory + "/a", range(100), k=1)
    second = save(memory + "/b", [*range(50, 60), 200], k=2, base=base_of(first, "a"), erased=[0, 1, 50 + 10])
    save(memory + "/c", [1, 300], k=3, base=base_of(second, "b"), erased=[200])
    expected = dict.fromkeys(range(100), 1.0) | dict.fromkeys(range(50, 60), 2.0) | {1: 3.0, 300: 3.0}
    del expected[0], expected[60]
    assert contents(memory + "/c") == expected
    assert verify(memory + "/c").require_good().n_checkpoints == 3


def test_where_erased_ids_are_not_known_the_ids_that_exist_tell(memory: str) -> None:
    first = save(memory + "/a", range(100), k=1)
    save(memory + "/b", [5, 200], k=2, base=base_of(first, "a"), all_ids=[5, 6, 7, 200])
    assert contents(memory + "/b") == {5: 2.0, 6: 1.0, 7: 1.0, 200: 2.0}
    save(memory + "/none", [], k=2, base=base_of(first, "a"), all_ids=[])
    assert contents(memory + "/none") == {}


_OPS = st.lists(st.tuples(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)), st.booleans()), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(0, 60)), _OPS, st.integers(1, 9))
def test_any_chain_reads_as_the_rows_that_were_there(full: set[int], later: list[tuple[set[int], set[int], bool]], step_rows: int) -> None:
    fsspec.filesystem("memory").store.clear()
    rows = dict.fromkeys(full, 1.0)
    below, name = save("memory://any/0", list(full), k=1, part_bytes=1, step_rows=step_rows), "0"
    for k, (written, erased, known) in enumerate(later, start=2):
        gone = erased - written
        rows = {i: value for i, value in rows.items() if i not in gone} | dict.fromkeys(written, float(k))
        tell = {"erased": list(gone)} if known else {"all_ids": list(rows)}
        below = save(f"memory://any/{k}", list(written), k=k, base=base_of(below, name), part_bytes=1, step_rows=step_rows, **tell)  # type: ignore[arg-type]
        name = str(k)
    assert contents(f"memory://any/{name}") == rows
    verify(f"memory://any/{name}").require_good()


def test_a_base_that_was_replaced_is_refused(memory: str) -> None:
    first = save(memory + "/a", range(10), k=1)
    save(memory + "/b", [1], k=3, base=base_of(first, "a"))
    save(memory + "/a", range(10), k=2)
    with pytest.raises(CheckpointError, match="built on save"):
        open_chain(memory + "/b")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_shards": 3}, "of another cluster, other shards or another kind"),
        ({"weights_only": True}, "of another cluster, other shards or another kind"),
        ({"definition": replace(USER, optimizer=sgd())}, "another identity"),
        ({"definition": replace(USER, name="item")}, "lacks table 'user'"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(memory: str, options: dict[str, object], says: str) -> None:
    first = save(memory + "/a", range(10), k=2)
    save(memory + "/b", range(5), k=3, base=base_of(first, "a"), **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=says):
        open_chain(memory + "/b")


def test_a_base_cut_later_is_refused(memory: str) -> None:
    first = save(memory + "/a", range(10), k=2)
    save(memory + "/b", range(5), k=1, base=base_of(first, "a"))
    with pytest.raises(CheckpointError, match="cut before its base"):
        open_chain(memory + "/b")


def test_a_checkpoint_that_is_built_on_itself_ends(memory: str) -> None:
    save(memory + "/a", range(10), k=2, base=BaseCheckpoint("a", f"{2:032x}"))
    with pytest.raises(CheckpointError, match="built on 64 others"):
        open_chain(memory + "/a")


def test_a_missing_base_is_named(memory: str) -> None:
    save(memory + "/b", range(10), k=2, base=BaseCheckpoint("a", "1" * 32))
    with pytest.raises(CheckpointError, match=r"checkpoints/a/manifest\.json: not there"):
        open_chain(memory + "/b")


# --- verify -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path) -> str:
    save(str(tmp_path / "a"), range(500), k=1, part_bytes=4000, step_rows=50)
    return str(tmp_path / "a")


@pytest.mark.parametrize("name", [part_path("user", 0, 0), part_path("user", 1, 1)])
def test_every_damaged_file_is_named_and_the_others_are_looked_at_too(url: str, name: str) -> None:
    path, other = Path(url, name), Path(url, part_path("user", 0, 1))
    for victim in (path, other):
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    report = verify(url)
    assert len(report.faults) == 2
    assert name in "".join(report.faults)
    with pytest.raises(CheckpointError, match="checksum"):
        report.require_good()


def test_missing_and_truncated_files_are_named(url: str) -> None:
    Path(url, part_path("user", 0, 0)).unlink()
    victim = Path(url, part_path("user", 1, 0))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert sorted(fault.rpartition("/")[2] for fault in verify(url).faults) == [
        "shard-0-part-0.parquet: not there",
        f"shard-1-part-0.parquet: {victim.stat().st_size} bytes, expected {victim.stat().st_size + 1}: truncated or replaced",
    ]


def test_files_that_changed_places_are_found(url: str) -> None:
    manifest = list_checkpoints(url)[0].manifest
    assert manifest is not None
    first, second = manifest.files_of("user", 0)[:2]
    one, two = Path(url, first.path), Path(url, second.path)
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    swapped = {first: replace(second, part=first.part), second: replace(first, part=second.part)}
    Path(url, MANIFEST).write_bytes(encode_manifest(replace(manifest, files=tuple(swapped.get(f, f) for f in manifest.files))))
    assert any("not behind those of the part before" in fault for fault in verify(url).faults)
    with pytest.raises(CheckpointError, match="not behind"):
        list(open_chain(url).rows(USER, 0))


def test_rows_of_another_shard_and_versions_beyond_the_cut_are_found(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path))
    with ShardWriter(storage, "1" * 32, Cut(0, 1, 5), weights_only=False) as writer:
        writer.add_rows(USER, [block_of(USER, ids_of(range(100)), (1 << 48) + 6)])
        share = writer.finish([(USER, 1)])
    for shares, says in (([share], "versions outside"), ([replace(share, cut=Cut(0, 1, 6))], "")):
        storage.write(MANIFEST, encode_manifest(assemble(SaveInfo("1" * 32, "demo", "c" * 32, 1, False), shares)))
        assert [says in fault for fault in verify(str(tmp_path)).faults] == [True] * bool(says)
    other = replace(share, cut=Cut(1, 1, 6), files=())
    info = SaveInfo("1" * 32, "demo", "c" * 32, 1, False, slots=ClusterMap.first(0, 2).shard_runs)
    manifest = assemble(info, [replace(share, cut=Cut(0, 1, 6)), other])
    storage.write(MANIFEST, encode_manifest(manifest))
    assert "ids of other shards" in verify(str(tmp_path)).faults[0]


def test_progress_ends_with_all_bytes(url: str) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(url, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.n_bytes, report.n_bytes)
    assert len(seen) == report.n_files


# --- list and prune ---------------------------------------------------------------------------------------------------------------


def test_list_names_whole_unfinished_and_damaged_checkpoints(tmp_path: Path) -> None:
    save(str(tmp_path / "b"), range(10), k=1)
    save(str(tmp_path / "a"), range(10), k=2)
    save(str(tmp_path / "c"), range(10), k=3)
    save(str(tmp_path / "d"), range(10), k=4)
    (tmp_path / "c" / MANIFEST).unlink()
    (tmp_path / "d" / MANIFEST).write_text("{}")
    found = list_checkpoints(str(tmp_path))
    assert [(one.name, one.manifest is not None) for one in found] == [("b", True), ("a", True), ("c", False), ("d", False)]
    assert found[2].problem == "not finished"
    assert "damaged" in found[3].problem
    with pytest.raises(CheckpointError, match="did not finish"):
        open_chain(str(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        open_chain(str(tmp_path / "e"))


@pytest.mark.parametrize("where", ["memory", "file"])
def test_prune_keeps_the_newest_and_what_they_are_built_on(tmp_path: Path, memory: str, where: str) -> None:
    root = memory if where == "memory" else str(tmp_path)
    full = save(root + "/1", range(10), k=1)
    save(root + "/2", range(10), k=2)
    third = save(root + "/3", [1], k=3, base=base_of(full, "1"))
    save(root + "/4", [2], k=4, base=base_of(third, "3"))
    CheckpointStorage(root + "/4").write("notes.txt", b"mine")
    save(root + "/5", range(10), k=5)
    assert prune(root, keep=2) == ["2"]
    assert contents(root + "/4")[1] == 3.0
    assert prune(root, keep=1) == ["4", "3", "1"]
    assert [one.name for one in list_checkpoints(root) if one.manifest is not None] == ["5"]
    assert CheckpointStorage(root + "/4").names() == ["notes.txt"]  # another program's file stays
    assert prune(root, keep=1) == []


def test_weights_only_exports_and_other_clusters_count_apart_when_old_ones_are_deleted(tmp_path: Path) -> None:
    root = str(tmp_path)
    for k, name in enumerate(("1", "2", "3"), 1):
        save(f"{root}/{name}", range(10), k=k)
    for k, name in enumerate(("e4", "e5"), 4):
        export = save(f"{root}/{name}", range(10), k=k, weights_only=True)
    save(f"{root}/o6", range(10), k=6, cluster="other")
    assert prune(root, keep=1, like=export, dry_run=True) == ["e4"]
    assert prune(root, keep=1, dry_run=True) == ["e4", "2", "1"]
    assert len(list_checkpoints(root)) == 6
    assert prune(root, keep=1, like=export) == ["e4"]
    assert prune(root, keep=1) == ["2", "1"]
    assert [one.name for one in list_checkpoints(root)] == ["3", "e5", "o6"]


def test_a_checkpoint_whose_base_is_gone_is_no_backup_for_which_another_one_goes(tmp_path: Path) -> None:
    root = str(tmp_path)
    save(root + "/1", range(10), k=1)
    lost = save(root + "/2", range(10), k=2)
    save(root + "/3", [1], k=3, base=base_of(lost, "2"))
    (tmp_path / "2" / MANIFEST).unlink()
    assert prune(root, keep=1) == []
    assert contents(root + "/1")


def test_prune_needs_a_number_and_a_folder_of_checkpoints(url: str) -> None:
    with pytest.raises(InvalidInputError, match="keep"):
        prune(url, keep=0)
    with pytest.raises(InvalidInputError, match="give the folder"):
        prune(url, keep=1)


# --- writing ----------------------------------------------------------------------------------------------------------------------


def write(storage: CheckpointStorage, save_id: str, value: float) -> ShardWriter:
    with ShardWriter(storage, save_id, Cut(0, 1, 5), weights_only=False) as writer:
        writer.add_rows(USER, [block_of(USER, ids_of(range(50)), 1)])
        writer.add_rows(USER, [block_of(USER, ids_of(range(50, 90)), 1, value)])
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


@pytest.mark.parametrize(("error", "n_pauses"), [(OSError(28, "No space left on device"), 4), (PermissionError("no"), 0)])
def test_a_write_that_goes_on_failing_is_an_error_with_its_url(memory: str, error: Exception, n_pauses: int) -> None:
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
    assert absolute_url("run/a") == f"file://{tmp_path}/run/a"
    assert shown("hdfs://user:secret@host:1/x@y") == "hdfs://***@host:1/x@y"
    assert "secret" not in repr(CheckpointStorage("memory://u:secret@x/y"))


def test_a_block_of_records_is_a_copy() -> None:
    ids = ids_of([1, 2])
    records = np.zeros((2, USER.record.size_bytes), np.uint8)
    block = RowBlock.of_records(USER, ids, records, False)
    records[:] = 255
    assert not block.weights.any()
