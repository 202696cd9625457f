"""One trainer's session with all shards: its identity, its numbered pushes, and the failures not raised yet.

The trainer says hello at its first push (in sync mode it takes its place then): shard 0 issues the incarnation, the others are told. Pushes
go out one at a time, so that every shard sees them in the same order. Thread-safe; lives in the process that made it.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from kvemb.client.ack import DEFAULT_TIMEOUT_S, Ack, PartAck, copied, waits_s
from kvemb.client.all_shards import AllShards
from kvemb.client.outbox import RefusedPush, Sent, put_together
from kvemb.client.push_sender import PushSender, ShardLeftError
from kvemb.datapath.prefetched_rows import PrefetchedRows, route_prefetched
from kvemb.datapath.push import gradients_of_now
from kvemb.errors import (
    FencedError,
    FrozenTableError,
    KvembError,
    PushRejectedError,
    ShardFailedError,
    ShardUnavailableError,
    StorageError,
    TableAlteredError,
    TableDroppedError,
)
from kvemb.net.deadline import Deadline, pauses
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import (
    BYE,
    GET_STATUS,
    GET_TABLE,
    HELLO,
    LEFT_SESSION,
    ByeRequest,
    Empty,
    HelloReply,
    HelloRequest,
    LeftSessionRequest,
    PushPart,
    TableRequest,
    digest_tables,
)
from kvemb.protocol.shard_routing import route, split
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef

BYE_TIMEOUT_S = 2.0
_LOOK_TIMEOUT_S = 1.0
_REROUTE_TIMEOUT_S = 5.0
_JOIN_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class _Numbered(NamedTuple):
    """A part that has its sequence at a shard."""

    stream: PushSender
    body: PushPart
    part: PartAck


class _Serials(NamedTuple):
    """Of the shards' map by which a push was routed, of the registry of tables, and of the newest load, as it names them."""

    shards: int
    tables: int
    load: int


