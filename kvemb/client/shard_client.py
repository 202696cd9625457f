"""Every verb that changes something through the shards, in one place: tables, pushes, flush, assign, erase.

It deals in definitions and validated rows; the interface of callers is kvemb.api. What must not live here: storage, and
questions that change nothing (kvemb.client.shard_questions). Thread-safe; not fork-safe (`kvemb.client.all_shards` says so to the caller).
"""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

from kvemb.client.ack import DEFAULT_TIMEOUT_S, Ack
from kvemb.client.all_shards import AllShards
from kvemb.client.missing_rows import MissingRows
from kvemb.client.push_session import PushSession
from kvemb.client.shard_questions import ShardQuestions
from kvemb.datapath.prefetched_rows import PrefetchedRows
from kvemb.errors import SlotsMovedError
from kvemb.net.deadline import Deadline
from kvemb.process import interrupts
from kvemb.protocol.message_format import Message, TableRows
from kvemb.protocol.messages import (
    MAX_PART_BYTES,
    CountReply,
    CreateTableRequest,
    Empty,
    EraseTableReply,
    EraseTableRequest,
    FlushReply,
    FlushRequest,
    RowsRequest,
    TableReply,
    TableRequest,
)
from kvemb.protocol.shard_routing import pieces, route
from kvemb.schema.table_def import TableDef

M = TypeVar("M", bound=Message)

_ERASE_BYTES = MAX_PART_BYTES // 4  # a row without weights is small in a message, and as much work as any
_ANSWER_MARGIN_S = 1.0
_MOVED_PAUSE_S = 0.02
log = logging.getLogger("kvemb")


