"""The committer: acknowledged pushes are in the journal, in order, and the shard is still ours; and the effect of a full disk.

The journal and the hand-over are scripted; no sleeps: a gate holds a commit exactly as long as a test wants it held.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvemb.init
import kvemb.optim
from kvemb.errors import FencedError, JournalFullError, PushRejectedError, ShardFailedError, ShardUnavailableError, from_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart, PushReply
from kvemb.schema.policies import NO_POLICIES, Policies
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from paramserver.apply.committer import Committed, Committer, Handover
from paramserver.ingest.ingest import Ingest
from paramserver.ingest.sessions import Sessions
from paramserver.ingest.sync_steps import SyncSteps
from paramserver.journal import START, BatchEntry, Entry, Journal, Position, SessionEntry, decode_entry
from paramserver.journal.write_ahead_log import FencedLog
from paramserver.life.admission import Admissions
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows, RowsWork
from paramserver.model.tables import Tables

TABLE = TableDef("t", 1, kvemb.optim.sgd(1.0), kvemb.init.zeros())
MEAN = TableDef("m", 1, kvemb.optim.sgd(1.0), kvemb.init.zeros(), reduce="mean")
WAIT_S = 90.0


class ScriptedLog(FencedLog):
    """A log that remembers, and does what a test says instead of reaching a disk."""

    def __init__(self) -> None:
        super().__init__(None, lambda: None)
        self.entries: list[Entry] = []
        self.commits: list[int] = []  # entries that were there at each commit
        self.on_append: Callable[[], None] = lambda: None
        self.on_commit: Callable[[], None] = lambda: None

    def append(self, entry: Entry) -> Position:
        self.on_append()
        self.entries.append(entry)
        return Position(1, len(self.entries))

    def commit(self) -> None:
        self.on_commit()
        self.commits.append(len(self.entries))


class Heard(list[PushReply]):
    """Replies about one part."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def __call__(self, reply: PushReply) -> None:
        self.append(reply)
        self.came.set()

    def wait(self) -> PushReply:
        assert self.came.wait(WAIT_S)
        return self[-1]


class Rig:
    """Intake, committer and hand-over; the test is the apply thread."""

    def __init__(self, *, trainers: int = 0, k: int = 0) -> None:
        self.fenced_log = ScriptedLog()
        self.ingest = Ingest(Sessions(True), SyncSteps.first(trainers, WAIT_S) if trainers else None, record=self.fenced_log.record)
        self.handover, self.tables = Handover(), Tables([])
        self.failed: list[BaseException] = []
        self.over = threading.Event()
        sync = bool(trainers)
        self.admissions = Admissions(lambda key, serial: self.policies(key, serial), self.tables, sync=sync)
        self.policies: Callable[[str, int], Policies] = lambda key, serial: NO_POLICIES
        self.committer = Committer(
            self.ingest,
            self.tables,
            self.fenced_log,
            self.handover,
            judges=lambda: [self.admissions.judge],
            sync=sync,
            epoch=5,
            k=k,
            failed=self._fail,
        )
        self.committer.thread.start()
        self.sequences: dict[str, int] = {}

    def _fail(self, error: BaseException) -> None:
        self.ingest.outcomes.fail(error)
        self.failed.append(error)
        self.over.set()

    def push(
        self, trainer: str, ids: Sequence[int], *, table: TableDef = TABLE, lr: float = 1.0, more: bool = False, step: int = 0
    ) -> Heard:
        sequence = self.sequences[trainer] = self.sequences.get(trainer, 0) + 1
        array = np.array(ids, np.uint64)
        rows = CheckedRows(
            table, array, np.ones((len(ids), 1), np.float32), np.empty(0, np.uint64), table.optimizer.check_hyper({"lr": lr})
        )
        heard = Heard()
        self.incarnation = self.ingest.sessions._sessions[trainer].incarnation
        part = PushPart(trainer, self.incarnation, sequence, step or sequence, more, [], sequence)
        self.ingest.submit(part, (rows,), heard, lambda: False)
        return heard

    def take(self) -> Committed:
        batch = self.handover.get()
        assert batch is not None
        return batch

    def batches(self) -> list[BatchEntry]:
        return [entry for entry in self.fenced_log.entries if isinstance(entry, BatchEntry)]


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield build
    for rig in rigs:
        assert rig.committer.thread.stop(WAIT_S)


