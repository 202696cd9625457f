"""Runs the conversations of one batch with all its nodes at once, under one deadline.

Sending and receiving interleave on non-blocking sockets: sending everything first would deadlock on full buffers. A bounded window of
requests is in flight per node, so that neither side's buffers grow with the batch. Whatever goes wrong, the caller drops every link that
took part, because a link with unread replies would hand them to the next batch.

A server may send a large reply in many small pieces (memcached: 6.5 kB), and to look at each costs far more than the bytes do. So while
much more is certainly on its way, the kernel is asked to wake this process only when a larger piece lies ready (SO_RCVLOWAT). It is a
hint in both directions: replies turn out shorter where rows are missing, and then the wait ends after QUIET_S.

Of small replies, as writes have them, a server sends a few at a time, and each would wake this process for nothing that it can do. How many
bytes come at least is known of those (`ReplyReader.fewest_bytes`). So it sleeps until half of the window is certain to be answered, or all
that remains.
"""

import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from kvemb.errors import DeadlineExceededError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.wire.replies import RepliesInOrder, ReplyReader, Step

WINDOW_STEPS = 6
LOW_WATER_BYTES = 128 << 10
LEAST_WATER_BYTES = 16 << 10  # smaller pieces are not worth the wait
QUIET_S = 0.002
LONG_QUIET_S = 0.05  # while the replies are certain to come: for servers that send something else


class Conversation:
    """The steps of one batch on one link, in order, and how far they have come."""

    def __init__(self, link: Link, steps: Sequence[Step]) -> None:
        self.link = link
        self._steps = steps
        self._sent = 0  # steps handed to the kernel whole
        self._answered = 0
        self._unsent = memoryview(b"")  # rest of the step being sent
        self._taken_bytes = 0  # of the reply being read
        self._was_full = False  # whether the last reply was about as large as it could be
        self._low_water_bytes = 1
        self._heard_s = time.monotonic()
        self._sure = True  # no wait was in vain since bytes came
        self.done, self.events = not steps, select.POLLIN
        self.quiet_s: float | None = None  # how long to wait for bytes that the kernel holds back; None: it holds none

    def go_on(self) -> None:
        """Send until the kernel takes no more or the window is full; then choose how many bytes must come before it is woken."""
        if self.done:
            if self._low_water_bytes > 1:
                self._set_low_water(1, LONG_QUIET_S)
            return
        while len(self._unsent) or (self._sent < len(self._steps) and self._sent - self._answered < WINDOW_STEPS):
            data = self._unsent if len(self._unsent) else self._next_request()
            self._unsent = data[self.link.send(data) :]
            if len(self._unsent):
                break
        writes = self.link.wants_write or (len(self._unsent) and not self.link.waits_to_read)
        self.events = select.POLLIN | select.POLLOUT if writes else select.POLLIN
        self._choose_low_water()

    def _next_request(self) -> memoryview:
        """The next step's request, and those behind it that are small and need not be built: one call, and the server is woken once."""
        source = self._steps[self._sent].source
        request = source() if callable(source) else source
        self._sent += 1
        while self._sent < len(self._steps) and self._sent - self._answered < WINDOW_STEPS:
            source = self._steps[self._sent].source
            if not isinstance(source, memoryview) or len(request) + len(source) > self.link.JOINED_BYTES:
                break
            request = memoryview(b"".join((request, source)))
            self._sent += 1
        return request

    def receive(self) -> None:
        """Read the bytes that have arrived and hand them to their replies."""
        self._heard_s, self._sure = time.monotonic(), True
        if self.link.receive():
            self._answer()
        while not self.done and self.link.pending and self.link.receive():  # a poll would not tell of these
            self._answer()

    def _answer(self) -> None:
        data, position = self.link.received, 0
        while not self.done:
            step = self._steps[self._answered]
            taken_bytes = step.reply.feed(data[position:] if position else data)
            position += taken_bytes
            self._taken_bytes += taken_bytes
            if not step.reply.done:
                break
            self._was_full = 2 * self._taken_bytes > step.reply_bytes
            self._taken_bytes = 0
            self._answered += 1
            self.done = self._answered == len(self._steps)
        self.link.consume(position)
        if self.done and position < len(data):
            raise ProtocolError(f"node {self.link.address}: sent more than was asked for: {data[position : position + 40].tobytes()!r}")

    def _choose_low_water(self) -> None:
        """Choose how much must lie ready before this process is woken: a larger piece while at least two of them are on their way.

        For small replies: all bytes that are certain to come before there is something to do (half of the window free, or all answered).
        """
        on_way_bytes = sum([step.reply_bytes for step in self._steps[self._answered + 1 : self._sent]])
        piece_bytes = min(LOW_WATER_BYTES, on_way_bytes // 2)
        quiet_s = QUIET_S if self._was_full and piece_bytes >= LEAST_WATER_BYTES else LONG_QUIET_S
        n_bytes = piece_bytes
        if quiet_s == LONG_QUIET_S:
            until = self._sent if self._sent == len(self._steps) else self._sent - WINDOW_STEPS // 2
            fewest_bytes = (
                sum([step.reply.fewest_bytes for step in self._steps[self._answered : until]]) if self._sure and not on_way_bytes else 0
            )
            n_bytes = fewest_bytes - self._taken_bytes - len(self.link.received) if fewest_bytes else 1
        self._set_low_water(n_bytes, quiet_s)

    def silent(self, for_s: float) -> bool:
        """Whether nothing has come for so long."""
        return time.monotonic() - self._heard_s >= for_s

    def time_out(self) -> None:
        """Read the bytes there are when a larger piece is long in coming, and wait for no piece until a full reply has come."""
        if self.quiet_s is not None and time.monotonic() - self._heard_s > self.quiet_s:
            self._was_full = self._sure = False
            self._set_low_water(1, LONG_QUIET_S)  # the next poll reports any byte

    def _set_low_water(self, n_bytes: int, quiet_s: float) -> None:
        n_bytes = max(1, n_bytes - self.link.HIDDEN_BYTES)  # these may have been read already, and come into sight with the rest
        if n_bytes != self._low_water_bytes:
            self.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, n_bytes)
            self._low_water_bytes = n_bytes
        self.quiet_s = quiet_s if n_bytes > 1 else None


