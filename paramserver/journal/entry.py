"""One entry of the journal as bytes: a merged batch with all that its replay needs, or a change of session. Pure.

    header size u32 | msgpack header | zeros up to a multiple of 8 | arrays of each table
    arrays: ids '<u8' [n] | rows '<f4' (of opaque bytes '|u1') [n, dim], of an assign with state [n, dim + s] | zeros up to a multiple of 8

The header of a batch is [format, "batch", version, kind, steps, watermarks, tables], and after them the reason where a policy or a drop
erased the rows. A watermark is [trainer, incarnation, sequence], a table [key, schema, n, dim, hyper]. The header of a session is [format,
"session", trainer, incarnation], that of an event [format, "event", name, table, serial, gone, came, left], where slots are [[shard, [slot,
…]], …]. Arrays lie at multiples of 8, so that they can be used where they were read. The framing of `segment` has a checksum. Even so
decoding trusts no byte: every container has a small limit, and every type and length is checked before memory is allocated for it.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError, JournalDamagedError, ParameterServerError, UnknownTableError, other_format
from kvemb.protocol.message_format import ItemBudget
from kvemb.schema.table_def import MAX_DIM, TableDef

from ..model.batch import APPLY, ASSIGN, DROPPED, ERASE, EVICTED, Batch, CheckedRows, dims_of

FORMAT_VERSION = 1
MAX_HEADER_BYTES = 16 << 20
_MAX_ITEMS = 1 << 16
_MAX_ITEMS_IN_ALL = 1 << 19
_MAX_TEXT = 1 << 16
_MAX_COUNT = 1 << 63
_BATCH_FIELDS = (7, 8)  # without a reason, and with one
_SIZE = struct.Struct("<I")

Find = Callable[[str, int], TableDef]
"""(key, schema) -> definition, also of a table that was dropped since. Raises UnknownTableError."""


@dataclass(frozen=True)
class Watermark:
    """The last sequence of a trainer's parts that a batch contains."""

    trainer: str
    incarnation: int
    sequence: int


@dataclass(frozen=True, eq=False)
class BatchEntry:
    """A journal entry that holds all of batch k that its replay needs.

    Args:
        version: (epoch, k) that the rows get. Replay uses it, so that stochastic rounding gives the same bits.
        batch: rows of each table with ids (ascending for "apply"), rows and run-time values; the versions that a pull saw are not kept.
        steps: per table of the batch the table's optimizer step before this batch.
        watermarks: of the pushes that the batch contains.
    """

    version: int
    batch: Batch
    steps: tuple[int, ...]
    watermarks: tuple[Watermark, ...]


@dataclass(frozen=True)
class SessionEntry:
    """A hello that issued an incarnation, or took one over."""

    trainer: str
    incarnation: int


Slots = tuple[tuple[int, tuple[int, ...]], ...]
"""(another shard, the slots that moved between it and this one), …"""


@dataclass(frozen=True)
class EventEntry:
    """A change that is no batch, for the feed: it stands behind every batch that it concerns, and replay leaves it out.

    Args:
        name: "moved" (slots have come from other shards, or gone to them), "load" (the rows are a checkpoint's from here on), "drop". Or
            "alter", which stands before every batch of the table that is filled.
        table: the key of the table that was dropped, or of the one that is to take another's place.
        serial: of the cluster map's shards, as of the move.
        gone, came: the slots that moved.
        left: whether the shard has no slots any more.
    """

    name: str
    table: str = ""
    serial: int = 0
    gone: Slots = ()
    came: Slots = ()
    left: bool = False


MOVED, LOAD, DROP, ALTER = "moved", "load", "drop", "alter"
Entry = BatchEntry | SessionEntry | EventEntry


def encode_entry(entry: Entry) -> list[bytes | memoryview]:
    """Return the entry's bytes in pieces. Arrays are not copied: they must not change while the pieces are in use."""
    header: bytes = msgpack.packb(_header(entry))
    if len(header) > MAX_HEADER_BYTES:
        raise ParameterServerError(f"journal entry: a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are read back")
    pieces: list[bytes | memoryview] = [_SIZE.pack(len(header)) + header]
    if isinstance(entry, BatchEntry):
        pieces.append(bytes(_padding(_SIZE.size + len(header))))
        for rows in entry.batch.tables:
            raw = _raw(rows.rows, rows.definition.row_dtype.newbyteorder("<").str)
            pieces += [_raw(rows.ids, "<u8"), raw, bytes(_padding(len(raw)))]
    return [piece for piece in pieces if len(piece)]


