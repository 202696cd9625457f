"""The intake and the apply thread together, on storage in memory: order, backpressure, failure, flush and drain.

No sleeps: a storage gate holds the apply thread exactly as long as a test wants it held.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
import pytest
from memory_store import MemoryStore, memory_node

import kvemb.init
import kvemb.optim
from kvemb.config import StorageConfig
from kvemb.errors import (
    BarrierError,
    DeadlineExceededError,
    FencedError,
    JournalFullError,
    KvembError,
    PushRejectedError,
    ShardFailedError,
    ShardUnavailableError,
    StorageError,
    TableDroppedError,
    from_wire,
)
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart, PushReply
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult
from paramserver.apply.applier import Applier
from paramserver.apply.committer import Committer, Handover
from paramserver.engine.engine import Engine
from paramserver.ingest.barrier import Barrier
from paramserver.ingest.ingest import Ingest
from paramserver.ingest.sessions import Sessions
from paramserver.ingest.unapplied_parts import Limits
from paramserver.journal.fenced_log import FencedLog
from paramserver.model.batch import ASSIGN, ERASE, CheckedRows, RowsWork
from paramserver.model.tables import Tables
from tests.unit.forgetful_journal import ForgetfulJournal

_NUMBERS = count()
TABLE = TableDef("t", 1, kvemb.optim.sgd(1.0), kvemb.init.zeros())
MEAN = TableDef("m", 1, kvemb.optim.sgd(1.0), kvemb.init.zeros(), reduce="mean")


class GatedStore(MemoryStore):
    """Reads wait until the gate is open, and say when they have come to it."""

    def __init__(self, config: StorageConfig, role: str) -> None:
        super().__init__(config, role)
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        self.reached.set()
        assert self.gate.wait(30)
        return super().read(parts, deadline)


class Outcome:
    """The replies about one part."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.final: PushReply | None = None
        self._over = threading.Event()

    def __call__(self, reply: PushReply) -> None:
        self.states.append(reply.state)
        if reply.state != "accepted":
            self.final = reply
            self._over.set()

    def wait(self) -> PushReply:
        assert self._over.wait(30)
        assert self.final is not None
        return self.final

    def error(self) -> KvembError:
        return from_wire(self.wait().error)


