"""Data files: blocks of rows to Parquet bytes and back. Bytes in, bytes out; no storage here.

Columns: id (int64 or uint64, by the table's id_dtype); version (uint64: epoch << 48 | k); weights (fixed-size list of float or halffloat;
opaque bytes: fixed-size binary). Then slots, the optimizer's state: fixed-size list of float; absent where there is none. bfloat16 weights
stand there as floats. Parquet has neither that type nor 16-bit integers: their bits alone would take as many bytes, and no other program
could read them.

Uncompressed, in pages of our own (`plain_parquet`): zstd saved a tenth of the bytes at half the speed (docs/adr/0012). And a file that is
not compressed cannot unfold into more memory than it has bytes. The checksum is taken over the very bytes that are parsed.

The two optional libraries are imported on first use, with an error that says how to get them. Between records and data files rows travel
as blocks of columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.arrays.rounding import opaque_bytes, storage_dtype, to_float32
from kvemb.checkpoint.format.checkpoint_manifest import FileEntry, SortKeys
from kvemb.checkpoint.format.plain_parquet import PlainWriter, columns_of, read_group
from kvemb.errors import CheckpointError
from kvemb.process.extras import require_extra
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.table_def import TableDef


@dataclass(frozen=True, eq=False)
class RowBlock:
    """n rows of one table."""

    ids: NDArray[np.uint64]  # uint64 [n]
    versions: NDArray[np.uint64]  # uint64 [n]
    weights: NDArray[Any]  # [n, dim] in the storage dtype, contiguous
    state: NDArray[np.float32] | None  # float32 [n, state_size], contiguous; None where a checkpoint holds weights only

    def __len__(self) -> int:
        return len(self.ids)

    @staticmethod
    def of_records(definition: TableDef, ids: NDArray[np.uint64], records: NDArray[np.uint8], weights_only: bool) -> "RowBlock":
        """Split whole records, uint8 [n, record bytes], of ids, uint64 [n], into columns: copies."""
        record = definition.record
        weights = np.ascontiguousarray(records[:, HEADER_SIZE : record.prefix_bytes]).view(storage_dtype(definition.dtype))
        state = None if weights_only else np.ascontiguousarray(records[:, record.prefix_bytes :]).view("<f4")
        return RowBlock(ids, record.versions(records), weights, state)

    def records(self, definition: TableDef, versions: NDArray[np.uint64] | int) -> NDArray[np.uint8]:
        """Return the rows as records with these versions: uint8 [n, record bytes]. Without a state they get a new row's."""
        state = new_state(definition, len(self)) if self.state is None else self.state
        return definition.record.encode(self.ids, versions, self.weights, state)

    def take(self, rows: NDArray[Any] | slice) -> "RowBlock":
        """Return some of the rows."""
        state = None if self.state is None else self.state[rows]
        return RowBlock(self.ids[rows], self.versions[rows], self.weights[rows], state)

    @staticmethod
    def concatenate(blocks: Sequence["RowBlock"]) -> "RowBlock":
        """Put blocks behind each other; at least one."""
        if len(blocks) == 1:
            return blocks[0]
        state = [block.state for block in blocks if block.state is not None]
        return RowBlock(
            np.concatenate([block.ids for block in blocks]),
            np.concatenate([block.versions for block in blocks]),
            np.concatenate([block.weights for block in blocks]),
            np.concatenate(state) if state else None,
        )


def new_state(definition: TableDef, n: int) -> NDArray[np.float32]:
    """Return the state of n rows that were never pushed: float32 [n, state_size]."""
    fields = definition.optimizer.state_fields()
    one_row = np.repeat(np.array([s.initial for s in fields], np.float32), [s.size(definition.dim) for s in fields])
    return np.tile(one_row, (n, 1))


def row_bytes(definition: TableDef, weights_only: bool) -> int:
    """Return how many bytes one row takes in a data file at least."""
    weights = definition.dim * storage_dtype("float32" if definition.dtype == "bfloat16" else definition.dtype).itemsize
    return 16 + weights + (0 if weights_only else 4 * definition.record.state_size)


GROUP_BYTES = 8 << 20
_MAX_GROUP_ROWS = 1 << 18
_MAX_GROUPS = 1 << 14
_FOOTER_BYTES = 16 << 20
_ENCODINGS = {"PLAIN", "RLE"}


