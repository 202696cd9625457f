"""Eviction by every policy, against a plain model of rows, with pushes and deaths between all steps.

The shard is driven by hand here, step by step: a push comes, the committer journals what there is, a batch is applied, the evictor does
a step, time passes, the process dies and another one goes on from the journal. Rows begin at 0 and count their pushes, so a row says
whether it began anew, and how often each push was applied to it.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore

import kvemb.init
import kvemb.optim
from kvemb import evict
from kvemb.config import StorageConfig
from kvemb.errors import StorageError
from kvemb.evict import Eviction
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart, PushReply
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.policies import NO_POLICIES
from kvemb.schema.record import make_version, split_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from paramserver.apply.committer import Committer, Handover
from paramserver.engine.engine import Engine
from paramserver.ingest.ingest import Ingest
from paramserver.ingest.sessions import Sessions
from paramserver.ingest.sync_steps import Membership
from paramserver.journal import BatchEntry, Entry, Position
from paramserver.journal.write_ahead_log import FencedLog
from paramserver.life import evictor as evictor_module
from paramserver.life.admission import Admissions
from paramserver.life.eviction_verdicts import terms
from paramserver.life.evictor import Evictor
from paramserver.model.batch import ERASE, CheckedRows, RowsWork
from paramserver.model.row_ages import RowAges
from paramserver.model.tables import Tables, TableState
from paramserver.model.transition import Timeline
from paramserver.recovery.replay import Recovery
from tests.matrix import examples
from tests.unit.lonely_engine import ALONE
from tests.unit.mortal_shard import KilledError, MemoryJournal, MortalStore
from tests.unit.run_states import all_rows

TABLE = TableDef("t", 2, kvemb.optim.sgd(1.0), kvemb.init.zeros())
_NUMBERS = count()
_DAY_S = 86_400.0
POLICIES = [
    evict.older_than(batches=4),
    evict.older_than(days=2),
    evict.l2_below(2.5),
    evict.keep(6),
    evict.older_than(days=1) & evict.l2_below(2.5),
    evict.older_than(batches=9) | evict.keep(8),
    evict.keep(3) & evict.older_than(batches=3),
]


class _Journal(FencedLog):
    """A journal in memory."""

    def __init__(self, entries: list[Entry]) -> None:
        super().__init__(None, lambda: None)
        self.entries = entries

    def append(self, entry: Entry) -> Position:
        self.entries.append(entry)
        return Position(1, len(self.entries))

    def commit(self) -> None:
        pass


def _never(error: StorageError, pause_s: float) -> None:
    raise error


class HandDriven:
    """One shard, and what a plain model says of its rows as of the journal's end: by id (batch of the last push, pushes since it began)."""

    def __init__(self, policy: Eviction) -> None:
        self.policy, self.now_s = policy, 1_000_000.0
        self.entries: list[Entry] = []
        self.model: dict[int, tuple[int, int]] = {}
        self.applied_at: dict[int, float] = {}  # by batch: when a shard first had it applied
        self.n_judged = self.n_evicted = 0
        self.store = MortalStore(StorageConfig("memory", (f"evict-{next(_NUMBERS)}:1",)), role="shard:0")
        self.store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
        self.store.open(Deadline.after(60))
        self.saved: tuple[int, int, tuple[np.ndarray, np.ndarray]] = (0, 0, (np.empty(0, np.uint64), np.empty(0, np.uint64)))
        self.points: tuple[tuple[int, int], ...] = ()
        self.epoch = 0
        self.start()

    def start(self) -> None:
        """Let another process go on."""
        self.epoch += 1
        k, step, rows = self.saved
        self.tables = Tables([TableState(TABLE, step, rows)])
        self.engine = Engine(self.store, self.tables, Timeline(self.epoch), k=k, timeout_s=5, repair=ALONE)
        self.ingest = Ingest(Sessions(True), None)
        recovery = Recovery(MemoryJournal(self.entries), Position(1, k), k, lambda name, schema: TABLE).scan()  # type: ignore[arg-type]
        recovery.run(self.engine, self.tables, self.ingest.sessions, Membership(1), _never)
        self.note_applied()
        self.ages = RowAges(self.points, k=self.engine.k)
        self.ages.mark(self.now_s, self.engine.k)
        self.handover = Handover(100)
        admissions = Admissions(lambda key, serial: NO_POLICIES, self.tables, sync=False)
        journal, epoch = _Journal(self.entries), self.epoch
        self.committer = Committer(
            self.ingest,
            self.tables,
            journal,
            self.handover,
            judges=lambda: [admissions.judge],
            sync=False,
            epoch=epoch,
            k=self.engine.k,
            failed=_fail,
        )
        parts: Any = SimpleNamespace(
            shard=0,
            tables=self.tables,
            ages=self.ages,
            engine=self.engine,
            ingest=self.ingest,
            store=self.store,
            timeout_s=5,
            registry=SimpleNamespace(serial=0, policies=lambda key: replace(NO_POLICIES, eviction=self.policy)),
            maps=SimpleNamespace(cluster_map=ClusterMap.first(1, 1)),
        )
        self.evictor = Evictor(parts, clock=lambda: self.now_s, wall_s=self.now_s)
        self.trainer = f"trainer {self.epoch}"
        self.incarnation, self.sequence = self.ingest.attendance.hello(self.trainer, 0)[0], 0

    @property
    def state(self) -> TableState:
        return self.tables.state(TABLE)

    def note_applied(self) -> None:
        for k in range(1, self.engine.k + 1):
            self.applied_at.setdefault(k, self.now_s)

    # --- what may happen, in any order -----------------------------------------------------------------------------------------------

    def push(self, ids: set[int]) -> None:
        self.sequence += 1
        some = np.array(sorted(ids), np.uint64)
        rows = CheckedRows(TABLE, some, np.full((len(some), 2), -1, np.float32), np.empty(0, np.uint64), TABLE.optimizer.defaults())
        part = PushPart(self.trainer, self.incarnation, self.sequence, self.sequence, False, [], self.sequence)
        self.ingest.submit(part, (rows,), lambda reply: None, lambda: False)

    def commit(self) -> None:
        """Let the committer take what there is; then the model knows it, and whether rows were to be evicted."""
        n_before = len(self.entries)
        if self.ingest._queue._queue or self.ingest._eviction is not None:
            self.committer._commit(self.ingest.take(100))
        for entry in self.entries[n_before:]:
            assert isinstance(entry, BatchEntry)
            self.learn(entry)

    def learn(self, entry: BatchEntry) -> None:
        k = split_version(entry.version)[1]
        for rows in entry.batch.tables:
            ids = rows.ids.tolist()
            if entry.batch.kind == ERASE:
                self.require_evictable(ids, k)
                self.n_evicted += len(ids)
                for row_id in ids:
                    del self.model[row_id]
            else:
                for row_id, n_pushes in zip(ids, -rows.rows[:, 0], strict=True):
                    self.model[row_id] = k, self.model.get(row_id, (0, 0))[1] + int(n_pushes)

    def require_evictable(self, ids: list[int], k: int) -> None:
        """Every row is there, and the policy may send it: nothing that came before this entry has made it young or large."""
        for row_id in ids:
            assert row_id in self.model
            assert any(self.may_go(term, row_id, k) for term in terms(self.policy)), (row_id, self.model[row_id])

    def may_go(self, policy: Eviction, row_id: int, k: int) -> bool:
        pushed, n_pushes = self.model[row_id]
        if policy.of:
            return (all if policy.kind == "all_of" else any)([self.may_go(one, row_id, k) for one in policy.of])
        if policy.kind == "l2_below":
            return (2 * n_pushes**2) ** 0.5 < policy.limit
        if policy.kind == "keep":
            return len(self.model) > int(0.98 * policy.limit)
        if policy.unit == "batches":
            return k - 1 - pushed >= policy.limit
        return self.now_s - self.applied_at[pushed] >= policy.limit * _DAY_S

    def apply(self) -> None:
        batch = self.handover.get(timeout_s=0)
        if batch is None:
            return
        applied = self.engine.run(batch.batch, batch.version, _never)
        self.note_applied()
        if isinstance(batch.work, RowsWork):
            batch.work.finish(applied.n_existed)
            self.ingest.outcomes.settle(batch.work, {})
        else:
            parts = [part for push in batch.work for part in push.parts]  # type: ignore[union-attr]
            self.ingest.outcomes.settle(batch.work, {id(part.ticket): PushReply(part.ticket.sequence, "applied") for part in parts})
        if not self.handover._waiting:
            self.handover.get(timeout_s=0)

    def walk(self) -> None:
        self.evictor.step(print)

    def save(self) -> None:
        self.saved = self.engine.k, self.state.step, all_rows(self.state)
        self.points = self.ages.points

    def die(self, n_rows: int) -> None:
        """Die in the next batch, after some rows of it were written, or before it."""
        self.store.left = n_rows
        with suppress(KilledError):
            self.apply()
        self.store.left = None
        self.start()

    # --- the end --------------------------------------------------------------------------------------------------------------------

    def until_nothing_goes(self) -> None:
        """Let everything be applied, and walks go on until two rounds have found nothing."""
        quiet_s = 0.0
        while quiet_s < 150:
            n_before = len(self.entries)
            self.commit()
            while self.handover._waiting:
                self.apply()
            self.walk()
            self.now_s += 5.0
            quiet_s = quiet_s + 5 if len(self.entries) == n_before else 0

    def require_same(self) -> None:
        """Index and storage have the model's rows, and no others; each has counted its pushes since it began."""
        ids = np.arange(64, dtype=np.uint64)
        got = MemoryStore.read(self.store, [ReadPart(TABLE.keys(ids, pages=False), TABLE.record.size_bytes, TABLE.record.size_bytes)],
                               Deadline.after(60))[0].in_key_order()  # fmt: skip
        counts = {int(i): int(w) for i, w, found in zip(ids, TABLE.record.weights(got.records)[:, 0], got.found, strict=True) if found}
        assert counts == {row_id: n for row_id, (_, n) in self.model.items()}
        assert set(np.flatnonzero(self.state.versions(ids)).tolist()) == set(self.model)
        assert self.state.n_rows == len(self.model)


