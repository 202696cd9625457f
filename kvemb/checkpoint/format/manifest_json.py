"""manifest.json: bytes in, values out, no I/O.

Decoding trusts nothing. Every path must be the one that follows from table, shard and part; sizes, counts and totals must agree with each
other. A release that does not know the format version refuses it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvemb.checkpoint.format.checkpoint_manifest import (
    IDS,
    ROLES,
    ROWS,
    BaseCheckpoint,
    CheckpointManifest,
    Cut,
    FileEntry,
    SavedTable,
    check_name,
)
from kvemb.checkpoint.format.strict_json import Fields, decode, encode
from kvemb.errors import CheckpointError, InvalidInputError
from kvemb.schema.record import MAX_EPOCH, MAX_K
from kvemb.schema.slots import N_SLOTS, from_runs
from kvemb.schema.table_def import TableDef, check_table_name

FORMAT, FORMAT_VERSION = "kvemb-checkpoint", 3
MAX_EXTRA_BYTES = 64 << 10
MAX_FILES = 200_000
MAX_FILE_BYTES = 1 << 30
MAX_SHARDS = 4096
_MAX_TABLES = 4096
_MAX_COUNT = 1 << 53  # the largest that every JSON reader keeps exactly
_HEX = frozenset("0123456789abcdef")


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the bytes of manifest.json."""
    return encode(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "save_id": manifest.save_id,
            "cluster": manifest.cluster,
            "cluster_id": manifest.cluster_id,
            "created_s": manifest.created_s,
            "weights_only": manifest.weights_only,
            "base": None if manifest.base is None else {"name": manifest.base.name, "save_id": manifest.base.save_id},
            "slots": list(manifest.slots),
            "cuts": [{"shard": cut.shard, "epoch": cut.epoch, "k": cut.k} for cut in manifest.cuts],
            "tables": [{"definition": table.definition.to_dict(), "steps": list(table.steps)} for table in manifest.tables],
            "files": [file_fields(file) for file in manifest.files],
            "totals": {"files": len(manifest.files), "rows": manifest.n_rows, "bytes": manifest.size_bytes},
            "extra": manifest.extra,
            **({"cut_s": manifest.cut_s} if manifest.cut_s is not None else {}),
        }
    )


def decode_manifest(data: bytes, where: str) -> CheckpointManifest:
    """Read manifest.json; CheckpointError: damaged, contradicting itself, or of another format, and nothing of it was used."""
    fields = decode(data, where)
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT))
    version = fields.integer("format_version", 0, 1 << 31)
    if version != FORMAT_VERSION:
        reads = f"this release reads {FORMAT_VERSION}"
        raise CheckpointError(f"{where}: format version {version}, {reads}; load it with the release that saved it (docs/upgrade.md)")
    cut_known = fields.has("cut_s")
    fields.only(
        "format", "format_version", "save_id", "cluster", "cluster_id", "created_s", "weights_only", "base", "cuts", "tables", "files",
        "totals", "extra", "slots", *(["cut_s"] if cut_known else []),
    )  # fmt: skip
    cuts = tuple(read_cut(item) for item in fields.objects("cuts", MAX_SHARDS))
    if not cuts or [cut.shard for cut in cuts] != list(range(len(cuts))):
        raise fields.wrong("cuts", "one per shard, from 0 on")
    tables = tuple(_read_table(item, len(cuts)) for item in fields.objects("tables", _MAX_TABLES))
    manifest = CheckpointManifest(
        save_id=read_hex(fields, "save_id"),
        cluster=fields.text("cluster"),
        cluster_id=read_hex(fields, "cluster_id"),
        created_s=fields.integer("created_s", 0, _MAX_COUNT),
        weights_only=fields.flag("weights_only"),
        cuts=cuts,
        tables=tables,
        files=tuple(read_file(item) for item in fields.objects("files", MAX_FILES)),
        base=_read_base(fields.maybe("base")),
        extra=_read_extra(fields),
        slots=_read_slots(fields, len(cuts)),
        cut_s=fields.integer("cut_s", 0, _MAX_COUNT) if cut_known else None,
    )
    _check_agreement(manifest, fields, where)
    return manifest


def check_extra(extra: object) -> dict[str, Any]:
    """Return the user's values, or refuse values that a manifest cannot keep."""
    if not isinstance(extra, dict):
        raise InvalidInputError(f"extra is {type(extra).__name__}, expected a mapping of names to JSON values")
    try:
        data = encode({"extra": extra})
        decode(data, "extra")
    except (TypeError, CheckpointError) as error:
        raise InvalidInputError(f"extra: {error}; give numbers, text, lists and mappings") from error
    if len(data) > MAX_EXTRA_BYTES:
        raise InvalidInputError(f"extra: {len(data)} bytes of JSON, at most {MAX_EXTRA_BYTES} are kept; store the path of a file instead")
    return extra


