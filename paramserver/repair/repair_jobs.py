"""Repairs and comparisons that were asked for, as jobs of the apply thread. `step` is for that thread, the rest for any."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import DeadlineExceededError, KvembError, LostRowError, ShardUnavailableError, StorageError
from kvemb.net.deadline import Deadline

from ..engine.storage_pace import NO_BATCH, Pause
from ..model.tables import TableState
from .repairer import Repairer


@dataclass(eq=False)
class RepairTicket:
    """A request for a repair or a comparison.

    Args:
        addresses: nodes to compare row by row although their markers may be in order.
        compared: rows to compare with storage, of one table.
        nodes, rows: how many were repaired, and restored, once it is done.
    """

    addresses: frozenset[str] = frozenset()
    compared: tuple[TableState, NDArray[np.uint64]] | None = None
    nodes: int = 0
    rows: int = 0
    finished: bool = False
    error: KvembError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, deadline: Deadline) -> None:
        """Wait until the repair has ended."""
        if not self.done.wait(deadline.remaining_s()):
            raise DeadlineExceededError(f"the repair did not end within {deadline.timeout_s:g} s; it goes on")
        if self.error is not None:
            raise self.error


class _AskedJob(ABC):
    """A job that answers requests: all that were made since its last step."""

    passing: tuple[type[Exception], ...] = ()

    def __init__(self, repairer: Repairer, wake: Callable[[], None]) -> None:
        self._repairer, self._wake = repairer, wake
        self._lock = threading.Lock()
        self._asked: list[RepairTicket] = []
        self.due_s = math.inf

    def step(self, pause: Pause) -> bool:
        with self._lock:
            tickets, self._asked, self.due_s = self._asked, [], math.inf
        try:
            self._answer(tickets, pause)
        finally:
            for ticket in tickets:
                if ticket.error is None and not ticket.finished:
                    ticket.error = ShardUnavailableError("the shard stopped before the repair had ended; ask again when it is back")
                ticket.done.set()
        return False

    def _ask(self, ticket: RepairTicket) -> RepairTicket:
        with self._lock:
            self._asked.append(ticket)
            self.due_s = 0.0
        self._wake()
        return ticket

    @abstractmethod
    def _answer(self, tickets: list[RepairTicket], pause: Pause) -> None:
        """Do what these ask for; raises an error that ends the shard."""


class Repairs(_AskedJob):
    """Repairs of nodes; one answers all requests."""

    name = "a repair"

    def ask(self, addresses: Iterable[str] = ()) -> RepairTicket:
        """Have every lost node repaired, and these nodes compared with the index; returns at once."""
        return self._ask(RepairTicket(frozenset(addresses)))

    def _answer(self, tickets: list[RepairTicket], pause: Pause) -> None:
        rows_before = self._repairer.figures.rows
        try:
            n_nodes = self._repairer.nodes(NO_BATCH, pause, suspects=frozenset().union(*(ticket.addresses for ticket in tickets)))
        except KvembError as error:
            for ticket in tickets:
                ticket.error = error
            raise
        for ticket in tickets:
            ticket.nodes, ticket.rows, ticket.finished = n_nodes, self._repairer.figures.rows - rows_before, True


class Comparisons(_AskedJob):
    """Comparisons of rows. An error of storage goes to the caller only; a row that is lost for good ends the shard, too."""

    name = "a comparison of rows"

    def __init__(self, repairer: Repairer, wake: Callable[[], None], timeout_s: float) -> None:
        super().__init__(repairer, wake)
        self._timeout_s = timeout_s

    def ask(self, table: TableState, ids: NDArray[np.uint64]) -> RepairTicket:
        """Have some rows compared with storage; returns at once."""
        return self._ask(RepairTicket(compared=(table, ids)))

    def _answer(self, tickets: list[RepairTicket], pause: Pause) -> None:
        for ticket in tickets:
            assert ticket.compared is not None
            try:
                ticket.rows, ticket.finished = self._repairer.compare(*ticket.compared, self._timeout_s), True
            except KvembError as error:
                ticket.error = error
                if not isinstance(error, StorageError) or isinstance(error, LostRowError):
                    raise
