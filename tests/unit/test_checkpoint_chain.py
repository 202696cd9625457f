"""Checkpoints on top of each other are read as one; prune never breaks a chain."""

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import (
    ERASED,
    IDS,
    MANIFEST,
    BaseCheckpoint,
    CheckpointManifest,
)
from kvemb.checkpoint.listing import checkpoint_at, list_checkpoints, prune
from kvemb.checkpoint.verify import verify
from kvemb.errors import CheckpointError, InvalidInputError
from kvemb.init import uniform
from kvemb.optim import adam, sgd
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef
from tests.matrix import examples
from tests.unit.checkpoint_files import USER, base_of, contents, memory, save

__all__ = ["memory"]  # the fixture
DENSE = TableDef("user", 4, adam(), uniform(), num_ids=1 << 40)  # neighbouring ids share a slot: its keys are no mixed ids
UNSIGNED = replace(USER, id_dtype="uint64")


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


_WIDE = [*range(40), *(at + near for at in (1 << 32, 1 << 50, 1 << 63, (1 << 64) - 6) for near in range(-5, 6))]  # negative ones, too
_PAGES = (1, 2, 3, 1000, 1 << 20, 1 << 33)
_LOW = [*range(40), *(page * DENSE.placement.ids_per_group + at for page in _PAGES for at in range(5)), (1 << 40) - 1]


def dealt(n_shards: int) -> tuple[int, ...]:
    """Runs of slots dealt out in turn, as after many moves: keys of several shards stand between each other."""
    return tuple(value for number, slot in enumerate(range(0, N_SLOTS, 192)) for value in (slot, number % n_shards))


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_any_chain_reads_as_the_rows_that_were_there(data: st.DataObject) -> None:
    fsspec.filesystem("memory").store.clear()
    definition = data.draw(st.sampled_from([USER, UNSIGNED, DENSE]))
    some = st.sets(st.sampled_from(_LOW if definition is DENSE else _WIDE))
    options = {"definition": definition, "n_shards": data.draw(st.integers(1, 3)), "part_bytes": 1}
    options["step_rows"] = data.draw(st.integers(1, 9))
    options["slots"] = data.draw(st.sampled_from([(), dealt(options["n_shards"])]))
    full, later = data.draw(some), data.draw(st.lists(st.tuples(some, some, st.booleans()), min_size=1, max_size=4))
    rows = dict.fromkeys(full, 1.0)
    below, name = save("memory://any/0", list(full), k=1, **options), "0"  # type: ignore[arg-type]
    for k, (written, erased, known) in enumerate(later, start=2):
        gone = erased - written
        rows = {i: value for i, value in rows.items() if i not in gone} | dict.fromkeys(written, float(k))
        tell = {"erased": list(gone)} if known else {"all_ids": list(rows)}
        below = save(f"memory://any/{k}", list(written), k=k, base=base_of(below, name), **options, **tell)  # type: ignore[arg-type]
        name = str(k)
    assert contents(f"memory://any/{name}", definition) == rows
    verify(f"memory://any/{name}").require_good()


