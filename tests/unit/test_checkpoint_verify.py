"""Verify finds what is wrong in the files of a checkpoint, and names it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import (
    ERASED,
    IDS,
    MANIFEST,
    Cut,
    part_path,
)
from kvemb.checkpoint.format.manifest_json import encode_manifest
from kvemb.checkpoint.listing import list_checkpoints
from kvemb.checkpoint.verify import verify
from kvemb.checkpoint.writer import SaveInfo, ShardWriter, assemble
from kvemb.errors import CheckpointError
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.record import make_version
from tests.unit.checkpoint_files import USER, base_of, block_of, contents, in_order, save


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


def test_files_that_changed_places_are_found(tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    save(url, range(500), k=1, part_bytes=4000, step_rows=50)
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


@pytest.mark.parametrize("role", [ERASED, IDS])
def test_files_of_ids_that_changed_places_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setattr("kvemb.checkpoint.writer.MAX_IDS", 50)
    first, url = save(str(tmp_path / "a"), range(500), k=1, n_shards=1), str(tmp_path / "b")
    tell = {"erased": range(200)} if role == ERASED else {"all_ids": range(200)}
    manifest = save(url, [600], k=2, n_shards=1, base=base_of(first, "a"), **tell)  # type: ignore[arg-type]
    assert len(manifest.files_of("user", 0, role)) == 4
    verify(url).require_good()
    one, two = manifest.files_of("user", 0, role)[1:3]
    a, b = Path(url, one.path).read_bytes(), Path(url, two.path).read_bytes()
    Path(url, one.path).write_bytes(b)
    Path(url, two.path).write_bytes(a)
    swapped = {one: replace(two, part=one.part), two: replace(one, part=two.part)}
    Path(url, MANIFEST).write_bytes(encode_manifest(replace(manifest, files=tuple(swapped.get(f, f) for f in manifest.files))))
    report = verify(url)
    assert report.faults
    assert all("its ids are not behind those of the part before" in fault and f"/{one.table}/" in fault for fault in report.faults)
    with pytest.raises(CheckpointError, match="not behind"):
        list(open_chain(url).rows(USER, 0))


@pytest.mark.parametrize("change", [[1, 0], [0, 0, 1], [0, 1, 1]], ids=["two changed places", "the first one twice", "the last one twice"])
def test_one_row_that_is_out_of_order_is_found(tmp_path: Path, change: list[int]) -> None:
    storage, ids = CheckpointStorage(str(tmp_path)), in_order(range(100))
    for at in (0, 49, 98):
        for ordered in (True, False):
            rows = np.concatenate([ids[:at], ids[at : at + 2] if ordered else ids[at : at + 2][change], ids[at + 2 :]])
            with ShardWriter(storage, "1" * 32, Cut(0, 1, 5), weights_only=False) as writer:
                writer.add_rows(USER, [block_of(USER, rows, make_version(1, 5))])
                share = writer.finish([(USER, 1)])
            storage.write(MANIFEST, encode_manifest(assemble(SaveInfo("1" * 32, "demo", "c" * 32, 1, False), [share])))
            found = [fault.rpartition(": ")[2] for fault in verify(str(tmp_path)).faults]
            assert found == ([] if ordered else ["ids are not in order, or one stands twice"])


def test_parts_that_overlap_are_found(tmp_path: Path) -> None:
    storage, ids = CheckpointStorage(str(tmp_path)), in_order(range(100))
    for begin, good in ((60, True), (59, False), (30, False)):
        with ShardWriter(storage, "1" * 32, Cut(0, 1, 5), weights_only=False) as writer:
            for rows in (ids[:60], ids[begin:]):
                writer.add_rows(USER, [block_of(USER, rows, make_version(1, 5), 5.0)])
            share = writer.finish([(USER, 1)])
        manifest = assemble(SaveInfo("1" * 32, "demo", "c" * 32, 1, False), [share])
        storage.write(MANIFEST, encode_manifest(manifest))
        says = "part-1.parquet: its ids are not behind those of the part before"
        assert [says in fault for fault in verify(str(tmp_path)).faults] == [True] * (not good)
        if good:
            assert contents(str(tmp_path)) == dict.fromkeys(range(100), 5.0)
        else:
            with pytest.raises(CheckpointError, match=says):
                contents(str(tmp_path))


def test_rows_of_another_shard_and_versions_beyond_the_cut_are_found(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path))
    with ShardWriter(storage, "1" * 32, Cut(0, 1, 5), weights_only=False) as writer:
        writer.add_rows(USER, [block_of(USER, in_order(range(100)), (1 << 48) + 6)])
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
