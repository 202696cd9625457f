"""The nodes of a kind of storage as a repair sees them: markers, and small values by which shards meet. See `kvemb.stores.store_repair`."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import Marker, Why
from kvemb.coordination.replicated_values import ValueCell
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import Containers, RowKeys
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult


@dataclass(frozen=True)
class LostNode:
    """A node that cannot be relied on."""

    address: str  # "host:port"
    # "empty": its marker is gone (restarted empty, flushed, evicted). "suspect": another server process than the one that the marker was
    # written for (restart from a snapshot, failover). "repairing": a repair has begun.
    why: Why
    nonce: str | None = None  # of the repair that has begun


@dataclass(frozen=True, eq=False)
class RepairLane:
    """A repair that a store takes part in; all rows of a batch in it are of one node."""

    # address, process: of the node and its server
    address: str
    process: str
    nonce: str  # of the repair
    places: NDArray[np.int64]  # int64 [n], the markers that the node had when it began: by their slots, or by the node's own number

    def begun(self, expected: Marker) -> Marker:
        """The marker of a place while the repair goes on, after the one that is expected of a whole node."""
        return replace(expected, run_id=self.process, repair=self.nonce, repairing=True)

    def ended(self, expected: Marker) -> Marker:
        """The marker of a place whose repair is over."""
        return replace(expected, repair=self.nonce, repairing=False)


@dataclass(frozen=True, eq=False)
class MarkedState:
    """The state of a node by its markers."""

    # address, process: of the node and its server
    address: str
    process: str
    places: NDArray[np.int64]  # int64 [n], as of `RepairLane`
    values: list[bytes | None]  # n values in the places of markers, None where there is none
    # of each None where it is in order, else why not, and the nonce of the repair that goes on for this process
    judged: list[tuple[Why, str | None] | None]
    elsewhere: Collection[int] = ()  # the numbers of those whose markers may be at another node: they do not say what this one has lost

    @property
    def has_lost(self) -> bool:
        """Whether the node itself is not in order."""
        return any(one is not None and at not in self.elsewhere for at, one in enumerate(self.judged))

    @property
    def nonce(self) -> str | None:
        """Of the repair that goes on."""
        return next((one[1] for one in self.judged if one is not None and one[1] is not None), None)

    def repaired(self, at: int) -> str:
        """The nonce of the last repair of a place in order, under any map in force; "" for none, and for places not in order."""
        value = self.values[at]
        return "" if value is None or self.judged[at] is not None else Marker.decode(value, self.address).repair

    @property
    def lost(self) -> LostNode | None:
        """What is wrong; None for a node in order."""
        found = [one for one in self.judged if one is not None]
        if not found:
            return None
        why = next((why for why, nonce in found if nonce is None), None)
        return LostNode(self.address, "repairing", self.nonce) if why is None else LostNode(self.address, why)


class RowBatches(Protocol):
    """Batches of rows, in a repair or not."""

    def read(self, parts: Sequence[ReadPart], deadline: Deadline, lane: RepairLane | None = None) -> list[ReadResult]:
        """Read parts."""

    def write(self, parts: Sequence[WritePart], deadline: Deadline, lane: RepairLane | None = None) -> list[WriteResult]:
        """Write parts."""

    def erase(self, parts: Sequence[WritePart], deadline: Deadline, lane: RepairLane | None = None) -> list[NDArray[np.bool_]]:
        """Delete the rows of parts."""


class MarkedNodes(ABC):
    """The nodes of a kind of storage as a repair sees them: their markers, and the small values by which shards meet."""

    @abstractmethod
    def addresses(self, deadline: Deadline) -> Sequence[str]:
        """Ask for the nodes there are now; `state` and `slots_of` go by the answer."""

    @abstractmethod
    def state(self, address: str, deadline: Deadline, lane: RepairLane | None = None) -> MarkedState:
        """Look at the markers of one of these nodes; NodeLostError: it has none of these places now, WrongNodeError: another is there."""

    @abstractmethod
    def expected(self, state: MarkedState, at: int) -> Marker:
        """The marker that a place would have on a whole node."""

    @abstractmethod
    def swap(self, state: MarkedState, changes: Mapping[int, Marker], deadline: Deadline) -> bool:
        """Replace markers, by their numbers in the state, where nothing has changed since; return whether all were."""

    @abstractmethod
    def slots_of(self, address: str, lane: RepairLane | None = None) -> NDArray[np.bool_]:
        """The slots whose rows belong to a node, in a repair those that are in it: bool [16384]."""

    @abstractmethod
    def cell(self, address: str, name: str, process: str, deadline: Deadline) -> ValueCell:
        """A node's copy of a small value; it is written only while its server is this process."""

    @abstractmethod
    def report(self, lane: RepairLane, shard: int) -> tuple[str, bytes]:
        """The name and the value of a shard's report."""

    @abstractmethod
    def covers(self, report: bytes | None, lane: RepairLane, places: NDArray[np.int64]) -> bool:
        """Whether a report says that the rows of these places are in order."""

    @abstractmethod
    def keep(self, whole: Sequence[MarkedState], deadline: Deadline) -> None:
        """Put small values right that whole nodes should have."""

    def begun(self, lane: RepairLane, deadline: Deadline) -> None:  # noqa: B027 - most kinds note nothing
        """Whatever the node has lost is in repair: what comes to it from now on is as good as its marker."""

    def over(self, lane: RepairLane, shards: Collection[int], deadline: Deadline) -> None:  # noqa: B027
        """The markers of these places have been renewed."""

    @abstractmethod
    def keys_on(self, address: str, slots: NDArray[np.bool_], deadline: Deadline) -> Iterator[RowKeys] | None:
        """See `StoreRepair.keys_on`."""

    @abstractmethod
    def make_way(self, containers: Containers, deadline: Deadline, lane: RepairLane | None) -> int:
        """See `StoreRepair.make_way`; `lane` of a repair."""

    def holds(self, address: str, name: str) -> bool:
        """Whether a node has a copy of a small value."""
        return True

    def looks_lost(self, deadline: Deadline) -> bool:
        """See `StoreRepair.looks_lost`."""
        return False
