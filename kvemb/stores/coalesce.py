"""Small parts of a batch whose rows lie alike, handled as one part. Pure.

A batch of a parameter server has a part for each of tens of tables, a thousand rows each. Most of its price is then that of NumPy's calls
for each part and node, not that of its bytes. So parts of one record size and one layout are coalesced, at the price of a copy of their
records. The results are cut up again. Large parts stand alone: they would be copied for nothing.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows
from kvemb.schema.keys import RowKeys, coalesce_keys
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult

_SMALL_ROWS = 4096
_MOST_PARTS = 1 << 16  # of one `coalesce_keys`


def read_coalesced(parts: Sequence[ReadPart], read: Callable[[Sequence[ReadPart]], list[ReadResult]]) -> list[ReadResult]:
    """Read parts as fewer ones; a result that was cut out of a larger one is in the order of its keys.

    Args:
        parts: as in `StoreRows.read`; those that bring memory of their own stand alone.
        read: reads the coalesced parts.
    """
    if len(parts) < 2:
        return read(parts)
    groups = _groups([part.keys for part in parts], [None if part.into is not None else _read_group(part) for part in parts])
    if len(groups) == len(parts):
        return read(parts)
    results: dict[int, ReadResult] = {}
    for group, result in zip(groups, read([_coalesced_read([parts[i] for i in group]) for group in groups]), strict=True):
        results |= {group[0]: result} if len(group) == 1 else dict(zip(group, _cut(result, [parts[i] for i in group]), strict=True))
    return [results[i] for i in range(len(parts))]


def write_coalesced(
    parts: Sequence[WritePart], write: Callable[[Sequence[WritePart]], list[WriteResult]], *, one_node: bool = False
) -> list[WriteResult]:
    """Write parts as fewer ones.

    Args:
        parts: as in `StoreRows.write`.
        write: writes the coalesced parts.
        one_node: whether one node has all rows. Rows under keys of their own need not be put in any order then, and joining them would
            cost more than it saves.
    """
    if len(parts) < 2:
        return write(parts)
    groups = _groups([part.keys for part in parts], [_write_group(part, one_node) for part in parts])
    if len(groups) == len(parts):
        return write(parts)
    results: dict[int, WriteResult] = {}
    for group, result in zip(groups, write([_coalesced_write([parts[i] for i in group]) for group in groups]), strict=True):
        for i, rows in zip(group, _bounds([parts[i] for i in group]), strict=True):
            results[i] = WriteResult(result.stored[rows], None if result.tokens is None else result.tokens[rows])
    return [results[i] for i in range(len(parts))]


def _groups(keys: Sequence[RowKeys], group_keys: Sequence[Hashable | None]) -> list[list[int]]:
    """Which parts become one, by their numbers: small ones of one group key, which is not None."""
    groups: dict[Hashable, list[int]] = {}
    for i, (what, one) in enumerate(zip(group_keys, keys, strict=True)):
        joins = what is not None and 0 < len(one) <= _SMALL_ROWS and one.tables is None
        groups.setdefault((what, i // _MOST_PARTS) if joins else i, []).append(i)
    return list(groups.values())


def _read_group(part: ReadPart) -> Hashable:
    return part.keys.coalesce_key, part.record_bytes, part.prefix_bytes, part.tokens, part.foreign


def _write_group(part: WritePart, one_node: bool) -> Hashable | None:
    if one_node and part.keys.coalesce_key is None:
        return None
    return part.keys.coalesce_key, part.records.shape[1], part.tokens is None


def _coalesced_read(parts: Sequence[ReadPart]) -> ReadPart:
    first = parts[0]
    if len(parts) == 1:
        return first
    keys = coalesce_keys([part.keys for part in parts])
    return ReadPart(keys, first.record_bytes, first.prefix_bytes, first.tokens, foreign=first.foreign)


def _coalesced_write(parts: Sequence[WritePart]) -> WritePart:
    if len(parts) == 1:
        return parts[0]
    tokens = [part.tokens for part in parts if part.tokens is not None]
    records = np.concatenate([part.records for part in parts])
    return WritePart(coalesce_keys([part.keys for part in parts]), records, np.concatenate(tokens) if tokens else None)


def _bounds(parts: Sequence[ReadPart] | Sequence[WritePart]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate((len(part.keys) for part in parts), initial=0))]


def _cut(result: ReadResult, parts: Sequence[ReadPart]) -> list[ReadResult]:
    if result.order is None:
        places: list[slice | NDArray[np.intp]] = [*_bounds(parts)]
    else:
        at = np.empty_like(result.order)
        at[result.order] = np.arange(len(at))
        places = [at[rows] for rows in _bounds(parts)]
    return [_some(result, rows) for rows in places]


def _some(result: ReadResult, rows: slice | NDArray[np.intp]) -> ReadResult:
    tokens = None if result.tokens is None else result.tokens[rows]
    foreign = None if result.foreign is None else result.foreign[rows]
    return ReadResult(as_rows(as_items(result.records)[rows]), result.found[rows], None, tokens, foreign)