def decode_entry(payload: bytes | memoryview, find_table: Find) -> Entry:
    """Read an entry.

    Raises:
        JournalDamagedError: any field is wrong, or the tables it names are not those of the registry; nothing of it was used.
    """
    view = memoryview(payload).toreadonly()
    _expect(len(view) >= _SIZE.size, "it is cut off")
    (size,) = _SIZE.unpack_from(view)
    start = _SIZE.size + size
    _expect(size <= min(MAX_HEADER_BYTES, len(view) - _SIZE.size), f"a header of {size} bytes in an entry of {len(view)}")
    items = _unpack(view[_SIZE.size : start])
    _expect(type(items) is list and len(items) >= 2, "no list of fields")
    if items[0] is True or items[0] != FORMAT_VERSION:
        raise JournalDamagedError(other_format("an entry of the journal", items[0], (FORMAT_VERSION,)))
    if items[1] == "session":
        _expect(len(items) == 4 and start == len(view), "fields of a session")
        return SessionEntry(_text(items[2], "trainer"), _count(items[3], "incarnation"))
    if items[1] == "event":
        _expect(len(items) == 8 and start == len(view) and items[2] in (MOVED, LOAD, DROP, ALTER), "fields of an event")
        _expect(type(items[7]) is bool, "whether the shard has left")
        table, serial = _text(items[3], "table"), _count(items[4], "serial")
        return EventEntry(items[2], table, serial, _slots(items[5]), _slots(items[6]), items[7])
    _expect(items[1] == "batch" and len(items) in _BATCH_FIELDS, "fields of a batch")
    return _batch(items, view, start, find_table)


def version_of(payload: bytes | memoryview) -> int:
    """Return the version of a batch's entry, without its rows; 0 for any other entry, and for bytes that are none: see `decode_entry`."""
    return batch_head(payload)[0]


def batch_head(payload: bytes | memoryview) -> tuple[int, list[str]]:
    """Return the version of a batch's entry and whose pushes it holds; (0, []) for any other entry, and for bytes that are none."""
    view = memoryview(payload).toreadonly()
    size = _SIZE.unpack_from(view)[0] if len(view) >= _SIZE.size else 0
    try:
        items = _unpack(view[_SIZE.size : _SIZE.size + min(size, MAX_HEADER_BYTES)])
    except JournalDamagedError:
        return 0, []
    if not (type(items) is list and len(items) in _BATCH_FIELDS and items[1] == "batch" and type(items[2]) is int):
        return 0, []
    marks = items[5] if type(items[5]) is list else []
    return items[2], [mark[0] for mark in marks if type(mark) is list and mark and type(mark[0]) is str]


def _header(entry: Entry) -> list[Any]:
    if isinstance(entry, SessionEntry):
        return [FORMAT_VERSION, "session", entry.trainer, entry.incarnation]
    if isinstance(entry, EventEntry):
        return [FORMAT_VERSION, "event", entry.name, entry.table, entry.serial, entry.gone, entry.came, entry.left]
    batch = entry.batch
    marks = [[mark.trainer, mark.incarnation, mark.sequence] for mark in entry.watermarks]
    tables = [[t.definition.key, t.definition.schema, len(t.ids), t.rows.shape[1], dict(t.hyper)] for t in batch.tables]
    reason = [batch.reason] if batch.reason else []
    return [FORMAT_VERSION, "batch", entry.version, batch.kind, list(entry.steps), marks, tables, *reason]


def _batch(items: list[Any], view: memoryview, start: int, find: Find) -> BatchEntry:
    version, kind, steps, marks, tables = items[2:7]
    reason = items[7] if len(items) == 8 else ""
    _expect(len(items) == 7 or (kind == ERASE and reason in (EVICTED, DROPPED)), "reason")
    _expect(type(version) is int and 0 < version < (1 << 64) - 1, "version")
    _expect(type(kind) is str and kind in (APPLY, ASSIGN, ERASE), "kind")
    _expect(type(steps) is list and type(tables) is list and len(steps) == len(tables), "steps and tables")
    _expect(type(marks) is list and all(type(mark) is list and len(mark) == 3 for mark in marks), "watermarks")
    watermarks = tuple(Watermark(_text(t, "trainer"), _count(i, "incarnation"), _count(s, "sequence")) for t, i, s in marks)
    start += _padding(start)
    definitions = [_definition(fields, find) for fields in tables]
    rows = tuple(_rows(kind, *each) for each in _arrays(tables, definitions, view, start))
    names = [one.definition.key for one in rows]
    _expect(len(set(names)) == len(names), f"a table stands twice in {names}")
    return BatchEntry(version, Batch(kind, rows, reason), tuple(_count(step, "step") for step in steps), watermarks)


