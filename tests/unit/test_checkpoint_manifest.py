"""The manifest: a round trip keeps every field, and a damaged manifest is refused."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvemb.checkpoint.format.checkpoint_manifest import (
    ERASED,
    IDS,
    BaseCheckpoint,
    CheckpointManifest,
    Cut,
    FileEntry,
    SavedTable,
    part_path,
    table_folder,
)
from kvemb.checkpoint.format.manifest_json import check_extra, decode_manifest, encode_manifest
from kvemb.checkpoint.format.strict_json import encode
from kvemb.checkpoint.writer import Fragment, decode_fragment, encode_fragment
from kvemb.errors import CheckpointError, InvalidInputError
from kvemb.schema.cluster_map import ClusterMap
from tests.unit.checkpoint_files import CLUSTER_ID, USER

FILES = (FileEntry("user", 0, 0, "rows", 5, 999, "a" * 32), FileEntry("user", 1, 0, "rows", 6, 999, "b" * 32))
FULL = CheckpointManifest(
    "1" * 32,
    "demo",
    CLUSTER_ID,
    1700000000,
    False,
    (Cut(0, 1, 2), Cut(1, 3, 4)),
    (SavedTable(USER, (7, 8)),),
    FILES,
    None,
    {"step": 9},
    ClusterMap.first(0, 2).shard_runs,
)
INCREMENTAL = replace(
    FULL,
    base=BaseCheckpoint("step-1", "2" * 32),
    files=(*FILES, FileEntry("user", 0, 0, ERASED, 2, 99, "c" * 32), FileEntry("user", 1, 0, IDS, 0, 99, "d" * 32)),
)


@pytest.mark.parametrize(
    "manifest",
    [FULL, INCREMENTAL, replace(FULL, files=(), weights_only=True), replace(FULL, cut_s=1700000001)],
)
def test_a_manifest_comes_back_as_it_went(manifest: CheckpointManifest) -> None:
    assert decode_manifest(encode_manifest(manifest), "m") == manifest


def test_a_manifest_says_who_owned_what() -> None:
    assert FULL.slot_shards.tolist() == [0] * 8192 + [1] * 8192


FRAGMENT = Fragment("1" * 32, Cut(1, 2, 3), True, ((USER, 4),), (FILES[1],))


def test_a_fragment_comes_back_as_it_went() -> None:
    assert decode_fragment(encode_fragment(FRAGMENT), "f") == FRAGMENT


@pytest.mark.parametrize("format_", ["kvemb-checkpoint-shard", "kvemb-checkpoint-shard-1", "kvemb-checkpoint-shard-3", "kvemb-checkpoint"])
def test_a_fragment_of_another_release_is_refused_since_its_rows_have_another_order(format_: str) -> None:
    tree = json.loads(encode_fragment(FRAGMENT))
    del tree["checksum"]
    assert tree["format"] == "kvemb-checkpoint-shard-2"
    assert decode_fragment(encode(tree), "f") == FRAGMENT
    with pytest.raises(CheckpointError, match=f"f: format is '{format_}', expected 'kvemb-checkpoint-shard-2'"):
        decode_fragment(encode(tree | {"format": format_}), "f")


def crooked(change: object, manifest: CheckpointManifest = FULL) -> bytes:
    """A manifest whose fields were changed by a program that computes the checksum."""
    tree = json.loads(encode_manifest(manifest))
    del tree["checksum"]
    change(tree)  # type: ignore[operator]
    return encode(tree)


def set_file(**fields: object) -> object:
    return lambda tree: tree["files"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_file(path="../../etc/passwd"), "no other file is read"),
        (set_file(path="/etc/passwd"), "no other file is read"),
        (set_file(path="s3://elsewhere/part.parquet"), "no other file is read"),
        (set_file(path="user/../user/shard-0-part-0.parquet"), "no other file is read"),
        (set_file(table="..", path=part_path("..", 0, 0)), "which is not in it"),
        (set_file(table="item", path=part_path("item", 0, 0)), "which is not in it"),
        (set_file(shard=2, path=part_path("user", 2, 0)), "of shard 2, it has 2"),
        (set_file(part=1, path=part_path("user", 0, 1)), "parts are missing"),
        (set_file(rows=-1), "whole number"),
        (set_file(rows=True), "whole number"),
        (set_file(rows=1 << 60), "whole number"),
        (set_file(rows=6), "totals"),
        (set_file(bytes=1 << 40), "whole number"),
        (set_file(checksum="x" * 32), "32 hex digits"),
        (set_file(role="secret"), "one of rows"),
        (set_file(role=ERASED, path=part_path("user", 0, 0, ERASED)), "in a full checkpoint"),
        (set_file(more=1), "unknown or missing fields: more"),
        (lambda tree: tree["files"].append(tree["files"][0]), "twice"),
        (lambda tree: tree.update(format_version=4), "format version 4, this release reads 3"),
        (lambda tree: tree.update(format_version=0), "format version 0, this release reads 3"),
        (lambda tree: tree.pop("slots"), "unknown or missing fields: slots"),
        (lambda tree: tree.update(format="zip"), "format is 'zip'"),
        (lambda tree: tree.update(more=1), "unknown or missing fields: more"),
        (lambda tree: tree.pop("extra"), "unknown or missing fields: extra"),
        (lambda tree: tree.update(cuts=[]), "one per shard"),
        (lambda tree: tree["cuts"].reverse(), "one per shard"),
        (lambda tree: tree["cuts"][0].update(epoch=1 << 16), "epoch"),
        (lambda tree: tree["tables"].append(tree["tables"][0]), "each table once"),
        (lambda tree: tree["tables"][0].update(steps=[1]), "a list of 2"),
        (lambda tree: tree["tables"][0]["definition"].update(name="a\nx"), "table definition"),
        (lambda tree: tree["files"][0].update(table="\ud800"), "a table's name"),
        (lambda tree: tree["tables"][0]["definition"].update(dim="many"), "table definition"),
        (lambda tree: tree["tables"][0]["definition"].update(optimizer=[]), "table definition"),
        (lambda tree: tree.update(base={"name": "../other", "save_id": "2" * 32}), "the name of a checkpoint beside"),
        (lambda tree: tree.update(base={"name": "..", "save_id": "2" * 32}), "the name of a checkpoint beside"),
        (lambda tree: tree.update(base={"name": "s3://x", "save_id": "2" * 32}), "the name of a checkpoint beside"),
        (lambda tree: tree.update(extra={"x": "y" * (65 << 10)}), "bytes of JSON"),
        (lambda tree: tree.update(totals={"files": 2, "rows": 0, "bytes": 0}), "totals"),
        (lambda tree: tree.update(created_s="now"), "created_s"),
        (lambda tree: tree.update(slots=[0, 2]), "runs of slots and their shards"),
        (lambda tree: tree.update(slots=[1, 0]), "runs of slots and their shards"),
        (lambda tree: tree.update(slots=[0, 0, 8192]), "runs of slots and their shards"),
        (lambda tree: tree.update(slots=[0, 1 << 16]), "whole numbers from 0"),
        (lambda tree: tree.update(slots=None), "slots"),
    ],
)
def test_a_crooked_manifest_is_refused_by_name(change: object, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        decode_manifest(crooked(change), "file:///ckpt/manifest.json")
    assert says in str(caught.value)
    assert "file:///ckpt/manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"rows": 1, "rows": 2}',
        b'{"rows": NaN}',
        b'{"rows": ' + b"9" * 10_000 + b"}",
        encode_manifest(FULL)[:-30],
        encode_manifest(FULL) + b"{}",
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="m: "):
        decode_manifest(data, "m")


@settings(deadline=None)
@given(st.data())
def test_every_flipped_bit_is_found_or_changes_nothing(data: st.DataObject) -> None:
    whole = bytearray(encode_manifest(INCREMENTAL))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = decode_manifest(bytes(whole), "m")
    except CheckpointError:
        return
    assert found == INCREMENTAL  # whitespace between the values


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.data())
def test_any_value_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    tree = json.loads(encode_manifest(INCREMENTAL))
    del tree["checksum"]
    node = tree
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(_JSON)
    with suppress(CheckpointError):  # any other error fails the test
        decode_manifest(encode(tree), "m")


@pytest.mark.parametrize("extra", [None, [1], {"x": object()}, {"x": float("nan")}, {"x": "y" * (64 << 10)}, {"x": b"bytes"}])
def test_extra_that_cannot_be_kept_is_refused_before_anything_is_saved(extra: object) -> None:
    with pytest.raises(InvalidInputError, match="extra"):
        check_extra(extra)


def test_extra_nested_too_deeply_is_refused_when_it_is_given() -> None:
    deep: dict[str, object] = {}
    for _ in range(40):
        deep = {"x": deep}
    with pytest.raises(InvalidInputError, match="levels"):
        check_extra(deep)


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "_x", "manifest.json", "shard-0.json"])
def test_the_folder_of_a_table_is_never_a_special_name(name: str) -> None:
    assert table_folder(name)[0] == "%"
    assert "/" not in table_folder(name)