def _fail(error: BaseException) -> None:
    raise error


IDS = st.sets(st.integers(0, 15), min_size=1, max_size=6)
STEPS = st.one_of(
    st.tuples(st.just("push"), IDS),
    st.tuples(st.just("push"), IDS),
    st.tuples(st.just("commit")),
    st.tuples(st.just("apply")),
    st.tuples(st.just("walk")),
    st.tuples(st.just("walk")),
    st.tuples(st.just("passes"), st.sampled_from([1.0, 70.0, 0.5 * _DAY_S, 1.1 * _DAY_S])),
    st.tuples(st.just("save")),
    st.tuples(st.just("die"), st.integers(0, 5)),
)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=examples(30), deadline=None)
@given(steps=st.lists(STEPS, max_size=40), portion=st.sampled_from([1, 3, 4096]))
def test_rows_go_only_while_their_policy_says_so_and_in_the_end_all_of_them(policy: Eviction, steps: list[tuple], portion: int) -> None:
    shard = HandDriven(policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evictor_module, "_ERASED_ROWS", portion)
        patch.setattr(evictor_module, "_SLICE_ROWS", 2 * portion)
        for name, *values in steps:
            if name == "passes":
                shard.now_s += values[0]
            else:
                getattr(shard, name)(*values)
        shard.until_nothing_goes()
        shard.require_same()
        require_none_is_left(shard)
        shard.die(0)  # and a process that knows it all from the journal agrees
        shard.require_same()


