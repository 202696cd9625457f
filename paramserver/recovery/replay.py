"""Recovery: brings tables, sessions and storage from the saved state to the end of the journal, before anything is served.

Two passes over the journal after the state's position. The first checks that no batch is missing, and learns which rows will be erased.
The second applies batch by batch, each under its old version. A stored row is not touched, and every other one gets the bits that it
would have had. Breaking off is fine: the next start does the same again.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvemb.errors import JournalDamagedError, n_of
from kvemb.schema.record import split_version

from ..engine.engine import Engine
from ..engine.storage_pace import Pause
from ..ingest.sessions import Sessions
from ..ingest.sync_steps import Membership
from ..journal import BatchEntry, Entry, Journal, Position, SessionEntry, decode_entry
from ..journal.entry import Find
from ..journal.write_ahead_log import NO_INCARNATION
from ..model.batch import APPLY, ASSIGN, ERASE
from ..model.tables import Tables
from ..model.transition import Replay

_SAY_EVERY_S = 5.0
log = logging.getLogger("paramserver")


@dataclass(frozen=True)
class Recovered:
    """The result of a replay, and how long it took.

    Args:
        batches, rows: replayed; rows that were stored already count too.
        seconds: of both passes.
        members: of a sync job, at the journal's end.
    """

    batches: int = 0
    rows: int = 0
    seconds: float = 0.0
    members: Membership = field(default_factory=lambda: Membership(0))


class Recovery:
    """Applies the end of one shard's journal over its saved state."""

    def __init__(self, journal: Journal, start: Position, k: int, find: Find) -> None:
        if max(start.segment, 1) < journal.start.segment:
            raise JournalDamagedError(
                f"the saved state needs the journal from segment {start.segment} on, but it begins with {journal.start.segment}: state and "
                "journal are not from the same time. Put the data folder of the shard's last owner back."
            )
        self._journal, self._start, self._saved_k, self._find = journal, start, k, find
        self.k = k  # of the last batch, once the first pass was made
        self._begun_s = time.monotonic()
        self._n_entries = self._n_rows = 0
        self._n_applied: Callable[[], int] = lambda: 0
        self._rules = Replay(0)

    @property
    def is_done(self) -> bool:
        """Whether the first pass has found nothing after the saved state."""
        return not self._n_entries

    def looked_through(self) -> tuple[int, int]:
        """How far the first pass is: rows, and 0, since their number is not known. Any thread."""
        return self._n_rows, 0

    def applied(self) -> tuple[int, int]:
        """How far the second pass is: rows, of all that are in the journal. Any thread."""
        return self._n_applied(), self._n_rows

    def scan(self) -> "Recovery":
        """Make the first pass."""
        say = teller(lambda: f"looks through {n_of(self._n_entries, 'entry', 'entries')} of the journal, with {n_of(self._n_rows, 'row')}")
        for entry in self._entries():
            say()
            self._n_entries += 1
            if not isinstance(entry, BatchEntry):
                continue
            k = split_version(entry.version)[1]
            if k > self._saved_k and k != self.k + 1:
                raise JournalDamagedError(
                    f"the journal goes from batch {self.k} to batch {k}: entries between them are missing. Put the data folder "
                    "of the shard's last owner back."
                )
            if k > self._saved_k:
                self.k = k
                self._rules.reach(entry.version)
                for rows in entry.batch.tables:
                    self._rules.will_change(entry.batch.kind, rows, entry.version)
                self._n_rows += entry.batch.n_rows
        return self

    def run(self, engine: Engine, tables: Tables, sessions: Sessions, members: Membership, pause: Pause) -> Recovered:
        """Make the second pass."""
        rows_before, n_batches = engine.rows_applied, 0
        self._n_applied = lambda: engine.rows_applied - rows_before
        say = teller(lambda: f"{self._n_applied()} of the journal's {self._n_rows} rows are applied")
        for _, entry in zip(range(self._n_entries), self._entries(), strict=False):
            if isinstance(entry, SessionEntry):
                members = _restore(entry, sessions, members)
            elif isinstance(entry, BatchEntry) and split_version(entry.version)[1] > self._saved_k:
                self._check_steps(entry, tables)
                engine.run(entry.batch, entry.version, pause, self._rules, between=say)
                n_batches += 1
                say()
            if isinstance(entry, BatchEntry):
                refused = entry.batch.kind == ERASE and not entry.batch.tables
                for mark in entry.watermarks:
                    sessions.restore(mark.trainer, mark.incarnation, mark.sequence, refused=refused)
        done = Recovered(n_batches, self._n_applied(), time.monotonic() - self._begun_s, members)
        if self._n_entries:
            rate = done.rows / max(done.seconds, 1e-9)
            log.info("recovered from the journal in %.2f s: %d batches, %d rows (%.0f rows/s)", done.seconds, done.batches, done.rows, rate)
        return done

    def _entries(self) -> Iterator[Entry]:
        for after, payload in self._journal.read(self._start):
            try:
                yield decode_entry(payload, self._find)
            except JournalDamagedError as error:
                raise JournalDamagedError(f"{error} (ends at offset {after.offset} of segment {after.segment})") from error

    def _check_steps(self, entry: BatchEntry, tables: Tables) -> None:
        for rows, step in zip(entry.batch.tables, entry.steps, strict=True):
            state = tables.state(rows.definition)
            if entry.batch.kind == ASSIGN:  # a table that takes another's place begins with its steps
                state.raise_step(step)
            if entry.batch.kind == APPLY and state.step < step:  # more: slots came with more while the batch was on its way
                raise JournalDamagedError(
                    f"table {rows.definition.name!r}: the journal's batch {split_version(entry.version)} is step {step + 1}, but the state "
                    f"has {state.step} steps before it: state and journal are not from the same time."
                )


def teller(how_far: Callable[[], str]) -> Callable[[], None]:
    """Return a function that logs now and then how far a long recovery has come, to show that it goes on."""
    said_s = time.monotonic()

    def say() -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= _SAY_EVERY_S:
            said_s = time.monotonic()
            log.info("recovering: %s", how_far())

    return say


def _restore(entry: SessionEntry, sessions: Sessions, members: Membership) -> Membership:
    if entry.incarnation == NO_INCARNATION:
        return members.bye(entry.trainer)
    sessions.restore(entry.trainer, entry.incarnation)
    return members.hello(entry.trainer, entry.incarnation)
