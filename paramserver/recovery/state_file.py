"""The saved state of a shard, as bytes: all that it needs to go on, because storage is never scanned. Pure.

    magic 8 | format version u32 | header size u32 | msgpack header | ids and versions of each table, raw '<u8' | xxh3-64 of all before

It is the state as of a position in the journal; later entries are replayed on top.
If anything is wrong (size, checksum, a field), nothing of it is used: an index with one wrong version would report a good row as lost.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.errors import KvembError, ParameterServerError, other_format
from kvemb.schema.table_def import TableDef

MAGIC = b"kvembsst"
FORMAT_VERSION = 3
_READS = (2, FORMAT_VERSION)  # 2: without a mark, and no notes follow it
_HEAD = struct.Struct("<8sII")
_KEYS = (
    "cluster_id", "shard", "n_shards", "epoch", "k", "rows_applied", "next_incarnation", "tables", "sessions", "members", "complete",
    "journal", "mark",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TableImage:
    """One table: definition, applies so far, and the rows that exist (uint64 [n] ids and versions)."""

    definition: TableDef
    step: int
    ids: NDArray[np.uint64]
    versions: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class ShardState:
    """Everything a shard keeps over its end.

    Args:
        cluster_id: 16 bytes.
        shard: its number.
        n_shards: numbers of shards that the cluster map had; only written, never used.
        epoch: of the process that wrote it (0: the shard never served).
        k: of the last batch applied; the next process goes on counting.
        rows_applied: for status.
        next_incarnation: the next one to issue (shard 0).
        tables: images.
        sessions: (trainer, incarnation, last sequence).
        members: (trainer, incarnation) of a sync job, see `paramserver.ingest.sync_steps.Membership`.
        complete: whether all trainers of that job have been here at once.
        journal: (segment, offset) from which the journal is replayed; None: there is none yet.
        mark: of a saved state, its own, so that no two files are alike; of a note (`paramserver.recovery.state_changes`) the checksum of
            the file that it follows.
        gone: of a note runs of slots, of which there is no row any more where they are 1.
    """

    cluster_id: bytes
    shard: int
    n_shards: int
    epoch: int = 0
    k: int = 0
    rows_applied: int = 0
    next_incarnation: int = 1
    tables: tuple[TableImage, ...] = ()
    sessions: tuple[tuple[str, int, int], ...] = ()
    members: tuple[tuple[str, int], ...] = ()
    complete: bool = False
    journal: tuple[int, int] | None = None
    mark: int = 0
    gone: bytes = b""


def encode_state(state: ShardState) -> Iterator[bytes | memoryview]:
    """Yield the file's bytes piece by piece, so that a large index is never copied whole."""
    fields = {key: getattr(state, key) for key in _KEYS}
    fields["tables"] = [[t.definition.to_dict(), t.step, len(t.ids)] for t in state.tables]
    fields["sessions"] = [list(session) for session in state.sessions]
    if state.gone:
        fields["gone"] = state.gone
    header: bytes = msgpack.packb(fields)
    checksum = xxhash.xxh3_64()
    for chunk in _chunks(header, state.tables):
        checksum.update(chunk)
        yield chunk
    yield struct.pack("<Q", checksum.intdigest())


def decode_state(data: bytes, where: str) -> ShardState:
    """Read a state file.

    Args:
        data: all of the file.
        where: its path, for messages.

    Raises:
        ParameterServerError: truncated, changed, or of another format; nothing of it was used.
    """
    if len(data) < _HEAD.size + 8 or data[:8] != MAGIC:
        raise _damaged(where, "it is no state file, or cut off")
    _, version, header_size = _HEAD.unpack_from(data)
    if version not in _READS:
        raise ParameterServerError(other_format(f"{where}: the shard's saved state", version, _READS))
    if xxhash.xxh3_64_intdigest(memoryview(data)[:-8]) != struct.unpack("<Q", data[-8:])[0]:
        raise _damaged(where, "its checksum does not match")
    try:
        start = _HEAD.size + header_size
        fields = msgpack.unpackb(data[_HEAD.size : start])
        tables, start = _read_tables(fields.pop("tables"), data, start)
        sessions = tuple((str(t), int(i), int(s)) for t, i, s in fields.pop("sessions"))
        members = tuple((str(t), int(i)) for t, i in fields.pop("members"))
        journal = fields.pop("journal")
        position = None if journal is None else (int(journal[0]), int(journal[1]))
        state = ShardState(**fields, tables=tables, sessions=sessions, members=members, journal=position)
    except (KvembError, ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise _damaged(where, f"{type(error).__name__}: {error}") from error
    if start != len(data) - 8:
        raise _damaged(where, f"{len(data) - 8 - start} bytes too many")
    return state


def _chunks(header: bytes, tables: tuple[TableImage, ...]) -> Iterator[bytes | memoryview]:
    yield _HEAD.pack(MAGIC, FORMAT_VERSION, len(header))
    yield header
    for table in tables:
        for array in (table.ids, table.versions):
            yield np.ascontiguousarray(array, dtype="<u8").view(np.uint8).data


def _read_tables(entries: list[Any], data: bytes, start: int) -> tuple[tuple[TableImage, ...], int]:
    images = []
    for fields, step, n in entries:
        ids, versions = (np.frombuffer(data, "<u8", n, at) for at in (start, start + 8 * n))
        images.append(
            TableImage(TableDef.from_dict(fields), int(step), ids.astype(np.uint64, copy=False), versions.astype(np.uint64, copy=False))
        )
        start += 16 * n
    return tuple(images), start


def _damaged(where: str, why: str) -> ParameterServerError:
    return ParameterServerError(
        f"{where}: the shard's saved state is damaged ({why}). Put a good copy of the file back; without one this shard's rows cannot be "
        "told from lost ones."
    )