class Gate:
    """Holds the thread that comes to it."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(WAIT_S)


def test_a_push_is_accepted_only_once_its_entry_is_committed(make: Callable[..., Rig]) -> None:
    rig, gate = make(k=7), Gate()
    rig.ingest.attendance.hello("a", 0)
    rig.fenced_log.on_commit = gate
    heard = rig.push("a", [3, 4])
    duplicate = Heard()
    assert gate.reached.wait(WAIT_S)
    rig.sequences["a"] -= 1
    rows = rig.batches()[0].batch.tables
    part = PushPart("a", rig.incarnation, 1, 1, False, [], 1)
    rig.ingest.submit(part, rows, duplicate, lambda: False)
    assert (heard, duplicate) == ([], [])
    assert rig.ingest.sessions.to_save() == [("a", 1, 0)]
    gate.open.set()
    assert heard.wait().state == duplicate.wait().state == "accepted"
    assert rig.ingest.sessions.to_save() == [("a", 1, 1)]
    batch, (entry,) = rig.take(), rig.batches()
    assert batch.version == entry.version == make_version(5, 8)
    assert batch.end == Position(1, 2)
    assert (entry.batch.kind, entry.batch.tables[0].ids.tolist(), entry.steps) == (APPLY, [3, 4], (0,))
    assert [(mark.trainer, mark.incarnation, mark.sequence) for mark in entry.watermarks] == [("a", 1, 1)]


def test_parts_are_accepted_with_the_last_part_of_their_push(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.ingest.attendance.hello("a", 0)
    parts = [rig.push("a", [n], more=n < 11, step=1) for n in range(12)]
    for heard in parts:
        assert heard.wait().state == "accepted"
    (entry,) = rig.batches()
    assert (entry.batch.tables[0].ids.tolist(), entry.watermarks[0].sequence) == (list(range(12)), 12)


def test_several_batches_share_a_commit(make: Callable[..., Rig]) -> None:
    rig, gate = make(), Gate()
    rig.ingest.attendance.hello("a", 0)
    rig.fenced_log.on_commit = gate
    first = rig.push("a", [1], table=MEAN)
    assert gate.reached.wait(WAIT_S)
    later = [rig.push("a", [1], table=MEAN) for _ in range(2)]  # tables of means are never merged
    gate.open.set()
    rig.take()
    rig.take()
    assert [heard.wait().state for heard in (first, *later)] == ["accepted"] * 3
    assert [entry.version & 0xFF for entry in rig.batches()] == [1, 2, 3]
    assert [entry.steps for entry in rig.batches()] == [(0,), (1,), (2,)]
    assert rig.fenced_log.commits in ([1, 2, 4], [1, 2, 3, 4])  # after the hello's: one or two behind the gate, as room was there


def test_what_comes_in_while_the_engine_is_busy_is_merged(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.ingest.attendance.hello("a", 0)
    heard = [rig.push("a", [1]).wait() for _ in range(2)]  # the hand-over is full now
    waiting = [rig.push("a", [1, n]) for n in range(2, 5)]
    assert [len(rig.batches()), [len(one) for one in waiting]] == [2, [0, 0, 0]]
    rig.take()
    assert [one.wait().state for one in waiting] == ["accepted"] * 3
    assert [reply.state for reply in heard] == ["accepted"] * 2
    assert [entry.batch.tables[0].ids.tolist() for entry in rig.batches()] == [[1], [1], [1, 2, 3, 4]]


def test_assign_and_erase_are_journaled_in_their_place(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.ingest.attendance.hello("a", 0)
    for kind in (ASSIGN, ERASE):
        rows = CheckedRows(TABLE, np.array([9, 2], np.uint64), np.ones((2, int(kind == ASSIGN)), np.float32), np.empty(0, np.uint64), {})
        work = RowsWork(kind, rows)
        with rig.ingest.state.changed:  # what submit_rows does before it waits
            rig.ingest._enqueue(work)
        assert rig.take().work is work
        rig.push("a", [1]).wait()
        rig.take()
    assert [entry.batch.kind for entry in rig.batches()] == [ASSIGN, APPLY, ERASE, APPLY]
    assert [entry.steps for entry in rig.batches()] == [(0,), (0,), (1,), (1,)]
    assert [len(entry.watermarks) for entry in rig.batches()] == [0, 1, 0, 1]


def test_hellos_and_goodbyes_are_durable_before_they_are_answered(make: Callable[..., Rig]) -> None:
    rig = make()
    assert rig.ingest.attendance.hello("a", 0) == (1, 0)
    assert rig.ingest.attendance.hello("a", 1) == (1, 0)  # a reconnect is nothing new
    rig.ingest.attendance.bye("a", 1)
    rig.ingest.attendance.hello("a", 1)
    assert rig.fenced_log.entries == [SessionEntry("a", 1), SessionEntry("a", 0), SessionEntry("a", 1)]
    assert rig.fenced_log.commits == [1, 2, 3]


def test_a_hello_that_cannot_be_kept_is_answered_when_it_is_said_again(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.fenced_log.on_commit = lambda: (_ for _ in ()).throw(JournalFullError("disk full"))
    for incarnation in (0, 1, 1):  # no trainer hears of the first; another shard's would come back with its number
        with pytest.raises(ShardUnavailableError, match="disk full"):
            rig.ingest.attendance.hello("b", incarnation)
    rig.fenced_log.on_commit = lambda: None
    assert rig.ingest.attendance.hello("b", 1) == (1, 0)
    assert rig.fenced_log.commits == [4]
    rig.fenced_log.on_append = lambda: (_ for _ in ()).throw(JournalFullError("disk full"))
    assert rig.ingest.attendance.hello("b", 1) == (1, 0)  # a reconnect is nothing new
    rig.ingest.attendance.bye("b", 1)
    assert rig.ingest.attendance.n_trainers == 0


@pytest.mark.parametrize("where", ["on_append", "on_commit"])
def test_a_full_disk_stops_acknowledgements_says_so_and_recovers(make: Callable[..., Rig], where: str) -> None:
    rig, tried = make(), threading.Event()
    rig.ingest.attendance.hello("a", 0)
    full = threading.Event()
    full.set()

    def write() -> None:
        if full.is_set():
            tried.set()
            raise JournalFullError("journal/7: No space left on device")

    setattr(rig.fenced_log, where, write)
    heard = rig.push("a", [1])
    assert tried.wait(WAIT_S)
    tried.clear()
    assert tried.wait(WAIT_S)  # again
    assert heard == []
    assert rig.ingest.state.waits_for == "JournalFullError: journal/7: No space left on device"
    assert not rig.ingest.backlog.drain(Deadline.after(0))
    assert "No space left" in rig.ingest.backlog.describe()
    full.clear()
    assert heard.wait().state == "accepted"
    assert [len(rig.batches()), rig.batches()[0].version & 0xFF, rig.ingest.state.waits_for] == [1, 1, ""]


def test_a_full_disk_does_not_hold_up_a_stop(make: Callable[..., Rig]) -> None:
    rig, gate = make(), threading.Event()
    rig.ingest.attendance.hello("a", 0)

    def full() -> None:
        gate.set()
        raise JournalFullError("no space")

    rig.fenced_log.on_append = full
    heard = rig.push("a", [1])
    assert gate.wait(WAIT_S)
    assert rig.committer.thread.stop(WAIT_S)
    assert heard == []


def test_a_process_that_lost_the_shard_acknowledges_nothing_and_sends_its_trainers_away(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.ingest.attendance.hello("a", 0)
    rig.push("a", [1]).wait()
    rig.fenced_log.on_commit = lambda: (_ for _ in ()).throw(FencedError("epoch 6 has taken the shard over"))
    reply = rig.push("a", [1]).wait()
    assert reply.state == "failed"
    assert isinstance(from_wire(reply.error), ShardUnavailableError)
    assert rig.over.wait(WAIT_S)
    assert isinstance(rig.failed[0], FencedError)
    with pytest.raises(ShardUnavailableError, match="lost the shard"):
        rig.push("a", [1])


def test_a_bug_in_the_journal_fails_the_shard_by_name(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.ingest.attendance.hello("a", 0)
    rig.fenced_log.on_append = lambda: (_ for _ in ()).throw(ValueError("oops"))
    assert isinstance(from_wire(rig.push("a", [1]).wait().error), ShardFailedError)


def test_a_sync_step_is_journaled_as_a_whole_or_not_at_all(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    for trainer in ("a", "b"):
        rig.ingest.attendance.hello(trainer, 0)
    first = rig.push("a", [1], table=MEAN)
    with rig.ingest.state.changed:
        assert (first, rig.batches()) == ([], [])
    second = rig.push("b", [1, 2], table=MEAN)
    assert first.wait().state == second.wait().state == "accepted"
    (entry,) = rig.batches()
    assert entry.batch.tables[0].rows.tolist() == [[1.0], [0.5]]
    assert {(mark.trainer, mark.sequence) for mark in entry.watermarks} == {("a", 1), ("b", 1)}


def test_a_refused_step_uses_its_sequences_up_durably(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    for trainer in ("a", "b"):
        rig.ingest.attendance.hello(trainer, 0)
    parts = [rig.push("a", [1], lr=0.5), rig.push("b", [1], lr=0.25)]
    batch, (entry,) = rig.take(), rig.batches()
    assert [heard.wait().state for heard in parts] == ["accepted"] * 2
    assert (entry.batch.kind, entry.batch.tables, batch.batch.tables) == (ERASE, (), ())
    assert {(mark.trainer, mark.sequence) for mark in entry.watermarks} == {("a", 1), ("b", 1)}
    assert batch.work.error["type"] == PushRejectedError.__name__  # type: ignore[union-attr]


def test_a_drain_does_not_wait_for_a_step_that_lacks_somebody(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    for trainer in ("a", "b"):
        rig.ingest.attendance.hello(trainer, 0)
    heard = rig.push("a", [1])
    assert rig.ingest.backlog.drain(Deadline.after(0))
    assert heard == []


def test_the_log_writes_what_the_journal_reads_back(tmp_path: Path) -> None:
    asked: list[int] = []
    fenced_log = FencedLog(Journal(tmp_path, "os"), lambda: asked.append(len(asked)))
    fenced_log.record("a", 1)
    rows = CheckedRows(TABLE, np.array([1, 5], np.uint64), np.ones((2, 1), np.float32), np.empty(0, np.uint64), TABLE.optimizer.defaults())
    fenced_log.append(BatchEntry(make_version(5, 1), Batch(APPLY, (rows,)), (0,), ()))
    assert asked == [0]
    fenced_log.commit()
    end = fenced_log.journal.end
    assert (asked, fenced_log.journal.size_bytes > 0) == ([0, 1], True)
    fenced_log.journal.close()
    journal = Journal(tmp_path, "os")
    entries = [decode_entry(payload, lambda name, schema: TABLE) for _, payload in journal.read(START)]
    assert entries[0] == SessionEntry("a", 1)
    assert isinstance(entries[1], BatchEntry)
    assert entries[1].batch.tables[0].ids.tolist() == [1, 5]
    assert list(journal.read(end)) == []
    journal.close()


def test_applies_that_come_with_slots_are_counted_before_the_batches_numbered_next(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.ingest.attendance.hello("a", 0)
    rig.push("a", [1]).wait()
    state = rig.tables.state(TABLE)
    rig.committer.raise_step(state, 40)
    rig.push("a", [2]).wait()
    rig.committer.raise_step(state, 7)  # fewer than there are
    assert rig.handover.get(timeout_s=WAIT_S) is not None
    rig.push("a", [3]).wait()
    batches = [entry for entry in rig.fenced_log.entries if isinstance(entry, BatchEntry)]
    assert [entry.steps for entry in batches] == [(0,), (41,), (42,)]  # the first one is still to be applied
    assert state.step == 40


def test_batches_are_numbered_on_in_a_higher_epoch(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.ingest.attendance.hello("a", 0)
    rig.push("a", [1]).wait()
    assert rig.committer.rise(9) >= 1
    rig.push("a", [2]).wait()
    versions = [entry.version for entry in rig.fenced_log.entries if isinstance(entry, BatchEntry)]
    assert versions == [make_version(5, 1), make_version(9, 2)]
