"""Whose pushes a batch holds, looked up in the journal: for an operator's question. Recovery reads from the beginning instead."""

from kvemb.net.deadline import Deadline

from .entry import batch_head
from .segment import HEADER_SIZE, Position
from .write_ahead_log import Journal


def trainers_of(journal: Journal, version: int, deadline: Deadline) -> list[str]:
    """Return the trainers whose pushes were merged into a batch; [] where the journal does not have it, or time is up.

    Segments are tried from the last one back: one is read as far as the batch, of those behind it only the first batch.

    Raises:
        JournalDamagedError: a segment cannot be read, perhaps because it was discarded meanwhile.
    """
    for number in range(journal.end.segment, journal.start.segment - 1, -1):
        earlier = True  # as long as no batch was seen here
        for after, payload in journal.read(Position(number, HEADER_SIZE)):
            at, trainers = batch_head(payload)
            if at == version:
                return trainers
            if after.segment != number or at > version or deadline.expired:
                break
            earlier = earlier and not at
        if not earlier or deadline.expired:
            return []
    return []
