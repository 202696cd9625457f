"""Runs the conversations of one batch with all its nodes at once, under one deadline.

Sending and receiving interleave on non-blocking sockets: sending everything first would deadlock on full buffers. A bounded window of
requests is in flight per node, so that neither side's buffers grow with the batch. Whatever goes wrong, the caller drops every link that
took part, because a link with unread replies would hand them to the next batch.
"""

import select
from collections.abc import Sequence

from kvemb.errors import DeadlineExceededError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.wire.replies import Step

WINDOW_STEPS = 4


class Conversation:
    """The steps of one batch on one link, in order, and how far they have come."""

    def __init__(self, link: Link, steps: Sequence[Step]) -> None:
        self.link = link
        self._steps = steps
        self._sent = 0  # steps handed to the kernel whole
        self._answered = 0
        self._unsent = memoryview(b"")  # rest of the step being sent

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
        if not self.link.receive():
            return
        while not self.done:
            reply = self._steps[self._answered].reply
            self.link.consume(reply.feed(self.link.received))
            if not reply.done:
                return
            self._answered += 1
        if len(self.link.received):
            raise ProtocolError(f"node {self.link.address}: sent more than was asked for: {self.link.received[:40].tobytes()!r}")


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
        poll.register(fd, _interest(conversation))
    while active:
        events = poll.poll(deadline.remaining_s() * 1000)
        if not events:
            if not deadline.expired:
                continue
            slow = ", ".join(conversation.link.address for conversation in active.values())
            raise DeadlineExceededError(f"no complete answer within {deadline.timeout_s:g} s from node {slow}")
        for fd, event in events:
            conversation = active[fd]
            if event & ~select.POLLOUT:
                conversation.receive()
            if conversation.done:
                poll.unregister(fd)
                del active[fd]
                continue
            conversation.send()
            poll.modify(fd, _interest(conversation))


def _interest(conversation: Conversation) -> int:
    return select.POLLIN | (select.POLLOUT if conversation.wants_to_send else 0)
