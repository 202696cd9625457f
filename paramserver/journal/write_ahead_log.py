"""The journal of one shard: entries are appended, committed in groups, read back in order, and discarded once a snapshot holds them.

Each process begins a segment of its own, whose header fixes where its predecessor's last one ended. Bytes that an older process, still
alive, writes there later are never read. Only committed entries are ever yielded. The form of a file is in `segment`, that of an entry in
`entry`; neither is known here.

A failed sync leaves unknown which bytes reached the disk, and asking again would report success without writing them. (Rebello et al., "Can
applications recover from fsync failures?", USENIX ATC 2020.) So the segment ends where it was last known durable, and later entries are
written to a new one before `commit` returns.

A process that was taken for dead may wake up in the middle of anything. So `FencedLog` reads the epoch again after every commit, before
any trainer is told. Entries committed before a successor raised the epoch are in the journal that the successor reads. Later ones are not
acknowledged.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvemb.errors import ClosedError, FencedError, InvalidInputError, JournalFullError, ParameterServerError
from kvemb.process import sync_folder

from ..shard_process.data_dir import make_folder, mend
from . import segment_files
from .entry import Entry, SessionEntry, encode_entry
from .log_reader import Segment, read_entries, recover
from .segment import ENTRY_HEADER_SIZE, HEADER_SIZE, START, Position, SegmentHeader, damaged, frame

Pieces = Sequence[bytes | memoryview]
_MAX_RACES = 16


@dataclass(eq=False)
class _Current(Segment):
    """The segment that is written: `end` is where the committed entries end, `written` where all do; not `trusted` after a failed sync."""

    descriptor: int
    written: int
    trusted: bool = True

    def commit(self, *, fsync: bool) -> None:
        """Record that all that is written is committed, once it is durable."""
        if fsync and self.written > self.end:
            segment_files.sync(self.descriptor)
        self.end = self.written


class Journal:
    """One folder of segments. Thread-safe; not fork-safe. Opening it recovers what is there and begins a new segment.

    Raises:
        JournalDamagedError: files are missing, or do not hold the bytes that were written to them; nothing was changed.
    """

    def __init__(self, folder: Path, durability: str, *, segment_bytes: int = 256 << 20) -> None:
        if durability not in ("fsync", "os"):
            raise InvalidInputError(f"a journal's durability is {durability!r}; give 'fsync' or 'os'")
        self._folder, self._fsync, self._segment_bytes = folder, durability == "fsync", segment_bytes
        self._lock = threading.RLock()
        self._pending: list[list[bytes | memoryview]] = []
        self._litter: Path | None = None
        self._closed = False
        self._past, self._current = self._open()

    @property
    def start(self) -> Position:
        """Where the oldest entry that is kept begins."""
        with self._lock:
            first = self._past[0] if self._past else self._current
            return Position(first.header.number, HEADER_SIZE)

    @property
    def end(self) -> Position:
        """Where the next entry begins, unless it begins a new segment."""
        with self._lock:
            return Position(self._current.header.number, self._current.written)

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(segment.end for segment in self._past) + self._current.written

    def append(self, pieces: Pieces) -> Position:
        """Write an entry; it is neither durable nor visible before `commit`.

        Returns:
            The position after it.

        Raises:
            JournalFullError: nothing of it was kept; entries before it are as they were. Try again later.
        """
        with self._lock:
            self._check_open()
            kept = [memoryview(piece).cast("B") for piece in pieces]
            size = ENTRY_HEADER_SIZE + sum(len(piece) for piece in kept)
            if self._needs_segment(size):
                self.commit()
                if self._needs_segment(size):
                    self._rotate()
            self._write(self._current, kept)
            self._pending.append(list(kept))
            return self.end

    def commit(self) -> None:
        """Make the appended entries durable, and visible.

        Raises:
            JournalFullError: they are not known durable, or the segment is not in its folder any more. They are kept: call `commit` again,
                do not append them again.
        """
        with self._lock:
            self._check_open()
            if self._current.trusted:
                try:
                    self._current.commit(fsync=self._fsync)
                except OSError:
                    self._current.trusted = False
            try:
                segment_files.require_in_place(self._current.path, self._current.descriptor)
            except OSError as error:
                raise _full(self._current.path, error) from error
            if not self._current.trusted and self._pending:
                self._rotate()
            self._pending.clear()

    def read(self, start: Position = START) -> Iterator[tuple[Position, memoryview]]:
        """Yield (position after it, payload) of the committed entries from `start` on, as of this call; one at a time in memory."""
        with self._lock:
            if start > self.end:
                raise damaged(str(self._current.path), self._current.written, f"the journal ends here, expected entries up to {start}")
            segments = [Segment(s.path, s.header, s.end) for s in [*self._past, self._current] if s.header.number >= start.segment]
        return read_entries(segments, start)

    def discard_before(self, position: Position) -> None:
        """Delete the segments before the one that `position` names; that one stays, and so does the current one.

        It stays even when the position is its end. A later `read` from this position must find its segment, which shows that nothing is
        missing. A position that a failed sync has moved to a later segment is safe, too: it still names the earlier one.
        """
        with self._lock:
            while self._past and self._past[0].header.number < position.segment:
                try:
                    self._past[0].path.unlink(missing_ok=True)
                    if self._fsync:
                        # One after another: a later segment must never be gone before an earlier one.
                        sync_folder(self._folder)
                except OSError as error:
                    raise ParameterServerError(f"{self._past[0].path}: cannot be deleted: {error.strerror}") from error
                self._past.pop(0)

    def close(self) -> None:
        """Stop writing. Entries that were appended and not committed may or may not be durable."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pending.clear()
                os.close(self._current.descriptor)

    def give_up(self) -> None:
        """Stop, and delete the segment that was begun at the opening if nothing was committed to it.

        Its header says where the segment before it ends. Where that end is found to be too early, an operator may put that segment's whole
        file back, and all of it must count.
        """
        with self._lock:
            if not self._closed and self._current.end == HEADER_SIZE:
                self._closed = True
                self._drop(self._current.descriptor, self._current.path)
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._folder}: the journal is closed")

    def _open(self) -> tuple[list[Segment], _Current]:
        """Recover the segments of earlier processes and begin one that follows them."""
        for race in range(_MAX_RACES):
            try:
                make_folder(self._folder)
                past = recover(self._folder, sync=self._fsync)
            except OSError as error:
                raise ParameterServerError(f"{self._folder}: the journal cannot be read: {error.strerror}") from error
            try:
                return past, self._begin(past[-1].header.number + 1, past[-1].end) if past else self._begin(1, 0)
            except FencedError:  # an older process that lives on has just begun this one: recover it, too
                if race == _MAX_RACES - 1:
                    raise
        raise AssertionError

    # --- writing --------------------------------------------------------------------------------------------------------------------

    def _needs_segment(self, size: int) -> bool:
        current = self._current
        return not current.trusted or (current.written > HEADER_SIZE and current.written + size > self._segment_bytes)

    def _write(self, segment: _Current, pieces: list[memoryview]) -> None:
        """Write an entry after the others, or leave the segment as it was."""
        head = frame(segment.header, segment.written, segment.end, list(pieces))
        try:
            segment_files.write_all(segment.descriptor, [head, *pieces], segment.written)
        except OSError as error:
            try:
                os.ftruncate(segment.descriptor, segment.written)
            except OSError:
                segment.trusted = False
            raise _full(segment.path, error) from error
        segment.written += len(head) + sum(len(piece) for piece in pieces)

    def _rotate(self) -> None:
        """Go on in a new segment, which takes over the uncommitted entries. All of it succeeds, or the old segment stays."""
        old = self._current
        new = self._begin(old.header.number + 1, old.end)
        try:
            for pieces in self._pending:
                self._write(new, pieces)  # type: ignore[arg-type]
            new.commit(fsync=self._fsync)
        except (OSError, JournalFullError) as error:
            self._drop(new.descriptor, new.path)
            raise (error if isinstance(error, JournalFullError) else _full(new.path, error)) from error
        self._past.append(Segment(old.path, old.header, old.end))
        self._current = new
        self._pending.clear()
        os.close(old.descriptor)

    def _begin(self, number: int, previous_end: int) -> _Current:
        header = SegmentHeader(number, int.from_bytes(os.urandom(8), "little"), previous_end)
        path = segment_files.path_of(self._folder, number)
        try:
            if self._litter is not None:
                self._litter.unlink(missing_ok=True)
                self._litter = None
            descriptor = segment_files.create(path)
        except FileExistsError as error:
            raise FencedError(f"{path}: another process has begun this segment of the journal: it owns the shard now") from error
        except OSError as error:
            raise _full(path, error) from error
        try:
            segment_files.write_all(descriptor, [header.pack()], 0)
            if self._fsync:
                segment_files.sync(descriptor)
                sync_folder(self._folder)
        except OSError as error:
            self._drop(descriptor, path)
            raise _full(path, error) from error
        return _Current(path, header, HEADER_SIZE, descriptor, HEADER_SIZE)

    def _drop(self, descriptor: int, path: Path) -> None:
        """Delete a segment for whose entries no promise was made."""
        os.close(descriptor)
        try:
            path.unlink()
        except OSError:
            self._litter = path  # before a segment is begun under this number again


