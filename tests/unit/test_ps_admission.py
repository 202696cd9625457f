"""Which gradients are held back: the counts of ids, and admissions against a model in plain Python, with crashes between all steps."""

from collections import Counter, defaultdict
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvemb
from kvemb import admit
from kvemb.admit import Admission
from kvemb.arrays.hashing import digest64
from kvemb.schema.policies import NO_POLICIES, Policies
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from paramserver.ingest.work_queue import merge_pushes
from paramserver.life.admission import Admissions
from paramserver.life.occurrences import LEAST_CELLS, MOST_CELLS, OccurrenceFilter, cells_for
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows, PartTicket, Push, ReceivedPart
from paramserver.model.tables import Tables
from tests.matrix import examples
from tests.unit.run_states import all_rows

TABLE = TableDef("t", 1, kvemb.optim.sgd(1.0), kvemb.init.zeros())
OTHER = TableDef("free", 1, kvemb.optim.sgd(1.0), kvemb.init.zeros())
MASK = (1 << 64) - 1


def rows_of(ids: list[int], definition: TableDef = TABLE) -> CheckedRows:
    array = np.array(sorted(ids), np.uint64)
    return CheckedRows(definition, array, np.ones((len(ids), 1), np.float32), np.empty(0, np.uint64), definition.optimizer.defaults())


def mixed(word: int) -> int:
    """The splitmix64 finalizer, in plain Python."""
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & MASK
    return word ^ word >> 31


class Model:
    """Rows and counts of one table, one id at a time."""

    def __init__(self, admission: Admission) -> None:
        self.admission, self.rows, self.counts = admission, set[int](), Counter[int]()

    def held_back(self, ids: Counter[int], k: int) -> set[int]:
        """Return the ids that are held back of a batch with so many gradients of each."""
        held = set()
        for one, times in ids.items():
            if one in self.rows:
                continue
            self.counts[one] += times
            if self._let_in(one, times, k):
                self.counts[one] -= times  # those that brought it in are not counted; the others stay when its row is erased
                self.rows.add(one)
            else:
                held.add(one)
        return held

    def _let_in(self, one: int, times: int, k: int) -> bool:
        if self.admission.kind == "after":
            return self.counts[one] >= self.admission.value
        drawn = mixed(one ^ digest64("admission", TABLE.key, TABLE.seed, k)) >> 11
        return drawn * 2.0**-53 < 1.0 - (1.0 - self.admission.value) ** times


class Shard:
    """Admissions beside a journal whose batches are applied when the test says so."""

    def __init__(self, admission: Admission) -> None:
        self._policies = {TABLE.key: Policies(admission)}
        self.journal: list[tuple[int, Batch]] = []
        self._sequences = count(1)
        self.start()

    def start(self) -> None:
        """As after a crash: what is in the journal is applied, counts are gone."""
        self.tables, self.n_applied = Tables([]), 0
        self.admissions = Admissions(lambda key, serial: self._policies.get(key, NO_POLICIES), self.tables, sync=False)
        while self.apply():
            pass

    def push(self, parts: list[list[int]]) -> list[int]:
        """Number a batch of one part per trainer; return how many gradients of each were held back."""
        tickets = [PartTicket(next(self._sequences), 0, 0) for _ in parts]
        received = [ReceivedPart((rows_of(ids), rows_of(ids, OTHER)), ticket) for ids, ticket in zip(parts, tickets, strict=True)]
        pushes = [Push(f"t{number}", number, 1, (part,)) for number, part in enumerate(received, start=1)]
        held_back = self.admissions.judge(pushes, len(self.journal) + 1, self.unapplied)
        self._number(merge_pushes(pushes, sync=False, held_back=[held_back]))
        return [ticket.held_back for ticket in tickets]

    def change(self, kind: str, ids: list[int]) -> None:
        self._number(Batch(kind, (rows_of(ids),)))

    def _number(self, batch: Batch) -> None:
        self.journal.append((len(self.journal) + 1, batch))

    def unapplied(self) -> list[Batch]:
        """As a hand-over has them: the batch applied last among them."""
        return [batch for _, batch in self.journal[max(0, self.n_applied - 1) :]]

    def apply(self) -> bool:
        if self.n_applied == len(self.journal):
            return False
        k, batch = self.journal[self.n_applied]
        for rows in batch.tables:
            state = self.tables.state(rows.definition)
            if batch.kind == ERASE:
                state.erased(rows.ids, make_version(1, k))
            else:
                state.applied(rows.ids, make_version(1, k))
        self.n_applied += 1
        return True


IDS = st.lists(st.integers(0, 3), unique=True, max_size=4)
STEPS = st.lists(
    st.sampled_from(["push"] * 6 + [ASSIGN, ERASE, ERASE, "applied", "applied", "crash"]).flatmap(
        lambda what: st.tuples(st.just(what), st.lists(IDS, min_size=1, max_size=3) if what == "push" else IDS)
    ),
    min_size=10,
    max_size=60,
)
POLICIES = st.one_of(st.builds(admit.after, st.integers(1, 5)), st.builds(admit.probability, st.floats(0.05, 1)))