def require_none_is_left(shard: HandDriven) -> None:
    kept = [leaf for leaf in terms(shard.policy) if leaf.kind == "keep"]
    for leaf in kept:
        assert len(shard.model) <= leaf.limit
    if any(leaf.unit == "days" for leaf in shard.policy.parts):
        shard.now_s += 0.05 * _DAY_S  # so much later they may be found
        shard.until_nothing_goes()
    k = shard.engine.k + 1
    others = [term for term in terms(shard.policy) if term.kind != "keep"]
    margin = 0.96  # of days: ages are known that well
    for term in others:
        late = [row_id for row_id in shard.model if _surely_goes(shard, term, row_id, k, margin)]
        assert not late


def _surely_goes(shard: HandDriven, policy: Eviction, row_id: int, k: int, margin: float) -> bool:
    pushed, _ = shard.model[row_id]
    if policy.of:
        return (all if policy.kind == "all_of" else any)([_surely_goes(shard, one, row_id, k, margin) for one in policy.of])
    if policy.unit == "days":
        known_s = next((time_s for time_s, upto in shard.ages.points if upto >= pushed), shard.now_s)  # a death may have made it younger
        return (shard.now_s - known_s) * margin > policy.limit * _DAY_S + 200
    return shard.may_go(policy, row_id, k)


