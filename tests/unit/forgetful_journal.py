"""A journal that keeps nothing, for tests of threads and orders that need no disk."""

from paramserver.journal import START, Position


class ForgetfulJournal:
    """Takes what `Ledger` asks of a journal, and forgets it."""

    size_bytes = 0
    end = START

    def append(self, payload: object) -> Position:
        return START

    def commit(self) -> None:
        """Nothing to keep."""

    def discard_before(self, position: Position) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """Nothing is open."""