def run(conversations: Sequence[Conversation], deadline: Deadline, meanwhile: Sequence[Callable[[], None]] = ()) -> None:
    """Complete all conversations; DeadlineExceededError names the nodes that had not answered, or were silent for as long as one may be."""
    poll = select.poll()
    active = {conversation.link.sock.fileno(): conversation for conversation in conversations if not conversation.done}
    for fd, conversation in active.items():
        conversation.go_on()
        poll.register(fd, conversation.events)
    for work in meanwhile:
        work()
    while active:
        wait_s = min([deadline.remaining_s(), deadline.silent_s, *[each.quiet_s for each in active.values() if each.quiet_s is not None]])
        ready = poll.poll(wait_s * 1000)
        for fd, event in ready:
            conversation = active[fd]
            if event & ~select.POLLOUT or conversation.link.wants_write:
                conversation.receive()
            conversation.go_on()
            if conversation.done:
                poll.unregister(fd)
                del active[fd]
            else:
                poll.modify(fd, conversation.events)
        for conversation in active.values():
            conversation.time_out()
        if not ready and (silent := [each for each in active.values() if each.silent(deadline.silent_s)]):
            raise DeadlineExceededError(f"no answer within {deadline.silent_s:g} s from node {_addresses(silent)}")
        if active and deadline.expired:  # also where a node sends a few bytes now and then
            raise DeadlineExceededError(f"no complete answer within {deadline.timeout_s:.3g} s from node {_addresses(active.values())}")


def _addresses(conversations: Iterable[Conversation]) -> str:
    return ", ".join(conversation.link.address for conversation in conversations)


def round_trip(link: Link, request: bytes, replies: Sequence[ReplyReader], deadline: Deadline) -> None:
    """Send a few commands to one node, as when connecting or looking after it, and read their replies."""
    try:
        run([Conversation(link, [Step(memoryview(request), RepliesInOrder(replies))])], deadline)
    except DeadlineExceededError as error:
        within_s = min(deadline.timeout_s, deadline.silent_s)
        raise NodeUnavailableError(
            f"node {link.address}: no complete answer within {within_s:.3g} s. Is the server running, and the address right?"
        ) from error
    except ProtocolError as error:
        text = str(error)
        where = "" if text.startswith("node ") else f"node {link.address}: "
        raise ProtocolError(f"{where}{text}; is this a server of the kind that storage.kind says?") from error