def group_rows(definition: TableDef, weights_only: bool = False) -> int:
    """Return how many rows one row group holds: about 8 MiB."""
    return max(1, min(_MAX_GROUP_ROWS, GROUP_BYTES // row_bytes(definition, weights_only)))


def checksum(*pieces: bytes | memoryview) -> str:
    """Return the checksum that manifests carry, of these bytes behind each other: xxh3, 128 bits, in hex."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def encode_rows(definition: TableDef, blocks: Sequence[RowBlock], weights_only: bool) -> list[bytes | memoryview]:
    """Return the pieces of a data file; each block is a row group. They share memory with the blocks."""
    return _encode(_schema(definition, weights_only), [_columns(definition, block, weights_only) for block in blocks])


def encode_ids(definition: TableDef, ids: NDArray[np.uint64]) -> list[bytes | memoryview]:
    """Return the pieces of a data file of ids alone: uint64 [n], in order."""
    steps = range(0, len(ids), _MAX_GROUP_ROWS)
    return _encode(_id_schema(definition), [[ids[at : at + _MAX_GROUP_ROWS]] for at in steps])


def decode_rows(definition: TableDef, data: bytes, entry: FileEntry, weights_only: bool, where: str, order: SortKeys) -> Iterator[RowBlock]:
    """Yield a data file's rows, row group by row group."""
    last = -1
    for columns in _decode(_schema(definition, weights_only), data, entry, row_bytes(definition, weights_only), where):
        ids, versions = columns["id"].view(np.uint64), columns["version"]
        last = _check_order(order(ids), last, where)
        state = columns.get("slots")
        if state is None and not weights_only:
            state = np.empty((len(ids), 0), np.float32)
        yield RowBlock(ids, versions, _stored(definition, columns["weights"], where), state)


def decode_ids(definition: TableDef, data: bytes, entry: FileEntry, where: str, order: SortKeys) -> Iterator[NDArray[np.uint64]]:
    """Yield the ids of a file of ids alone; raises as `decode_rows`."""
    last = -1
    for columns in _decode(_id_schema(definition), data, entry, 8, where):
        ids = columns["id"].view(np.uint64)
        last = _check_order(order(ids), last, where)
        yield ids


def _encode(schema: Any, groups: Sequence[Sequence[NDArray[Any]]]) -> list[bytes | memoryview]:
    writer = PlainWriter(schema, "id")
    pieces = [piece for columns in groups for piece in writer.add(columns)]
    return [*pieces, writer.footer()]


def _decode(schema: Any, data: bytes, entry: FileEntry, min_row_bytes: int, where: str) -> Iterator[dict[str, NDArray[Any]]]:
    if len(data) != entry.size_bytes:
        raise CheckpointError(f"{where}: {len(data)} bytes, expected {entry.size_bytes}: truncated or replaced")
    if checksum(data) != entry.checksum:
        raise CheckpointError(f"{where}: damaged, its checksum is not the one in the manifest")
    pa, parquet, columns = require_extra("pyarrow"), require_extra("pyarrow.parquet"), columns_of(schema)
    try:
        file = parquet.ParquetFile(pa.BufferReader(data), thrift_string_size_limit=_FOOTER_BYTES, thrift_container_size_limit=_FOOTER_BYTES)
        _check_shape(file, schema, entry, min_row_bytes, where)
        for group in range(file.num_row_groups):
            if (found := read_group(columns, file.metadata.row_group(group), data)) is not None:
                yield found
                continue
            table = file.read_row_group(group, use_threads=False)  # as an earlier release wrote it, or another program
            if table.num_rows != (expected := file.metadata.row_group(group).num_rows):
                raise CheckpointError(f"{where}: damaged: row group {group} has {table.num_rows} rows, its footer says {expected}")
            yield _arrays(table, schema, where)
    except (pa.ArrowException, OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: damaged, no Parquet file of ours: {error}") from error


def _check_shape(file: Any, schema: Any, entry: FileEntry, min_row_bytes: int, where: str) -> None:
    """Refuse, before any row is read, a file that could take more memory than the manifest says."""
    metadata = file.metadata
    if not file.schema_arrow.equals(schema):
        raise CheckpointError(f"{where}: its columns are {_listed(file.schema_arrow)}, expected {_listed(schema)}")
    if metadata.num_rows != entry.rows:
        raise CheckpointError(f"{where}: {metadata.num_rows} rows, expected {entry.rows}")
    if metadata.num_rows * min_row_bytes > entry.size_bytes or metadata.num_row_groups > _MAX_GROUPS:
        raise CheckpointError(
            f"{where}: {metadata.num_rows} rows in {metadata.num_row_groups} groups do not fit its {entry.size_bytes} bytes"
        )
    in_groups = sum(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if in_groups != metadata.num_rows:
        raise CheckpointError(f"{where}: damaged: its row groups have {in_groups} rows, its footer says {metadata.num_rows}")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in (group.column(index) for index in range(group.num_columns)):
            if column.compression != "UNCOMPRESSED" or not _ENCODINGS.issuperset(column.encodings):
                raise CheckpointError(f"{where}: column {column.path_in_schema} is {column.compression} {column.encodings}, expected plain")


def _arrays(table: Any, schema: Any, where: str) -> dict[str, NDArray[Any]]:
    """The columns of a row group as arrays, [n] or [n, width]."""
    found = {}
    for field in schema:
        chunks = [chunk for chunk in table.column(field.name).chunks if len(chunk)]
        arrays = [_array(chunk, field.type) for chunk in chunks]
        if sum(chunk.null_count for chunk in chunks):
            raise CheckpointError(f"{where}: column {field.name} has missing values")
        found[field.name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return found


def _array(chunk: Any, kind: Any) -> NDArray[Any]:
    pa = require_extra("pyarrow")
    if pa.types.is_fixed_size_binary(kind):
        return binary_rows(chunk)
    if not pa.types.is_fixed_size_list(kind):
        return np.asarray(chunk.to_numpy(zero_copy_only=True))
    return np.asarray(chunk.flatten().to_numpy(zero_copy_only=True)).reshape(len(chunk), kind.list_size)


def binary_rows(chunk: Any) -> NDArray[np.uint8]:
    """Return pyarrow's array of n values of w bytes as uint8 [n, w], over its memory; values that are missing have any bytes."""
    width = chunk.type.byte_width
    return np.frombuffer(chunk.buffers()[1], np.uint8, len(chunk) * width, chunk.offset * width).reshape(len(chunk), width)


def _columns(definition: TableDef, block: RowBlock, weights_only: bool) -> list[NDArray[Any]]:
    """The columns of `_schema`, [n] or [n, width]."""
    columns: list[NDArray[Any]] = [block.ids, block.versions, _readable(definition, block.weights)]
    if _has_state(definition, weights_only):
        assert block.state is not None
        columns.append(block.state)
    return columns


def _schema(definition: TableDef, weights_only: bool) -> Any:
    pa = require_extra("pyarrow")
    fields = [*_id_schema(definition), pa.field("version", pa.uint64(), nullable=False)]
    fields.append(pa.field("weights", weights_type(definition.dtype, definition.dim), nullable=False))
    if _has_state(definition, weights_only):
        fields.append(pa.field("slots", _list_type(pa.float32(), definition.record.state_size), nullable=False))
    return pa.schema(fields)


def _id_schema(definition: TableDef) -> Any:
    pa = require_extra("pyarrow")
    return pa.schema([pa.field("id", pa.int64() if definition.id_dtype == "int64" else pa.uint64(), nullable=False)])


def _list_type(kind: Any, width: int) -> Any:
    pa = require_extra("pyarrow")  # without nulls, writing is nearly twice as fast
    return pa.list_(pa.field("element", kind, nullable=False), width)


def weights_type(dtype: str, dim: int) -> Any:
    """Return pyarrow's type of a row's weights in Parquet: a list of floats, bfloat16 as float32; opaque bytes as binary of one length."""
    pa = require_extra("pyarrow")
    if opaque_bytes(dtype) is not None:
        return pa.binary(dim)
    return _list_type(pa.float16() if dtype == "float16" else pa.float32(), dim)


def _readable(definition: TableDef, weights: NDArray[Any]) -> NDArray[Any]:
    return to_float32(weights, "bfloat16") if definition.dtype == "bfloat16" else weights


def _stored(definition: TableDef, weights: NDArray[Any], where: str) -> NDArray[Any]:
    """Return the weights in the storage dtype, exactly, or refuse them."""
    if definition.dtype != "bfloat16":
        return weights
    bits = weights.view(np.uint32)
    if (bits & np.uint32(0xFFFF)).any():
        raise CheckpointError(f"{where}: weights that are no bfloat16 in a table of bfloat16")
    return (bits >> np.uint32(16)).astype(storage_dtype("bfloat16"))


def _has_state(definition: TableDef, weights_only: bool) -> bool:
    return definition.record.state_size > 0 and not weights_only


def _check_order(keys: NDArray[np.uint64], last: int, where: str) -> int:
    if len(keys) and (int(keys[0]) <= last or (keys[1:] <= keys[:-1]).any()):
        raise CheckpointError(f"{where}: ids are not in order, or one stands twice")
    return int(keys[-1]) if len(keys) else last


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
