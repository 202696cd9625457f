"""One batch on Redis Cluster: rows still to be answered, which nodes are asked in this round, and what their answers mean. Pure.

The first round asks for all rows, in node order, and replies are parsed straight into the results. Rows that were redirected go into
further rounds, a few at a time, and are put in place afterwards.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import DeadlineExceededError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.stores.node_batch import NodeSteps, group_by_node
from kvemb.stores.redis_cluster.slot_map import SlotMap
from kvemb.stores.redis_server.redis_commands import NOT_NOW, redirect_target
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart
from kvemb.stores.server_errors import server_error
from kvemb.wire.codec import Codec, RecordsToWrite
from kvemb.wire.replies import RowsStep

Rows = slice | NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class NodeShare:
    """The rows of one part that one node is asked for in one round."""

    address: str
    part: int  # index of the part
    rows: Rows  # which rows of the part, in its node order
    slot: int  # a slot of one of these rows, for the marker
    asking: bool  # an importing node is asked, out of turn
    steps: NodeSteps
    buffers: tuple[NDArray[np.generic], ...]  # arrays that the replies fill when `rows` is no slice of the results


@dataclass
class Redirects:
    """The redirections of a round: slots that have moved, and where to; whether a new slot map is needed, or a pause."""

    unclear: bool = False
    wait: bool = False
    last: bytes = b""
    moved: dict[int, str] = field(default_factory=dict)

    def error(self, deadline: Deadline) -> StorageError:
        """The error when the deadline passes before the rows have settled."""
        text = self.last.decode("ascii", "replace")
        return DeadlineExceededError(f"the cluster redirected rows for {deadline.timeout_s:g} s without an end; last: {text}")


@dataclass(eq=False)
class _PartInProgress:
    """One part's rows in node order, and those still to be answered."""

    keys: RowKeys
    slots: NDArray[np.int64]
    order: NDArray[np.intp] | None
    left: list[Rows]
    ask: dict[str, list[int]] = field(default_factory=dict)


