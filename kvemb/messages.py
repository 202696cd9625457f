"""The messages between trainers and parameter servers: msgpack with a fixed schema. Pure.

Every message travels as [magic, version, type name, field, field, ...]; arrays are raw little-endian bytes, so that a part of any size
costs one copy. Decoding trusts nothing: small limits on every container, every field's type and every array's length checked, and
anything off raises MessageError before a value is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError, MessageError
from kvemb.rounding import storage_dtype
from kvemb.table_def import MAX_DIM

MAGIC = "kvemb"
PROTOCOL_VERSION = 1
SERVICE = "kvemb.ParameterServer"
MAX_MESSAGE_BYTES = 64 << 20
MAX_PART_BYTES = 16 << 20
_MAX_ITEMS = 4096
_MAX_ITEMS_IN_ALL = 1 << 17
_MAX_TEXT = 1 << 20


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows of one table inside a message: ids with gradients or weights, and the versions that a pull saw.

    Args:
        table: name.
        schema: the sender's 8-bit digest of the table's definition.
        ids: uint64 [n], distinct.
        rows: [n, dim] of `kvemb.rounding.storage_dtype(dtype)` (dim 0 where the message carries no rows).
        versions: uint64 [n] as pulled (0 = missing), or [0] when unknown.
        hyper: run-time values of the optimizer in force for these gradients; empty = the table's defaults.
        dtype: how the rows travel: "float32", "float16" or "bfloat16". Whoever receives them computes in float32.
    """

    table: str
    schema: int
    ids: NDArray[np.uint64]
    rows: NDArray[Any]
    versions: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    hyper: dict[str, float] = field(default_factory=dict)
    dtype: str = "float32"

    def to_list(self) -> list[Any]:
        dim = self.rows.shape[1] if self.rows.ndim == 2 else 0
        rows = _raw(self.rows, storage_dtype(self.dtype).str)
        return [self.table, self.schema, _raw(self.ids, "<u8"), dim, self.dtype, rows, _raw(self.versions, "<u8"), self.hyper]

    @staticmethod
    def from_list(items: object) -> "TableRows":
        if not isinstance(items, list) or len(items) != 8:
            raise MessageError("rows of a table: expected a list of 8 fields")
        table, schema, ids, dim, dtype, rows, versions, hyper = items
        _expect(isinstance(table, str) and type(schema) is int and 0 <= schema < 256, "table and schema")
        _expect(type(dim) is int and 0 <= dim <= MAX_DIM and isinstance(hyper, dict), "dim and hyper")
        _expect(all(isinstance(k, str) and isinstance(v, float) for k, v in hyper.items()), "hyper values")
        id_array, version_array = _array(ids, "<u8"), _array(versions, "<u8")
        row_array = _array(rows, _wire_dtype(dtype))
        _expect(len(row_array) == len(id_array) * dim, f"{len(id_array)} ids of dim {dim} with {len(row_array)} row values")
        _expect(len(version_array) in (0, len(id_array)), f"{len(id_array)} ids with {len(version_array)} versions")
        return TableRows(table, schema, id_array, row_array.reshape(len(id_array), dim), version_array, hyper, dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        return self.ids.nbytes + self.rows.nbytes + self.versions.nbytes


@dataclass(frozen=True, eq=False)
class FreshRows:
    """Of n rows that a trainer holds, those that are no longer what it holds, as they are now.

    Args:
        at: uint32 [m], where they stand among the n, ascending.
        versions: uint64 [m], 0 for rows that do not exist (now).
        rows: weights in the table's storage dtype, one row for each version above 0, in order; what does not exist, the trainer computes.
    """

    at: NDArray[np.uint32]
    versions: NDArray[np.uint64]
    rows: bytes

    def to_list(self) -> list[Any]:
        return [_raw(self.at, "<u4"), _raw(self.versions, "<u8"), self.rows]

    @staticmethod
    def from_list(items: object) -> "FreshRows":
        if not isinstance(items, list) or len(items) != 3:
            raise MessageError("fresh rows: expected a list of 3 fields")
        at, versions = _array(items[0], "<u4"), _array(items[1], "<u8")
        _expect(len(at) == len(versions), f"{len(at)} fresh rows with {len(versions)} versions")
        _expect(bool((at[1:] > at[:-1]).all()), "fresh rows that do not ascend")
        _expect(isinstance(items[2], bytes), "fresh rows as bytes")
        return FreshRows(at, versions, items[2])

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        return self.at.nbytes + self.versions.nbytes + len(self.rows)


class _Budget:
    """Counts a message's items while they are unpacked: with limits on single containers alone, 4 MiB could still become 300 MB of maps."""

    def __init__(self) -> None:
        self._left = _MAX_ITEMS_IN_ALL

    def spend(self, container: Any) -> Any:
        """Take one list or map into account and hand it on."""
        self._left -= 1 + len(container)
        if self._left < 0:
            raise ValueError(f"more than {_MAX_ITEMS_IN_ALL} items")
        return container


@dataclass(frozen=True, eq=False)
class Message:
    """Base of every message; subclasses are plain frozen dataclasses whose fields are checked by annotation."""

    _types: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls) -> None:
        Message._types[cls.__name__] = cls

    def encode(self) -> bytes:
        """Return the message's bytes."""
        values = [_plain(getattr(self, f.name)) for f in fields(self)]
        packed: bytes = msgpack.packb([MAGIC, PROTOCOL_VERSION, type(self).__name__, *values])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a message of this type.

        Raises:
            MessageError: malformed, truncated, oversized, of another type or protocol version; nothing of it was used.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise MessageError(f"message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are taken")
        budget = _Budget()
        try:
            items = msgpack.unpackb(
                data,
                list_hook=budget.spend,
                object_hook=budget.spend,
                max_array_len=_MAX_ITEMS,
                max_map_len=_MAX_ITEMS,
                max_str_len=_MAX_TEXT,
                max_bin_len=len(data),
                max_ext_len=0,
            )
        except Exception as error:  # msgpack raises ValueError, UnpackException, TypeError, RecursionError: all mean bad bytes
            raise MessageError(f"not a msgpack message: {type(error).__name__}: {error}") from error
        if not isinstance(items, list) or len(items) < 3 or items[0] != MAGIC:
            raise MessageError("not a kvemb message")
        if items[1] is True or items[1] != PROTOCOL_VERSION:
            raise MessageError(f"protocol version {items[1]!r}, expected {PROTOCOL_VERSION}; use the same kvemb release everywhere")
        if items[2] != cls.__name__:
            raise MessageError(f"message of type {items[2]!r}, expected {cls.__name__}")
        return cls._from_values(items[3:])

    @classmethod
    def _from_values(cls, values: list[Any]) -> Self:
        wanted = fields(cls)
        if len(values) != len(wanted):
            raise MessageError(f"{cls.__name__}: {len(values)} fields, expected {len(wanted)}")
        checked = {f.name: _checked(f"{cls.__name__}.{f.name}", f.type, v) for f, v in zip(wanted, values, strict=True)}
        return cls(**checked)


