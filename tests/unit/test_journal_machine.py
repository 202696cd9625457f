"""The journal in any order of commits, failures, deletions and restarts."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvemb import process
from kvemb.errors import JournalFullError
from paramserver.journal import START, Journal, Position, segment_files
from tests.matrix import examples
from tests.unit.journal_disk import FaultyOs


class JournalMachine(RuleBasedStateMachine):
    """Appends, commits, faults, crashes that keep any part of the uncommitted entries, reopenings and discards."""

    @initialize(durability=st.sampled_from(["fsync", "os"]))
    def begin(self, durability: str) -> None:
        self.system = FaultyOs()
        self.patch = pytest.MonkeyPatch()
        for module in (segment_files, process):
            self.patch.setattr(module, "os", self.system)
        self.folder = Path(tempfile.mkdtemp(prefix="kvemb-journal-"))
        self.durability = durability
        self.committed: list[tuple[Position, bytes]] = []
        self.pending: list[tuple[Position, bytes]] = []
        self.discarded = 0
        self.count = 0
        self.open()

    def open(self) -> None:
        self.journal = Journal(self.folder, self.durability, segment_bytes=250)

    @rule(size=st.integers(0, 120), n_pieces=st.integers(1, 3))
    def append(self, size: int, n_pieces: int) -> None:
        self.count += 1
        payload = f"{self.count}:".encode() + bytes(size)
        cut = len(payload) // n_pieces
        pieces = [payload[i * cut : (i + 1) * cut] for i in range(n_pieces - 1)] + [payload[(n_pieces - 1) * cut :]]
        try:
            position = self.journal.append(pieces)
        except JournalFullError:
            if not self.journal._pending:  # before it met the full disk it had committed the others
                self.settle()
            return
        if len(self.journal._pending) == 1:
            self.settle()
        self.pending.append((position, payload))

    @rule()
    def commit(self) -> None:
        try:
            self.journal.commit()
        except JournalFullError:
            assert self.system.fail_syncs or self.system.room is not None
            return
        self.settle()

    def settle(self) -> None:
        self.committed += self.pending
        self.pending = []

    @rule(room=st.one_of(st.none(), st.integers(0, 200)), fail_syncs=st.booleans())
    def change_weather(self, room: int | None, fail_syncs: bool) -> None:
        self.system.room, self.system.fail_syncs = room, fail_syncs and self.durability == "fsync"

    @rule(keep=st.floats(0, 1), noise=st.binary(max_size=60))
    def crash(self, keep: float, noise: bytes) -> None:
        current = self.journal._current
        self.journal.close()
        size = current.path.stat().st_size
        kept = current.end + int(keep * (size - current.end))
        os.truncate(current.path, kept)
        with open(current.path, "ab") as file:
            file.write(noise)
        self.reopen()

    @rule()
    def stop(self) -> None:
        self.journal.close()
        self.reopen()

    def reopen(self) -> None:
        self.system.room, self.system.fail_syncs = None, False
        self.open()
        found = [bytes(payload) for _, payload in self.journal.read()]
        before, maybe = [p for _, p in self.committed[self.discarded :]], [p for _, p in self.pending]
        survived = found[len(before) :]
        assert found[: len(before)] == before
        assert survived == maybe[: len(survived)]  # not acknowledged: any number of the first of them may be there
        self.committed = list(self.committed[: self.discarded]) + [(p, bytes(payload)) for p, payload in self.journal.read()]
        self.pending = []

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.committed)))
        position = self.committed[n - 1][0] if n else START
        self.journal.discard_before(position)
        before, self.discarded = self.discarded, len(self.committed) - len(list(self.journal.read()))
        assert all(p <= position for p, _ in self.committed[before : self.discarded])

    @invariant()
    def shows_what_was_committed(self) -> None:
        if hasattr(self, "journal"):
            assert [bytes(payload) for _, payload in self.journal.read()] == [p for _, p in self.committed[self.discarded :]]

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            self.patch.undo()
            shutil.rmtree(self.folder)


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
