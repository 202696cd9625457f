"""One batch over several nodes: which node gets which rows, and the arrays that replies fill. Pure.

Rows of a part are put in the order of their nodes once. Each node's share is then a plain slice of every array: replies are parsed straight
into the result. Parts of one record size and one layout are coalesced, except large ones: for tens of tables of a thousand rows, NumPy's
calls for each part and node cost more than a copy of the bytes. The results are cut up again.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows
from kvemb.errors import NodeUnavailableError, RecordError
from kvemb.process.cached_property import batch_value
from kvemb.schema.keys import RowKeys, coalesce_keys
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.server_errors import MENDED, server_error
from kvemb.wire.replies import RowsStep, Step, UnexpectedValueError
from kvemb.wire.request_arrays import StepLimit

_SMALL_ROWS = 4096
_MOST_PARTS = 1 << 16  # of one `coalesce_keys`


@batch_value
class Grouped:
    """The keys of a part in the order of their nodes."""

    keys: RowKeys  # in node order
    order: NDArray[np.intp] | None  # intp [n], position in the part of each; None when one node has all
    shares: list[tuple[int, slice]]  # (node index, slice) of each node that has rows


def group_by_node(keys: RowKeys, nodes: NDArray[np.integer[Any]] | None, kinds: NDArray[np.int8] | None = None) -> Grouped:
    """Put n keys in the order of their nodes, and within a node of their kinds, int8 [n]; where rows lie in pages, page by page."""
    locality = keys.locality()
    n = len(keys.ids)
    if nodes is None and locality is None and (kinds is None or (len(kinds) and (kinds == kinds[0]).all())):
        return Grouped(keys, None, [(0, slice(0, n))] if n else [])
    if nodes is None and kinds is None and locality is not None:
        order = locality.argsort(kind="stable")
        return Grouped(keys[order], order, [(0, slice(0, n))])
    nodes = np.zeros(len(keys), dtype=np.int64) if nodes is None else nodes
    wide = nodes if kinds is None else nodes.astype(np.int64) * (int(kinds.max(initial=0)) + 1) + kinds
    rank: NDArray[np.signedinteger[Any]] = wide.astype(np.int16 if wide.max(initial=0) < 1 << 15 else np.int64)
    # 16-bit keys: NumPy sorts them by radix, in linear time.
    if locality is None:
        order = np.argsort(rank, kind="stable")
    else:
        by_page = np.argsort(locality, kind="stable")
        order = by_page[np.argsort(rank[by_page], kind="stable")]
    sorted_nodes = nodes[order]
    present, starts = np.unique(sorted_nodes, return_index=True)
    bounds = [*starts.tolist(), len(keys)]
    shares = [(int(node), slice(bounds[i], bounds[i + 1])) for i, node in enumerate(present)]
    return Grouped(keys[order], order, shares)


@batch_value
class NodeSteps:
    """The steps of one part at one node, with its keys, by which an error names its row."""

    address: str
    keys: RowKeys
    steps: list[RowsStep]

    def row_errors(self) -> Iterator[tuple[int, bytes]]:
        """Every (row in the share, error line) that the node sent."""
        start = 0
        for step in self.steps:
            for row, line in step.reply.errors:
                yield start + row, line
            start += step.reply.n_rows


def raise_row_errors(parts: list[NodeSteps]) -> None:
    """Raise the first error line that a node sent in place of a row's reply, as a typed error."""
    for part in parts:
        if any([step.reply.errors for step in part.steps]):
            row, line = next(part.row_errors())
            raise server_error(part.address, line, part.keys, row)


def closed_under(steps: Sequence[Step], limit: StepLimit, error: NodeUnavailableError) -> NodeUnavailableError:
    """Return the error of a node that closed the connection, once later batches have smaller steps where these may be why."""
    largest_bytes = max((step.reply_bytes for step in steps), default=0)
    if not limit.ended(largest_bytes):
        return error
    return NodeUnavailableError(
        f"{error} If it is: does it limit what waits for a client (client-output-buffer-limit, maxmemory-clients)? It was asked for "
        f"{largest_bytes >> 10:,} KB at a time, and is asked for less from now on."
    )


def unexpected_value(parts: list[NodeSteps], error: UnexpectedValueError) -> RecordError:
    """Say under which row's key a value of another size was found."""
    for part in parts:
        start = 0
        for step in part.steps:
            if step.reply is error.reply:
                return RecordError(
                    f"node {part.address}, {part.keys.described(start + error.row)}: a value of {error.size_bytes} bytes lies under this "
                    f"row's key, expected a record of {error.expected_bytes}. Another program wrote there, or the table was created "
                    f"with another definition. {MENDED}"
                )
            start += step.reply.n_rows
    return RecordError(str(error))


def read_coalesced(parts: Sequence[ReadPart], read: Callable[[Sequence[ReadPart]], list[ReadResult]]) -> list[ReadResult]:
    """Read parts as fewer ones, except those with memory of their own; a result cut out of a larger one is in the order of its keys."""
    if len(parts) < 2:
        return read(parts)
    groups = _groups([part.keys for part in parts], [None if part.into is not None else _read_group(part) for part in parts])
    if len(groups) == len(parts):
        return read(parts)
    results: dict[int, ReadResult] = {}
    for group, result in zip(groups, read([_coalesced_read([parts[i] for i in group]) for group in groups]), strict=True):
        results |= {group[0]: result} if len(group) == 1 else dict(zip(group, _cut(result, [parts[i] for i in group]), strict=True))
    return [results[i] for i in range(len(parts))]


class CoalescedWrite:
    """Parts that are written as fewer ones (`parts`), whose results `results` cuts up again. See `StoreRows.write`.

    Where one node has all rows, those under keys of their own need no order, and joining them would cost more than it saves.
    """

    def __init__(self, parts: Sequence[WritePart], *, one_node: bool = False) -> None:
        self._parts, self._groups = parts, list[list[int]]()
        self.parts = parts
        if len(parts) > 1:
            self._groups = _groups([part.keys for part in parts], [_write_group(part, one_node) for part in parts])
            if len(self._groups) < len(parts):
                self.parts = [_coalesced_write([parts[i] for i in group]) for group in self._groups]

    def results(self, written: list[WriteResult]) -> list[WriteResult]:
        """Return the result of each part that was given."""
        if self.parts is self._parts:
            return written
        results: dict[int, WriteResult] = {}
        for group, result in zip(self._groups, written, strict=True):
            for i, rows in zip(group, _bounds([self._parts[i] for i in group]), strict=True):
                results[i] = WriteResult(result.stored[rows], None if result.tokens is None else result.tokens[rows])
        return [results[i] for i in range(len(self._parts))]


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