class PushSession:
    """Sends one trainer's pushes to all shards, each under the next sequence.

    One class, because pushes and those that are routed again take their sequences under the same lock.
    """

    def __init__(
        self,
        servers: AllShards,
        cluster_id: bytes,
        trainer: str,
        *,
        sync: bool,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._servers, self._cluster_id, self.trainer, self.sync = servers, cluster_id, trainer, sync
        self._sending = threading.Lock()
        self._streams: dict[int, PushSender] = {}
        self._heard: dict[int, frozenset[int]] = {}  # by a map's shards_serial: the shards that hear of every push of a sync job
        self._rerouting: threading.Thread | None = None
        self._rerouting_lock = threading.Lock()
        self._n_rerouted = 0
        self._map_serial = 0  # of the shards that the last push was routed by
        self._closed = threading.Event()
        self._incarnation = 0
        self._introduced = False
        self._step = self._inherited = 0  # the latter: the last step that our predecessor took part in at any shard
        self._behind: dict[int, int] = {}  # shards that await an earlier step than the others, which our predecessor took part in elsewhere
        self._failed: list[Ack] = []
        self._last_failed: Ack | None = None
        self._failed_lock = threading.Lock()

    def push(self, tables: Sequence[TableRows], deadline: Deadline, prefetched: Sequence[PrefetchedRows] = ()) -> Ack:
        """Send a push.

        Raises:
            ShardUnavailableError: a shard could not be reached or its window stayed full; nothing of the push was sent.
            KvembError: an earlier push failed and no caller waited for it (its error), or the session has ended (FencedError,
                ShardFailedError); nothing of this push was sent.
        """
        self._servers.check_usable()
        if not self._sending.acquire(timeout=deadline.remaining_s()):
            raise ShardUnavailableError(f"another thread's push still waits for room after {deadline.timeout_s:g} s")
        try:
            if self._failed:
                self.raise_unseen()
            if not self._introduced:
                self._introduce(deadline)
            if self._behind:
                self._catch_up(deadline)
            cluster_map = self._follow_map(deadline)
            if self._failed:  # an earlier push was found refused just now
                self.raise_unseen()
            wanted = self._shares(tables, cluster_map, cluster_map.writing_shards if self.sync else ())
            prefetched_of = route_prefetched(prefetched, cluster_map) if prefetched else []
            began_s = time.monotonic()
            for shard in wanted:
                self._stream(shard).wait_room(deadline)
            window_s = time.monotonic() - began_s
            self._step += 1
            serials = _Serials(cluster_map.shards_serial, self._servers.tables_serial, self._servers.load_serial)
            numbered = self._number(wanted, prefetched_of, self._step, serials)
            ack = Ack(f"push {self._step} of trainer {self.trainer!r}", [one.part for one in numbered], self._note_failure, self._timeout_s)
            _send(numbered, ack)
            ack.window_s = window_s
            return ack
        finally:
            self._sending.release()

    def take_place(self, deadline: Deadline) -> None:
        """Say hello to all shards now, and not at the first push; raises as `push` does."""
        self._servers.check_usable()
        if not self._sending.acquire(timeout=deadline.remaining_s()):
            raise ShardUnavailableError(f"another thread's push still waits for room after {deadline.timeout_s:g} s")
        try:
            if not self._introduced:
                self._introduce(deadline)
        finally:
            self._sending.release()

    def wait_accepted(self, deadline: Deadline) -> None:
        """Wait until everything sent is accepted; raises as `wait_applied` does."""
        self._wait(PushSender.wait_accepted, deadline)

    def wait_applied(self, deadline: Deadline) -> None:
        """Wait until everything sent is applied."""
        self._wait(PushSender.wait_applied, deadline)

    def undelivered(self) -> list[Ack]:
        """The pushes that not every shard has accepted, without those whose failure a caller was told of."""
        with self._failed_lock:
            failed = [ack for ack in self._failed if not ack.failure_seen]
        waiting = [ack for stream in list(self._streams.values()) for ack in stream.unaccepted()]
        return list(dict.fromkeys([*failed, *waiting]))

    def raise_unseen(self) -> None:
        """Raise the failure of a push that no caller waited for, if there is one."""
        with self._failed_lock:
            failed, self._failed = self._failed, []
        errors = [error for error in (ack.take_error() for ack in failed) if error is not None]
        if errors:
            error = copied(errors[0])
            error.add_note("An earlier push failed, and no call had waited for it; the call that raised this did nothing.")
            if len(errors) > 1:
                error.add_note(f"{len(errors) - 1} more pushes have failed since.")
            raise error

    def close(self, deadline: Deadline | None) -> None:
        """Wait until everything sent is accepted (not at all without a deadline), say goodbye, end the streams."""
        if self._servers.forked:
            return
        try:
            if deadline is not None:
                self._wait_streams(PushSender.wait_accepted, deadline)
        except (FencedError, ShardFailedError):
            self.raise_unseen()
            if self._last_failed is None:  # otherwise a caller that waited for a push of this failure knows of it already
                raise
        else:
            if deadline is not None:
                self.raise_unseen()
        finally:
            self._closed.set()
            if (rerouting := self._rerouting) is not None:
                rerouting.join(_JOIN_S)
            self._say_bye()
            for stream in list(self._streams.values()):
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
        with suppress(ShardUnavailableError):
            self._wait_each(wait, deadline.within(waits_s(deadline)))
            return
        causes = {str(channel): self._trouble(shard, deadline) for shard, channel in self._servers.channels.items()}
        known = "; ".join(f"{where} says: {cause}" for where, cause in causes.items() if cause)
        try:
            self._wait_each(wait, deadline)
        except ShardUnavailableError as error:
            raise ShardUnavailableError(f"{error}{'. ' + known if known else ''}") from error

    def _wait_each(self, wait: Callable[[PushSender, Deadline], None], deadline: Deadline) -> None:
        before = -1
        while before != self._n_rerouted:  # parts routed again may be with a stream whose wait is over
            before = self._n_rerouted
            for stream in list(self._streams.values()):
                wait(stream, deadline)

    def _introduce(self, deadline: Deadline) -> None:
        first = self._servers.call(0, HELLO, self._hello_request(), deadline)
        self._incarnation = first.incarnation
        others = dict.fromkeys((shard for shard in self._servers.numbers if shard), self._hello_request())
        replies = {0: first, **self._servers.call_each(HELLO, others, deadline)}
        self._introduced = True
        for shard, reply in replies.items():
            self._stream(shard, introduced=True)
            self._servers.heard(reply.tables_serial, reply.load_serial)
        self._step = self._inherited = max(0, *(reply.first_step - 1 for reply in replies.values()))
        writing = self._servers.cluster_map.writing_shards  # no trainer pushes to the others: they stay where they are
        firsts = {shard: reply.first_step for shard, reply in replies.items() if shard in writing}
        self._behind = {shard: first for shard, first in firsts.items() if 0 < first <= self._step}

    def _catch_up(self, deadline: Deadline) -> None:
        """Take part with nothing in the steps that only some shards have had of our predecessor: from the next step on all are level."""
        for shard in list(self._behind):
            stream = self._stream(shard)
            while (step := self._behind[shard]) <= self._step:
                stream.wait_room(deadline)
                serials = _Serials(self._servers.cluster_map.shards_serial, 0, self._servers.load_serial)
                body, part = (
                    self._part(stream.next_sequence(), [], False, step, serials),
                    PartAck(stream.where, 0, partial(self._trouble, shard), stream.channel.say_trouble),
                )
                ack = Ack(f"empty part of step {step} of trainer {self.trainer!r}", [part], self._note_failure, self._timeout_s)
                stream.send(body.sequence, Sent(body.encode(), part, ack))
                self._behind[shard] += 1
            del self._behind[shard]

    def _hello_request(self) -> HelloRequest:
        return HelloRequest(self.trainer, self._incarnation, self._cluster_id, self._servers.cluster_map.serial)

    def _stream(self, shard: int, *, introduced: bool = False) -> PushSender:
        """The stream to a shard; one that has joined since gets our hello before its first part."""
        stream = self._streams.get(shard)
        if stream is None:
            channel = self._servers.channels[shard]
            stream = PushSender(
                channel,
                self._hello_of(shard),
                self._route_again_soon,
                heard=self._servers.heard,
                introduced=introduced,
                recovers=not self.sync,
            )
            self._streams[shard] = stream
        elif (channel := self._servers.channels.get(shard, stream.channel)) is not stream.channel:
            stream.use(channel)
        return stream

    def _hello_of(self, shard: int) -> Callable[[Deadline], HelloReply]:
        """The hello after a broken connection to one shard."""

        def hello(deadline: Deadline) -> HelloReply:
            if shard not in self._servers.numbers:  # it has applied all parts that it took: it had drained when it left the cluster
                request = LeftSessionRequest(shard, self.trainer, self._incarnation)
                raise ShardLeftError(self._servers.call(0, LEFT_SESSION, request, deadline).last_sequence)
            try:
                reply = self._servers.call(shard, HELLO, self._hello_request(), deadline)
                if (reply.mode == "sync") != self.sync:  # a push would stop it for good; started again in order it takes them
                    raise ShardUnavailableError(
                        f"{self._streams[shard].where} was started in mode {reply.mode}, and this job runs in the other one. Start it "
                        "again with the kvemb.yaml of the others (parameter_servers.mode); pushes wait for it"
                    )
                self._stream(shard)  # where it was asked
                self._servers.heard(reply.tables_serial, reply.load_serial)
                return reply
            except ShardUnavailableError:
                with suppress(StorageError):
                    self._servers.refresh_map(Deadline.after(_LOOK_TIMEOUT_S))  # it may have left the cluster while we slept
                raise
            except PushRejectedError as error:
                raise ShardFailedError(
                    f"{self._streams[shard].where} was restarted and does not know this trainer any more: {error}. What it had "
                    "acknowledged and not applied is lost there. Close this cluster and connect again to go on from the rows "
                    "in storage."
                ) from error

        return hello

    def _shares(self, tables: Sequence[TableRows], cluster_map: ClusterMap, always: Collection[int]) -> dict[int, list[TableRows]]:
        """The parts of a push for each shard; those of `always` get one in any case, as in each step of a sync job."""
        routed = [route(rows, cluster_map) for rows in tables]
        shares = [[share[shard] for share in routed] for shard in range(cluster_map.n_shards)]
        return {shard: share for shard, share in enumerate(shares) if shard in always or any(len(rows.ids) for rows in share)}

    def _number(
        self, wanted: dict[int, list[TableRows]], prefetched_of: list[list[list[PrefetchedRows]]], step: int, serials: _Serials
    ) -> list[_Numbered]:
        """Give each shard's share of a push, and its share of the prefetched rows if there are any, the next sequences there."""
        numbered: list[_Numbered] = []
        for shard, tables in wanted.items():
            stream = self._stream(shard)
            messages = _with_prefetched(split(tables), prefetched_of[shard]) if prefetched_of else [(rows, []) for rows in split(tables)]
            first = stream.next_sequence()
            for index, (message, prefetched) in enumerate(messages):
                more = index + 1 < len(messages)
                body = self._part(first + index, message, more, step, serials, prefetched)
                n_rows = sum(len(rows.ids) for rows in message)
                part = PartAck(stream.where, n_rows, partial(self._trouble, shard), stream.channel.say_trouble, prefetched)
                numbered.append(_Numbered(stream, body, part))
        return numbered

    def _part(
        self,
        sequence: int,
        tables: list[TableRows],
        more: bool,
        step: int,
        serials: _Serials,
        prefetched: Sequence[PrefetchedRows] = (),
    ) -> PushPart:
        questions = [rows.to_message() for rows in prefetched]
        return PushPart(
            trainer=self.trainer,
            incarnation=self._incarnation,
            sequence=sequence,
            step=step,
            more=more,
            tables=tables,
            digest=digest_tables(tables, questions),
            prefetched=questions,
            map_serial=serials.shards,
            tables_serial=serials.tables,
            load_serial=serials.load,
        )

    # --- parts that were refused, and go anew ---------------------------------------------------------------------------------------

    def _follow_map(self, deadline: Deadline) -> ClusterMap:
        """Return the map to route by. Parts routed by an earlier map are with their shards, or routed again, before any goes by this one.

        This waits for answers that do not depend on the other trainers of a sync job: before slots change their shard, all shards have
        handed out the same steps, and each refuses the rest.
        """
        while True:
            cluster_map = self._servers.cluster_map
            refused = self._refused() if any(stream.refused for stream in self._streams.values()) else []
            same = cluster_map.shards_serial == self._map_serial and not any(push.moved for push in refused)
            if same and not refused:
                return cluster_map
            for stream in list(self._streams.values()):
                (stream.wait_level if same else stream.wait_answered)(deadline)
            refused = self._refused()
            if moved := [push.serial for push in refused if push.moved]:
                cluster_map = self._newer_map(max(moved), deadline)
            if not all(self._send_anew(push, cluster_map, deadline) for push in refused):
                continue
            self._map_serial = cluster_map.shards_serial
            self._heard[self._map_serial] = cluster_map.writing_shards

    def _refused(self) -> list[RefusedPush]:
        """The pushes of which shards have refused parts that may go anew, in the order in which they were made."""
        return put_together((shard, sent) for shard, stream in list(self._streams.items()) for sent in stream.refused)

    def _send_anew(self, push: RefusedPush, cluster_map: ClusterMap, deadline: Deadline) -> bool:
        """Send the refused parts of a push under new sequences, by the map and tables in force; or let it fail, if nothing of it was taken.

        Returns:
            Whether that was done; else more of its parts have been refused since: they go together.
        """
        taken = push.outdated and push.ack.is_taken(deadline)
        if push.outdated and not taken and (push.closed is not None or push.ack.failed):
            self._fail_refused(push, push.closed or push.refusals[0])
            return True
        if push.outdated and not taken and not push.ack.consists_of(push.parts):
            return False
        by_load = push.outdated and push.closed is None
        for shard in push.shards if by_load and self._servers.load_serial <= push.load_serial else ():
            with suppress(ShardLeftError):
                self._hello_of(shard)(deadline)  # which load it has carried out: as it joined, say
        writing = cluster_map.writing_shards
        # Of a sync job's step the others have their part: it goes to those that refused theirs, and to those that have joined since.
        missed = push.shards if push.step <= self._inherited else push.shards | (writing - self._heard.get(push.serial, frozenset()))
        serials = _Serials(cluster_map.shards_serial, push.tables_serial, self._servers.load_serial if push.outdated else push.load_serial)
        try:
            tables = self._of_now(push, serials.load, deadline) if taken else push.tables
            wanted = self._shares(tables, cluster_map, writing & missed if self.sync else ())
            if taken and self.sync and not wanted.keys() <= missed:  # a shard has one part of each step
                raise FrozenTableError("its rows are those of other shards now")
        except FrozenTableError as error:
            self._fail_refused(push, _taken_in_part(push, error))
            return True
        prefetched_of = route_prefetched(push.prefetched, cluster_map) if push.prefetched and not taken else []
        numbered = self._number(wanted, prefetched_of, push.step, serials)
        push.ack.replace_parts(push.parts, [one.part for one in numbered])
        _send(numbered, push.ack)
        self._forget_refused(push)
        return True

    def _of_now(self, push: RefusedPush, load_serial: int, deadline: Deadline) -> list[TableRows]:
        """The rows of a push that other shards have taken, by the definitions in force, without those of tables that are gone or loaded."""
        found = list[TableRows]()
        for rows in push.tables:
            with suppress(TableDroppedError):  # what the other shards had taken is gone, too
                reply = self._servers.call(0, GET_TABLE, TableRequest(rows.table, rows.schema), deadline)
                if not push.load_serial < reply.load_serial <= load_serial:
                    found.append(gradients_of_now(rows, TableDef.from_dict(reply.table)))
        return found

    def _fail_refused(self, push: RefusedPush, error: KvembError) -> None:
        push.ack.part_failed(error)
        self._forget_refused(push)

    def _forget_refused(self, push: RefusedPush) -> None:
        self._n_rerouted += 1
        for shard in push.shards:
            self._streams[shard].resent(push.parts)

    def _newer_map(self, serial: int, deadline: Deadline) -> ClusterMap:
        if self._servers.cluster_map.shards_serial > serial:
            return self._servers.cluster_map
        for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            with suppress(StorageError):
                self._servers.refresh_map(deadline)
            if (cluster_map := self._servers.cluster_map).shards_serial > serial:
                return cluster_map
            if deadline.expired or self._closed.wait(pause_s):
                break
        raise ShardUnavailableError(
            f"shards refused rows that were routed by the cluster map of serial {serial}, and the nodes have no newer one yet; nothing of "
            "them was taken"
        )

    def _route_again_soon(self) -> None:
        """Have a thread do it, unless one is at it: perhaps no caller pushes now, and acks are waited for."""
        with self._rerouting_lock:
            if self._rerouting is None:
                thread = threading.Thread(target=self._keep_routing, name="kvemb-reroute", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending: refused parts are told as undelivered
                    thread.start()
                    self._rerouting = thread

    def _keep_routing(self) -> None:
        while not self._closed.is_set():
            with self._rerouting_lock:
                if not any(stream.refused for stream in list(self._streams.values())):
                    self._rerouting = None
                    return
            try:
                with self._sending:
                    self._follow_map(Deadline.after(_REROUTE_TIMEOUT_S))
            except KvembError:  # tried again; a caller that waits for an ack asks the shards why
                self._closed.wait(_LONGEST_PAUSE_S)

    def _trouble(self, shard: int, deadline: Deadline) -> str:
        """Why a shard is late, as far as its stream and it itself can tell; asked only when a caller's time is nearly up."""
        told = [stream.trouble] if (stream := self._streams.get(shard)) is not None else []
        with suppress(KvembError):  # when it does not answer, the stream's own word must do
            reply = self._servers.call(shard, GET_STATUS, Empty(), deadline)
            told = [f"it is starting: {reply.starting}"] if reply.starting else [*told, reply.failure]
            told = [*filter(None, told)] or [reply.step]
        return "; ".join(filter(None, told))

    def _note_failure(self, ack: Ack) -> None:
        with self._failed_lock:
            self._failed.append(ack)
            self._last_failed = ack

    def _say_bye(self) -> None:
        """Say goodbye to all shards: one whose idle stream has ended awaits us, too, and a new one has heard of us from the others."""
        if self._introduced:
            self._introduced = False
            with suppress(KvembError):
                self._servers.try_each(BYE, ByeRequest(self.trainer, self._incarnation), Deadline.after(BYE_TIMEOUT_S))


def _send(numbered: Sequence[_Numbered], ack: Ack) -> None:
    for stream, body, part in numbered:
        placements = {rows.table: rows.placement for rows in body.tables}
        stream.send(body.sequence, Sent(body.encode(), part, ack, placements))


def _taken_in_part(push: RefusedPush, why: KvembError) -> KvembError:
    shards = ", ".join(map(str, sorted(push.shards)))
    return TableAlteredError(
        f"{push.closed} Of this push the rows of shard {shards} were refused, and those of the other shards were taken before: {why}"
    )


def _with_prefetched(
    messages: list[list[TableRows]], prefetched: list[list[PrefetchedRows]]
) -> list[tuple[list[TableRows], list[PrefetchedRows]]]:
    """Let prefetched rows travel with the last rows of a push, and in messages of their own behind them where one is not enough."""
    pairs = [(tables, list[PrefetchedRows]()) for tables in messages[:-1]]
    return [*pairs, *zip_longest(messages[-1:], prefetched or [[]], fillvalue=[])]
