"""Looks at every byte of a checkpoint and of those it is built on; changes nothing. All faults are found, not only the first.

Also compares a checkpoint with storage, row by row, every byte of weights and state. Reads only.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import to_caller
from kvemb.checkpoint.chain import Chain, Checkpoint, open_chain
from kvemb.checkpoint.format.checkpoint_manifest import ROWS, FileEntry, SortKeys
from kvemb.checkpoint.format.parquet_blocks import RowBlock, decode_ids, decode_rows
from kvemb.errors import CheckpointError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.store import Store

_N_THREADS = 4
_SHOWN = 20

VerifyProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread, one call at a time."""


@dataclass(frozen=True)
class VerifyReport:
    """The amounts checked, and the faults found (empty: none)."""

    n_checkpoints: int
    n_files: int
    n_rows: int
    n_bytes: int
    faults: tuple[str, ...]

    def require_good(self) -> "VerifyReport":
        """Raise CheckpointError naming the faults, if there are any."""
        if self.faults:
            more = [f"and {len(self.faults) - _SHOWN} more"] if len(self.faults) > _SHOWN else []
            raise CheckpointError("; ".join([*self.faults[:_SHOWN], *more]))
        return self


def verify(url: str, progress: VerifyProgress | None = None) -> VerifyReport:
    """Check a checkpoint and its chain: sizes, checksums, contents, totals."""
    return verify_chain(open_chain(url), progress)


def verify_chain(chain: Chain, progress: VerifyProgress | None = None) -> VerifyReport:
    """Check a chain that is open, as `verify`."""
    work = [(level, entry) for level in chain.levels for entry in level.manifest.files]
    counter = _Counter(chain.size_bytes, progress)
    with ThreadPoolExecutor(_N_THREADS, thread_name_prefix="kvemb-verify") as pool:
        found = list(pool.map(lambda one: _look_at(chain, one[0], one[1], counter), work))
    faults = [fault for _, fault in found if fault]
    ends: dict[tuple[int, str, str, int], int] = {}
    for (level, entry), (span, fault) in zip(work, found, strict=True):  # parts of a stream stand after each other in a manifest
        key = (id(level), entry.table, entry.role, entry.shard)
        if not fault and span and span[0] <= ends.get(key, -1):
            faults.append(f"{level.storage.where(entry.path)}: its ids are not behind those of the part before")
        if span:
            ends[key] = span[1]
    n_rows = sum(level.manifest.n_rows for level in chain.levels)
    return VerifyReport(len(chain.levels), len(work), n_rows, chain.size_bytes, tuple(faults))


class _Counter:
    """Counts the bytes that several threads have checked, and tells a progress callback. Thread-safe."""

    def __init__(self, total: int, progress: VerifyProgress | None) -> None:
        self._done, self._total, self._progress, self._lock = 0, total, progress, Lock()

    def add(self, n: int) -> None:
        with self._lock:
            self._done += n
            if self._progress is not None:
                self._progress(self._done, self._total)


def _look_at(chain: Chain, level: Checkpoint, entry: FileEntry, counter: _Counter) -> tuple[tuple[int, int] | None, str]:
    """Return ((first, last) of its sort keys or None, the fault or "") of one file."""
    try:
        return _ids_of(chain, level, entry), ""
    except CheckpointError as error:
        return None, str(error)
    finally:
        counter.add(entry.size_bytes)


def _ids_of(chain: Chain, level: Checkpoint, entry: FileEntry) -> tuple[int, int] | None:
    where, manifest = level.storage.where(entry.path), level.manifest
    data = level.storage.read(entry.path, entry.size_bytes)
    table = manifest.table(entry.table)
    assert table is not None  # the manifest was checked
    placement, slot_shards = table.definition.placement, manifest.slot_shards

    def is_own(ids: NDArray[np.uint64]) -> bool:
        return bool((slot_shards[placement.slots(ids)] == entry.shard).all())

    first, last, order = None, None, table.definition.order.keys
    if entry.role == ROWS:
        low, high = _versions_between(chain, level, entry.shard)
        for block in decode_rows(table.definition, data, entry, manifest.weights_only, where, order):
            if ((block.versions <= np.uint64(low)) | (block.versions > np.uint64(high))).any():
                raise CheckpointError(f"{where}: versions outside ({low}, {high}], the cuts of its base and its own")
            first, last = _span(block.ids, first, last, is_own, order, where)
    else:
        for ids in decode_ids(table.definition, data, entry, where, order):
            first, last = _span(ids, first, last, is_own, order, where)
    return None if first is None or last is None else (first, last)


