"""What makes a promise durable: the journal, and the question asked before every answer: is the shard still ours?

A process that was taken for dead may wake up in the middle of anything. So the epoch is read again after every commit, before anybody is
told. What was committed before a successor raised the epoch is in the journal that the successor reads. What comes later is not
acknowledged. No threads here; thread-safe.
"""

from collections.abc import Callable

from . import Entry, Journal, Position, SessionEntry, encode_entry

NO_INCARNATION = 0
"""In a SessionEntry: the trainer said goodbye."""


class FencedLog:
    """The journal of one shard, which promises nothing for a shard that has another owner.

    Args:
        journal: open.
        still_ours: raises FencedError once another process owns the shard.
    """

    def __init__(self, journal: Journal, still_ours: Callable[[], None]) -> None:
        self.journal, self._still_ours = journal, still_ours

    def append(self, entry: Entry) -> Position:
        """Write an entry, durable with the next `commit`; return the position behind it.

        Raises:
            JournalFullError: nothing of the entry is in the journal.
        """
        return self.journal.append(encode_entry(entry))

    def commit(self) -> None:
        """Return when everything appended is durable and the shard is still ours: only then may it be acknowledged.

        Raises:
            JournalFullError: not durable; try again.
            FencedError: another process owns the shard; nothing may be acknowledged any more.
        """
        self.journal.commit()
        self._still_ours()

    def record(self, trainer: str, incarnation: int) -> None:
        """Make a hello (or, with NO_INCARNATION, a goodbye) durable. Raises as `append` and `commit` do."""
        self.append(SessionEntry(trainer, incarnation))
        self.commit()

    def discard_before(self, position: Position) -> None:
        """Let go of what lies before a position that the saved state has reached.

        Raises:
            FencedError: another process owns the shard, whose state may need it; nothing was deleted.
            ParameterServerError: a file cannot be deleted.
        """
        self._still_ours()
        self.journal.discard_before(position)
