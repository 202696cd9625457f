"""How far a journal reaches, without opening it: nothing is changed, so whoever finds too little can leave all as it was."""

from pathlib import Path

from kvemb.errors import JournalBehindError, JournalDamagedError
from kvemb.schema.record import split_version

from . import segment_files
from .entry import version_of
from .log_reader import read_entries, recover
from .segment import START, Position


def last_batch(folder: Path, start: Position = START) -> int:
    """Return the k of the last batch from a position on; 0 when there is none.

    Args:
        folder: of the journal.
        start: of the saved state that the journal is replayed on.

    Raises:
        JournalBehindError: the journal ends before `start`.
        JournalDamagedError: a file is missing, or does not hold what was written to it.
    """
    try:
        segments = recover(folder, sync=False)
    except OSError as error:
        raise JournalDamagedError(f"{folder}: the journal cannot be read: {error.strerror}") from error
    last = Position(segments[-1].header.number, segments[-1].end) if segments else START
    # A failed sync moves entries to another segment, and positions behind them stay; but then that segment is there.
    if start > last:
        raise JournalBehindError(
            f"{segment_files.path_of(folder, start.segment)}: the saved state goes on from offset {start.offset} of this segment, but the "
            f"journal ends at offset {last.offset} of segment {last.segment}: the pushes acknowledged after that are missing. Put the "
            "files of that folder back as they were, or the data folder of the shard's last owner."
        )
    k = 0
    for _, payload in read_entries([one for one in segments if one.header.number >= start.segment], start):
        version = version_of(payload)
        k = split_version(version)[1] if version else k
    return k