class ClusterBatch(ABC):
    """Rows of several parts. Subclasses know what is asked for."""

    def __init__(self, all_keys: Sequence[RowKeys]) -> None:
        self._all_keys = all_keys
        self._parts: list[_PartInProgress] = []
        self._started = False

    def _kinds(self, part: int, keys: RowKeys, codec: Codec) -> NDArray[np.int8] | None:
        """Which rows of a part have requests of one length; see `Codec.read_kinds`."""
        return codec.write_kinds(keys, None)

    @abstractmethod
    def _begin(self, part: int, keys: RowKeys, order: NDArray[np.intp] | None) -> None:
        """Make the result arrays of a part, whose rows are in the order given."""

    @abstractmethod
    def _steps(self, part: int, keys: RowKeys, rows: Rows, codec: Codec) -> tuple[list[RowsStep], tuple[NDArray[np.generic], ...]]:
        """The steps for some rows, and the buffers their replies fill."""

    def _place(self, share: NodeShare, good: NDArray[np.bool_]) -> None:  # noqa: B027 - most batches have nothing to place
        """Put answered rows of a share that is no slice into the results."""

    @property
    def pending(self) -> bool:
        """Whether rows remain to be answered."""
        if not self._started:
            return any(len(keys) for keys in self._all_keys)
        return any(part.left or part.ask for part in self._parts)

    def plan(self, slot_map: SlotMap, codec: Codec, asking_codec: Codec) -> list[NodeShare]:
        """Decide which nodes are asked for which rows in this round."""
        if not self._started:
            self._start(slot_map, codec)
        shares = []
        for index, part in enumerate(self._parts):
            for rows in part.left:
                shares += self._by_node(index, part, rows, slot_map, codec)
            for address, asked in part.ask.items():
                shares.append(self._share(index, part, np.array(asked, dtype=np.intp), address, asking_codec, asking=True))
            part.left, part.ask = [], {}
        return shares

    def slots_of(self, share: NodeShare) -> NDArray[np.int64]:
        """Of every row of a share."""
        return self._parts[share.part].slots[share.rows]

    def _missing(self, share: NodeShare) -> NDArray[np.bool_] | bool:
        """Which rows of a share were answered to be missing."""
        return False

    def settle(
        self, shares: list[NodeShare], moved: set[str], unsure: Collection[tuple[str, int]] = (), lost: Collection[tuple[str, int]] = ()
    ) -> Redirects:
        """Take a round's answers: rows that were redirected are pending again, and so are all rows of nodes whose marker has moved.

        Of importing nodes and slots without a marker, `unsure`, missing rows are asked for again; all where neither node has it, `lost`.
        """
        redirects = Redirects()
        for share in shares:
            part = self._parts[share.part]
            size = share.rows.stop - share.rows.start if isinstance(share.rows, slice) else len(share.rows)
            positions = np.arange(size) + share.rows.start if isinstance(share.rows, slice) else share.rows
            good = np.full(size, share.address not in moved)
            if share.address in moved:
                part.left.append(positions)
                redirects.last = b"marker moved"
            else:
                self._redirect(part, share, positions, good, redirects)
                if share.asking and (unsure or lost):
                    slots = part.slots[positions]
                    doubtful, gone = (np.isin(slots, [slot for node, slot in some if node == share.address]) for some in (unsure, lost))
                    self._ask_again(part, positions, good, good & (gone | (doubtful & self._missing(share))), redirects)
            self._place(share, good)
        return redirects

    def _ask_again(
        self, part: _PartInProgress, positions: NDArray[np.intp], good: NDArray[np.bool_], again: NDArray[np.bool_], redirects: Redirects
    ) -> None:
        if again.any():
            good[again] = False
            part.left.append(positions[again])
            redirects.wait = True
            redirects.last = b"the marker of a slot has not moved with its rows, or is lost"

    def _start(self, slot_map: SlotMap, codec: Codec) -> None:
        self._started = True
        for index, keys in enumerate(self._all_keys):
            slots = keys.slots()
            grouped = group_by_node(keys, slot_map.nodes[slots], self._kinds(index, keys, codec))
            order = grouped.order
            part = _PartInProgress(grouped.keys, slots[order], order, [rows for _, rows in grouped.shares])
            self._parts.append(part)
            self._begin(index, grouped.keys, order)

    def _by_node(self, index: int, part: _PartInProgress, rows: Rows, slot_map: SlotMap, codec: Codec) -> list[NodeShare]:
        nodes = slot_map.nodes[part.slots[rows]]
        if len(nodes) and (nodes == nodes[0]).all():
            return [self._share(index, part, rows, slot_map.addresses[int(nodes[0])], codec)]
        positions = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return [self._share(index, part, positions[nodes == node], slot_map.addresses[int(node)], codec) for node in np.unique(nodes)]

    def _share(self, index: int, part: _PartInProgress, rows: Rows, address: str, codec: Codec, *, asking: bool = False) -> NodeShare:
        keys = part.keys[rows]
        steps, buffers = self._steps(index, keys, rows, codec)
        slot = int(part.slots[rows][-1])
        return NodeShare(address, index, rows, slot, asking, NodeSteps(address, keys, steps), buffers)

    def _redirect(
        self, part: _PartInProgress, share: NodeShare, positions: NDArray[np.intp], good: NDArray[np.bool_], redirects: Redirects
    ) -> None:
        again = []
        for row, line in share.steps.row_errors():
            good[row] = False
            redirects.last = line
            kind = line.split(b" ", 1)[0]
            if kind == b"-ASK":
                part.ask.setdefault(redirect_target(line, share.address), []).append(int(positions[row]))
                continue
            if kind == b"-MOVED":
                redirects.moved[int(part.slots[positions[row]])] = redirect_target(line, share.address)
            elif kind in NOT_NOW:
                redirects.unclear = redirects.wait = True
            else:
                raise server_error(share.address, line, share.steps.keys, row)
            again.append(positions[row])
        if again:
            part.left.append(np.array(again, dtype=np.intp))


