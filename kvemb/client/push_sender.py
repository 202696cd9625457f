"""The ordered push stream to one shard: sends parts, reports their results, reconnects and sends again.

One thread per shard reads the answers; gRPC's own thread takes the parts from `_outgoing`. Thread-safe; lives in the process that made it.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import grpc

from kvemb.client.ack import Ack, PartAck, copied
from kvemb.client.outbox import MAX_UNAPPLIED_PARTS, WINDOW_PARTS, Outbox, Sent
from kvemb.client.shard_channel import ShardChannel
from kvemb.datapath.prefetched_rows import check_changed_rows
from kvemb.errors import (
    ClusterLoadedError,
    FencedError,
    KvembError,
    ParameterServerError,
    PushRejectedError,
    ShardFailedError,
    ShardUnavailableError,
    SlotsMovedError,
    TableDroppedError,
    from_wire,
)
from kvemb.net.deadline import SAY_AFTER_S, Deadline, pauses
from kvemb.protocol.message_format import ChangedRowsBlock
from kvemb.protocol.messages import HelloReply, PushReply

HELLO_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_JOIN_S = 1.0
_FINAL = (FencedError, ShardFailedError)
_ANEW = (SlotsMovedError, TableDroppedError, ClusterLoadedError)
"""Refusals of parts that are not final: the session decides what becomes of the push, over all its shards."""
_PASSING = (
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,  # as of a broken HTTP/2 stream
)  # fmt: skip


class ShardLeftError(Exception):
    """The shard has left the cluster."""

    def __init__(self, last_sequence: int) -> None:
        super().__init__(f"it has left the cluster, and had taken {last_sequence} parts")
        self.last_sequence = last_sequence


class PushSender:
    """Sends parts to one shard, in order, over one stream that is opened again when it breaks.

    One class, because callers, the thread that reads answers and gRPC's own look at the same outbox under one lock.

    Attributes:
        channel, where: to the shard, as far as is known; which it is, for people.
        trouble: why the shard cannot be reached at the moment, or "".
    """

    def __init__(
        self,
        channel: ShardChannel,
        hello: Callable[[Deadline], HelloReply],
        on_refused: Callable[[], None] = lambda: None,
        *,
        heard: Callable[[int], None] = lambda serial: None,
        introduced: bool = True,
        recovers: bool = True,
    ) -> None:
        self.channel, self.where, self._hello, self._on_refused = channel, str(channel), hello, on_refused
        self._heard = heard
        self._introduced, self._recovers = introduced, recovers
        self._refused: list[Sent] = []
        self._changed = threading.Condition()
        self._outbox = Outbox(self.where)
        self._generation = 0  # of the connection; an outgoing iterator of an older one ends
        self._failure: KvembError | None = None
        self.trouble = ""
        self._closing = False
        self._call: Any = None
        self._thread: threading.Thread | None = None

    def use(self, channel: ShardChannel) -> None:
        """Go on by another channel: the shard is elsewhere now, or its number has come back there."""
        with self._changed:
            call, self.channel, self.where = self._call, channel, str(channel)
        if call is not None:
            call.cancel()

    def wait_room(self, deadline: Deadline) -> None:
        """Wait until the window has room for another push."""
        if (failure := self._failure) is not None and not self._is_final:
            self._ask_again(failure, deadline)
        full = f"its window of {WINDOW_PARTS} unaccepted or {MAX_UNAPPLIED_PARTS} unapplied parts is full; nothing was sent"
        self._wait(lambda: self._outbox.has_room, deadline, full)

    def wait_accepted(self, deadline: Deadline) -> None:
        """Wait until the shard has accepted (or refused) everything sent; raises as `wait_room` does."""
        done = "it has not accepted everything sent to it"
        self._wait(lambda: self._outbox.n_unaccepted == 0 and not self._refused, deadline, done)

    def wait_applied(self, deadline: Deadline) -> None:
        """Wait until the shard has applied (or refused) everything sent; raises as `wait_room` does."""
        self._wait(lambda: len(self._outbox) == 0 and not self._refused, deadline, "it has not applied everything sent to it")

    def wait_answered(self, deadline: Deadline) -> None:
        """Wait until the shard has accepted or refused everything sent; raises as `wait_room` does."""
        self._wait(lambda: self._outbox.n_unaccepted == 0, deadline, "it has not answered everything sent to it")

    def wait_level(self, deadline: Deadline) -> None:
        """Wait until everything sent after a refused part is answered, and its number is free; raises as `wait_room` does."""
        self._wait(lambda: self._outbox.is_level, deadline, "it has not answered what was sent to it behind a part that it refused")

    def next_sequence(self) -> int:
        """The sequence of the next part. The caller makes sure that only one thread sends."""
        return self._outbox.next_sequence

    def send(self, sequence: int, sent: Sent) -> None:
        """Queue the part that was numbered with `next_sequence`; a failure since then is told by its ack."""
        with self._changed:
            failure = self._failure
            if failure is None:
                try:
                    self._outbox.add(sequence, sent)
                    self._start()
                except PushRejectedError as error:
                    if self._refused:  # since this part was numbered, an earlier one was refused, and goes anew: this one after it
                        why = self._refused[-1].refusal
                        self._put_back(sent, why if isinstance(why, SlotsMovedError) else self._refusal_before(sent))
                    else:
                        failure = error
            self._changed.notify_all()
        if failure is not None:
            sent.ack.part_failed(failure)

    @property
    def refused(self) -> list[Sent]:
        """The parts that the shard refused because slots have moved, or a table was closed, in the order of their sequences."""
        with self._changed:
            return list(self._refused)

    def resent(self, parts: Collection[PartAck]) -> None:
        """Forget parts among `refused`: others have taken their place, or their push has failed."""
        gone = {id(part) for part in parts}
        with self._changed:
            self._refused = [sent for sent in self._refused if id(sent.part) not in gone]
            self._changed.notify_all()

    def unaccepted(self) -> list[Ack]:
        """The pushes of which the shard has not accepted a part yet."""
        with self._changed:
            return [*(sent.ack for sent in self._refused), *self._outbox.unaccepted()]

    def close(self) -> None:
        """End the stream; parts that are not applied yet are forgotten. Idempotent."""
        with self._changed:
            self._closing = True
            call, thread = self._call, self._thread
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)  # a hello to a shard that is down ends with the channel

    # --- waiting

    def _wait(self, done: Callable[[], bool], deadline: Deadline, what: str) -> None:
        def over(timeout_s: float) -> bool:
            return self._changed.wait_for(lambda: self._is_final or done(), timeout_s)

        with self._changed:
            late = not over(min(SAY_AFTER_S, deadline.remaining_s()))
        if late:
            self.channel.say_trouble(deadline)
        with self._changed:
            late = not over(deadline.remaining_s())
            if self._failure is not None and self._is_final:
                error = copied(self._failure)
                if isinstance(error, ShardFailedError) and not self._recovers:
                    error.add_note("Once the shard is mended, connect again, to take part in the next step of the sync job.")
                raise error
        if late:
            why = self.trouble or "connected"
            raise ShardUnavailableError(f"{self.where}: within {deadline.timeout_s:g} s {what} ({why})")

    @property
    def _is_final(self) -> bool:
        """Whether nothing will ever be sent again."""
        may_be_mended = self._recovers and isinstance(self._failure, ShardFailedError) and not self._outbox.forgotten
        return self._failure is not None and not may_be_mended

    def _ask_again(self, failure: KvembError, deadline: Deadline) -> None:
        """Go on with a shard that had failed, if it is mended. The caller makes sure that only one thread sends."""
        try:
            reply = self._hello(deadline)
        except ShardLeftError:
            raise copied(failure) from None
        with self._changed:
            try:
                self._outbox.resume(reply.last_sequence)
            except ShardFailedError as error:
                self._failure = error
                raise
            self._failure, self._thread, self._introduced, self.trouble = None, None, True, ""

    # --- the thread

    def _start(self) -> None:
        if self._thread is None:
            name = f"kvemb-push-{self.channel.shard}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
            # At the interpreter's end gRPC cannot start the call's threads any more: from the first push on they are there.
            self._changed.wait_for(lambda: bool(self._call or self._failure or self.trouble), HELLO_TIMEOUT_S)

    def _run(self) -> None:
        """Stay connected while there is something to send; after a break pause, longer each time without an answer."""
        waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while self._wait_for_parts():
            try:
                if not self._introduced:
                    self._reintroduce()
                self._introduced = False
                if self._exchange():
                    waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                self.trouble = "the shard ended the stream"
            except ShardLeftError as left:
                self._leave(left.last_sequence)
                return
            except ShardUnavailableError as error:
                self.trouble = str(error)
                self.channel.away(self.trouble)
            except KvembError as error:
                self._fail(error)
                return
            except Exception as error:  # a bug of ours must not leave callers waiting
                self._fail(ParameterServerError(f"{self.where}: push stream: {type(error).__name__}: {error}"))
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing, next(waits))

    def _wait_for_parts(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or len(self._outbox) > 0)
            return not self._closing

    def _reintroduce(self) -> None:
        reply = self._hello(Deadline.after(HELLO_TIMEOUT_S))
        with self._changed:
            self._outbox.reconcile(reply.last_sequence)

    def _exchange(self) -> bool:
        """Run one connection to its end; return whether the shard answered anything."""
        with self._changed:
            self._generation += 1
            if self._closing:
                return False
            self._outbox.rewind()
            self._call = call = self.channel.push_stream(self._outgoing(self._generation))
            self._changed.notify_all()
        answered = False
        try:
            for data in call:
                answered, self.trouble = True, ""
                if self.channel.absence.since_s is not None:
                    self.channel.back()
                self._receive(PushReply.decode(data))
        except grpc.RpcError as error:
            translated = self.channel.translate(error, "push")
            if call.code() in _PASSING:
                raise ShardUnavailableError(str(translated)) from error
            raise translated from error
        finally:
            call.cancel()
            with self._changed:
                self._generation += 1
                self._changed.notify_all()
        return answered

    def _outgoing(self, generation: int) -> Iterator[bytes]:
        """Give the parts from the cursor on, as they come; runs in gRPC's thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over(generation) or self._outbox.has_next)
                if self._is_over(generation):
                    return
                data = self._outbox.take()
            if data is not None:
                yield data

    def _is_over(self, generation: int) -> bool:
        return self._closing or self._failure is not None or generation != self._generation

    def _receive(self, reply: PushReply) -> None:
        if reply.sequence == 0:  # not about a part: the shard could not read the message
            raise from_wire(reply.error)
        error, again = from_wire(reply.error) if reply.state == "failed" else None, False
        with self._changed:
            sent = self._outbox.get(reply.sequence)
            if sent is None:
                return
            if error is None:
                self._outbox.answered(reply.sequence, applied=reply.state == "applied")
            elif isinstance(error, ShardUnavailableError):
                raise error  # to be sent again: to the shard after its restart, or to the process that took it over
            else:
                # One after a refused part goes again, unless its own push was refused, or a sync job has lost a step.
                if is_gap := isinstance(error, PushRejectedError) and self._outbox.is_behind(reply.sequence):
                    error = self._refusal_before(sent) or error
                again = is_gap and self._recovers and not sent.ack.failed and not isinstance(error, _ANEW)
                self._outbox.refused(reply.sequence, again=again)
                if isinstance(error, _ANEW):
                    self._put_back(sent, error)
            self._changed.notify_all()
        if again:
            return
        if isinstance(error, _ANEW):
            self._on_refused()
        elif error is not None:
            sent.ack.part_failed(error)
            if isinstance(error, _FINAL):
                raise error
        elif reply.state in ("released", "applied"):
            self._computed(sent, reply)
        else:
            sent.ack.part_accepted(sent.part)

    def _refusal_before(self, sent: Sent) -> KvembError | None:
        """Why an earlier part of the same push was refused; in a sync job an earlier step, since steps keep their order."""
        before = [one for one in self._refused if one.part.refused and (one.ack is sent.ack or not self._recovers)]
        return before[-1].refusal if before else None

    def _put_back(self, sent: Sent, why: KvembError | None) -> None:
        sent.refusal = why
        self._refused.append(sent)
        sent.ack.part_refused(sent.part)

    def _computed(self, sent: Sent, reply: PushReply) -> None:
        """Take over an answer about a part's batch, which is in storage or about to be."""
        self._heard(reply.tables_serial)
        sent.part.held_back = max(sent.part.held_back, reply.held_back)  # an answer that is given again may not know
        changed_rows: list[ChangedRowsBlock] = []
        try:
            if reply.changed_rows:
                check_changed_rows(sent.part.prefetched, reply.changed_rows)
                changed_rows = reply.changed_rows
        finally:
            sent.ack.part_computed(sent.part, reply.changed, reply.elapsed, changed_rows, applied=reply.state == "applied")

    def _leave(self, last_sequence: int) -> None:
        """Nothing goes to the shard any more: parts that it had taken are applied, the rest is to be routed again."""
        with self._changed:
            self._outbox.reconcile(last_sequence)
            taken, rest = self._outbox.split(last_sequence)
            for sent in rest:
                self._put_back(sent, SlotsMovedError(f"{self.where} has left the cluster"))
            self._thread = None  # should the number come back, the next part begins another one
            self._changed.notify_all()
        for sent in taken:
            sent.ack.part_computed(sent.part, -1.0, 0, applied=True)
        if rest:
            self._on_refused()

    def _fail(self, error: KvembError) -> None:
        """Nothing can be sent any more: tell every waiting ack."""
        with self._changed:
            self._failure = error
            waiting = [*self._refused, *self._outbox.clear()]
            self._refused = []
            self._changed.notify_all()
        for sent in waiting:
            sent.ack.part_failed(error)