def _versions_between(chain: Chain, level: Checkpoint, shard: int) -> tuple[int, int]:
    """The cut of the base (0 of a full checkpoint) and the cut of the level itself."""
    at = chain.levels.index(level)
    low = chain.levels[at + 1].manifest.cuts[shard].version if at + 1 < len(chain.levels) else 0
    return low, level.manifest.cuts[shard].version


def _span(
    ids: NDArray[np.uint64],
    first: int | None,
    last: int | None,
    is_own: Callable[[NDArray[np.uint64]], bool],
    order: SortKeys,
    where: str,
) -> tuple[int | None, int | None]:
    if not len(ids):
        return first, last
    if not is_own(ids):
        raise CheckpointError(f"{where}: holds ids of other shards than its own")
    ends = order(ids[[0, -1]]).tolist()
    return (ends[0] if first is None else first), ends[1]


_BLOCK_BYTES = 8 << 20


@dataclass
class Comparison:
    """How one table of a checkpoint compares with storage: numbers of rows, and the first id that differs or is missing.

    Storage has a row with the same bytes, with a newer version, with other bytes, or not at all. A newer row was trained since the save;
    it can be told from a wrong one only in the saved cluster.
    """

    table: str
    n_rows: int = 0
    n_same: int = 0
    n_newer: int = 0
    n_different: int = 0
    n_missing: int = 0
    first: int | None = None

    @property
    def good(self) -> bool:
        """Whether no row is missing or has other bytes under a version that the checkpoint covers."""
        return not (self.n_different or self.n_missing)


def compare(
    chain: Chain, store: Store, tables: dict[str, TableDef], *, cluster_id: str, timeout_s: float, progress: Callable[[int, int], None]
) -> list[Comparison]:
    """Compare every row."""
    total = sum(level.manifest.n_rows for level in chain.levels)
    results, done = [], 0
    for saved in chain.newest.tables:
        definition, found = saved.definition, Comparison(saved.definition.name)
        here = tables.get(definition.name)
        if here is not None:
            here.require_same(definition)
        for cut in chain.newest.cuts:
            newest = cut.version if chain.newest.cluster_id == cluster_id else None
            for block in chain.rows(definition, cut.shard):
                for some in _blocks(block, definition):
                    _compare(some, here, store, found, newest, timeout_s, weights_only=chain.newest.weights_only)
                    done += len(some)
                    progress(done, total)
        results.append(found)
    return results


def _blocks(block: RowBlock, definition: TableDef) -> list[RowBlock]:
    step = max(1, _BLOCK_BYTES // definition.record.size_bytes)
    return [block.take(slice(at, at + step)) for at in range(0, len(block), step)]


def _compare(
    block: RowBlock, here: TableDef | None, store: Store, result: Comparison, newest: int | None, timeout_s: float, *, weights_only: bool
) -> None:
    result.n_rows += len(block)
    if here is None:
        result.n_missing += len(block)
        return
    record = here.record
    wanted = record.prefix_bytes if weights_only else record.size_bytes
    keys = here.keys(block.ids, pages=store.capabilities.pages)
    part = ReadPart(keys, record.size_bytes, wanted)
    read = store.rows.read([part], Deadline.after(timeout_s))[0].in_key_order()
    record.check(read.records, block.ids, read.found, store.rows.whereabouts(keys))
    expected = block.records(here, 0)[:, HEADER_SIZE:wanted]
    same = read.found & (read.records[:, HEADER_SIZE:wanted] == expected).all(axis=1)
    newer = np.zeros(len(block), bool)
    if newest is not None:
        newer = read.found & ~same & (record.versions(read.records) > np.uint64(newest))
    bad: NDArray[np.bool_] = ~same & ~newer
    result.n_same += int(same.sum())
    result.n_newer += int(newer.sum())
    result.n_missing += int((~read.found).sum())
    result.n_different += int((bad & read.found).sum())
    if result.first is None and bad.any():
        result.first = int(to_caller(block.ids, here.id_dtype)[int(np.argmax(bad))])
