"""A checkpoint against what storage holds now, row by row, every byte of weights and state. Reads only."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import to_caller
from kvemb.checkpoint.chain import Chain
from kvemb.checkpoint.format.row_block import RowBlock
from kvemb.net.deadline import Deadline
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.store import Store

_BLOCK_BYTES = 8 << 20


@dataclass
class Comparison:
    """How one table of a checkpoint compares with storage: numbers of rows, and the first id that differs or is missing. Storage has a row
    with the same bytes, with a newer version, with other bytes, or not at all. Newer is trained since the save, and only told apart within
    the saved cluster."""

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
    """Compare every row.

    Args:
        chain: the checkpoint.
        store: open.
        tables: the cluster's, by name; a table that is not there has no rows.
        cluster_id: of the cluster, in hex.
        timeout_s: of one storage call.
        progress: called with (rows done, rows in all at most).

    Raises:
        TableMismatchError: a table has another identity.
        CheckpointError, StorageError: it cannot be read.
    """
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
    read = store.read([part], Deadline.after(timeout_s))[0].in_key_order()
    record.check(read.records, block.ids, read.found, store.whereabouts(keys))
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