@dataclass(frozen=True, eq=False)
class Empty(Message):
    """A request or reply without fields."""


@dataclass(frozen=True, eq=False)
class HelloRequest(Message):
    """A trainer introduces itself to a shard before its first push; incarnation 0 asks shard 0 to issue one."""

    trainer: str
    incarnation: int
    cluster_id: bytes
    n_shards: int


@dataclass(frozen=True, eq=False)
class HelloReply(Message):
    """The incarnation in force and the last sequence this shard has accepted from it (0 = none).

    first_step is the number of the sync step that this shard awaits from the trainer; 0 in async mode, and while nobody knows.
    """

    incarnation: int
    last_sequence: int
    mode: str
    first_step: int = 0


@dataclass(frozen=True, eq=False)
class PushPart(Message):
    """One shard's part of a push.

    Args:
        trainer, incarnation, sequence: identity of the part at this shard; sequences are 1, 2, 3, … without gaps.
        step: number of the push at the trainer; in sync mode parts of one step are applied together.
        more: further parts of the same push follow to this shard (a large push is split); applied when the last is in.
        tables: rows of each table (a table without rows here still counts as a step of its optimizer).
        digest: xxh3-64 over the arrays of tables and held; tells other data under a used sequence.
        return_rows: whether the reply is to carry the updated rows.
        held: sync mode only: ids of rows that the trainer holds for later steps (dim 0), with their versions. The reply says which of them
            are others after this step.
    """

    trainer: str
    incarnation: int
    sequence: int
    step: int
    more: bool
    tables: list[TableRows]
    digest: int
    return_rows: bool = False
    held: list[TableRows] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class PushReply(Message):
    """State of one part: "accepted", then "applied"; or "failed" with an error.

    Args:
        k: the shard's batch that applied it (state "applied").
        changed: fraction of its rows whose version at apply was not the one the pull saw; -1.0 when the push carried no versions.
        elapsed: of this shard's batches, from the newest that the pulled rows had seen to the newest that they have seen at apply; 0 where
            none of them changed.
        error: {} or {"type", "message"} (`kvemb.errors.to_wire`).
        epoch: of the shard's versions: the part's rows have the version (epoch, k) now (state "applied").
        others: how many of the shard's batches up to k in this epoch changed rows for anybody but this trainer.
        rows: for each table of the part the updated weights of its ids, in their order and in the table's storage dtype; [] when
            they were not asked for or are not at hand. At most twice as large as the gradients, so a reply is never split.
        fresh: for each table that the part holds rows of those that changed; [] when it holds none, and when it is not known: the part was
            answered before (by a process that was killed since, perhaps), or storage did not give the rows. Pull them then.
    """

    sequence: int
    state: str
    k: int = 0
    changed: float = -1.0
    elapsed: int = 0
    error: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    others: int = 0
    rows: list[bytes] = field(default_factory=list)
    fresh: list[FreshRows] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Reply(Message):
    """Reply of every unary call: an error, or the encoded message of the call's own reply type."""

    error: dict[str, str]
    body: bytes