def file_fields(file: FileEntry) -> dict[str, Any]:
    """A file entry as plain values."""
    return {
        "path": file.path, "table": file.table, "shard": file.shard, "part": file.part, "role": file.role, "rows": file.rows,
        "bytes": file.size_bytes, "checksum": file.checksum,
    }  # fmt: skip


def read_file(fields: Fields) -> FileEntry:
    """Read a file entry; its path must be the one that follows from the rest."""
    fields.only("path", "table", "shard", "part", "role", "rows", "bytes", "checksum")
    table, role = fields.text("table"), fields.text("role")
    try:
        check_table_name(table)
    except InvalidInputError as error:
        raise fields.wrong("table", f"a table's name ({error})") from error
    if role not in ROLES:
        raise fields.wrong("role", f"one of {', '.join(ROLES)}")
    file = FileEntry(
        table,
        fields.integer("shard", 0, MAX_SHARDS - 1),
        fields.integer("part", 0, MAX_FILES),
        role,
        rows=fields.integer("rows", 0 if role == IDS else 1, _MAX_COUNT),  # an empty list of ids has a meaning
        size_bytes=fields.integer("bytes", 1, MAX_FILE_BYTES),
        checksum=read_hex(fields, "checksum"),
    )
    if fields.text("path") != file.path:
        raise fields.wrong("path", f"{file.path!r}, which follows from table, shard, part and role; no other file is read")
    return file


def read_cut(fields: Fields) -> Cut:
    """Read a cut."""
    fields.only("shard", "epoch", "k")
    return Cut(fields.integer("shard", 0, MAX_SHARDS - 1), fields.integer("epoch", 0, MAX_EPOCH), fields.integer("k", 0, MAX_K))


def read_hex(fields: Fields, name: str) -> str:
    """Read 32 hex digits."""
    text = fields.text(name, 32)
    if len(text) != 32 or not _HEX.issuperset(text):
        raise fields.wrong(name, "32 hex digits")
    return text


def _read_table(fields: Fields, n_shards: int) -> SavedTable:
    fields.only("definition", "steps")
    try:
        definition = TableDef.from_dict(fields.object("definition"))
    except (InvalidInputError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise fields.wrong("definition", f"a table definition ({error})") from error
    return SavedTable(definition, fields.integers("steps", n_shards, _MAX_COUNT))


def _read_base(fields: Fields | None) -> BaseCheckpoint | None:
    if fields is None:
        return None
    fields.only("name", "save_id")
    try:
        return BaseCheckpoint(check_name(fields.text("name")), read_hex(fields, "save_id"))
    except InvalidInputError as error:
        raise fields.wrong("name", f"the name of a checkpoint beside this one ({error})") from error


def _read_slots(fields: Fields, n_shards: int) -> tuple[int, ...]:
    slots = fields.integers("slots", None, N_SLOTS - 1)
    try:
        from_runs(np.array(slots, dtype="<u2").tobytes(), n_shards)
    except ValueError as error:
        raise fields.wrong("slots", f"runs of slots and their shards ({error})") from error
    return slots


def _read_extra(fields: Fields) -> dict[str, Any]:
    try:
        return check_extra(fields.object("extra"))
    except InvalidInputError as error:
        raise fields.wrong("extra", str(error)) from error


def _check_agreement(manifest: CheckpointManifest, fields: Fields, where: str) -> None:
    """Refuse a manifest whose parts contradict each other."""
    names = [table.definition.name for table in manifest.tables]
    if len(set(names)) != len(names):
        raise fields.wrong("tables", "each table once")
    for what in _contradictions(manifest, set(names)):
        raise CheckpointError(f"{where}: {what}")
    totals = {"files": len(manifest.files), "rows": manifest.n_rows, "bytes": manifest.size_bytes}
    if fields.object("totals") != totals:
        raise fields.wrong("totals", f"{totals}, as the files add up to")


def _contradictions(manifest: CheckpointManifest, names: set[str]) -> Iterator[str]:
    keys = [(file.table, file.role, file.shard, file.part) for file in manifest.files]
    if len(set(keys)) != len(keys):
        yield "a file stands twice in it"
    for (table, role, shard), files in manifest.streams.items():
        if table not in names:
            yield f"{files[0].path}: of table {table!r}, which is not in it"
        if shard >= manifest.n_shards:
            yield f"{files[0].path}: of shard {shard}, it has {manifest.n_shards}"
        if [file.part for file in files] != list(range(len(files))):
            yield f"{files[0].path}: parts are missing, it has numbers {[file.part for file in files][:20]}"
        if role != ROWS and manifest.base is None:
            yield f"{files[0].path}: {'ids' if role == IDS else 'erased ids'} in a full checkpoint"