def _full(path: Path, error: OSError) -> JournalFullError:
    return JournalFullError(f"{path}: {error.strerror}; nothing is acknowledged until the journal can be written: {mend(error)}.")


NO_INCARNATION = 0
"""In a SessionEntry: the trainer said goodbye."""


class FencedLog:
    """The journal of one shard, which promises nothing for a shard that has another owner."""

    def __init__(self, journal: Journal, still_ours: Callable[[], None]) -> None:
        self.journal, self._still_ours = journal, still_ours

    def append(self, entry: Entry) -> Position:
        """Write an entry, durable with the next `commit`; return the position after it.

        Raises:
            JournalFullError: nothing of the entry is in the journal.
        """
        return self.journal.append(encode_entry(entry))

    def commit(self) -> None:
        """Return when everything appended is durable and the shard is still ours: only then may it be acknowledged.

        Raises:
            FencedError: another process owns the shard; nothing may be acknowledged any more.
        """
        self.journal.commit()
        try:
            self._still_ours()
        except OSError as error:
            raise _full(Path(error.filename or "?"), error) from error

    def record(self, trainer: str, incarnation: int) -> None:
        """Make a hello (or, with NO_INCARNATION, a goodbye) durable. Raises as `append` and `commit` do."""
        self.append(SessionEntry(trainer, incarnation))
        self.commit()

    def discard_before(self, position: Position) -> None:
        """Discard entries before a position that the saved state has reached.

        Raises:
            FencedError: another process owns the shard, whose state may need them; nothing was deleted.
        """
        self._still_ours()
        self.journal.discard_before(position)


class AppliedMark:
    """The last batch applied. Thread-safe; costs an apply one notification.

    Attributes:
        now: the number of the last batch applied, and the position after its entry.
        n_changes: how often the mark has changed, or its readers were woken.
    """

    def __init__(self, k: int, position: Position) -> None:
        self._changed = threading.Condition()
        self.now, self.n_changes = (k, position), 0

    def reach(self, k: int, position: Position) -> None:
        """Note that a batch is applied, all of it."""
        with self._changed:
            self.now = k, position
            self.n_changes += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Have every reader look again: there is an entry that is no batch, or a reader is to end."""
        with self._changed:
            self.n_changes += 1
            self._changed.notify_all()

    def wait(self, n_changes: int, timeout_s: float) -> None:
        """Wait until there are more changes than these."""
        with self._changed:
            self._changed.wait_for(lambda: self.n_changes != n_changes, timeout_s)