class ShardClient:
    """The shards of one cluster, for one trainer.

    Args:
        servers: checked by `AllShards.describe`.
        session: of this trainer.
        timeout_s: of every verb, unless its caller says otherwise.
        close_timeout_s: in sync mode, of the end: the last push is accepted with the others' of its step.
    """

    def __init__(
        self,
        servers: AllShards,
        session: PushSession,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        close_timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._servers, self._session, self.timeout_s, self._close_timeout_s = servers, session, timeout_s, close_timeout_s
        self._closed = self._remembered = False
        interrupts.prepare()
        self.missing = MissingRows(servers)
        self.questions = ShardQuestions(servers, timeout_s)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the shards are, in order."""
        return tuple(channel.address for channel in self._servers.channels.values())

    @property
    def servers(self) -> AllShards:
        """The shards."""
        return self._servers

    @property
    def trainer(self) -> str:
        """The name under which this process pushes."""
        return self._session.trainer

    @property
    def n_undelivered(self) -> int:
        """How many pushes not every shard has accepted."""
        return len(self._session.undelivered())

    def create_table(self, definition: TableDef, exist_ok: bool, timeout_s: float | None) -> TableDef:
        """Register a table with shard 0; return it as registered."""
        request = CreateTableRequest(definition.to_dict(), exist_ok)
        reply = self._servers.call(0, "CreateTable", request, TableReply, self._deadline(timeout_s))
        return TableDef.from_dict(reply.table)

    def drop_table(self, name: str, timeout_s: float | None = None) -> int:
        """Drop a table, behind this process's own pushes; return how many rows were erased.

        Called again, it goes on with a drop that was broken off. Unless the caller gave a timeout, every half a million rows of a shard
        have the whole default time.
        """
        deadline = self._deadline(timeout_s)
        self._session.wait_applied(deadline)
        table = TableDef.from_dict(self._servers.call(0, "DropTable", TableRequest(name), TableReply, deadline).table)
        n_erased, left = 0, True
        while left:
            deadline = deadline if timeout_s is not None else self._deadline(None)
            request = EraseTableRequest(table.key, _wait_s(deadline))
            replies = self._servers.call_each("EraseTable", request, EraseTableReply, deadline).values()
            n_erased, left = n_erased + sum(reply.n_erased for reply in replies), any(reply.n_left for reply in replies)
        self._servers.call(0, "EndDrop", TableRequest(table.key), Empty, deadline)
        return n_erased

    def push(self, tables: Sequence[TableRows], timeout_s: float | None = None, prefetched: Sequence[PrefetchedRows] = ()) -> Ack:
        """Send a push; see `PushSession.push`."""
        if not self._remembered:
            interrupts.remember(self)
            self._remembered = True
        return self._session.push(tables, self._deadline(timeout_s), prefetched)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until this process's pushes, and all that the shards had accepted from others, are applied; log the pushes left out."""
        deadline = self._deadline(timeout_s)
        self._session.wait_applied(deadline)
        for shard, reply in self._servers.call_each("Flush", FlushRequest(_wait_s(deadline)), FlushReply, deadline).items():
            if reply.left_out:
                log.info("a flush left out on shard %d %s", shard, reply.left_out)

    def assign(self, rows: TableRows, timeout_s: float | None = None) -> None:
        """Set rows, behind this process's own pushes.

        Raises:
            ShardUnavailableError, DeadlineExceededError: some of the rows may have been set, or may still be.
        """
        self._change_rows("Assign", rows, Empty, timeout_s)

    def erase(self, rows: TableRows, timeout_s: float | None = None) -> int:
        """Erase rows, behind this process's own pushes; return how many existed. Raises as `assign` does."""
        return sum(reply.n_rows for reply in self._change_rows("Erase", rows, CountReply, timeout_s))

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that connected."""
        return self._servers.forked

    def undelivered(self) -> list[Ack]:
        """See `PushSession.undelivered`."""
        return self._session.undelivered()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for acceptance of all pushes, and leave. Idempotent.

        Args:
            timeout_s: of that wait; otherwise as long as an acceptance may take.

        Raises:
            KvembError: a push failed that no caller waited for, or was not accepted in time. Closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        if timeout_s is None:
            timeout_s = self._close_timeout_s if self._session.sync else interrupts.DELIVERY_TIMEOUT_S
        try:
            self._session.close(Deadline.after(timeout_s))
        finally:
            interrupts.forget(self)
            self._servers.close()
            self.missing.close()

    def _change_rows(self, method: str, rows: TableRows, reply_type: type[M], timeout_s: float | None) -> list[M]:
        """Send each shard its rows, one message at a time; unless the caller gave a timeout, each message has the whole default time."""
        deadline = self._deadline(timeout_s)
        self._session.wait_accepted(deadline)
        limit = MAX_PART_BYTES if rows.rows.size else _ERASE_BYTES
        queues = self._queues([rows], limit)
        replies: list[M] = []
        while True:
            heads = [next(queue, None) for queue in queues]
            if all(head is None for head in heads):
                return replies
            deadline = deadline if timeout_s is not None else self._deadline(None)
            sent = {shard: head for shard, head in enumerate(heads) if head is not None}
            requests = {shard: RowsRequest(head, _wait_s(deadline)) for shard, head in sent.items()}
            answers = self._servers.try_each(method, requests, reply_type, deadline)
            moved = [sent[shard] for shard, answer in answers.items() if isinstance(answer, SlotsMovedError)]
            for answer in answers.values():
                if isinstance(answer, Exception) and (not isinstance(answer, SlotsMovedError) or deadline.expired):
                    raise answer
            replies += [answer for answer in answers.values() if not isinstance(answer, Exception)]
            if moved:  # nothing of these was taken: they, and the rows not sent yet, are routed by the map as it is now
                time.sleep(min(_MOVED_PAUSE_S, deadline.remaining_s()))
                self._servers.refresh_map(deadline)
                queues = self._queues([*moved, *(piece for queue in queues for piece in queue)], limit)

    def _queues(self, rows: Sequence[TableRows], limit_bytes: int) -> list[Iterator[TableRows]]:
        """Distribute rows over shards, and each shard's over messages."""
        cluster_map = self._servers.cluster_map
        routed = [route(one, cluster_map) for one in rows]
        shares = [[share[shard] for share in routed] for shard in range(cluster_map.n_shards)]
        return [chain.from_iterable(pieces(one, limit_bytes) for one in share if len(one.ids)) for share in shares]

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.of_caller(self.timeout_s if timeout_s is None else timeout_s)


def _wait_s(deadline: Deadline) -> float:
    """How long a shard may wait on our behalf: it gives up before we do, and names the reason."""
    return max(deadline.remaining_s() - _ANSWER_MARGIN_S, deadline.remaining_s() / 2)