class Rig:
    """A shard without gRPC and disk."""

    def __init__(self, *, trainers: int = 0, barrier_timeout_s: float = 30.0, limits: Limits | None = None) -> None:
        self.store = GatedStore(StorageConfig("memory", (f"intake-{next(_NUMBERS)}:1",)), role="shard:0")
        self.store.provision(b"c" * 16, b"g" * 8, Deadline.after(5))
        self.store.open(Deadline.after(5))
        self.tables = Tables([])
        self.engine = Engine(self.store, self.tables, epoch=1, k=0, timeout_s=5)
        barrier = Barrier(trainers, barrier_timeout_s) if trainers else None
        self.intake = Ingest(Sessions(issues=True), barrier, limits)
        self.failed = threading.Event()
        failed, self.handover, ledger = (lambda error: self.failed.set()), Handover(), FencedLog(ForgetfulJournal(), lambda: None)  # type: ignore[arg-type]
        self.applier = Applier(self.intake, self.engine, self.tables, self.handover, failed=failed)
        self.committer = Committer(self.intake, self.tables, ledger, self.handover, sync=bool(trainers), epoch=1, k=0, failed=failed)
        self.applier.start()
        self.committer.start()
        self.sequences: dict[int, int] = {}
        self.open_steps: dict[int, int] = {}

    def hello(self, trainer: str = "a") -> int:
        return self.intake.hello(trainer, 0)[0]

    def push(
        self,
        incarnation: int,
        grads: dict[int, float],
        *,
        trainer: str = "a",
        table: TableDef = TABLE,
        more: bool = False,
        step: int = 0,
        lr: float = 1.0,
        seen: list[int] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        sequence = self.sequences.get(incarnation, 0) + 1
        ids, values = np.array(list(grads), np.uint64), np.array(list(grads.values()), np.float32).reshape(-1, 1)
        rows = CheckedRows(table, ids, values, np.array(seen or [], np.uint64), table.optimizer.check_hyper({"lr": lr}))
        step = step or self.open_steps.pop(incarnation, sequence)
        if more:
            self.open_steps[incarnation] = step
        part = PushPart(trainer, incarnation, sequence, step, more, [], sequence)
        outcome = Outcome()
        self.intake.submit(part, (rows,), outcome, cancelled)
        self.sequences[incarnation] = sequence
        return outcome

    def change(self, kind: str, values: dict[int, float]) -> int:
        ids, rows = np.array(list(values), np.uint64), np.array(list(values.values()), np.float32).reshape(-1, 1)
        rows = rows[:, : 0 if kind == ERASE else 1]
        checked = CheckedRows(TABLE, ids, rows, np.empty(0, np.uint64), TABLE.optimizer.defaults())
        return self.intake.submit_rows(RowsWork(kind, checked), Deadline.after(30))

    def weights(self, ids: list[int], table: TableDef = TABLE) -> list[float]:
        from kvemb.schema.keys import RowKeys

        size, keys = table.record.size_bytes, RowKeys(table.tag, np.array(ids, np.uint64))
        got = MemoryStore.read(self.store, [ReadPart(keys, size, size)], Deadline.after(5))[0].in_key_order()
        assert got.found.all()
        return table.record.weights(got.records)[:, 0].tolist()

    def hold(self) -> None:
        """Hold the apply thread at its next read."""
        self.store.gate.clear()
        self.store.reached.clear()

    def close(self) -> None:
        self.store.gate.set()
        assert self.committer.stop(30)
        assert self.applier.stop(30)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(**options: object) -> Rig:
        rigs.append(Rig(**options))  # type: ignore[arg-type]
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


def test_a_push_is_accepted_then_applied(make: Callable[..., Rig]) -> None:
    rig = make()
    outcome = rig.push(rig.hello(), {5: 2.0}, seen=[0])
    reply = outcome.wait()
    assert outcome.states == ["accepted", "applied"]
    assert (reply.k, reply.changed, reply.elapsed) == (1, 0.0, 0)
    assert rig.weights([5]) == [-2.0]


def test_what_is_pending_is_merged_into_one_batch(make: Callable[..., Rig]) -> None:
    rig = make()
    a, b = rig.hello("a"), rig.hello("b")
    rig.hold()
    first = rig.push(a, {1: 1.0})
    assert rig.store.reached.wait(30)
    later = [rig.push(b, {1: 1.0, 2: 1.0}, trainer="b"), rig.push(a, {2: 3.0})]
    rig.store.gate.set()
    assert first.wait().k == 1
    assert [outcome.wait().k for outcome in later] == [2, 2]
    assert rig.weights([1, 2]) == [-2.0, -4.0]


def test_staleness_is_measured_against_the_versions_that_the_pull_saw(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    for _ in range(3):
        rig.push(a, {1: 1.0, 2: 1.0}).wait()
    reply = rig.push(a, {1: 1.0, 2: 1.0}, seen=[(1 << 48) + 1, 0]).wait()
    assert (reply.changed, reply.elapsed) == (1.0, 2)


def test_assign_and_erase_keep_their_place_among_pushes(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.push(a, {1: 1.0})
    assert rig.change(ASSIGN, {1: 10.0, 2: 20.0}) == 1
    rig.push(a, {1: 1.0, 2: 1.0}).wait()
    assert rig.weights([1, 2]) == [9.0, 19.0]
    assert rig.change(ERASE, {1: 0.0, 7: 0.0}) == 1
    assert rig.tables.state(TABLE).n_rows == 1


def test_rows_of_a_dropped_table_are_refused_although_they_were_checked_before_and_what_was_taken_is_answered(
    make: Callable[..., Rig],
) -> None:
    rig = make()
    a, b = rig.hello("a"), rig.hello("b")
    rig.push(a, {1: 1.0}).wait()
    rig.push(b, {2: 1.0}, trainer="b", more=True)
    rig.intake.refuse_table(TABLE.key)
    for refused in (
        lambda: rig.push(a, {3: 1.0}),
        lambda: rig.push(b, {3: 1.0}, trainer="b", table=MEAN),  # would complete a push whose first part is of the table
        lambda: rig.change(ASSIGN, {4: 1.0}),
    ):
        with pytest.raises(TableDroppedError, match="'t'"):
            refused()
    again, new = Outcome(), Outcome()
    assert rig.intake.answer_known(PushPart("a", a, 1, 1, False, [], 1), again)
    assert again.wait().k == 1
    assert not rig.intake.answer_known(PushPart("a", a, 2, 2, False, [], 2), new)
    assert rig.push(a, {3: 1.0}, table=MEAN).wait().state == "applied"
    assert rig.change(ERASE, {1: 0.0, 2: 0.0, 3: 0.0}) == 1  # which is how its rows go


def test_pushes_are_never_merged_across_an_assign(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.hold()
    rig.push(a, {9: 1.0})
    assert rig.store.reached.wait(30)
    rig.push(a, {1: 1.0})
    values = CheckedRows(TABLE, np.array([1], np.uint64), np.full((1, 1), 10, np.float32), np.empty(0, np.uint64), {})
    with rig.intake._changed:  # what submit_rows does before it waits
        rig.intake._enqueue(RowsWork(ASSIGN, values))
    last = rig.push(a, {1: 1.0})
    rig.store.gate.set()
    assert last.wait().k == 4
    assert rig.weights([1]) == [9.0]


def test_parts_of_one_push_are_applied_as_one(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    first = rig.push(a, {1: 1.0}, more=True)
    rig.intake.flush(Deadline.after(30))  # does not wait for an incomplete push
    assert first.states == []  # nor is a part of it accepted
    last = rig.push(a, {2: 1.0, 1: 1.0})
    assert (first.wait().k, last.wait().k) == (1, 1)
    assert first.states == last.states == ["accepted", "applied"]
    assert rig.weights([1, 2]) == [-2.0, -1.0]


def test_a_push_that_was_never_completed_is_not_mixed_into_the_next(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    half = rig.push(a, {1: 1.0}, step=1, more=True)
    rig.push(a, {2: 1.0}, step=2).wait()
    assert isinstance(half.error(), PushRejectedError)
    assert rig.weights([2]) == [-1.0]
    assert rig.tables.state(TABLE).n_rows == 1


def test_a_push_with_two_learning_rates_is_refused_and_can_be_corrected(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.push(a, {1: 1.0}, step=1, more=True)
    with pytest.raises(PushRejectedError, match="run-time values"):
        rig.push(a, {2: 1.0}, step=1, lr=0.5)
    rig.push(a, {2: 1.0}, step=1).wait()
    assert rig.weights([1, 2]) == [-1.0, -1.0]


def test_without_room_a_part_waits_and_nothing_is_lost(make: Callable[..., Rig]) -> None:
    rig = make(limits=Limits(trainer_bytes=0))
    a = rig.hello()
    rig.hold()
    rig.push(a, {1: 1.0})
    assert rig.store.reached.wait(30)
    with pytest.raises(ShardUnavailableError, match="nothing of the part was taken"):
        rig.push(a, {1: 1.0}, cancelled=lambda: True)
    rig.store.gate.set()
    rig.push(a, {1: 1.0}).wait()
    assert rig.weights([1]) == [-2.0]


def test_a_trainer_with_nothing_waiting_is_let_in_even_when_the_queue_is_full(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2, limits=Limits(total_items=1))
    a, b = rig.hello("a"), rig.hello("b")
    first = rig.push(a, {1: 1.0})
    rig.push(b, {1: 1.0}, trainer="b", cancelled=lambda: True)  # otherwise the step could never be completed
    assert first.wait().state == "applied"


def test_flush_says_which_storage_error_is_in_the_way(make: Callable[..., Rig]) -> None:
    rig = make()
    node = memory_node(rig.store.addresses[0])
    node.down = True
    outcome = rig.push(rig.hello(), {1: 1.0})
    rig.store.reached.wait(30)
    with pytest.raises(DeadlineExceededError, match=r"1 pushes to be applied.*NodeUnavailableError"):
        rig.intake.flush(Deadline.after(0.3))
    node.down = False
    rig.intake.flush(Deadline.after(30))
    assert outcome.wait().state == "applied"
    assert rig.intake.last_error == ""


def test_what_was_tried_again_between_batches_is_no_failure_once_it_is_done(make: Callable[..., Rig]) -> None:
    rig, errors, done = make(), [], threading.Event()

    class OneRetry:
        def step(self, pause: Callable[[StorageError, float], None]) -> bool:
            errors.append(rig.intake.last_error)
            if len(errors) == 1:
                pause(StorageError("a node is away"), 0.0)
                errors.append(rig.intake.last_error)
                return True
            done.set()
            return False

        def due_in_s(self) -> None:
            return None

    rig.applier.chores = OneRetry()  # type: ignore[assignment]
    rig.handover.wake()
    assert done.wait(30)
    assert errors == ["", "StorageError: a node is away", ""]


def test_a_failed_shard_refuses_everything_with_the_cause(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.push(a, {1: 1.0}).wait()
    held = rig.push(rig.hello("b"), {4: 1.0}, trainer="b", more=True)
    memory_node(rig.store.addresses[0]).flush()
    assert isinstance(rig.push(a, {1: 1.0}).error(), ShardFailedError)
    assert rig.failed.wait(30)
    assert isinstance(held.error(), ShardFailedError)
    for refused in (
        lambda: rig.push(a, {1: 1.0}),
        lambda: rig.intake.flush(Deadline.after(5)),
        lambda: rig.change(ERASE, {1: 0.0}),
        rig.hello,
    ):
        with pytest.raises(ShardFailedError, match="NodeLostError"):
            refused()
    assert rig.intake.pending() == (0, 0.0)
    assert not rig.intake.drain(Deadline.after(5))


def test_draining_finishes_what_was_accepted_and_takes_nothing_new(make: Callable[..., Rig]) -> None:
    rig = make()
    a = rig.hello()
    rig.hold()
    outcome = rig.push(a, {1: 1.0})
    assert rig.store.reached.wait(30)
    assert not rig.intake.drain(Deadline.after(0))
    with pytest.raises(ShardUnavailableError, match="draining"):
        rig.push(a, {1: 1.0})
    assert "a (to step 1)" in rig.intake.describe_pending()
    rig.store.gate.set()
    assert rig.intake.drain(Deadline.after(30))
    assert outcome.wait().state == "applied"


def test_a_stopped_shard_gives_up_the_batch_that_waits_for_storage(make: Callable[..., Rig]) -> None:
    rig = make()
    memory_node(rig.store.addresses[0]).down = True
    rig.push(rig.hello(), {1: 1.0})
    assert rig.store.reached.wait(30)
    assert not rig.intake.drain(Deadline.after(0))
    assert rig.applier.stop(30)
    assert rig.intake.pending()[0] == 1


def test_an_older_incarnation_is_fenced_but_what_it_completed_counts(make: Callable[..., Rig]) -> None:
    rig = make()
    old = rig.hello()
    rig.hold()
    rig.push(old, {1: 1.0})
    waiting = rig.push(old, {1: 1.0})
    rig.hello()
    with pytest.raises(FencedError):
        rig.push(old, {1: 1.0})
    rig.store.gate.set()
    assert waiting.wait().state == "applied"
    assert rig.weights([1]) == [-2.0]


# --- sync mode --------------------------------------------------------------------------------------------------------------------------


def test_a_step_is_applied_once_when_all_parts_are_in(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    a, b = rig.hello("a"), rig.hello("b")
    first = rig.push(a, {1: 4.0}, table=MEAN)
    with pytest.raises(DeadlineExceededError):
        rig.intake.flush(Deadline.after(0.05))
    assert first.states == []  # accepted is the whole step, or nothing of it
    second = rig.push(b, {1: 2.0, 2: 2.0}, trainer="b", table=MEAN)
    assert (first.wait().k, second.wait().k) == (1, 1)
    assert rig.weights([1, 2], MEAN) == [-3.0, -1.0]


def test_after_a_goodbye_the_mean_is_over_those_who_stay(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    a, b = rig.hello("a"), rig.hello("b")
    for step in (1, 2):
        rig.push(a, {1: 4.0}, table=MEAN, step=step)
    rig.push(b, {}, trainer="b", table=MEAN, step=1).wait()
    rig.intake.bye("b", b)
    rig.intake.flush(Deadline.after(30))
    assert rig.weights([1], MEAN) == [-6.0]


def test_two_learning_rates_in_a_step_fail_it_for_all_and_the_job_goes_on(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    a, b = rig.hello("a"), rig.hello("b")
    refused = [rig.push(a, {1: 1.0}, lr=0.5), rig.push(b, {1: 1.0}, trainer="b")]
    assert {type(outcome.error()) for outcome in refused} == {PushRejectedError}
    rig.push(a, {1: 1.0})
    rig.push(b, {1: 1.0}, trainer="b").wait()
    assert rig.weights([1]) == [-2.0]


def test_an_overdue_step_fails_the_shard_and_names_the_missing_trainer(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2, barrier_timeout_s=0.05)
    a, _ = rig.hello("a"), rig.hello("slow")
    error = rig.push(a, {1: 1.0}).error()
    assert isinstance(error, BarrierError)
    assert "slow" in str(error)
    assert rig.failed.wait(30)
    with pytest.raises(ShardFailedError, match=r"BarrierError.*slow"):
        rig.push(a, {1: 1.0})
    assert rig.tables.state(TABLE).n_rows == 0


def test_a_third_trainer_is_refused_and_gets_no_incarnation(make: Callable[..., Rig]) -> None:
    rig = make(trainers=2)
    rig.hello("a")
    rig.hello("b")
    with pytest.raises(BarrierError, match="a, b"):
        rig.hello("c")
    assert rig.intake.sessions.next_incarnation == 3


# --- leases of a sync job: no threads; the test is the committer, and the clock is its own ------------------------------------------------


class SyncRig:
    """An intake with a clock that stands still."""

    def __init__(self, on_lost: str, trainers: int = 3) -> None:
        self.now_s = 100.0
        self.recorded: list[tuple[str, int]] = []
        self.on_record: Callable[[], None] = lambda: None
        barrier = Barrier(trainers, 10.0, on_lost=on_lost)
        self.intake = Ingest(Sessions(issues=True), barrier, record=self.record, clock=lambda: self.now_s)
        self.of = {name: self.intake.hello(name, 0)[0] for name in "abc"[:trainers]}
        self.sequences: dict[int, int] = {}

    def record(self, trainer: str, incarnation: int) -> None:
        self.on_record()
        self.recorded.append((trainer, incarnation))

    def push(self, trainer: str, step: int, *, more: bool = False, incarnation: int = 0) -> Outcome:
        incarnation, outcome = incarnation or self.of[trainer], Outcome()
        sequence = self.sequences.get(incarnation, 0) + 1
        self.intake.submit(PushPart(trainer, incarnation, sequence, step, more, [], sequence), (), outcome, lambda: False)
        self.sequences[incarnation] = sequence
        return outcome

    def take(self) -> list[str]:
        """The trainers of the next step, which is applied at once."""
        (step,) = self.intake.take()
        assert isinstance(step, list)
        tickets = [part.ticket for push in step for part in push.parts]
        self.intake.settle(step, {id(ticket): PushReply(ticket.sequence, "applied") for ticket in tickets})
        return sorted(push.trainer for push in step)


def begun(on_lost: str) -> SyncRig:
    """A job of three that has done a step, and in which all but c have sent the next."""
    rig = SyncRig(on_lost)
    for trainer in "abc":
        rig.push(trainer, 1)
    assert rig.take() == ["a", "b", "c"]
    for trainer in "ab":
        rig.push(trainer, 2)
    return rig


def test_a_dropped_trainer_is_journaled_as_gone_before_a_step_goes_on_without_it() -> None:
    rig = begun("drop")
    seen: list[str] = []
    rig.on_record = lambda: seen.append(rig.intake.describe_pending())  # at that time the step still waits
    rig.recorded.clear()
    rig.now_s += 10
    assert rig.take() == ["a", "b"]
    assert rig.recorded == [("c", 4), ("c", 0)]
    assert all("2 accepted changes" in text for text in seen)
    assert rig.intake.kept()[1:] == ((("a", 1), ("b", 2)), True)


def test_what_a_dropped_trainer_sends_is_refused_and_says_why() -> None:
    rig = begun("drop")
    rig.now_s += 10
    rig.take()
    for call in (lambda: rig.push("c", 2), lambda: rig.intake.hello("c", rig.of["c"]), lambda: rig.intake.bye("c", rig.of["c"])):
        with pytest.raises(FencedError, match="dropped from the sync job: step 2 waited 10 s for c"):
            call()


def test_a_dropped_trainer_says_hello_again_and_is_waited_for() -> None:
    rig = begun("drop")
    half = rig.push("c", 2, more=True)
    rig.now_s += 10
    assert rig.take() == ["a", "b"]
    assert isinstance(half.error(), FencedError)
    incarnation, last = rig.intake.hello("c", 0)
    assert (incarnation, last, rig.intake.first_step("c")) == (5, 0, 3)
    for trainer in "ab":
        rig.push(trainer, 3)
    rig.push("c", 3, incarnation=incarnation)
    assert rig.take() == ["a", "b", "c"]


def test_a_slow_trainer_that_still_sends_parts_is_not_dropped() -> None:
    rig = begun("drop")
    for _ in range(5):
        rig.now_s += 9
        rig.push("c", 2, more=True)
    rig.now_s += 9
    rig.push("c", 2)
    assert rig.take() == ["a", "b", "c"]


def test_a_full_disk_holds_up_a_drop_until_there_is_room() -> None:
    rig = begun("drop")
    full = [JournalFullError("/j", "no space"), JournalFullError("/j", "no space")]
    said: list[str] = []

    def once_full() -> None:
        said.append(rig.intake.trouble)
        if full:
            rig.intake.wake()
            raise full.pop()

    rig.on_record = once_full
    rig.intake._changed.wait = lambda timeout=None: True  # type: ignore[method-assign]  # the disk has room at once
    rig.now_s += 10
    assert rig.take() == ["a", "b"]
    assert "no space" in said[1]
    assert rig.intake.journal_error == ""


def test_a_lost_trainer_is_waited_for_and_everybody_who_asks_is_told() -> None:
    rig = begun("wait")
    assert rig.intake.trouble == ""
    rig.now_s += 3600
    assert rig.intake.trouble == "step 2 waited 3600 s for c; here are a, b"
    with pytest.raises(DeadlineExceededError, match="waited 3600 s for c"):
        rig.intake.flush(Deadline.after(0))
    incarnation = rig.intake.hello("c", 0)[0]
    assert rig.intake.first_step("c") == 2
    rig.push("c", 2, incarnation=incarnation)
    assert rig.take() == ["a", "b", "c"]
    assert rig.intake.trouble == ""


def test_a_restarted_trainer_s_predecessor_is_told_that_its_push_was_given_up() -> None:
    rig = SyncRig("wait", trainers=2)
    outcome = rig.push("b", 1)
    incarnation = rig.intake.hello("b", 0)[0]
    assert isinstance(outcome.error(), FencedError)
    rig.push("a", 1)
    rig.push("b", 1, incarnation=incarnation)
    assert rig.take() == ["a", "b"]
    assert rig.intake.pending()[0] == 0


def test_a_lost_trainer_stops_the_job_where_that_is_the_rule() -> None:
    rig = begun("abort")
    rig.now_s += 10
    with pytest.raises(BarrierError, match=r"step 2 waited 10 s for c; here are a, b\. Nothing of it was applied"):
        rig.intake.take()