@dataclass(frozen=True, eq=False)
class DescribeReply(Message):
    """What a client must know: identity, mode, the node markers' cluster id, and the registry's tables (as plain dicts)."""

    cluster: str
    cluster_id: bytes
    shard: int
    n_shards: int
    mode: str
    trainers: int
    tables: list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class CreateTableRequest(Message):
    """Create a table; exist_ok accepts an existing one of the same identity."""

    table: dict[str, Any]
    exist_ok: bool


@dataclass(frozen=True, eq=False)
class TableReply(Message):
    """The table's definition as registered."""

    table: dict[str, Any]


@dataclass(frozen=True, eq=False)
class RowsRequest(Message):
    """assign (rows given) or erase (dim 0): applied in order with pushes, answered once applied, or after timeout_s."""

    rows: TableRows
    timeout_s: float


@dataclass(frozen=True, eq=False)
class TableRequest(Message):
    """Ask about one table by name; the empty name means all of them (flush)."""

    table: str


@dataclass(frozen=True, eq=False)
class FlushRequest(Message):
    """Wait until everything this shard accepted before the call is applied; at most timeout_s."""

    timeout_s: float


@dataclass(frozen=True, eq=False)
class CountReply(Message):
    """A number of rows."""

    n_rows: int


@dataclass(frozen=True, eq=False)
class IdsRequest(Message):
    """List a table's ids in ascending order, from the first id after `after` (inclusive when `first`), at most `limit`."""

    table: str
    first: bool
    after: int
    limit: int


@dataclass(frozen=True, eq=False)
class IdsReply(Message):
    """Ids in ascending uint64 order as raw '<u8' bytes; fewer than the limit = the end."""

    ids: bytes


@dataclass(frozen=True, eq=False)
class StatusReply(Message):
    """One shard as operators see it; the cache's figures count rows since the shard started, the recovery's are of its start."""

    shard: int
    epoch: int
    k: int
    rows_applied: int
    pending_parts: int
    lag_s: float
    n_rows: int
    n_trainers: int
    cache_bytes: int
    cache_lookups: int
    cache_hits: int
    failure: str
    journal_bytes: int = 0
    recovered_rows: int = 0
    recovery_s: float = 0.0
    dirty_rows: int = 0
    repair: str = ""


@dataclass(frozen=True, eq=False)
class ProgressReply(Message):
    """How far the shard has come: every batch up to k of this epoch is in storage, for all to see."""

    epoch: int
    k: int


