"""The saved state of release 0.1, read once: it lay in three forms, of which the row log's saved state is the only one now.

    state                the rows that existed, by id and version, in formats 2 and 3
    state-after-<sum>    notes: rows that came or went with slots since; each follows the file whose checksum it is named after
    snapshot/manifest    the runs of the local snapshot

All rows are in runs and journal, too. So a state of this release names the same runs, as of the last note; the rows are compared with the
image that 0.1 has left. What is left of the old files is removed once the new state is saved.
"""

import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.errors import JournalDamagedError, ParameterServerError
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef

from ..row_log import state_file
from ..row_log.state_file import (
    HEAD,
    STATE,
    LoggedTable,
    RunEntry,
    ShardState,
    damaged_state,
    decode_state,
    fields_of_all_formats,
    format_of,
)
from ..shard_process.data_dir import DataDir

Ids = NDArray[np.uint64]
SNAPSHOT = "snapshot"
"""The folder of the runs."""
_NOTES, _MANIFEST, _MANIFEST_MAGIC = "state-after-", "manifest", b"kvembsnp"
_SUM = struct.Struct("<Q")
_ANY = (1 << 64) - 1


def read_state(data: DataDir) -> ShardState | None:
    """Return the saved state in a shard's folder, also one of release 0.1; None where there is none."""
    raw = data.read(STATE)
    if raw is None:
        return None
    if format_of(raw, where := str(data.path / STATE)) not in state_file.OF_0_1:
        return decode_state(raw, where)
    if data.read("load") is not None:
        raise ParameterServerError(
            f"{data.path}: release 0.1 has begun to load a checkpoint here. Nothing was changed. Start the shard with that release until "
            "`kvemb status` shows it, stop it with SIGTERM, and start this one again."
        )
    state, _ = _read_image([raw, *_notes(data, raw)][-1], where)
    return _with_runs(state, data.path / SNAPSHOT / _MANIFEST)


def image_of(data: DataDir) -> Mapping[str, tuple[Ids, Ids]] | None:
    """Return ids and versions of rows as release 0.1 has saved them, by the table's key; None where this release has saved the state.

    Where notes followed the image it says nothing of the rows of now, and is empty.
    """
    raw = data.read(STATE)
    if raw is None or format_of(raw, where := str(data.path / STATE)) not in state_file.OF_0_1:
        return None
    return {} if _notes(data, raw) else _read_image(raw, where)[1]


def remove_old_files(data: DataDir) -> None:
    """Remove what release 0.1 has left beside the saved state, which does not name it any more."""
    for path in [data.path / SNAPSHOT / _MANIFEST, data.path / "load.switched", *data.path.glob(f"{_NOTES}*")]:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _notes(data: DataDir, raw: bytes) -> list[bytes]:
    """Return the notes that follow a state, the oldest first."""
    notes: dict[str, bytes] = {}
    while (newer := data.read(name := f"{_NOTES}{_SUM.unpack(raw[-_SUM.size :])[0]:016x}")) is not None:
        notes[name] = raw = newer
        _read_image(raw, str(data.path / name))
    k = _read_image(raw, STATE)[0].k
    for path in data.path.glob(f"{_NOTES}*"):
        if path.name not in notes and not path.suffix and _read_image(path.read_bytes(), str(path))[0].k > k:
            raise ParameterServerError(
                f"{path}: the file that this one follows is missing, or another one: the shard cannot tell which rows are its own. Put the "
                "data folder of the shard's last owner back, whole."
            )
    return list(notes.values())


def _read_image(raw: bytes, where: str) -> tuple[ShardState, dict[str, tuple[Ids, Ids]]]:
    """Read magic, format, header size | msgpack header | ids and versions of each table, raw '<u8' | xxh3-64 of all before."""
    format_of(raw, where)
    if xxhash.xxh3_64_intdigest(memoryview(raw)[: -_SUM.size]) != _SUM.unpack(raw[-_SUM.size :])[0]:
        raise damaged_state(where, "its checksum does not match")
    try:
        start = HEAD.size + HEAD.unpack_from(raw)[2]
        fields: dict[str, Any] = msgpack.unpackb(raw[HEAD.size : start])
        tables, rows = [], {}
        for definition, step, n in fields["tables"]:
            table = LoggedTable(TableDef.from_dict(definition), int(step))
            ids, versions = (np.frombuffer(raw, "<u8", n, at).astype(np.uint64, copy=False) for at in (start, start + 8 * n))
            tables.append(table)
            rows[table.definition.key] = ids, versions
            start += 16 * n
        state = ShardState(**fields_of_all_formats(fields), tables=tuple(tables))
    except Exception as error:  # whatever bad bytes do to msgpack and to the lines above
        raise damaged_state(where, f"{type(error).__name__}: {error}") from error
    if start != len(raw) - _SUM.size:
        raise damaged_state(where, f"{len(raw) - _SUM.size - start} bytes too many")
    return state, rows


def _with_runs(state: ShardState, path: Path) -> ShardState:
    """Return the state with the runs and the cut of a snapshot's manifest: magic | format u32 | size u32 | msgpack | xxh3-64."""
    if not path.exists():
        return state
    raw = path.read_bytes()
    try:
        magic, version, size = HEAD.unpack_from(raw)
        if magic != _MANIFEST_MAGIC or version != 1 or xxhash.xxh3_64_intdigest(raw[: -_SUM.size]) != _SUM.unpack(raw[-_SUM.size :])[0]:
            raise ValueError("not as it was written")
        fields = msgpack.unpackb(raw[HEAD.size : HEAD.size + size])
        runs = {str(key): [RunEntry(int(n), int(size), _ANY) for n, size in entries] for key, (_, _, entries) in fields["tables"].items()}
        cut = int(fields["cut"])
    except Exception as error:  # whatever bad bytes do to msgpack and to the lines above
        raise JournalDamagedError(
            f"{path}: offset 0: the snapshot's manifest is damaged ({error}). Put a good copy of the file back."
        ) from error
    now = make_version(state.epoch, state.k)  # which rows were erased before is not known for sure
    tables = tuple(replace(one, runs=tuple(runs.get(one.definition.key, ())), erased_since=now) for one in state.tables)
    return replace(state, tables=tables, cut=cut)
