"""Looks at every byte of a checkpoint and of those it is built on; changes nothing. All faults are found, not only the first."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.chain import Chain, open_chain
from kvemb.checkpoint.format.checkpoint_manifest import FileEntry
from kvemb.checkpoint.format.file_names import ROWS
from kvemb.checkpoint.format.parquet_blocks import decode_ids, decode_rows
from kvemb.checkpoint.reader import Checkpoint
from kvemb.errors import CheckpointError

_N_THREADS = 4
_SHOWN = 20

VerifyProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread, one call at a time."""


@dataclass(frozen=True)
class VerifyReport:
    """What was looked at, and what is wrong with it (empty: nothing)."""

    n_checkpoints: int
    n_files: int
    n_rows: int
    n_bytes: int
    faults: tuple[str, ...]

    def require_good(self) -> "VerifyReport":
        """Raise CheckpointError naming what is wrong, if anything is."""
        if self.faults:
            more = [f"and {len(self.faults) - _SHOWN} more"] if len(self.faults) > _SHOWN else []
            raise CheckpointError("; ".join([*self.faults[:_SHOWN], *more]))
        return self


def verify(url: str, progress: VerifyProgress | None = None) -> VerifyReport:
    """Check a checkpoint and its chain: sizes, checksums, contents, totals.

    Raises:
        CheckpointError: it cannot even be opened.
    """
    return verify_chain(open_chain(url), progress)


def verify_chain(chain: Chain, progress: VerifyProgress | None = None) -> VerifyReport:
    """The same, of a chain that is open."""
    work = [(level, entry) for level in chain.levels for entry in level.manifest.files]
    counter = _Counter(chain.size_bytes, progress)
    with ThreadPoolExecutor(_N_THREADS, thread_name_prefix="kvemb-verify") as pool:
        found = list(pool.map(lambda one: _look_at(chain, one[0], one[1], counter), work))
    faults = [fault for _, fault in found if fault]
    ends: dict[tuple[int, str, str, int], int] = {}
    for (level, entry), (span, fault) in zip(work, found, strict=True):  # parts of a stream stand behind each other in a manifest
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
    """Return ((first id, last id) or None, what is wrong or "") of one file."""
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
        return slot_shards is None or bool((slot_shards[placement.slots(ids)] == entry.shard).all())

    first = last = None
    if entry.role == ROWS:
        low, high = _versions_between(chain, level, entry.shard)
        for block in decode_rows(table.definition, data, entry, manifest.weights_only, where):
            if ((block.versions <= np.uint64(low)) | (block.versions > np.uint64(high))).any():
                raise CheckpointError(f"{where}: versions outside ({low}, {high}], the cuts of its base and its own")
            first, last = _span(block.ids, first, last, is_own, where)
    else:
        for ids in decode_ids(table.definition, data, entry, where):
            first, last = _span(ids, first, last, is_own, where)
    return None if first is None or last is None else (first, last)


def _versions_between(chain: Chain, level: Checkpoint, shard: int) -> tuple[int, int]:
    """The cut of the base (0 of a full checkpoint) and the cut of the level itself."""
    at = chain.levels.index(level)
    low = chain.levels[at + 1].manifest.cuts[shard].version if at + 1 < len(chain.levels) else 0
    return low, level.manifest.cuts[shard].version


def _span(
    ids: NDArray[np.uint64], first: int | None, last: int | None, is_own: Callable[[NDArray[np.uint64]], bool], where: str
) -> tuple[int | None, int | None]:
    if not len(ids):
        return first, last
    if not is_own(ids):
        raise CheckpointError(f"{where}: holds ids of other shards than its own")
    return (int(ids[0]) if first is None else first), int(ids[-1])