def test_keep_sends_those_that_were_pushed_longest_ago() -> None:
    shard = HandDriven(evict.keep(200))
    for at in range(60):
        shard.push(set(range(10 * at % 600, 10 * at % 600 + 10)))
        shard.commit()
        shard.apply()
    shard.push({0, 1, 2, 3, 4, 5, 6, 7, 8, 9})  # the oldest come again
    shard.commit()
    shard.apply()
    shard.until_nothing_goes()
    assert len(shard.model) == 196  # the walk goes to 0.98 of them
    assert set(range(10)) <= set(shard.model)
    assert set(range(420, 600)) <= set(shard.model)


def test_a_table_that_is_hot_throughout_is_held_all_the_same() -> None:
    shard, rng = HandDriven(evict.keep(20)), np.random.default_rng(0)
    for _ in range(300):
        shard.push(set(rng.permutation(64)[:40].tolist()))  # between any two walks all of them
        shard.commit()
        shard.apply()
        shard.walk()
        shard.now_s += 1
    shard.until_nothing_goes()
    assert len(shard.model) <= 20
    shard.require_same()


def test_batches_that_each_bring_more_new_rows_than_a_portion_has_are_kept_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictor_module, "_ERASED_ROWS", 16)
    monkeypatch.setattr(evictor_module, "_SLICE_ROWS", 32)
    shard, most = HandDriven(evict.keep(600)), 0
    for at in range(200):
        shard.push(set(range(30 * at, 30 * at + 30)))
        for _ in range(2):  # the push, and what the walk sends: one portion a batch
            shard.commit()
            shard.apply()
        shard.walk()
        shard.now_s += 1
        most = max(most, shard.state.n_rows if at > 100 else 0)
    assert most < 1.2 * 600
    shard.until_nothing_goes()
    assert set(range(30 * 185, 30 * 200)) <= set(shard.model)


def test_a_portion_that_took_long_does_not_let_a_table_grow_meanwhile() -> None:
    shard, most, n_sent = HandDriven(evict.keep(600)), 0, 0
    for at in range(160):
        shard.push(set(range(10 * at, 10 * at + 10)))
        for _ in range(2):
            shard.commit()
            shard.apply()
        if shard.evictor.sent is not None and not n_sent:
            n_sent, shard.evictor.sent.took_s = 1, 5.0  # a disk that stood still
        shard.walk()
        shard.now_s += 1
        most = max(most, shard.state.n_rows)
    assert n_sent
    assert most < 1.3 * 600, "it rested 20 times as long, although rows came all the time"


