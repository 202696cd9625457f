"""Questions to the shards that change nothing: which tables there are, how many rows, how far training has come, how they are.

Thread-safe; not fork-safe.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvemb.client.all_shards import AllShards
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import (
    COUNT,
    GET_STATUS,
    GET_TABLE,
    LIST_IDS,
    PROGRESS,
    STEP,
    Empty,
    IdsRequest,
    ProgressReply,
    StatusReply,
    TableRequest,
)
from kvemb.protocol.verb import Q, R, Verb
from kvemb.schema.policies import NO_POLICIES, Policies
from kvemb.schema.table_def import TableDef

PAGE_IDS = 1 << 20  # each costs a shard a look at all of its ids


class ShardQuestions:
    """Questions to the shards of one cluster; none of them changes anything."""

    def __init__(self, servers: AllShards, timeout_s: float) -> None:
        self._servers, self._timeout_s = servers, timeout_s

    def address(self, shard: int) -> str:
        """Where a shard is."""
        return self._servers.channels[shard].address

    def get_table(self, name: str, timeout_s: float | None = None) -> TableDef:
        """Return a registered table; UnknownTableError lists the others."""
        reply = self._servers.call(0, GET_TABLE, TableRequest(name), self._deadline(timeout_s))
        self._servers.heard(reply.tables_serial)
        return TableDef.from_dict(reply.table)

    def policies(self, name: str, timeout_s: float | None = None) -> Policies:
        """Return the newest policies of a table."""
        return NO_POLICIES.updated(self._servers.call(0, GET_TABLE, TableRequest(name), self._deadline(timeout_s)).policies)

    def count(self, table: str, timeout_s: float | None = None) -> int:
        """Return the number of rows that exist, over all shards."""
        replies = self._servers.call_each(COUNT, TableRequest(table), self._deadline(timeout_s))
        return sum(reply.n_rows for reply in replies.values())

    def step(self, table: str, timeout_s: float | None = None) -> int:
        """Return how often the optimizer was applied to a table, on the shard where that is most."""
        replies = self._servers.call_each(STEP, TableRequest(table), self._deadline(timeout_s))
        return max(reply.step for reply in replies.values())

    def rows_applied(self, table: str) -> int:
        """Return how many rows of a table were applied, by all shards since each of them was started."""
        replies = self._servers.call_each(STEP, TableRequest(table), self._deadline(None))
        return sum(reply.rows_applied for reply in replies.values())

    def ids(self, table: str, timeout_s: float | None = None) -> Iterator[NDArray[np.uint64]]:
        """List the ids of the rows that exist, shard by shard, in pages; the timeout is each page's."""
        self._servers.look(self._deadline(timeout_s))
        for shard in self._servers.numbers:
            request = IdsRequest(table, True, 0, PAGE_IDS)
            while True:
                reply = self._servers.call(shard, LIST_IDS, request, self._deadline(timeout_s))
                page = np.frombuffer(reply.ids, "<u8").astype(np.uint64, copy=False)
                yield page
                if len(page) < PAGE_IDS:
                    break
                request = IdsRequest(table, False, int(page[-1]), PAGE_IDS)

    def ask(self, shard: int, verb: Verb[Q, R], request: Q, timeout_s: float | None = None) -> R:
        """Return a shard's answer."""
        return self._servers.call(shard, verb, request, self._deadline(timeout_s))

    def ask_each(self, verb: Verb[Q, R], request: Q, timeout_s: float | None = None) -> dict[int, R]:
        """Return every shard's answer."""
        return self._servers.call_each(verb, request, self._deadline(timeout_s))

    def status(self, timeout_s: float | None = None) -> dict[int, StatusReply | Exception]:
        """Return each shard's state, or why it could not be asked."""
        return self._servers.try_each(GET_STATUS, Empty(), self._deadline(timeout_s))

    def progress(self, timeout_s: float | None = None) -> list[ProgressReply]:
        """Return how far each shard has come."""
        return list(self._servers.call_each(PROGRESS, Empty(), self._deadline(timeout_s)).values())

    def heads(self, timeout_s: float | None = None) -> dict[int, int]:
        """Return how far each shard that has slots has come: k."""
        replies = self._servers.call_each(PROGRESS, Empty(), self._deadline(timeout_s))
        return {shard: reply.k for shard, reply in replies.items() if shard in self._servers.cluster_map.writing_shards}

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.of_caller(self._timeout_s if timeout_s is None else timeout_s)
