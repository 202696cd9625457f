"""A full checkpoint and the incremental ones built on it, read as one: newest wins, erased rows stay away.

All files of one table and saved shard are in one order (`CheckpointManifest.order`), so the levels are merged as streams. One block of
every stream is in memory, and each turn takes all rows up to the smallest of the blocks' last keys. Memory is one block per stream, for
any sizes. The data files of one checkpoint are read one after another, and the next one is fetched meanwhile.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import ERASED, IDS, MANIFEST, CheckpointManifest, FileEntry, SortKeys
from kvemb.checkpoint.format.manifest_json import decode_manifest
from kvemb.checkpoint.format.parquet_blocks import RowBlock, decode_ids, decode_rows
from kvemb.checkpoint.format.strict_json import MAX_DOCUMENT_BYTES
from kvemb.errors import CheckpointError, TableMismatchError
from kvemb.process.work_ahead import work_ahead
from kvemb.schema.table_def import TableDef


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A complete checkpoint: its folder and its manifest."""

    storage: CheckpointStorage
    manifest: CheckpointManifest

    def rows(self, definition: TableDef, shard: int) -> Iterator[RowBlock]:
        """Yield the rows that one shard saved of a table, in order."""
        last, order = -1, definition.order.keys
        for entry, data, where in self._contents(self.manifest.files_of(definition.name, shard)):
            for block in decode_rows(definition, data, entry, self.manifest.weights_only, where, order):
                last = _check_ends(order(block.ids[[0, -1]]), last, where) if len(block) else last
                yield block

    def ids(self, definition: TableDef, shard: int, role: str) -> Iterator[NDArray[np.uint64]]:
        """Yield the ids of one shard's files of this role, in order; raises as `rows`."""
        last, order = -1, definition.order.keys
        for entry, data, where in self._contents(self.manifest.files_of(definition.name, shard, role)):
            for ids in decode_ids(definition, data, entry, where, order):
                last = _check_ends(order(ids[[0, -1]]), last, where) if len(ids) else last
                yield ids

    def _contents(self, entries: Sequence[FileEntry]) -> Iterator[tuple[FileEntry, bytes, str]]:
        with closing(work_ahead(self._read, entries, n_threads=1, name="kvemb-read")) as contents:
            for entry, data in zip(entries, contents, strict=True):
                yield entry, data, self.storage.where(entry.path)

    def _read(self, entry: FileEntry) -> bytes:
        return self.storage.read(entry.path, entry.size_bytes)


def open_checkpoint(url: str) -> Checkpoint:
    """Open a complete checkpoint."""
    storage = CheckpointStorage(url)
    if storage.size(MANIFEST) is None:
        names = list(storage.names())
        why = "no checkpoint there"
        if any(name.endswith(f"/{MANIFEST}") for name in names):
            why = "this is a folder of checkpoints, not one of them; `kvemb ls` shows their names"
        elif any(name.endswith(".parquet") for name in names):
            why = "a save that did not finish; try it again with resume"
        raise CheckpointError(f"{storage.where(MANIFEST)}: not there: {why}")
    return Checkpoint(storage, decode_manifest(storage.read(MANIFEST, MAX_DOCUMENT_BYTES), storage.where(MANIFEST)))


def _check_ends(ends: NDArray[np.uint64], last: int, where: str) -> int:
    if int(ends[0]) <= last:
        raise CheckpointError(f"{where}: its ids are not behind those of the part before")
    return int(ends[1])


MAX_LEVELS = 64
Ids = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Chain:
    """Checkpoints that are built on each other, newest first; the last one is full."""

    levels: tuple[Checkpoint, ...]

    @property
    def newest(self) -> CheckpointManifest:
        """The manifest that says which tables there are."""
        return self.levels[0].manifest

    @property
    def size_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(level.manifest.size_bytes for level in self.levels)

    def rows(self, definition: TableDef, shard: int) -> Iterator[RowBlock]:
        """Yield the rows that one shard had of a table, in order."""
        levels = [level for level in self.levels if level.manifest.table(definition.name) is not None]
        if len(levels) == 1:
            yield from levels[0].rows(definition, shard)
            return
        merging = [_Level.of(level, definition, shard) for level in levels]
        while any(level.rows.fill() for level in merging):
            yield from _merge(merging)

    def rows_of(self, definition: TableDef, shards: Sequence[int]) -> Iterator[RowBlock]:
        """Yield the rows that several shards had of a table, in order; raises as `rows`."""
        order = definition.order.keys
        streams = [_BlockCursor(self.rows(definition, shard), order) for shard in shards]
        while filled := [stream for stream in streams if stream.fill()]:
            bound = min(stream.last for stream in filled)
            taken = [block for stream in filled if isinstance(block := stream.take(bound), RowBlock)]
            merged = RowBlock.concatenate(taken)
            yield merged if len(taken) == 1 else merged.take(np.argsort(order(merged.ids)))


def open_chain(url: str, tables: Sequence[str] = ()) -> Chain:
    """Open a checkpoint with everything it is built on."""
    levels = [open_checkpoint(url)]
    while (base := levels[-1].manifest.base) is not None:
        if len(levels) == MAX_LEVELS:
            raise CheckpointError(f"{levels[0].storage!r}: built on {MAX_LEVELS} others or more; save a full checkpoint now and then")
        below = open_checkpoint(sibling_url(levels[-1].storage.url, base.name))
        _check_link(levels[-1], below)
        levels.append(below)
    there = [table.definition.name for table in levels[0].manifest.tables]
    if missing := [name for name in tables if name not in there]:
        raise CheckpointError(f"{levels[0].storage!r}: holds no table {missing[0]!r}; it holds {', '.join(there)}")
    return Chain(tuple(Checkpoint(one.storage, one.manifest.only(tables)) for one in levels) if tables else tuple(levels))