def test_a_dry_run_says_what_would_go_by_which_policy_and_erases_nothing() -> None:
    shard = HandDriven(evict.older_than(days=3) | evict.keep(20))
    shard.push(set(range(10)))
    shard.commit()
    shard.apply()
    shard.now_s += 70
    shard.walk()
    shard.now_s += 4 * _DAY_S
    for at in range(3):
        shard.push(set(range(10 + 10 * at, 20 + 10 * at)))
        shard.commit()
        shard.apply()
    would = shard.evictor.dry_run(shard.state, Deadline.after(30))
    assert would.by_policy == {"older_than(days=3)": 10, "keep(20)": 11}  # of 40 rows 19 are to be left
    assert would.size_bytes == 21 * TABLE.record.size_bytes
    assert would.oldest == 1
    assert len(shard.entries) == 4
    shard.until_nothing_goes()
    (done,) = shard.evictor.report().values()
    assert (done.by_policy, done.size_bytes, done.oldest) == (would.by_policy, would.size_bytes, would.oldest)
    assert shard.evictor.described(TABLE, done, shard.state.n_rows)["oldest_s"] > 3.9 * _DAY_S


def test_a_push_that_comes_between_the_choice_and_the_commit_keeps_its_row() -> None:
    shard = HandDriven(evict.l2_below(10.0))
    shard.push({1, 2})
    shard.commit()
    shard.apply()
    while shard.ingest._eviction is None:
        shard.now_s += 1
        shard.walk()
    shard.push({2})  # in the same group as the erase
    shard.commit()
    erased = [rows.ids.tolist() for entry in shard.entries for rows in entry.batch.tables if entry.batch.kind == ERASE]  # type: ignore[union-attr]
    assert erased == [[1]]


def test_a_push_that_is_journaled_and_not_applied_keeps_its_row() -> None:
    shard = HandDriven(evict.l2_below(10.0))
    shard.push({1, 2})
    shard.commit()
    shard.apply()
    shard.push({2})
    shard.commit()  # and is not applied when the walk chooses, by the index alone
    while shard.ingest._eviction is None:
        shard.now_s += 1
        shard.walk()
    shard.commit()
    erased = [rows.ids.tolist() for entry in shard.entries for rows in entry.batch.tables if entry.batch.kind == ERASE]  # type: ignore[union-attr]
    assert erased == [[1]]


def test_a_policy_that_is_taken_away_in_mid_walk_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictor_module, "_ERASED_ROWS", 2)
    shard = HandDriven(evict.l2_below(10.0))
    shard.push(set(range(10)))
    shard.commit()
    shard.apply()
    while shard.ingest._eviction is None:
        shard.now_s += 1
        shard.walk()
    shard.policy = evict.never()
    shard.until_nothing_goes()
    assert len(shard.model) == 8


def test_rows_of_slots_that_were_taken_over_count_as_pushed_then() -> None:
    ages, ids = RowAges(), np.arange(100, dtype=np.uint64)
    ages.mark(1000, 50)
    givers = np.full(100, make_version(1, 7), np.uint64)
    ages.become(ages.restarted(TABLE, ids[:50], make_version(4, 80)))
    pushed = ages.last_push(TABLE, ids, givers)
    assert (pushed[:50] == 80).all()
    assert ages.last_push(TABLE, ids[:1], np.array([make_version(4, 90)], np.uint64)) == 90
    slots = TABLE.placement.slots(ids)
    assert (pushed[50:][~np.isin(slots[50:], slots[:50])] == 7).all()
    again = RowAges(ages.points, ages.since, k=100)
    assert (again.last_push(TABLE, ids, givers) == pushed).all()
    assert RowAges(ages.points, k=49).points == ()  # those batches were rolled back


def test_ages_of_a_year_take_some_hundred_points_and_are_wrong_by_at_most_one_per_cent() -> None:
    ages = RowAges()
    last = 300 * 24 * 60 - 60
    for minute in range(0, last + 1, 60):
        ages.mark(60.0 * minute, minute)
    now_s = 60.0 * last
    assert len(ages.points) < 800
    for age_s in np.geomspace(7200, 0.9 * now_s, 50):
        true = int((now_s - age_s) // 60)
        found = ages.k_at(now_s - age_s)
        assert 0 <= true - found <= 60 + 0.012 * age_s / 60


def test_a_clock_that_goes_back_makes_no_row_older() -> None:
    ages = RowAges()
    ages.mark(5000, 10)
    ages.mark(1000, 20)
    assert ages.k_at(999) == -1
    assert ages.k_at(1000) >= 10
