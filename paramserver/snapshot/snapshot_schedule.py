"""The schedule of local snapshots: when one is due, and how the journal is cut after it, so that neither journal nor recovery time grows.

A snapshot begins when the journal has reached its size. It proceeds a slice at a time between batches, and ends with an image of the
index. Only then the journal's entries up to the snapshot's cut are discarded. Apply thread only.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence

from kvemb.schema.record import split_version
from kvemb.schema.table_def import TableDef

from ..engine.storage_pace import Pause
from ..journal import START, BatchEntry, Journal, Position, decode_entry
from ..journal.write_ahead_log import FencedLog
from ..model.tables import TableState
from . import SnapshotProgress, Snapshotter

log = logging.getLogger("paramserver")


class LocalSnapshots:
    """Says when one shard takes a local snapshot, and cuts its journal afterwards.

    Args:
        fenced_log: the journal.
        snapshotter: takes them.
        tables: all of the shard.
        save: saves the image of the shard as of a position; the pause is for tries of storage.
        max_bytes: of the journal, above which one is due.
        needed: whether rows exist that no snapshot and no journal has (of an earlier release, without a journal): then one is due at once.

    Attributes:
        due_bytes: `step` has nothing to do while the journal is not larger; -1 while a snapshot is under way, or needed.
    """

    def __init__(
        self,
        fenced_log: FencedLog,
        snapshotter: Snapshotter,
        tables: Callable[[], Sequence[TableState]],
        *,
        save: Callable[[Position, Pause], None],
        max_bytes: int,
        needed: bool = False,
    ) -> None:
        self._fenced_log, self.journal, self._snapshotter, self._tables = fenced_log, fenced_log.journal, snapshotter, tables
        self._save, self._max_bytes = save, max_bytes
        self.due_bytes = -1 if needed else max_bytes
        self._steps: Generator[SnapshotProgress, None, None] | None = None
        self._now: tuple[Position, Pause]  # of the step under way
        self._cut, self._again_bytes = START, self.due_bytes  # of the snapshot under way
        self._begun_s = 0.0
        self._progress = SnapshotProgress()
        self.taken = 0

    def step(self, applied: Position, pause: Pause) -> bool:
        """Begin a snapshot if one is due, or go on with it; return whether there is more to do.

        Args:
            applied: where the journal entry of the last batch applied ends.
            pause: between tries of storage; raises to give up.

        Raises:
            LostRowError, StorageError, JournalFullError, OSError: the snapshot was given up; the one before it stays in force.
        """
        self._now = applied, pause
        if self._steps is None:
            if self.journal.size_bytes <= self.due_bytes:
                return False
            self._again_bytes, self.due_bytes = self.due_bytes, -1
            self._cut, self._begun_s = applied, time.monotonic()
            self._steps = self._snapshotter.steps(self._tables(), lambda: self._save(*self._now))
        try:
            self._progress = next(self._steps)
            return True
        except StopIteration:
            self._end()
            return False
        except BaseException:
            self._steps, self.due_bytes = None, self._again_bytes
            raise

    def give_up(self) -> None:
        """Give up the snapshot under way, since runs are about to come from another shard. A new one begins when it is due."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
            self.due_bytes = self._again_bytes

    def _end(self) -> None:
        self._steps, before = None, self.journal.size_bytes
        self._fenced_log.discard_before(self._cut)
        self.taken += 1
        # Entries behind the cut stay: the next snapshot is due only when half the limit has come on top of them.
        self.due_bytes = max(self._max_bytes, self.journal.size_bytes + self._max_bytes // 2)
        took_s = time.monotonic() - self._begun_s
        log.info(
            "local snapshot: %d rows, %.1f MB in %.1f s; the journal went from %.1f MB to %.1f MB",
            self._progress.n_rows,
            self._progress.size_bytes / 1e6,
            took_s,
            before / 1e6,
            self.journal.size_bytes / 1e6,
        )


def reaches_back(journal: Journal, cut: int, k: int, find: Callable[[str, int], TableDef]) -> bool:
    """Whether snapshot and journal together hold every change up to now.

    Args:
        journal: of the shard.
        cut: of its local snapshot, as a version; 0 for none.
        k: batches so far.
        find: the registry's look-up.
    """
    entries = (decode_entry(payload, find) for _, payload in journal.read())
    behind = (entry.version for entry in entries if isinstance(entry, BatchEntry) and entry.version > cut)
    cut_k = split_version(cut)[1]
    if cut and cut_k == 0:  # a load began an epoch: the batches behind it are numbered on
        return True
    # Batches applied without a journal (by an earlier release) are in neither: they show as a gap in the numbers behind the cut.
    return split_version(next(behind, k + 1))[1] == cut_k + 1