@dataclass(frozen=True, eq=False)
class RepairRequest(Message):
    """Restore this shard's rows on every lost node, and compare them row by row on these nodes (`all_nodes`: on every node).

    Answered when it is done, or after timeout_s. No repair ends before every shard has done its part: ask them all at once.
    """

    addresses: list[str]
    all_nodes: bool
    timeout_s: float


@dataclass(frozen=True, eq=False)
class RepairReply(Message):
    """How many nodes took part, how many rows of this shard were rewritten there, and how long that took, waiting included."""

    nodes: int
    rows: int
    seconds: float


@dataclass(frozen=True, eq=False)
class ByeRequest(Message):
    """A trainer leaves; a sync job goes on without it."""

    trainer: str
    incarnation: int


@dataclass(frozen=True, eq=False)
class SaveRequest(Message):
    """Cut the shard and save it; told twice under one id, it is one save. `base_version`: the shard's cut in the base, 0 without one."""

    save_id: str
    url: str
    base_version: int
    weights_only: bool
    timeout_s: float


@dataclass(frozen=True, eq=False)
class SaveStatusRequest(Message):
    """How far is a save?"""

    save_id: str


@dataclass(frozen=True, eq=False)
class SaveReply(Message):
    """How far a save is: state "running", "done", "failed" (with the error) or "unknown"."""

    state: str
    error: str
    rows_done: int
    rows: int
    bytes_done: int


@dataclass(frozen=True, eq=False)
class LoadRequest(Message):
    """A load: check that this shard could (`begin` false), or begin: it is decided, and stands on the storage nodes."""

    load_id: str
    url: str
    save_id: str
    begin: bool


def digest_tables(tables: list[TableRows], held: Sequence[TableRows] = ()) -> int:
    """Return the xxh3-64 digest of the arrays of a push part."""
    state = xxhash.xxh3_64()
    for number, rows in enumerate([*tables, *held]):
        if number == len(tables):
            state.update(b"held ")  # a table of rows without weights would digest like rows that are held
        # Sizes too: without them the same bytes split otherwise (an id taken for a version) would digest alike.
        state.update(f"{rows.table} {len(rows.ids)} {rows.rows.size} {rows.dtype} {len(rows.versions)} ".encode())
        for array in (rows.ids, rows.rows, rows.versions):
            state.update(np.ascontiguousarray(array).data)
        state.update(repr(sorted(rows.hyper.items())).encode())
    return state.intdigest()


def _raw(array: NDArray[Any], dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data


def _array(data: object, dtype: str) -> NDArray[Any]:
    _expect(isinstance(data, bytes) and len(data) % np.dtype(dtype).itemsize == 0, f"array of {dtype}")
    return np.frombuffer(data, dtype=dtype)  # type: ignore[call-overload,no-any-return]


def _wire_dtype(name: object) -> str:
    try:
        return storage_dtype(name).str  # type: ignore[arg-type]  # refuses what is no text, too
    except InvalidInputError as error:
        raise MessageError(f"malformed message: rows: {error}") from error


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise MessageError(f"malformed message: {what}")


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], TableRows | FreshRows):
        return [rows.to_list() for rows in value]
    return value.to_list() if isinstance(value, TableRows) else value


def _checked(at: str, annotation: Any, value: Any) -> Any:
    """Check a field against its annotation (the few forms used above)."""
    if annotation is TableRows:
        return TableRows.from_list(value)
    if annotation in (list[TableRows], list[FreshRows]):
        _expect(isinstance(value, list), f"{at}: expected a list")
        return [annotation.__args__[0].from_list(item) for item in value]
    if annotation == list[bytes]:
        _expect(isinstance(value, list) and all(isinstance(v, bytes) for v in value), f"{at}: expected a list of bytes")
        return value
    if annotation == list[str]:
        _expect(isinstance(value, list) and all(isinstance(v, str) for v in value), f"{at}: expected a list of texts")
        return value
    if annotation == list[dict[str, Any]]:
        _expect(isinstance(value, list) and all(isinstance(v, dict) for v in value), f"{at}: expected a list of maps")
        return value
    if annotation == dict[str, str]:
        good = isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())
        _expect(good, f"{at}: expected a map of texts")
        return value
    kind = dict if annotation == dict[str, Any] else annotation
    _expect(type(value) is kind, f"{at}: got {type(value).__name__}, expected {kind.__name__}")
    return value
