"""The format of messages: msgpack with a fixed schema, and the arrays of rows in them. Pure.

Every message travels as [magic, version, type name, field, field, ...]; arrays are raw little-endian bytes, so that a part of any size
costs one copy. Decoding trusts nothing: small limits on every container, every field's type and every array's length checked, and anything
off raises MessageError before a value is used.

Two releases may speak with each other. A field that a later release adds comes last and has a default: an older release leaves it unread
and does not send it. A change that the other side must not overlook raises the protocol version, and is refused by name.

`installed_version` says which kvemb this process runs; shards and clients compare it.
"""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, Self, dataclass_transform

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.arrays.rounding import storage_dtype
from kvemb.errors import InvalidInputError, MessageError
from kvemb.schema.slots import EACH_SLOT, Placement
from kvemb.schema.table_def import MAX_DIM

MAGIC = "kvemb"
PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
_MAX_ITEMS = 4096
_MAX_ITEMS_IN_ALL = 1 << 17
_MAX_TEXT = 1 << 20


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows of one table inside a message: ids with gradients or weights, and the versions that a pull saw."""

    table: str  # name
    schema: int  # the sender's 8-bit digest of the table's definition
    ids: NDArray[np.uint64]  # uint64 [n], unique
    rows: NDArray[Any]  # [n, dim] of `kvemb.arrays.rounding.storage_dtype(dtype)` (dim 0 where the message carries no rows)
    # uint64 [n] as pulled (0 = missing), or [0] when unknown
    versions: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    # run-time values of the optimizer in force for these gradients; empty = the table's defaults
    hyper: dict[str, float] = field(default_factory=dict)
    dtype: str = "float32"  # how the rows travel: "float32", "float16" or "bfloat16". The receiver computes in float32.
    placement: Placement = EACH_SLOT  # how the table's ids fall into slots, for routing the rows; does not travel

    def slots(self) -> NDArray[np.int64]:
        """The slot of each row: int64 [n]."""
        return self.placement.slots(self.ids)

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

    def take(self, which: NDArray[np.intp] | slice) -> "TableRows":
        """Return some of the rows: those of a slice without a copy."""
        n_versions = len(self.versions)
        if isinstance(which, slice):
            return replace(self, ids=self.ids[which], rows=self.rows[which], versions=self.versions[which] if n_versions else self.versions)
        # `take`: brackets gather rows of [n, dim] at a half to a quarter of its speed
        versions = self.versions.take(which) if n_versions else self.versions
        return replace(self, ids=self.ids.take(which), rows=self.rows.take(which, axis=0), versions=versions)


@dataclass(frozen=True, eq=False)
class ChangedRowsBlock:
    """Those of a trainer's n rows that have changed since it read them, as they are now."""

    at: NDArray[np.uint32]  # uint32 [m], their indices among the n, ascending
    versions: NDArray[np.uint64]  # uint64 [m], 0 for rows that do not exist (now)
    # weights in the table's storage dtype, one row for each version above 0, in order; the trainer computes rows that do not exist
    rows: bytes

    def to_list(self) -> list[Any]:
        return [_raw(self.at, "<u4"), _raw(self.versions, "<u8"), self.rows]

    @staticmethod
    def from_list(items: object) -> "ChangedRowsBlock":
        if not isinstance(items, list) or len(items) != 3:
            raise MessageError("changed rows: expected a list of 3 fields")
        at, versions = _array(items[0], "<u4"), _array(items[1], "<u8")
        _expect(len(at) == len(versions), f"{len(at)} changed rows with {len(versions)} versions")
        _expect(bool((at[1:] > at[:-1]).all()), "changed rows that do not ascend")
        _expect(isinstance(items[2], bytes), "changed rows as bytes")
        return ChangedRowsBlock(at, versions, items[2])

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        return self.at.nbytes + self.versions.nbytes + len(self.rows)


