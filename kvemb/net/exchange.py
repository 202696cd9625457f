"""Runs the conversations of one batch with all its nodes at once, under one deadline.

Sending and receiving interleave on non-blocking sockets: sending everything first would deadlock on full buffers. A bounded window of
requests is in flight per node, so that neither side's buffers grow with the batch. Whatever goes wrong, the caller drops every link that
took part, because a link with unread replies would hand them to the next batch.

A server may send a large reply in many small pieces (memcached: 6.5 kB), and to look at each costs far more than the bytes do. So while
much more is certainly on its way, the kernel is asked to wake this process only when a larger piece lies ready (SO_RCVLOWAT). It is a
hint in both directions: replies turn out shorter where rows are missing, and then the wait ends after QUIET_S.

Of small replies, as writes have them, a server sends a few at a time, and each would wake this process for nothing that it can do. How many
bytes come at least is known of those (`ReplyReader.fewest_bytes`). So it sleeps until half of the window is certain to be answered, or all
of what is left.
"""

import select
import socket
import time
from collections.abc import Sequence

from kvemb.errors import DeadlineExceededError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.wire.replies import RepliesInOrder, ReplyReader, Step

WINDOW_STEPS = 6
LOW_WATER_BYTES = 128 << 10
LEAST_WATER_BYTES = 16 << 10  # smaller pieces are not worth the wait
QUIET_S = 0.002
LONG_QUIET_S = 0.05  # while what is waited for is certain to come: of servers that send something else


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
        self._low_water_bytes, self._quiet_s = 1, QUIET_S
        self._heard_s = time.monotonic()
        self._sure = True  # no wait was in vain since something came

    @property
    def done(self) -> bool:
        """Whether every reply has been read."""
        return self._answered == len(self._steps)

    @property
    def wants_to_send(self) -> bool:
        """Whether a request waits and the window has room for it."""
        return len(self._unsent) > 0 or (self._sent < len(self._steps) and self._sent - self._answered < WINDOW_STEPS)

    def send(self) -> None:
        """Send until the kernel takes no more or the window is full."""
        while self.wants_to_send:
            if not len(self._unsent):
                self._unsent = self._steps[self._sent].request
                self._sent += 1
            count = self.link.send(self._unsent)
            self._unsent = self._unsent[count:]
            if len(self._unsent):
                return

    def receive(self) -> None:
        """Read what has arrived and hand it to the replies it belongs to."""
        self._heard_s, self._sure = time.monotonic(), True
        if self.link.receive():
            self._answer()
        while self.link.pending and not self.done and self.link.receive():  # a poll would not tell of these
            self._answer()

    def _answer(self) -> None:
        while not self.done:
            reply = self._steps[self._answered].reply
            taken_bytes = reply.feed(self.link.received)
            self.link.consume(taken_bytes)
            self._taken_bytes += taken_bytes
            if not reply.done:
                return
            self._was_full = 2 * self._taken_bytes > self._steps[self._answered].reply_bytes
            self._taken_bytes = 0
            self._answered += 1
        if len(self.link.received):
            raise ProtocolError(f"node {self.link.address}: sent more than was asked for: {self.link.received[:40].tobytes()!r}")

    def wait_for_more(self) -> None:
        """Choose how much must lie ready before this process is woken: a larger piece while at least two of them are on their way.

        Of small replies, all that are certain to come before there is something to do.
        """
        on_way_bytes = sum(step.reply_bytes for step in self._steps[self._answered + 1 : self._sent])
        piece_bytes = min(LOW_WATER_BYTES, on_way_bytes // 2)
        if self._was_full and piece_bytes >= LEAST_WATER_BYTES:
            self._quiet_s = QUIET_S
            self._set_low_water(piece_bytes)
        else:
            self._quiet_s = LONG_QUIET_S
            self._set_low_water(max(1, self._certain_bytes()) if self._sure else 1)

    def _certain_bytes(self) -> int:
        """How many bytes must come before half of the window is free, or everything is answered."""
        until = self._sent if self._sent == len(self._steps) else self._sent - WINDOW_STEPS // 2
        fewest_bytes = sum(step.reply.fewest_bytes for step in self._steps[self._answered : until])
        return fewest_bytes - self._taken_bytes - len(self.link.received)

    @property
    def quiet_s(self) -> float | None:
        """How long to wait for what the kernel holds back; None where it holds nothing back."""
        return self._quiet_s if self._low_water_bytes > 1 else None

    def time_out(self) -> None:
        """Look at what there is when a larger piece is long in coming, and wait for none until a full reply has come."""
        if self._low_water_bytes > 1 and time.monotonic() - self._heard_s > self._quiet_s:
            self._was_full = self._sure = False
            self._set_low_water(1)  # the next poll reports what there is

    def _set_low_water(self, n_bytes: int) -> None:
        n_bytes = max(1, n_bytes - self.link.HIDDEN_BYTES)  # these may have been read already, and come into sight with the rest
        if n_bytes != self._low_water_bytes:
            self.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, n_bytes)
            self._low_water_bytes = n_bytes


def run(conversations: Sequence[Conversation], deadline: Deadline) -> None:
    """Complete all conversations.

    Raises:
        DeadlineExceededError: naming the nodes that had not answered.
        NodeUnavailableError, ProtocolError: the first failure of any node. In every case, drop all links that took part.
    """
    poll = select.poll()
    active = {conversation.link.sock.fileno(): conversation for conversation in conversations if not conversation.done}
    for fd, conversation in active.items():
        conversation.send()
        conversation.wait_for_more()
        poll.register(fd, _interest(conversation))
    while active:
        wait_s = min([deadline.remaining_s(), *(each.quiet_s for each in active.values() if each.quiet_s is not None)])
        events = poll.poll(wait_s * 1000)
        for fd, event in events:
            conversation = active[fd]
            if event & ~select.POLLOUT or conversation.link.wants_write:
                conversation.receive()
            if not conversation.done:
                conversation.send()
            conversation.wait_for_more()
            if conversation.done:
                poll.unregister(fd)
                del active[fd]
                continue
            poll.modify(fd, _interest(conversation))
        for conversation in active.values():
            conversation.time_out()
        if active and deadline.expired:  # also of a node that sends a little now and then
            slow = ", ".join(conversation.link.address for conversation in active.values())
            raise DeadlineExceededError(f"no complete answer within {deadline.timeout_s:g} s from node {slow}")


def round_trip(link: Link, request: bytes, replies: Sequence[ReplyReader], deadline: Deadline) -> None:
    """Send a few commands to one node, as when connecting or looking after it, and read their replies.

    Raises:
        NodeUnavailableError: the node is down, or did not answer all of them in time.
        ProtocolError: it answered something else.
    """
    try:
        run([Conversation(link, [Step(memoryview(request), RepliesInOrder(replies))])], deadline)
    except DeadlineExceededError as error:
        raise NodeUnavailableError(
            f"node {link.address}: no complete answer within {deadline.timeout_s:.3g} s. Is the server running, and the address right?"
        ) from error
    except ProtocolError as error:
        text = str(error)
        where = "" if text.startswith("node ") else f"node {link.address}: "
        raise ProtocolError(f"{where}{text}; is this a server of the kind that storage.kind says?") from error


def _interest(conversation: Conversation) -> int:
    link = conversation.link
    writes = link.wants_write or (conversation.wants_to_send and not link.waits_to_read)
    return select.POLLIN | (select.POLLOUT if writes else 0)
