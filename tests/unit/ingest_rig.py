"""What takes pushes in, with its apply thread, on storage that may be held up."""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from memory_store import MemoryStore

import kvemb.init
import kvemb.optim
from kvemb.config import StorageConfig
from kvemb.errors import (
    KvembError,
    from_wire,
)
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart, PushReply
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.policies import NO_POLICIES, Policies
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult
from paramserver.apply.applier import Applier
from paramserver.apply.changed_rows import ChangedRowsFinder
from paramserver.apply.committer import Committer, Handover
from paramserver.engine.engine import Engine
from paramserver.ingest.ingest import Ingest
from paramserver.ingest.part_checks import MapGate
from paramserver.ingest.sessions import Sessions
from paramserver.ingest.sync_steps import SyncSteps
from paramserver.ingest.work_queue import Limits
from paramserver.journal import START
from paramserver.journal.write_ahead_log import AppliedMark, FencedLog
from paramserver.life.admission import Admissions
from paramserver.model.batch import ERASE, CheckedRows, RowsWork
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from tests.unit.forgetful_journal import ForgetfulJournal
from tests.unit.idle_background import IdleBackground
from tests.unit.lonely_engine import ALONE

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
        assert self.gate.wait(90)
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
        assert self._over.wait(90)
        assert self.final is not None
        return self.final

    def error(self) -> KvembError:
        return from_wire(self.wait().error)


class Rig:
    """A shard without gRPC and disk."""

    def __init__(
        self,
        *,
        trainers: int = 0,
        barrier_timeout_s: float = 30.0,
        limits: Limits | None = None,
        background: Callable[["Rig"], IdleBackground] = lambda rig: IdleBackground(),
    ) -> None:
        self.store = GatedStore(StorageConfig("memory", (f"ingest-{next(_NUMBERS)}:1",)), role="shard:0")
        self.store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
        self.store.open(Deadline.after(60))
        self.tables = Tables([])
        self.engine = Engine(self.store, self.tables, Timeline(1), k=0, timeout_s=5, repair=ALONE)
        steps = SyncSteps.first(trainers, barrier_timeout_s) if trainers else None
        self.map = ClusterMap.first(0, 2)
        self.ingest = Ingest(Sessions(issues=True), steps, limits, gate=MapGate(0, lambda: self.map))
        self.failed = threading.Event()
        failed, self.handover, fenced_log = self._fail, Handover(), FencedLog(ForgetfulJournal(), lambda: None)  # type: ignore[arg-type]
        finder = ChangedRowsFinder(self.store, self.tables, 5)
        self.applier = Applier(
            self.ingest,
            self.engine,
            self.tables,
            self.handover,
            finder=finder,
            background=background(self),
            mark=AppliedMark(0, START),
            failed=failed,
            registry=SimpleNamespace(serial=0),  # type: ignore[arg-type]
        )
        sync, self.policies = bool(trainers), dict[str, Policies]()
        admissions = Admissions(lambda key, serial: self.policies.get(key, NO_POLICIES), self.tables, sync=sync)
        self.committer = Committer(
            self.ingest, self.tables, fenced_log, self.handover, judges=lambda: [admissions.judge], sync=sync, epoch=1, k=0, failed=failed
        )
        self.applier.thread.start()
        self.committer.thread.start()
        self.sequences: dict[int, int] = {}
        self.open_steps: dict[int, int] = {}

    def _fail(self, error: BaseException) -> None:
        self.ingest.outcomes.fail(error)
        self.failed.set()

    def hello(self, trainer: str = "a") -> int:
        return self.ingest.attendance.hello(trainer, 0)[0]

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
        part = PushPart(trainer, incarnation, sequence, step, more, [], sequence, map_serial=self.map.serial)
        outcome = Outcome()
        self.ingest.submit(part, (rows,), outcome, cancelled)
        self.sequences[incarnation] = sequence
        return outcome

    def change(self, kind: str, values: dict[int, float], reason: str = "") -> int:
        ids, rows = np.array(list(values), np.uint64), np.array(list(values.values()), np.float32).reshape(-1, 1)
        rows = rows[:, : 0 if kind == ERASE else 1]
        checked = CheckedRows(TABLE, ids, rows, np.empty(0, np.uint64), TABLE.optimizer.defaults())
        return self.ingest.submit_rows(RowsWork(kind, checked, reason), Deadline.after(30), self.map.serial)

    def weights(self, ids: list[int], table: TableDef = TABLE) -> list[float]:
        from kvemb.schema.keys import RowKeys

        size, keys = table.record.size_bytes, RowKeys(table.tag, np.array(ids, np.uint64))
        got = MemoryStore.read(self.store, [ReadPart(keys, size, size)], Deadline.after(60))[0].in_key_order()
        assert got.found.all()
        return table.record.weights(got.records)[:, 0].tolist()

    def hold(self) -> None:
        """Hold the apply thread at its next read."""
        self.store.gate.clear()
        self.store.reached.clear()

    def close(self) -> None:
        self.store.gate.set()
        assert self.committer.thread.stop(30)
        assert self.applier.thread.stop(30)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(**options: object) -> Rig:
        rigs.append(Rig(**options))  # type: ignore[arg-type]
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()