class ItemBudget:
    """Counts items while they are unpacked: with limits on single containers alone, 4 MiB could still become 300 MB of maps."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def spend(self, container: Any) -> Any:
        """Take one list or map into account and hand it on."""
        self._left -= 1 + len(container)
        if self._left < 0:
            raise ValueError(f"more than {self._limit} items")
        return container


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True, eq=False)
class Message:
    """Base of every message. To derive from it makes a frozen dataclass, whose fields are checked by annotation."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False)(cls)

    def encode(self) -> bytes:
        """Return the message's bytes."""
        values = [_plain(getattr(self, f.name)) for f in fields(self)]
        packed: bytes = msgpack.packb([MAGIC, PROTOCOL_VERSION, type(self).__name__, *values])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a message of this type; MessageError: malformed, oversized, of another type or version, and nothing of it was used."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise MessageError(f"message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are taken")
        budget = ItemBudget(_MAX_ITEMS_IN_ALL)
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
            raise MessageError(
                f"protocol version {items[1]!r}, expected {PROTOCOL_VERSION}: trainers, shards or commands run releases that do not speak "
                "with each other. Install one release for all of them (docs/upgrade.md)."
            )
        if items[2] != cls.__name__:
            raise MessageError(f"message of type {items[2]!r}, expected {cls.__name__}")
        values = items[3:]
        wanted, n_required = _field_checks(cls)  # type: ignore[arg-type]  # mypy does not take type[Self] for hashable
        if len(values) < n_required:
            raise MessageError(f"{cls.__name__}: {len(values)} fields, expected at least {n_required}")
        # Of another release there may be fewer, which have defaults, or more, which this release can do without.
        return cls(*[check(at, value) for (at, check), value in zip(wanted, values, strict=False)])


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
    if isinstance(value, list) and value and isinstance(value[0], TableRows | ChangedRowsBlock):
        return [rows.to_list() for rows in value]
    return value.to_list() if isinstance(value, TableRows) else value


Check = Callable[[str, Any], Any]
"""Takes where a field stands and what came; returns its value."""


@cache
def _field_checks(cls: type[Message]) -> tuple[list[tuple[str, Check]], int]:
    """How the fields of a message are checked, in order, and how many must be there: found once, since two replies come for every push."""
    n_required = sum(f.default is MISSING and f.default_factory is MISSING for f in fields(cls))
    return [(f"{cls.__name__}.{f.name}", _check_of(f.type)) for f in fields(cls)], n_required


def _check_of(annotation: Any) -> Check:
    """Return the check for an annotation (the few forms used in messages)."""
    if annotation is TableRows:
        return lambda at, value: TableRows.from_list(value)
    if annotation in (list[TableRows], list[ChangedRowsBlock]):
        return partial(_rows_of, kind=annotation.__args__[0])
    items: dict[Any, tuple[type, str]] = {
        list[bytes]: (bytes, "a list of bytes"),
        list[str]: (str, "a list of texts"),
        list[int]: (int, "a list of numbers"),
        list[dict[str, Any]]: (dict, "a list of maps"),
    }
    if annotation in items:
        kind, what = items[annotation]
        return partial(_list_of, kind=kind, what=what)
    if annotation == dict[str, str]:
        return _map_of_texts
    return partial(_of_type, kind=dict if annotation == dict[str, Any] else annotation)


def _rows_of(at: str, value: Any, kind: Any) -> Any:
    _expect(isinstance(value, list), f"{at}: expected a list")
    return [kind.from_list(item) for item in value]


def _list_of(at: str, value: Any, kind: type, what: str) -> Any:
    _expect(isinstance(value, list) and all(isinstance(v, kind) for v in value), f"{at}: expected {what}")
    return value


def _map_of_texts(at: str, value: Any) -> Any:
    good = isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())
    _expect(good, f"{at}: expected a map of texts")
    return value


def _of_type(at: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise MessageError(f"malformed message: {at}: got {type(value).__name__}, expected {kind.__name__}")
    return value


def installed_version() -> str:
    """Return the installed version, "" in a source tree that was never installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and needed for this question only

    try:
        return version("kvemb")
    except PackageNotFoundError:
        return ""


def digest_tables(tables: list[TableRows], prefetched: Sequence[TableRows] = ()) -> int:
    """Return the xxh3-64 digest of the arrays of a push part."""
    state = xxhash.xxh3_64()
    for number, rows in enumerate([*tables, *prefetched]):
        if number == len(tables):
            state.update(b"held ")  # a table of rows without weights would digest like rows that are prefetched
        # Sizes too: without them the same bytes split otherwise (an id taken for a version) would digest alike.
        state.update(f"{rows.table} {len(rows.ids)} {rows.rows.size} {rows.dtype} {len(rows.versions)} ".encode())
        for array in (rows.ids, rows.rows, rows.versions):
            state.update(np.ascontiguousarray(array).data)
        state.update(repr(sorted(rows.hyper.items())).encode())
    return state.intdigest()