@settings(max_examples=examples(150))
@given(POLICIES, STEPS)
def test_what_is_held_back_is_that_of_a_model_with_a_crash_between_all_steps(admission: Admission, steps: list[tuple[str, object]]) -> None:
    shard, model = Shard(admission), Model(admission)
    for what, given_ids in steps:
        if what == "push":
            parts: list[list[int]] = given_ids  # type: ignore[assignment]
            pushed = Counter(one for part in parts for one in part)
            held = model.held_back(pushed, len(shard.journal) + 1)
            assert shard.push(parts) == [len(held & set(part)) for part in parts]
            free, rows = shard.journal[-1][1].tables
            assert dict(zip(rows.ids.tolist(), rows.rows[:, 0].tolist(), strict=True)) == {
                one: pushed[one] for one in pushed if one not in held
            }
            assert free.ids.tolist() == sorted(pushed)
        elif what == "applied":
            shard.apply()
        elif what == "crash":
            shard.start()
            model.counts.clear()
        else:
            shard.change(what, given_ids)  # type: ignore[arg-type]
            model.rows = model.rows | set(given_ids) if what == ASSIGN else model.rows - set(given_ids)  # type: ignore[call-overload]
    while shard.apply():
        pass
    assert set(all_rows(shard.tables.state(TABLE))[0].tolist()) == model.rows


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=20), max_size=40), st.integers(1, 255))
def test_a_count_is_never_too_low(batches: list[list[int]], n: int) -> None:
    seen, true = OccurrenceFilter(), defaultdict[int, int](int)
    for ids in batches:
        times = [1 + one % 90 for one in ids]
        reached = seen.reach(np.array(ids, np.uint64), np.array(times, np.int64), n, most_cells=LEAST_CELLS)
        for one, much, there in zip(ids, times, reached.tolist(), strict=True):
            true[one] += much
            assert there or true[one] < n
            assert there == (true[one] >= n)  # so few ids share no cells
            if there:
                true[one] = min(true[one] - much, n - 1)  # what brought it there is not counted


def fresh(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.unique(rng.integers(0, 1 << 63, n, dtype=np.uint64))


@pytest.mark.parametrize("n", [2, 3])
def test_an_id_comes_in_early_with_the_probability_that_is_stated(n: int) -> None:
    rng, seen, early, total = np.random.default_rng(0), OccurrenceFilter(), 0, 0
    most = len(seen._cells)
    for _ in range(12):  # several generations of 19,000
        ids = fresh(rng, 5000)
        early += int(seen.reach(ids, np.ones(len(ids), np.int64), n, most_cells=most).sum())
        total += len(ids)
    assert early / total < 0.008
    assert seen.size_bytes == 2 * most


def test_the_filter_stays_as_large_as_it_may_be_and_remembers_a_window_of_ids() -> None:
    rng, seen, most = np.random.default_rng(1), OccurrenceFilter(), 1 << 19
    window = int(0.0719 * most)

    def come(ids: np.ndarray, n: int = 255) -> np.ndarray:
        return seen.reach(ids, np.ones(len(ids), np.int64), n, most_cells=most)

    for _ in range(40):
        come(fresh(rng, 5000))
    assert seen.size_bytes == 2 * most
    ids = fresh(rng, 5000)
    assert not come(ids).any()
    come(fresh(rng, window - 6000))
    assert come(ids, 2).all()
    ids = fresh(rng, 5000)
    come(ids)
    for _ in range(2 * window // 5000 + 2):
        come(fresh(rng, 5000))
    assert come(ids, 2).mean() < 0.01
    assert seen.size_bytes == 2 * most


def test_the_filter_of_a_large_table_may_be_larger() -> None:
    assert [cells_for(n) for n in (0, 10**6, 10**7, 10**10)] == [LEAST_CELLS, LEAST_CELLS, 1 << 28, MOST_CELLS]


def test_a_policy_that_was_taken_away_takes_its_counts_with_it() -> None:
    shard = Shard(admit.after(3))
    shard.push([[1, 2]])
    assert shard.admissions.filter_bytes(TABLE.key) > 0
    assert shard.admissions.held_back["t"] == 2
    shard._policies.clear()
    shard.push([[1]])
    assert shard.admissions.filter_bytes(TABLE.key) == 0
    assert shard.journal[-1][1].tables[1].ids.tolist() == [1]


def test_a_sync_step_is_decided_by_the_newest_policies_that_one_of_its_trainers_can_have_known() -> None:
    asked = list[int]()

    def policies(key: str, serial: int) -> Policies:
        asked.append(serial)
        return NO_POLICIES

    parts = [ReceivedPart((rows_of([1]),), PartTicket(1, 0, 0), tables_serial=serial) for serial in (4, 7, 0)]
    pushes = [Push(f"t{number}", number, 1, (part,)) for number, part in enumerate(parts, start=1)]
    for sync, expected in ((True, 7), (False, 0)):
        asked.clear()
        merge_pushes(pushes, sync=sync, held_back=[Admissions(policies, Tables([]), sync=sync).judge(pushes, 1, list)])
        assert set(asked) == {expected}


def test_a_batch_in_which_all_is_held_back_is_a_step_of_its_table() -> None:
    shard = Shard(admit.after(2))
    assert shard.push([[5], [6]]) == [1, 1]
    batch = shard.journal[-1][1]
    assert batch.kind == APPLY
    assert [len(rows.ids) for rows in batch.tables] == [2, 0]
