"""Every verb that changes something through the shards, in one place: tables, pushes, flush, assign, erase.

It deals in definitions and validated rows; the interface of callers is kvemb.api. Thread-safe; not fork-safe (`kvemb.client.all_shards`
says so to the caller).
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain

from kvemb.client.ack import DEFAULT_TIMEOUT_S, Ack
from kvemb.client.all_shards import AllShards
from kvemb.client.missing_rows import MissingRows
from kvemb.client.push_session import PushSession
from kvemb.client.shard_questions import ShardQuestions
from kvemb.datapath.prefetched_rows import PrefetchedRows
from kvemb.errors import ParameterServerError, SlotsMovedError
from kvemb.net.deadline import Deadline
from kvemb.process import interrupts
from kvemb.process.work_ahead import work_ahead
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import (
    ASSIGN_ROWS,
    CREATE_TABLE,
    DROP_TABLE,
    END_DROP,
    ERASE_ROWS,
    ERASE_TABLE,
    FLUSH,
    MAX_PART_BYTES,
    SET_POLICIES,
    CreateTableRequest,
    EraseTableRequest,
    FlushRequest,
    RowsRequest,
    SetPoliciesRequest,
    TableRequest,
)
from kvemb.protocol.shard_routing import pieces, route
from kvemb.protocol.verb import R, Verb
from kvemb.schema.policies import NO_POLICIES, PolicyChange
from kvemb.schema.table_def import TableDef

_MESSAGE_BYTES = MAX_PART_BYTES // 2  # small enough for a shard to be at several steps of several messages at a time
_AT_ONCE = 3  # messages to a shard: one is taken in and one journaled while one is applied
_ANSWER_MARGIN_S = 1.0
_MOVED_PAUSE_S = 0.02
_NEWER = "Install the newer one for the shards, too (docs/upgrade.md)"
log = logging.getLogger("kvemb")


class ShardClient:
    """The shards of one cluster, for one trainer.

    One class, because every verb comes behind this trainer's own pushes, which one session knows.

    Attributes:
        servers: the shards.
    """

    def __init__(
        self,
        servers: AllShards,
        session: PushSession,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        close_timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.servers, self._session, self.timeout_s, self._close_timeout_s = servers, session, timeout_s, close_timeout_s
        self._closed = self._remembered = False
        interrupts.prepare()
        self.missing = MissingRows(servers)
        self.questions = ShardQuestions(servers, timeout_s)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the shards are, in order."""
        return tuple(channel.address for channel in self.servers.channels.values())

    @property
    def trainer(self) -> str:
        """The name under which this process pushes."""
        return self._session.trainer

    @property
    def n_undelivered(self) -> int:
        """How many pushes not every shard has accepted."""
        return len(self._session.undelivered())

    def create_table(self, definition: TableDef, exist_ok: bool, policies: PolicyChange, timeout_s: float | None) -> TableDef:
        """Register a table with shard 0, or set the policies that are given of one that exists; return it as registered."""
        request = CreateTableRequest(definition.to_dict(), exist_ok, policies.to_dict())
        reply = self.servers.call(0, CREATE_TABLE, request, self.deadline(timeout_s))
        self.servers.heard(reply.tables_serial)
        table = TableDef.from_dict(reply.table)
        if request.policies and not reply.policies:
            raise ParameterServerError(f"table {table.name!r} exists now without its policies: shard 0 is of an older release. {_NEWER}.")
        if (has := NO_POLICIES.updated(reply.policies)).updated(request.policies) != has:
            self.set_policies(table.name, policies, timeout_s)
        return table

    def set_policies(self, name: str, policies: PolicyChange, timeout_s: float | None = None) -> None:
        """Change policies of a table, those that are given: in the registry first, then every shard is told.

        Raises:
            UnknownTableError, AccessDeniedError: nothing was changed.
            ShardUnavailableError: they may have been changed. A shard that was not told reads them when a trainer's push names them.
        """
        deadline = self.deadline(timeout_s)
        serial = self.servers.call(0, SET_POLICIES, SetPoliciesRequest(name, policies.to_dict()), deadline).tables_serial
        self.servers.heard(serial)
        self.servers.call_each(SET_POLICIES, SetPoliciesRequest(name, {}, serial), deadline)

    def drop_table(self, name: str, timeout_s: float | None = None) -> int:
        """Drop a table, after this process's own pushes; return how many rows were erased.

        Called again, it goes on with a drop that was broken off. Unless the caller gave a timeout, every half a million rows of a shard
        have the whole default time.
        """
        deadline = self.deadline(timeout_s)
        self._session.wait_applied(deadline)
        table = TableDef.from_dict(self.servers.call(0, DROP_TABLE, TableRequest(name), deadline).table)
        return self.end_drop(table.key, deadline, timeout_s)

    def end_drop(self, key: str, deadline: Deadline, timeout_s: float | None) -> int:
        """Erase the rows of a table without a name, and end its drop."""
        n_erased, left = 0, True
        while left:
            deadline = deadline if timeout_s is not None else self.deadline(None)
            request = EraseTableRequest(key, wait_s(deadline))
            replies = self.servers.call_each(ERASE_TABLE, request, deadline).values()
            n_erased, left = n_erased + sum(reply.n_erased for reply in replies), any(reply.n_left for reply in replies)
        self.servers.call(0, END_DROP, TableRequest(key), deadline)
        return n_erased

    def take_place(self, timeout_s: float | None = None) -> None:
        """Say hello to all shards; see `PushSession.take_place`."""
        self._session.take_place(self.deadline(timeout_s))

    def push(self, tables: Sequence[TableRows], timeout_s: float | None = None, prefetched: Sequence[PrefetchedRows] = ()) -> Ack:
        """Send a push; see `PushSession.push`."""
        if not self._remembered:
            interrupts.remember(self)
            self._remembered = True
        return self._session.push(tables, self.deadline(timeout_s), prefetched)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until this process's pushes, and all that the shards had accepted from others, are applied; log the pushes left out."""
        deadline = self.deadline(timeout_s)
        self._session.wait_applied(deadline)
        for shard, reply in self.servers.call_each(FLUSH, FlushRequest(wait_s(deadline)), deadline).items():
            if reply.left_out:
                log.info("a flush left out on shard %d %s", shard, reply.left_out)

    def wait_applied(self, deadline: Deadline) -> None:
        """Wait until this process's pushes are applied."""
        self._session.wait_applied(deadline)

    def assign(self, rows: TableRows, timeout_s: float | None = None, *, behind_pushes: bool = True) -> None:
        """Set rows, unless said otherwise after this process's own pushes.

        Raises:
            ShardUnavailableError, DeadlineExceededError: some of the rows may have been set, or may still be.
        """
        self._change_rows(ASSIGN_ROWS, rows, timeout_s, behind_pushes=behind_pushes)

    def erase(self, rows: TableRows, timeout_s: float | None = None) -> int:
        """Erase rows, after this process's own pushes; return how many existed. Raises as `assign` does."""
        return sum(reply.n_rows for reply in self._change_rows(ERASE_ROWS, rows, timeout_s))

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that connected."""
        return self.servers.forked

    def undelivered(self) -> list[Ack]:
        """See `PushSession.undelivered`."""
        return self._session.undelivered()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for acceptance of all pushes, and leave. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if timeout_s is None:
            timeout_s = self._close_timeout_s if self._session.sync else interrupts.DELIVERY_TIMEOUT_S
        try:
            self._session.close(Deadline.after(timeout_s))
        finally:
            interrupts.forget(self)
            self.servers.close()
            self.missing.close()

    def _change_rows(self, verb: Verb[RowsRequest, R], rows: TableRows, timeout_s: float | None, *, behind_pushes: bool = True) -> list[R]:
        """Send each shard its rows, a few messages ahead; unless the caller gave a timeout, each message has the whole default time."""
        deadline = self.deadline(timeout_s)
        if behind_pushes:
            self._session.wait_accepted(deadline)

        def send(heads: dict[int, TableRows]) -> list[tuple[TableRows, R | Exception]]:
            until = deadline if timeout_s is not None else self.deadline(None)
            requests = {shard: RowsRequest(head, wait_s(until)) for shard, head in heads.items()}
            answers = self.servers.try_each(verb, requests, until)
            return [(heads[shard], answer) for shard, answer in answers.items()]

        replies, queues = list[R](), self._queues([rows])
        while queues:
            moved: list[TableRows] = []
            ahead = rows.size_bytes > _MESSAGE_BYTES  # a small change is one message: it needs no threads
            rounds = _rounds(queues, moved)
            answered = work_ahead(send, rounds, n_threads=_AT_ONCE, name="kvemb-rows") if ahead else (send(heads) for heads in rounds)
            with closing(answered):
                for sent, answer in chain.from_iterable(answered):
                    if isinstance(answer, SlotsMovedError) and not (timeout_s is not None and deadline.expired):
                        moved.append(sent)
                    elif isinstance(answer, Exception):
                        raise answer
                    else:
                        replies.append(answer)
            if not moved:
                break
            # Nothing of these was taken: they, and the rows not sent yet, are routed by the map as it is now.
            pause = self.deadline(timeout_s) if timeout_s is None else deadline
            time.sleep(min(_MOVED_PAUSE_S, pause.remaining_s()))
            self.servers.refresh_map(pause)
            queues = self._queues([*moved, *(piece for queue in queues for piece in queue)])
        return replies

    def _queues(self, rows: Sequence[TableRows]) -> list[Iterator[TableRows]]:
        """Distribute rows over shards, and each shard's over messages."""
        cluster_map = self.servers.cluster_map
        routed = [route(one, cluster_map) for one in rows]
        shares = [[share[shard] for share in routed] for shard in range(cluster_map.n_shards)]
        return [chain.from_iterable(pieces(one, _MESSAGE_BYTES) for one in share if len(one.ids)) for share in shares]

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Return the deadline of a call of this timeout, or of the default one."""
        return Deadline.of_caller(self.timeout_s if timeout_s is None else timeout_s)


def _rounds(queues: Sequence[Iterator[TableRows]], moved: Sequence[TableRows]) -> Iterator[dict[int, TableRows]]:
    """Yield the next message to each shard, until there is none, or rows were refused because their slots have moved."""
    while not moved:
        heads = {shard: head for shard, head in enumerate(next(queue, None) for queue in queues) if head is not None}
        if not heads:
            return
        yield heads


def wait_s(deadline: Deadline) -> float:
    """How long a shard may wait on our behalf: it gives up before we do, and names the reason."""
    return max(deadline.remaining_s() - _ANSWER_MARGIN_S, deadline.remaining_s() / 2)