class ReadBatch(ClusterBatch):
    """The rows of a batch that are still to be read, and the results as they come in."""

    def __init__(self, parts: Sequence[ReadPart]) -> None:
        super().__init__([part.keys for part in parts])
        self._requests = parts
        self.results = [ReadResult(np.empty((0, p.prefix_bytes), np.uint8), np.empty(0, dtype=bool)) for p in parts]

    def _begin(self, part: int, keys: RowKeys, order: NDArray[np.intp] | None) -> None:
        request = self._requests[part]
        records = np.empty((len(keys), request.prefix_bytes), dtype=np.uint8) if request.into is None else request.into
        foreign = np.zeros(len(keys), dtype=bool) if request.foreign else None
        self.results[part] = ReadResult(records, np.zeros(len(keys), dtype=bool), order, None, foreign)

    def _kinds(self, part: int, keys: RowKeys, codec: Codec) -> NDArray[np.int8] | None:
        return codec.read_kinds(keys, self._requests[part].prefix_bytes)

    def _steps(self, part: int, keys: RowKeys, rows: Rows, codec: Codec) -> tuple[list[RowsStep], tuple[NDArray[np.generic], ...]]:
        result, n_rows = self.results[part], len(keys)
        if isinstance(rows, slice):
            records, found = result.records[rows], result.found[rows]
            foreign = None if result.foreign is None else result.foreign[rows]
        else:
            records, found = np.empty((n_rows, result.records.shape[1]), np.uint8), np.zeros(n_rows, dtype=bool)
            foreign = None if result.foreign is None else np.zeros(n_rows, dtype=bool)
        steps = codec.read_steps(keys, self._requests[part].record_bytes, records, found, None, foreign)
        return steps, (records, found) if foreign is None else (records, found, foreign)

    def _missing(self, share: NodeShare) -> NDArray[np.bool_] | bool:
        missing: NDArray[np.bool_] = ~share.buffers[1].astype(bool)
        return missing

    def _place(self, share: NodeShare, good: NDArray[np.bool_]) -> None:
        if isinstance(share.rows, slice):
            return
        result, rows = self.results[share.part], share.rows[good]
        result.records[rows], result.found[rows] = share.buffers[0][good], share.buffers[1][good]
        if result.foreign is not None:
            result.foreign[rows] = share.buffers[2][good]


class WriteBatch(ClusterBatch):
    """The records of a batch that are still to be written, and which were stored."""

    def __init__(self, parts: Sequence[WritePart]) -> None:
        super().__init__([part.keys for part in parts])
        self._requests = parts
        self._records = [part.records for part in parts]

    def _begin(self, part: int, keys: RowKeys, order: NDArray[np.intp] | None) -> None:
        if order is not None:
            self._records[part] = RecordsToWrite(self._requests[part].records, order).bytes()

    def _steps(self, part: int, keys: RowKeys, rows: Rows, codec: Codec) -> tuple[list[RowsStep], tuple[NDArray[np.generic], ...]]:
        out = np.zeros(len(keys), dtype=np.uint8)
        return codec.write_steps(keys, RecordsToWrite(self._records[part][rows]), None, out), (out,)


class EraseBatch(ClusterBatch):
    """The rows of a batch that are still to be deleted."""

    def __init__(self, parts: Sequence[WritePart]) -> None:
        super().__init__([part.keys for part in parts])

    def _begin(self, part: int, keys: RowKeys, order: NDArray[np.intp] | None) -> None:
        return

    def _steps(self, part: int, keys: RowKeys, rows: Rows, codec: Codec) -> tuple[list[RowsStep], tuple[NDArray[np.generic], ...]]:
        out = np.zeros(len(keys), dtype=np.uint8)
        return codec.erase_steps(keys, out), (out,)
