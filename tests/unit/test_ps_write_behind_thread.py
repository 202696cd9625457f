"""The apply thread writes behind: when nobody pushes, for a flush, for a drain, and until another shard takes over."""

import threading
import time
from typing import Any

import pytest
from memory_store import memory_node

from kvemb.errors import DeadlineExceededError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart, PushReply
from kvemb.schema.record import make_version
from paramserver.apply.applier import Applier
from paramserver.apply.changed_rows import ChangedRowsFinder
from paramserver.apply.committer import Committer, Handover
from paramserver.engine.write_behind import Bound
from paramserver.ingest.ingest import Ingest
from paramserver.ingest.sessions import Sessions
from paramserver.journal import START
from paramserver.journal.fenced_log import FencedLog
from paramserver.model.batch import APPLY
from tests.unit.forgetful_journal import ForgetfulJournal
from tests.unit.idle_background import IdleBackground
from tests.unit.write_behind_shard import FOREVER, Ids, Shard, batch, put


class Rig(Shard):
    """With its threads, and one trainer."""

    def __init__(self, bound: Bound = FOREVER) -> None:
        self.handover, fenced_log = Handover(), FencedLog(ForgetfulJournal(), lambda: None)  # type: ignore[arg-type]
        super().__init__(bound, wake=self.handover.wake, clock_s=time.monotonic)
        self.ingest = Ingest(Sessions(True), None, behind=self.behind)
        self.failed = threading.Event()
        finder, failed = ChangedRowsFinder(self.store, self.tables, 5), self._fail
        self.applier = Applier(
            self.ingest, self.engine, self.tables, self.handover, finder=finder, background=IdleBackground(), applied=START, failed=failed
        )
        self.committer = Committer(self.ingest, self.tables, fenced_log, self.handover, sync=False, epoch=1, k=0, failed=failed)
        self.incarnation, self.sequence = self.ingest.attendance.hello("a", 0)
        self.applier.thread.start()
        self.committer.thread.start()

    def _fail(self, error: BaseException) -> None:
        self.ingest.outcomes.fail(error)
        self.failed.set()

    def push(self, ids: Ids) -> PushReply:
        self.sequence += 1
        over, replies = threading.Event(), []

        def sink(reply: PushReply) -> None:
            replies.append(reply)
            if reply.state != "accepted":
                over.set()

        part = PushPart("a", self.incarnation, self.sequence, self.sequence, False, [], 1)
        self.ingest.submit(part, batch(APPLY, ids).tables, sink, lambda: False)
        assert over.wait(30)
        return replies[-1]

    def close(self) -> None:
        self.committer.thread.stop(30)
        assert self.applier.thread.stop(30)


@pytest.fixture
def rig() -> Any:
    made = Rig()
    yield made
    made.close()


def test_a_flush_returns_when_storage_has_everything(rig: Rig) -> None:
    rig.push([0, 1])
    assert rig.push([0, 1]).state == "applied"
    assert rig.k_of([0, 1]) == [1, 1]
    rig.ingest.backlog.flush(Deadline.after(30))
    assert rig.k_of([0, 1]) == [2, 2]
    rig.ingest.backlog.flush(Deadline.after(0))


def test_a_drain_ends_when_storage_has_everything(rig: Rig) -> None:
    rig.push([0, 1])
    rig.push([0, 1])
    assert rig.ingest.backlog.drain(Deadline.after(30))
    assert rig.k_of([0, 1]) == [2, 2]


def test_a_flush_without_storage_says_what_it_waits_for_and_a_drain_gives_up(rig: Rig) -> None:
    rig.push([0])
    rig.push([0])
    node, other = map(memory_node, rig.store.addresses)
    node.down = other.down = True
    with pytest.raises(DeadlineExceededError, match=r"waited 0.3 s for rows of applied pushes to be written to storage"):
        rig.ingest.backlog.flush(Deadline.after(0.3))
    assert not rig.ingest.backlog.drain(Deadline.after(0.05))
    assert "1 applied rows are not written to storage" in rig.ingest.backlog.describe()
    node.down = other.down = False
    assert rig.ingest.backlog.drain(Deadline.after(30))
    assert rig.ingest.state.waits_for == ""


def test_dirty_rows_are_written_when_no_batch_comes() -> None:
    rig = Rig(Bound(100, 1e-3))
    try:
        rig.push([0])
        rig.push([0])
        rig.behind.ask = lambda: None  # type: ignore[method-assign]  # nobody asks: it is their age
        rig.ingest.backlog.flush(Deadline.after(30))
        assert rig.k_of([0]) == [2]
    finally:
        rig.close()


def test_a_shard_that_another_has_taken_over_stops_when_it_finds_out_by_writing(rig: Rig) -> None:
    rig.push([0])
    rig.push([0])
    put(rig.store, 0, make_version(2, 1))
    with pytest.raises(ShardUnavailableError, match="has lost the shard"):
        rig.ingest.backlog.flush(Deadline.after(30))
    assert rig.failed.wait(30)