@pytest.mark.parametrize("definition", [USER, UNSIGNED, DENSE], ids=["signed", "unsigned", "dense"])
def test_a_chain_of_many_parts_and_shards_is_merged_in_its_own_order(memory: str, definition: TableDef) -> None:
    top = 1 << 40 if definition is DENSE else 1 << 64  # its upper half is negative
    everywhere, more = [*range(500), *range(top - 500, top)], [*range(top // 2 - 100, top // 2 + 100)]
    options = {"definition": definition, "n_shards": 3, "part_bytes": 1000, "step_rows": 17}
    options["slots"] = dealt(3)
    first = save(memory + "/a", everywhere, k=1, **options)  # type: ignore[arg-type]
    second = save(memory + "/b", [*more, *everywhere[::3]], k=2, base=base_of(first, "a"), erased=everywhere[1::3], **options)  # type: ignore[arg-type]
    left = {*more, *everywhere[::3], *everywhere[2::3]} - {*everywhere[::5]}
    third = save(memory + "/c", everywhere[4::15], k=3, base=base_of(second, "b"), all_ids=list(left | {*everywhere[4::15]}), **options)  # type: ignore[arg-type]
    expected = dict.fromkeys(everywhere[2::3], 1.0) | dict.fromkeys([*more, *everywhere[::3]], 2.0)
    expected = {i: value for i, value in expected.items() if i in left} | dict.fromkeys(everywhere[4::15], 3.0)
    assert contents(memory + "/c", definition) == expected
    assert verify(memory + "/c").require_good().n_checkpoints == 3
    assert all(len(level.files_of("user", shard)) > 1 for level in (first, second) for shard in range(3)), "one part a shard"
    assert all(second.files_of("user", shard, ERASED) and third.files_of("user", shard, IDS) for shard in range(3))


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
    with pytest.raises(CheckpointError, match="a folder of checkpoints, not one of them"):
        open_chain(str(tmp_path))


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


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def test_the_checkpoint_of_a_moment_is_the_newest_that_was_cut_before_it(tmp_path: Path) -> None:
    root = str(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* or before: there is none that says its moment"):
        checkpoint_at(root, at(100))
    for k, name in ((10, "b"), (20, "a"), (30, "c")):
        save(f"{root}/{name}", range(10), k=k)
    save(f"{root}/export", range(10), k=25, weights_only=True)
    assert checkpoint_at(root, at(21)).endswith("/a")  # begun at 20, cut at 21
    assert checkpoint_at(root, at(20.9)).endswith("/b")
    assert checkpoint_at(root, at(1e9)).endswith("/c")
    with pytest.raises(CheckpointError, match=r"the first one is of 1970-01-01"):
        checkpoint_at(root, at(10.9))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "rows.parquet").write_bytes(b"")  # a save under way
    assert checkpoint_at(root, at(21)).endswith("/a")
    (tmp_path / "d" / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match=r"/d: .*damaged.*\. It may be that of .*: name the one to load by its own URL"):
        checkpoint_at(root, at(21))
    (tmp_path / "d" / MANIFEST).unlink()
    save(f"{root}/other", range(10), k=40, cluster="other")
    with pytest.raises(InvalidInputError, match="clusters demo, other have saved here"):
        checkpoint_at(root, at(21))


def test_exports_alone_have_their_moments_too(tmp_path: Path) -> None:
    save(f"{tmp_path}/1", range(10), k=1, weights_only=True)
    assert checkpoint_at(str(tmp_path), at(2)).endswith("/1")


def test_manifests_that_were_read_are_not_read_again_and_those_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    root = str(tmp_path)
    for k in (1, 2, 3):
        save(f"{root}/{k}", range(10), k=k)
    known: dict[str, CheckpointManifest] = {}
    assert [one.name for one in list_checkpoints(root, known)] == list(known) == ["1", "2", "3"]
    (tmp_path / "2" / MANIFEST).write_text("{}")
    assert all(one.manifest is not None for one in list_checkpoints(root, known))
    (tmp_path / "1" / "notes.txt").write_text("another program's: so the folder stays")
    assert prune(root, keep=1, known=known) == ["2", "1"]
    assert [one.name for one in list_checkpoints(root, known) if one.manifest is not None] == ["3"]
    assert list(known) == ["3"]
    shutil.rmtree(tmp_path / "3")
    assert [one.manifest for one in list_checkpoints(root, known)] == [None]
    assert known == {}


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


def test_prune_needs_a_number_and_a_folder_of_checkpoints(tmp_path: Path) -> None:
    save(url := str(tmp_path / "a"), range(5), k=1)
    with pytest.raises(InvalidInputError, match="keep"):
        prune(url, keep=0)
    with pytest.raises(InvalidInputError, match="give the folder"):
        prune(url, keep=1)
