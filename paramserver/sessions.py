"""Sessions: which incarnation of each trainer is in force, and which of its parts this shard has accepted. Pure; the intake locks.

Shard 0 issues incarnations, one counter for the whole cluster, so that they order trainers; the other shards take over higher ones. Parts
of one session are numbered 1, 2, 3, …: the next one is taken, an earlier one is a duplicate and gets its first answer, a later one is a
gap.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvemb.errors import FencedError, PushRejectedError
from kvemb.messages import PushReply
from paramserver.batch import Part, Push, Ticket

KEPT_ANSWERS = 64
MAX_SESSIONS = 65536
MAX_NAME = 255


@dataclass(eq=False)
class Session:
    """One trainer.

    Args:
        trainer: its name.
        incarnation: the one in force.
        last_sequence: of the last accepted part.
        live: said hello to this process and not yet goodbye.
        held: accepted parts of a push whose last part is still to come.
        held_step: the step of that push.
        answers: tickets of recent parts by sequence, oldest first; every part that has no outcome yet is among them.
        n_waiting, bytes_waiting: complete pushes that are not applied yet.
    """

    trainer: str
    incarnation: int
    last_sequence: int = 0
    live: bool = True
    held: list[Part] = field(default_factory=list)
    held_step: int = 0
    answers: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    n_waiting: int = 0
    bytes_waiting: int = 0

    @property
    def complete_sequence(self) -> int:
        """The last sequence whose push is complete: held parts are not kept over a restart."""
        return self.last_sequence - len(self.held)

    def known(self, sequence: int, digest: int) -> Ticket | None:
        """Return the ticket of a part that was accepted before, or None for the next new one.

        Raises:
            PushRejectedError: a gap, or other data under a used sequence.
        """
        if sequence == self.last_sequence + 1:
            return None
        if sequence > self.last_sequence:
            raise PushRejectedError(
                f"trainer {self.trainer!r}: part {sequence} after part {self.last_sequence}: parts between them are missing; "
                "send them in order"
            )
        ticket = self.answers.get(sequence)
        if ticket is None:  # long since applied, or applied before a restart
            return Ticket(sequence, digest, 0, final=PushReply(sequence, "applied"))
        if ticket.digest != digest:
            raise PushRejectedError(
                f"trainer {self.trainer!r}: other data under sequence {sequence}, which was accepted before (digest {digest:016x}, "
                f"accepted {ticket.digest:016x}); a restarted trainer must say hello with incarnation 0"
            )
        return ticket

    def accept(self, part: Part, step: int) -> None:
        """Take the next part; parts of another push that were never completed are given up, not mixed into this one."""
        if step != self.held_step:
            self.drop_held({"type": "PushRejectedError", "message": f"trainer {self.trainer!r} began step {step} instead of completing it"})
        self.held_step = step
        self.last_sequence = part.ticket.sequence
        self.answers[part.ticket.sequence] = part.ticket
        self.held.append(part)
        while len(self.answers) > KEPT_ANSWERS and next(iter(self.answers.values())).final is not None:
            self.answers.popitem(last=False)

    def complete(self, step: int) -> Push:
        """Return the push that the last part completed."""
        push = Push(self.trainer, self.incarnation, step, tuple(self.held))
        self.held = []
        self.n_waiting += 1
        self.bytes_waiting += push.size_bytes
        return push

    def drop_held(self, reason: dict[str, str]) -> None:
        """Give up an incomplete push: nothing of it is applied."""
        held, self.held = self.held, []
        for part in held:
            part.ticket.finish(PushReply(part.ticket.sequence, "failed", error=reason))


class Sessions:
    """All sessions of a shard.

    Args:
        issues: whether this shard issues incarnations (shard 0).
        next_incarnation: the first it may issue.
        kept: (trainer, incarnation, last sequence) from a clean stop.
    """

    def __init__(self, issues: bool, next_incarnation: int = 1, kept: list[tuple[str, int, int]] | None = None) -> None:
        self._issues = issues
        self.next_incarnation = next_incarnation
        self._sessions = {name: Session(name, number, last, live=False) for name, number, last in kept or []}

    @property
    def live(self) -> list[Session]:
        """Sessions that said hello and not yet goodbye."""
        return [session for session in self._sessions.values() if session.live]

    def kept(self) -> list[tuple[str, int, int]]:
        """Return what a restart needs: (trainer, incarnation, last sequence of a complete push)."""
        return [(s.trainer, s.incarnation, s.complete_sequence) for s in self._sessions.values()]

    def check_hello(self, trainer: str, incarnation: int) -> None:
        """Refuse a hello that could not be granted; changes nothing."""
        if not 1 <= len(trainer) <= MAX_NAME or incarnation < 0:
            raise PushRejectedError(
                f"trainer {trainer[:MAX_NAME]!r}, incarnation {incarnation}: a name of 1 to {MAX_NAME} characters and a number"
            )
        old = self._sessions.get(trainer)
        if old is None and len(self._sessions) >= MAX_SESSIONS and all(s.live for s in self._sessions.values()):
            raise PushRejectedError(f"{MAX_SESSIONS} trainers are here already")
        if incarnation == 0:
            if not self._issues:
                raise PushRejectedError("incarnations are issued by shard 0; say hello there first and bring its number here")
        elif old is not None and incarnation < old.incarnation:
            raise _fenced(trainer, incarnation, old.incarnation)
        elif self._issues and (old is None or incarnation > old.incarnation):
            raise PushRejectedError(f"trainer {trainer!r}: incarnation {incarnation} was not issued to it by this shard")

    def hello(self, trainer: str, incarnation: int) -> Session:
        """Grant a hello that `check_hello` passed; an older incarnation of the trainer is fenced from here on."""
        old = self._sessions.get(trainer)
        if incarnation == 0:
            incarnation, self.next_incarnation = self.next_incarnation, self.next_incarnation + 1
        if old is not None and old.incarnation == incarnation:
            old.live = True
            return old
        if old is not None:
            old.drop_held({"type": "FencedError", "message": str(_fenced(trainer, old.incarnation, incarnation))})
        elif len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(s.trainer for s in self._sessions.values() if not s.live)]
        session = self._sessions[trainer] = Session(trainer, incarnation)
        return session

    def find(self, trainer: str, incarnation: int) -> Session:
        """Return the session in force of a trainer.

        Raises:
            FencedError: a newer incarnation took over.
            PushRejectedError: it never said hello, or said goodbye.
        """
        session = self._sessions.get(trainer)
        if session is None or incarnation > session.incarnation or (incarnation == session.incarnation and not session.live):
            raise PushRejectedError(f"trainer {trainer!r}, incarnation {incarnation}: not known here; say hello first")
        if incarnation < session.incarnation:
            raise _fenced(trainer, incarnation, session.incarnation)
        return session

    def bye(self, trainer: str, incarnation: int) -> None:
        """End a session; what it completed is still applied, an incomplete push is given up."""
        session = self.find(trainer, incarnation)
        # The numbers of the given-up parts are free again: nothing of them was applied, so the same trainer may come back and send them.
        session.last_sequence = session.complete_sequence
        for part in session.held:
            session.answers.pop(part.ticket.sequence, None)
        session.answers = OrderedDict((number, ticket) for number, ticket in session.answers.items() if ticket.final is None)
        session.drop_held({"type": "PushRejectedError", "message": f"trainer {trainer!r} said goodbye before the push was complete"})
        session.live = False

    def settled(self, push: Push) -> None:
        """Count a push as applied or failed."""
        session = self._sessions.get(push.trainer)
        if session is not None and session.incarnation == push.incarnation:
            session.n_waiting -= 1
            session.bytes_waiting -= push.size_bytes

    def drop_all_held(self, reason: dict[str, str]) -> None:
        """Give up every incomplete push (the shard failed)."""
        for session in self._sessions.values():
            session.drop_held(reason)


def _fenced(trainer: str, incarnation: int, newer: int) -> FencedError:
    return FencedError(
        f"trainer {trainer!r}: incarnation {incarnation} was fenced by the newer incarnation {newer}; this process must stop pushing"
    )