def sibling_url(url: str, name: str) -> str:
    """Return the URL of a checkpoint beside this one."""
    return f"{url.rpartition('/')[0]}/{name}"


def _check_link(upper: Checkpoint, lower: Checkpoint) -> None:
    """Refuse a base that is not the one this checkpoint was made on."""
    above, below = upper.manifest, lower.manifest
    where = upper.storage.where("manifest.json")
    assert above.base is not None
    if below.save_id != above.base.save_id:
        raise CheckpointError(f"{where}: built on save {above.base.save_id}; {lower.storage!r} now holds save {below.save_id}")
    same = [(one.cluster_id, one.n_shards, one.slots, one.weights_only) for one in (above, below)]
    if same[0] != same[1]:
        raise CheckpointError(f"{where}: of another cluster, other shards or another kind than its base {lower.storage!r}")
    if any(ours.version < theirs.version for ours, theirs in zip(above.cuts, below.cuts, strict=True)):
        raise CheckpointError(f"{where}: cut before its base {lower.storage!r} was")
    for table in below.tables:
        again = above.table(table.definition.name)
        if again is None:
            raise CheckpointError(f"{where}: lacks table {table.definition.name!r} of its base {lower.storage!r}")
        try:
            table.definition.require_same(again.definition)
        except TableMismatchError as error:
            raise CheckpointError(f"{where}: {error}") from error


class _BlockCursor:
    """Blocks of one kind of one level, of which the first rows are taken away again and again."""

    def __init__(self, blocks: Iterator[RowBlock] | Iterator[Ids], order: SortKeys) -> None:
        self._blocks: Iterator[Any] = blocks
        self._block: RowBlock | Ids | None = None
        self._order = order
        self._keys = np.empty(0, np.uint64)  # of the block at hand

    def fill(self) -> bool:
        """Hold a block that is not empty, if any remains."""
        while self._block is None or not len(self._block):
            self._block = next(self._blocks, None)
            if self._block is None:
                return False
            self._keys = self._order(_ids(self._block))
        return True

    @property
    def last(self) -> int:
        """The last key of the block at hand."""
        return int(self._keys[-1])

    def take(self, bound: int) -> RowBlock | Ids | None:
        """Take away and return the block's rows up to this key; None when there are none."""
        if self._block is None or not len(self._block):
            return None
        n = int(np.searchsorted(self._keys, np.uint64(bound), side="right"))
        taken, self._block = _slice(self._block, slice(0, n)), _slice(self._block, slice(n, None))
        self._keys = self._keys[n:]
        return taken if n else None


@dataclass(frozen=True, eq=False)
class _Level:
    """The streams of one checkpoint; `all_ids` only where it lists every existing id."""

    rows: _BlockCursor
    erased: _BlockCursor
    all_ids: _BlockCursor | None
    order: SortKeys

    @staticmethod
    def of(level: Checkpoint, definition: TableDef, shard: int) -> "_Level":
        has_ids, order = bool(level.manifest.files_of(definition.name, shard, IDS)), definition.order.keys
        return _Level(
            _BlockCursor(level.rows(definition, shard), order),
            _BlockCursor(level.ids(definition, shard, ERASED), order),
            _BlockCursor(level.ids(definition, shard, IDS), order) if has_ids else None,
            order,
        )

    @property
    def streams(self) -> list[_BlockCursor]:
        return [self.rows, self.erased, *([self.all_ids] if self.all_ids is not None else [])]


def _merge(levels: Sequence[_Level]) -> Iterator[RowBlock]:
    """Take one turn: everything up to the smallest last key."""
    order = levels[0].order
    bound = min(stream.last for level in levels for stream in level.streams if stream.fill())
    kept: list[RowBlock] = []
    hidden: list[Ids] = []  # keys of ids that newer levels have, as rows or as erased
    only: list[Ids] = []  # for each newer level that lists them: the keys of ids that may exist
    for level in levels:
        rows, erased = level.rows.take(bound), level.erased.take(bound)
        if isinstance(rows, RowBlock):
            keep, keys = np.ones(len(rows), bool), order(rows.ids)
            for some in hidden:
                keep &= ~_is_in(keys, some)
            for some in only:
                keep &= _is_in(keys, some)
            kept.append(rows if keep.all() else rows.take(keep))
            hidden.append(keys)
        if isinstance(erased, np.ndarray):
            hidden.append(order(erased))
        if level.all_ids is not None:
            there = level.all_ids.take(bound)
            only.append(order(there) if isinstance(there, np.ndarray) else np.empty(0, np.uint64))
    kept = [block for block in kept if len(block)]
    if len(kept) == 1:
        yield kept[0]
    elif kept:
        merged = RowBlock.concatenate(kept)
        yield merged.take(np.argsort(order(merged.ids)))


def _is_in(keys: Ids, of: Ids) -> NDArray[np.bool_]:
    """Which keys stand in another ascending array: bool [n]."""
    if not len(of):
        return np.zeros(len(keys), bool)
    at = np.minimum(np.searchsorted(of, keys), len(of) - 1)
    found: NDArray[np.bool_] = of[at] == keys
    return found


def _ids(block: RowBlock | Ids | None) -> Ids:
    assert block is not None
    return block.ids if isinstance(block, RowBlock) else block


def _slice(block: RowBlock | Ids, rows: slice) -> RowBlock | Ids:
    return block.take(rows) if isinstance(block, RowBlock) else block[rows]
