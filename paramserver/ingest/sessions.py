"""Sessions: which incarnation of each trainer is in force, and which of its parts this shard has taken. Pure; `Ingest` holds the lock.

Shard 0 issues incarnations, one counter for the whole cluster, so that they order trainers; the other shards take over higher ones. Parts
of one session are numbered 1, 2, 3, …. The next one is taken, an earlier one is a duplicate and gets its first answer, a later one is a
gap.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack

from kvemb.errors import FencedError, PushRejectedError, ShardUnavailableError, to_wire
from kvemb.protocol.messages import PushReply

from ..model.batch import PartTicket, Push, ReceivedPart

KEPT_ANSWERS = 64
MAX_SESSIONS = 16384
MAX_NAME = 255


@dataclass(eq=False)
class Session:
    """One incarnation of a trainer: which of its parts were taken, which are journaled, and their answers.

    Args:
        trainer: its name.
        incarnation: the one in force.
        last_sequence: of the last part that was taken.
        journaled_sequence: of the last part whose push is in the journal: a restart goes on from there.
        live: whether it said hello to this process and not yet goodbye.
        restored: whether it is known from before this process began, and was not heard of since.
        recorded: whether its last hello is in the journal.
        incomplete: parts of a push whose last part is still to come.
        incomplete_step: the step of that push.
        answers: tickets of recent parts by sequence, oldest first; every part that has no outcome yet is among them.
        n_waiting, bytes_waiting: complete pushes that are not applied yet.
        refused: sequences of parts in refused steps, as read from the journal at the start.
        dropped: why the predecessor lost its place in a sync job, where this session is only a fence: no process has its number.
    """

    trainer: str
    incarnation: int
    last_sequence: int = 0
    journaled_sequence: int = 0
    live: bool = True
    restored: bool = False
    recorded: bool = False
    incomplete: list[ReceivedPart] = field(default_factory=list)
    incomplete_step: int = 0
    answers: OrderedDict[int, PartTicket] = field(default_factory=OrderedDict)
    n_waiting: int = 0
    bytes_waiting: int = 0
    refused: set[int] = field(default_factory=set)
    dropped: str = ""

    def known(self, sequence: int, digest: int) -> PartTicket | None:
        """Return the ticket of a part that was taken before, or None for the next new one."""
        if sequence == self.last_sequence + 1:
            return None
        if sequence > self.last_sequence:
            raise PushRejectedError(
                f"trainer {self.trainer!r}: part {sequence} after part {self.last_sequence}: parts between them are missing; "
                "send them in order"
            )
        ticket = self.answers.get(sequence)
        if ticket is None:  # long since applied, or applied before a restart
            return PartTicket(sequence, digest, 0, final=self._first_outcome(sequence), accepted=True)
        if ticket.digest != digest:
            raise PushRejectedError(
                f"trainer {self.trainer!r}: other data under sequence {sequence}, which was taken before (digest {digest:016x}, "
                f"taken {ticket.digest:016x}); a restarted trainer must say hello with incarnation 0"
            )
        return ticket

    def _first_outcome(self, sequence: int) -> PushReply:
        if sequence not in self.refused:
            return PushReply(sequence, "applied")
        text = f"trainer {self.trainer!r}: part {sequence} was in a step that was refused before the shard was restarted"
        return PushReply(sequence, "failed", error={"type": "PushRejectedError", "message": text})

    def accept(self, part: ReceivedPart, step: int) -> None:
        """Take the next part; parts of another push that were never completed are given up, not mixed into this one."""
        if self.incomplete and step != self.incomplete_step:
            self.drop_incomplete(
                {"type": "PushRejectedError", "message": f"trainer {self.trainer!r} began step {step} instead of completing it"}
            )
        self.incomplete_step = step
        self.last_sequence = part.ticket.sequence
        self.answers[part.ticket.sequence] = part.ticket
        self.incomplete.append(part)
        while len(self.answers) > KEPT_ANSWERS and next(iter(self.answers.values())).final is not None:
            self.answers.popitem(last=False)

    def complete(self, step: int, now_s: float = 0.0) -> Push:
        """Return the push that the last part completed."""
        push = Push(self.trainer, self.incarnation, step, tuple(self.incomplete), now_s)
        self.incomplete = []
        self.n_waiting += 1
        self.bytes_waiting += push.size_bytes
        return push

    def record(self) -> None:
        """Record that the last hello is in the journal."""
        self.recorded = True

    def give_up_incomplete(self, reason: dict[str, str]) -> None:
        """Give up an incomplete push; its sequences are free again."""
        self.last_sequence -= len(self.incomplete)
        for part in self.incomplete:
            self.answers.pop(part.ticket.sequence, None)
        self.drop_incomplete(reason)

    def take_back(self, push: Push) -> None:
        """Free the sequences of a push that has had no effect, and of all pushes behind it: their trainer will use them again."""
        first = push.parts[0].ticket.sequence
        self.answers = OrderedDict((number, ticket) for number, ticket in self.answers.items() if number < first)
        self.last_sequence = min(self.last_sequence, first - 1)

    def drop_incomplete(self, reason: dict[str, str]) -> None:
        """Give up an incomplete push: nothing of it is applied."""
        given_up, self.incomplete = self.incomplete, []
        for part in given_up:
            part.ticket.finish(PushReply(part.ticket.sequence, "failed", error=reason))


class Sessions:
    """The sessions of all trainers that this shard knows. Not thread-safe: ingest locks."""

    def __init__(self, issues: bool, next_incarnation: int = 1, restored: list[tuple[str, int, int]] | None = None) -> None:
        self._issues = issues
        self.next_incarnation = next_incarnation
        self._sessions = {name: Session(name, number, last, last, live=False, restored=True) for name, number, last in restored or []}

    @property
    def live(self) -> list[Session]:
        """Sessions that said hello and not yet goodbye."""
        return [session for session in self._sessions.values() if session.live]

    def to_save(self) -> list[tuple[str, int, int]]:
        """Return the state for a restart: (trainer, incarnation, last sequence in the journal)."""
        return [(s.trainer, s.incarnation, s.journaled_sequence) for s in self._sessions.values()]

    def restore(self, trainer: str, incarnation: int, sequence: int = 0, *, refused: bool = False) -> None:
        """Take over an entry of the journal: a hello, or the last sequence of a push; an older one changes nothing."""
        self.next_incarnation = max(self.next_incarnation, incarnation + 1)
        session = self._sessions.get(trainer)
        if session is None or incarnation > session.incarnation:
            self._make_room(trainer)
            session = self._sessions[trainer] = Session(trainer, incarnation, live=False, restored=True)
        if incarnation == session.incarnation and sequence > session.journaled_sequence:
            session.last_sequence = session.journaled_sequence = sequence
            session.refused |= {sequence} if refused else set()

    def check_hello(self, trainer: str, incarnation: int) -> None:
        """Refuse a hello that could not be granted; changes nothing."""
        if not 1 <= len(trainer) <= MAX_NAME or incarnation < 0:
            raise PushRejectedError(
                f"trainer {trainer[:MAX_NAME]!r}, incarnation {incarnation}: a name of 1 to {MAX_NAME} characters and a number"
            )
        old = self._sessions.get(trainer)
        if old is None and len(self._sessions) >= MAX_SESSIONS and self._least_needed() is None:
            raise PushRejectedError(
                f"trainer {trainer!r}: {MAX_SESSIONS} trainers that have pushed are here already, the most a shard knows; those that are "
                "done must close their cluster"
            )
        if incarnation == 0:
            if not self._issues:
                raise PushRejectedError("incarnations are issued by shard 0; say hello there first and bring its number here")
        elif old is not None and incarnation < old.incarnation:
            raise _fenced(incarnation, old)
        elif self._issues and (old is None or incarnation > old.incarnation):
            raise PushRejectedError(f"trainer {trainer!r}: incarnation {incarnation} was not issued to it by this shard")

    def hello(self, trainer: str, incarnation: int) -> Session:
        """Grant a hello that `check_hello` passed; an older incarnation of the trainer is fenced from here on."""
        old = self._sessions.get(trainer)
        if incarnation == 0:
            incarnation, self.next_incarnation = self.next_incarnation, self.next_incarnation + 1
        if old is not None and old.incarnation == incarnation:
            old.live, old.restored, old.dropped = True, False, ""
            return old
        self._make_room(trainer)
        session = self._sessions[trainer] = Session(trainer, incarnation)
        if old is not None:
            old.drop_incomplete(to_wire(_fenced(old.incarnation, session)))
        return session

    def fence(self, trainer: str, why: str) -> int:
        """Refuse all parts that a trainer's incarnation sends from now on; return the number of the fence, above the incarnation.

        To journal that number as a hello keeps the fence over a restart. It is 0 when the trainer is not known.
        """
        old = self._sessions.get(trainer)
        if old is None:
            return 0
        number = old.incarnation + 1
        if self._issues:  # elsewhere no counter is needed: a number issued to the trainer later is above its last incarnation
            number, self.next_incarnation = self.next_incarnation, self.next_incarnation + 1
        session = self._sessions[trainer] = Session(trainer, number, live=False, dropped=why)
        old.drop_incomplete(to_wire(_fenced(old.incarnation, session)))
        return number

    def fenced(self, trainer: str, incarnation: int) -> FencedError:
        """Return the error that tells an older incarnation of a trainer why it must stop."""
        return _fenced(incarnation, self._sessions[trainer])

    def is_live(self, trainer: str, incarnation: int) -> bool:
        """Whether this incarnation said hello to this process and not yet goodbye."""
        session = self._sessions.get(trainer)
        return session is not None and session.live and session.incarnation == incarnation

    def _make_room(self, trainer: str) -> None:
        if trainer not in self._sessions and len(self._sessions) >= MAX_SESSIONS:
            least = self._least_needed()
            if least is not None:
                del self._sessions[least.trainer]

    def _least_needed(self) -> Session | None:
        """The session to forget first: of a trainer that never pushed and has left; then never pushed; then has left. The oldest."""
        spare = [session for session in self._sessions.values() if not (session.live and session.last_sequence)]
        return min(spare, key=lambda session: (session.last_sequence > 0, session.live), default=None)

    def find(self, trainer: str, incarnation: int) -> Session:
        """Return the session in force of a trainer."""
        session = self.find_any(trainer, incarnation)
        if session.restored:
            raise ShardUnavailableError(f"trainer {trainer!r}: this shard was restarted; say hello again")
        return session

    def find_any(self, trainer: str, incarnation: int) -> Session:
        """Return the session in force of a trainer, also one that said hello before the shard's restart; raises as `find` does."""
        session = self._sessions.get(trainer)
        here = session is not None and (session.live or session.restored)
        if session is None or incarnation > session.incarnation or (incarnation == session.incarnation and not here):
            raise PushRejectedError(f"trainer {trainer!r}, incarnation {incarnation}: not known here; say hello first")
        if incarnation < session.incarnation:
            raise _fenced(incarnation, session)
        return session

    def bye(self, trainer: str, incarnation: int) -> None:
        """End a session; its complete pushes are still applied, an incomplete one is given up."""
        session = self.find_any(trainer, incarnation)
        # The numbers of the given-up parts are free again: nothing of them was applied, so the same trainer may come back and send them.
        session.give_up_incomplete(
            {"type": "PushRejectedError", "message": f"trainer {trainer!r} said goodbye before the push was complete"}
        )
        session.answers = OrderedDict((number, ticket) for number, ticket in session.answers.items() if ticket.final is None)
        session.live = session.restored = session.recorded = False

    def journaled(self, push: Push) -> None:
        """Record that a push is in the journal."""
        session = self._sessions.get(push.trainer)
        if session is not None and session.incarnation == push.incarnation:
            session.journaled_sequence = max(session.journaled_sequence, push.parts[-1].ticket.sequence)

    def settled(self, push: Push) -> None:
        """Count a push as applied or failed."""
        session = self._sessions.get(push.trainer)
        if session is not None and session.incarnation == push.incarnation:
            session.n_waiting -= 1
            session.bytes_waiting -= push.size_bytes

    def drop_all_incomplete(self, reason: dict[str, str]) -> None:
        """Give up every incomplete push (the shard failed)."""
        for session in self._sessions.values():
            session.drop_incomplete(reason)


def _fenced(incarnation: int, newer: Session) -> FencedError:
    who = f"trainer {newer.trainer!r}: incarnation {incarnation}"
    if newer.dropped:
        return FencedError(f"{who} was dropped from the sync job: {newer.dropped}; connect again to join the job from its next step on")
    gone = "" if newer.live else ", or dropped from the sync job"  # of a fence from before the shard's restart only the number is known
    return FencedError(f"{who} was fenced by the newer incarnation {newer.incarnation}{gone}; this process must stop pushing")


def pack_sessions(sessions: Sequence[tuple[str, int, int]]) -> bytes:
    """Return (trainer, incarnation, last sequence in the journal) of each session as bytes."""
    packed: bytes = msgpack.packb([list(session) for session in sessions])
    return packed


def sessions_in(packed: bytes) -> list[tuple[str, int, int]]:
    """Return the sessions that `pack_sessions` was given."""
    return [(trainer, incarnation, sequence) for trainer, incarnation, sequence in msgpack.unpackb(packed)]
