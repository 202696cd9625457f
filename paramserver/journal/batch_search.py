"""Looking for a batch in the journal: whose pushes it holds, and where a reader goes on after it. Reads; changes nothing."""

from kvemb.net.deadline import Deadline
from kvemb.schema.record import split_version

from .entry import MOVED, EventEntry, Find, batch_head, decode_entry
from .segment import HEADER_SIZE, Position
from .write_ahead_log import Journal


def trainers_of(journal: Journal, version: int, deadline: Deadline) -> list[str]:
    """Return the trainers whose pushes were merged into a batch; [] where the journal does not have it, or time is up.

    Segments are tried from the last one back: one is read as far as the batch, of those behind it only the first batch.
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


def behind_version(journal: Journal, version: int) -> tuple[Position, int] | None:
    """Return where the entry of the last batch up to a version ends, and the batch's k; None where the journal begins with a later one.

    Segments are tried from the last one back, as of the one that has it all entries up to the version are read.
    """
    for number in range(journal.end.segment, journal.start.segment - 1, -1):
        found = None
        for after, payload in journal.read(Position(number, HEADER_SIZE)):
            at = batch_head(payload)[0]
            if at > version:
                break
            if at:
                found = after, split_version(at)[1]
        if found is not None:
            return found
    return None


def first_batch(journal: Journal) -> int | None:
    """Return the k of the first batch that the journal has; None where it has none. Raises as `behind_version`."""
    for _, payload in journal.read():
        if version := batch_head(payload)[0]:
            return split_version(version)[1]
    return None


def before_move(journal: Journal, serial: int, find: Find) -> tuple[Position, int] | None:
    """Return where the event of a move begins, and the k of the batch before it; None where the journal has none. Raises as above.

    The k is 0 where the journal has no earlier batch.
    """
    before, k = journal.start, 0
    for after, payload in journal.read():
        version = batch_head(payload)[0]
        if version:
            k = split_version(version)[1]
        elif isinstance(entry := decode_entry(payload, find), EventEntry) and entry.name == MOVED and entry.serial == serial:
            return before, k
        before = after
    return None
