"""One trainer's session with all shards: its identity, its numbered pushes, and the failures nobody has heard of yet.

The trainer says hello at its first push (in sync mode it takes its place then): shard 0 issues the incarnation, the others
are told. Pushes go out one at a time, so that every shard sees them in the same order. What must not live here: gRPC's
details (`shard_channel`), one shard's stream (`push_sender`), validation. Thread-safe; lives in the process that made it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest

from kvemb.client.ack import Ack, PartAck, copied
from kvemb.client.all_shards import AllShards
from kvemb.client.push_sender import PushSender
from kvemb.datapath.prefetched_rows import PrefetchedRows, route_prefetched
from kvemb.datapath.row_cache import RowCache
from kvemb.errors import FencedError, KvembError, PushRejectedError, ShardFailedError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import ByeRequest, Empty, HelloReply, HelloRequest, PushPart, StatusReply, digest_tables
from kvemb.protocol.shard_routing import route, split

BYE_TIMEOUT_S = 2.0
_STATUS_TIMEOUT_S = 1.0


class PushSession:
    """Sends one trainer's pushes to all shards, each under the next sequence.

    Args:
        servers: the shards.
        cluster_id: of the storage's markers; shards that serve another cluster refuse the hello.
        trainer: its name, unique in the job; a second process of the same name fences the first.
        sync: whether every shard gets a part of every push.
        row_cache: for the rows that come back with acks; None asks for none.
    """

    def __init__(self, servers: AllShards, cluster_id: bytes, trainer: str, *, sync: bool, row_cache: RowCache | None = None) -> None:
        self.row_cache = row_cache
        self._servers, self._cluster_id, self._trainer, self.sync = servers, cluster_id, trainer, sync
        self._sending = threading.Lock()
        self._streams = [PushSender(channel, self._hello_of(channel.shard), row_cache) for channel in servers.channels]
        self._incarnation = 0
        self._introduced = False
        self._step = 0
        self._behind: dict[int, int] = {}  # shards that await an earlier step than the others, which our predecessor took part in elsewhere
        self._failed: list[Ack] = []
        self._last_failed: Ack | None = None
        self._failed_lock = threading.Lock()

    @property
    def trainer(self) -> str:
        """The trainer's name."""
        return self._trainer

    def push(self, tables: Sequence[TableRows], deadline: Deadline, prefetched: Sequence[PrefetchedRows] = ()) -> Ack:
        """Send a push.

        Args:
            tables: one entry per table, ids unique. The arrays are copied before this returns.
            deadline: of the hello and of the wait for room in every shard's window.
            prefetched: rows that the trainer holds, one entry per table; sync mode only. The ack keeps the arrays.

        Raises:
            ShardUnavailableError: a shard could not be reached or its window stayed full; nothing of the push was sent.
            KvembError: an earlier push failed and nobody waited for it (its error), or the session has ended (FencedError,
                ShardFailedError); nothing of this push was sent.
        """
        self._servers.check_usable()
        if not self._sending.acquire(timeout=deadline.remaining_s()):
            raise ShardUnavailableError(f"another thread's push still waits for room after {deadline.timeout_s:g} s")
        try:
            self.raise_unseen()
            self._introduce(deadline)
            self._catch_up(deadline)
            cluster_map = self._servers.cluster_map
            routed = [route(rows, cluster_map) for rows in tables]
            shares = [[share[shard] for share in routed] for shard in range(len(self._streams))]
            prefetched_of = route_prefetched(prefetched, cluster_map)
            # In sync mode every shard hears of every step, also of one that has nothing for it.
            wanted = {shard: share for shard, share in enumerate(shares) if self.sync or any(len(rows.ids) for rows in share)}
            began_s = time.monotonic()
            for shard in wanted:
                self._streams[shard].wait_room(deadline)
            window_s = time.monotonic() - began_s
            ack = self._send(wanted, prefetched_of)
            ack.window_s = window_s
            return ack
        finally:
            self._sending.release()

    def wait_accepted(self, deadline: Deadline) -> None:
        """Wait until everything sent is accepted; raises as `wait_applied` does."""
        self._wait(PushSender.wait_accepted, deadline)

    def wait_applied(self, deadline: Deadline) -> None:
        """Wait until everything sent is applied.

        Raises:
            ShardUnavailableError: it was not within the deadline; waiting again is fine.
            KvembError: of a failed push that nobody has heard of, or of a session that has ended.
        """
        self._wait(PushSender.wait_applied, deadline)

    def undelivered(self) -> list[Ack]:
        """The pushes that not every shard has accepted, without those of whose failure somebody was told."""
        with self._failed_lock:
            failed = [ack for ack in self._failed if not ack.failure_seen]
        waiting = [ack for stream in self._streams for ack in stream.unaccepted()]
        return list(dict.fromkeys([*failed, *waiting]))

    def raise_unseen(self) -> None:
        """Raise the failure of a push that nobody waited for, if there is one."""
        with self._failed_lock:
            failed, self._failed = self._failed, []
        errors = [error for error in (ack.take_error() for ack in failed) if error is not None]
        if errors:
            error = copied(errors[0])
            error.add_note("An earlier push failed and nobody had waited for it; the call that raised this did nothing.")
            if len(errors) > 1:
                error.add_note(f"{len(errors) - 1} more pushes have failed since.")
            raise error

    def close(self, deadline: Deadline | None) -> None:
        """Wait until everything sent is accepted (not at all without a deadline), say goodbye, end the streams.

        Raises:
            KvembError: as `wait_accepted` does; the session is closed all the same.
        """
        if self._servers.forked:
            return
        try:
            if deadline is not None:
                self._wait_streams(PushSender.wait_accepted, deadline)
        except (FencedError, ShardFailedError):
            self.raise_unseen()
            if self._last_failed is None:  # otherwise whoever waited for a push that this failure took with it knows of it already
                raise
        else:
            if deadline is not None:
                self.raise_unseen()
        finally:
            self._say_bye()
            for stream in self._streams:
                stream.close()

    def _wait(self, wait: Callable[[PushSender, Deadline], None], deadline: Deadline) -> None:
        try:
            self._wait_streams(wait, deadline)
        except (FencedError, ShardFailedError):
            self.raise_unseen()  # the same failure, and now its ack counts as seen
            raise
        self.raise_unseen()

    def _wait_streams(self, wait: Callable[[PushSender, Deadline], None], deadline: Deadline) -> None:
        self._servers.check_usable()
        try:
            for stream in self._streams:
                wait(stream, deadline)
        except ShardUnavailableError as error:
            causes = {str(channel): self._trouble(channel.shard) for channel in self._servers.channels}
            known = "; ".join(f"{where} says: {cause}" for where, cause in causes.items() if cause)
            raise ShardUnavailableError(f"{error}{'. ' + known if known else ''}") from error

    def _introduce(self, deadline: Deadline) -> None:
        if self._introduced:
            return
        first = self._servers.call(0, "Hello", self._hello_request(), HelloReply, deadline)
        self._incarnation = first.incarnation
        others = [None, *[self._hello_request()] * (len(self._servers) - 1)]
        replies = [first, *self._servers.call_each("Hello", others, HelloReply, deadline)]
        self._introduced = True
        self._step = max(0, *(reply.first_step - 1 for reply in replies))
        self._behind = {shard: reply.first_step for shard, reply in enumerate(replies) if 0 < reply.first_step <= self._step}

    def _catch_up(self, deadline: Deadline) -> None:
        """Take part with nothing in the steps that only some shards have had of our predecessor: from the next step on all are level."""
        for shard in list(self._behind):
            stream, where = self._streams[shard], str(self._servers.channels[shard])
            while (step := self._behind[shard]) <= self._step:
                stream.wait_room(deadline)
                body, part = self._part(stream.next_sequence(), [], False, step), PartAck(where, 0, partial(self._trouble, shard))
                ack = Ack(f"empty part of step {step} of trainer {self._trainer!r}", [part], self._note_failure)
                stream.send(body.sequence, body.encode(), part, ack)
                self._behind[shard] += 1
            del self._behind[shard]

    def _hello_request(self) -> HelloRequest:
        return HelloRequest(self._trainer, self._incarnation, self._cluster_id, self._servers.cluster_map.serial)

    def _hello_of(self, shard: int) -> Callable[[Deadline], HelloReply]:
        """The hello after a broken connection to one shard."""

        def hello(deadline: Deadline) -> HelloReply:
            try:
                return self._servers.call(shard, "Hello", self._hello_request(), HelloReply, deadline)
            except PushRejectedError as error:
                raise ShardFailedError(
                    f"{self._servers.channels[shard]} was restarted and does not know this trainer any more: {error}. What it had "
                    "acknowledged and not applied is lost there. Close this cluster and connect again to go on from the rows "
                    "in storage."
                ) from error

        return hello

    def _send(self, wanted: dict[int, list[TableRows]], prefetched_of: list[list[list[PrefetchedRows]]]) -> Ack:
        self._step += 1
        parts: list[tuple[PushSender, PushPart, PartAck]] = []
        for shard, tables in wanted.items():
            stream, channel = self._streams[shard], self._servers.channels[shard]
            messages = _with_prefetched(split(tables), prefetched_of[shard])
            first = stream.next_sequence()
            for index, (message, prefetched) in enumerate(messages):
                more = index + 1 < len(messages)
                body = self._part(first + index, message, more, self._step, prefetched)
                n_rows = sum(len(rows.ids) for rows in message)
                to_keep = None if self.row_cache is None else self.row_cache.want(shard, message)
                parts.append((stream, body, PartAck(str(channel), n_rows, partial(self._trouble, shard), to_keep, prefetched)))
        ack = Ack(f"push {self._step} of trainer {self._trainer!r}", [part for _, _, part in parts], self._note_failure)
        for stream, body, part in parts:
            stream.send(body.sequence, body.encode(), part, ack)
        return ack

    def _part(self, sequence: int, tables: list[TableRows], more: bool, step: int, prefetched: Sequence[PrefetchedRows] = ()) -> PushPart:
        questions = [rows.to_message() for rows in prefetched]
        return PushPart(
            trainer=self._trainer,
            incarnation=self._incarnation,
            sequence=sequence,
            step=step,
            more=more,
            tables=tables,
            digest=digest_tables(tables, questions),
            return_rows=self.row_cache is not None,
            prefetched=questions,
        )

    def _trouble(self, shard: int) -> str:
        """Why a shard is late, as far as its stream and it itself can tell; asked only when somebody's time is up."""
        told = [self._streams[shard].trouble()]
        with suppress(KvembError):  # when it does not answer, the stream's own word must do
            told.append(self._servers.call(shard, "Status", Empty(), StatusReply, Deadline.after(_STATUS_TIMEOUT_S)).failure)
        return "; ".join(filter(None, told))

    def _note_failure(self, ack: Ack) -> None:
        with self._failed_lock:
            self._failed.append(ack)
            self._last_failed = ack

    def _say_bye(self) -> None:
        """Leave politely; a shard that is down or has fenced us forgets us without it."""
        if self._introduced:
            self._introduced = False
            request = ByeRequest(self._trainer, self._incarnation)
            requests = [None if stream.trouble() else request for stream in self._streams]
            try:
                self._servers.try_each("Bye", requests, Empty, Deadline.after(BYE_TIMEOUT_S))
            except KvembError:
                return


def _with_prefetched(
    messages: list[list[TableRows]], prefetched: list[list[PrefetchedRows]]
) -> list[tuple[list[TableRows], list[PrefetchedRows]]]:
    """Let prefetched rows travel with the last rows of a push, and in messages of their own behind them where one is not enough."""
    pairs = [(tables, list[PrefetchedRows]()) for tables in messages[:-1]]
    return [*pairs, *zip_longest(messages[-1:], prefetched or [[]], fillvalue=[])]