def _definition(fields: Any, find: Find) -> TableDef:
    _expect(type(fields) is list and len(fields) == 5, "fields of a table")
    name, schema = _text(fields[0], "table"), fields[1]
    _expect(type(schema) is int and 0 <= schema < 256, "schema")
    try:
        definition = find(name, schema)
    except UnknownTableError as error:
        raise _damaged(f"table {name!r}: {error}") from error
    _expect(definition.schema == schema, f"table {name!r}: schema {schema}, the registry's is {definition.schema}")
    return definition


def _arrays(
    tables: list[Any], definitions: list[TableDef], view: memoryview, start: int
) -> Iterator[tuple[list[Any], TableDef, memoryview]]:
    """Check the sizes of all tables against the bytes that are there; yield each table's fields and definition with its bytes."""
    ends = [start]
    for fields, definition in zip(tables, definitions, strict=True):
        n, dim = _count(fields[2], "number of rows"), _count(fields[3], "dim")
        _expect(dim <= MAX_DIM, f"dim {dim}")
        n_bytes = definition.row_dtype.itemsize * n * dim
        ends.append(ends[-1] + 8 * n + n_bytes + _padding(n_bytes))
    _expect(ends[-1] == len(view), f"{len(view)} bytes, expected {ends[-1]} by its header")
    for fields, definition, (low, high) in zip(tables, definitions, pairwise(ends), strict=True):
        yield fields, definition, view[low:high]


def _rows(kind: str, fields: list[Any], definition: TableDef, view: memoryview) -> CheckedRows:
    name, _, n, dim, hyper = fields
    _expect(type(hyper) is dict and all(type(k) is str and type(v) is float for k, v in hyper.items()), "run-time values")
    try:
        hyper = definition.optimizer.check_hyper(hyper)
    except InvalidInputError as error:
        raise _damaged(f"table {name!r}: {error}") from error
    _expect(dim in dims_of(kind, definition), f"table {name!r}: dim {dim}, expected one of {dims_of(kind, definition)}")
    ids = np.frombuffer(view, "<u8", n).astype(np.uint64, copy=False)
    own = definition.row_dtype
    rows = np.frombuffer(view, own.newbyteorder("<"), n * dim, 8 * n).astype(own, copy=False).reshape(n, dim)
    ordered = ids if kind == APPLY else np.sort(ids)
    _expect(bool((ordered[1:] > ordered[:-1]).all()), f"table {name!r}: ids that are not distinct, or out of order")
    return CheckedRows(definition, ids, rows, np.empty(0, np.uint64), hyper)


def _unpack(header: memoryview) -> Any:
    budget = ItemBudget(_MAX_ITEMS_IN_ALL)
    try:
        return msgpack.unpackb(
            header,
            list_hook=budget.spend,
            object_hook=budget.spend,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_str_len=_MAX_TEXT,
            max_bin_len=0,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises ValueError, UnpackException, TypeError, RecursionError: all mean bad bytes
        raise _damaged(f"{type(error).__name__}: {error}") from error


def _raw(array: NDArray[Any], dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data


def _padding(size: int) -> int:
    return -size % 8


def _text(value: object, what: str) -> str:
    _expect(type(value) is str, what)
    return str(value)


def _count(value: Any, what: str) -> int:
    _expect(type(value) is int and 0 <= value < _MAX_COUNT, what)
    return int(value)


def _slots(value: Any) -> Slots:
    _expect(type(value) is list and all(type(one) is list and len(one) == 2 and type(one[1]) is list for one in value), "slots of an event")
    return tuple((_count(shard, "shard"), tuple(_count(slot, "slot") for slot in slots)) for shard, slots in value)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise _damaged(what)


def _damaged(what: str) -> JournalDamagedError:
    return JournalDamagedError(f"journal entry: {what}")
