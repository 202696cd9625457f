"""The ledger can tell: every way of breaking the promise is seen, and keeping it is not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chaos.ledger import ACKED, BAD_READ, DIM, SENT, LedgerFile, Plan, Record, Verdict, Verifier, torn

from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slots import N_SLOTS
from tests.owners import shard_of

PLAN = Plan(seed=5, n_trainers=3)
N = 70  # a little more than two generations
Rows = dict[int, np.ndarray]


def everything_applied() -> Rows:
    rows: Rows = {}
    for trainer in range(3):
        for n in range(N):
            apply(rows, trainer, n)
    return rows


def apply(rows: Rows, trainer: int, n: int, *, times: int = 1, shard: int | None = None) -> None:
    ids, grads = PLAN.push(trainer, n)
    here = np.ones(len(ids), bool) if shard is None else shard_of(ids.view(np.uint64), 2) == shard
    for row, grad in zip(ids[here].tolist(), grads[here], strict=True):
        rows[row] = rows.get(row, np.zeros(DIM, np.float32)) - times * grad


def record(path: Path, sent: int = N, acked: int = N) -> Record:
    file = LedgerFile(path)
    for n in range(sent):
        file.note(SENT, n)
        if n < acked:
            file.note(ACKED, n)
    file.close()
    return Record.read(path)


def judge(rows: Rows, records: list[Record], *slot_shards: np.ndarray, drift: Rows | None = None) -> Verdict:
    def reader(some: Rows) -> Callable[[np.ndarray], np.ndarray]:
        return lambda ids: np.array([some.get(row, np.zeros(DIM)) for row in ids.tolist()], np.float32)

    return Verifier(PLAN, records, slot_shards or [equal_runs(2)], reader(rows), reader(rows if drift is None else drift)).run()


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    return [record(tmp_path / str(trainer)) for trainer in range(3)]


def test_what_was_applied_once_is_kept(records: list[Record]) -> None:
    rows = everything_applied()
    verdict = judge(rows, records)
    assert verdict.kept
    assert (verdict.pushes_sent, verdict.pushes_acked) == (3 * N, 3 * N)
    assert verdict.rows_verified == len(rows)


def lose_one_row(rows: Rows) -> None:
    ids, grads = PLAN.push(1, 40)
    rows[int(ids[7])] += grads[7]


def lose_a_whole_row(rows: Rows) -> None:
    rows.pop(next(iter(rows)))


def tear(rows: Rows) -> None:
    rows[next(iter(rows))][DIM // 2 :] = 0


def invent(rows: Rows) -> None:
    apply(rows, 0, N)


@pytest.mark.parametrize(
    ("harm", "seen"),
    [
        (lose_one_row, "lost"),
        (lose_a_whole_row, "lost"),
        (lambda rows: apply(rows, 2, 3, times=-1), "lost"),
        (lambda rows: apply(rows, 2, 3), "duplicated"),
        (lambda rows: apply(rows, 0, 69, times=2, shard=1), "duplicated"),
        (tear, "torn_rows"),
        (invent, "invented"),
    ],
)
def test_every_breach_is_seen(harm: Callable[[Rows], None], seen: str, records: list[Record]) -> None:
    rows = everything_applied()
    harm(rows)
    verdict = judge(rows, records)
    assert not verdict.kept
    assert getattr(verdict, seen) > 0
    assert verdict.examples or seen == "invented"


def test_a_push_without_acknowledgement_may_be_there_or_not_but_not_by_half(tmp_path: Path) -> None:
    records = [record(tmp_path / str(trainer), sent=N + 3) for trainer in range(3)]
    rows = everything_applied()
    apply(rows, 0, N)
    apply(rows, 1, N, shard=0)  # each shard's part is a promise of its own
    verdict = judge(rows, records)
    assert verdict.kept
    assert (verdict.parts_unacked_applied, verdict.parts_unacked_not_applied) == (3, 3 * 3 * 2 - 3)
    ids, grads = PLAN.push(2, N)
    rows[int(ids[0])] = rows.get(int(ids[0]), np.zeros(DIM, np.float32)) - grads[0]
    assert judge(rows, records).halved == 1


def test_a_push_that_was_split_by_several_maps_has_a_part_of_each_set_of_rows_that_stayed_together(tmp_path: Path) -> None:
    records = [record(tmp_path / str(trainer), sent=N + 1) for trainer in range(3)]
    rows = everything_applied()
    apply(rows, 1, N, shard=0)
    first, then = equal_runs(2), np.full(N_SLOTS, 2, np.uint16)
    assert judge(rows, records, then).halved == 1
    verdict = judge(rows, records, then, first, then)  # all was shard 2's, the first half shard 0's meanwhile
    assert verdict.kept
    assert (verdict.parts_unacked_applied, verdict.parts_unacked_not_applied) == (1, 3 * 2 - 1)
    ids, grads = PLAN.push(2, N)
    rows[int(ids[0])] = rows.get(int(ids[0]), np.zeros(DIM, np.float32)) - grads[0]
    verdict = judge(rows, records, then, first)
    assert verdict.halved == 1
    assert f"push {N} of trainer 2 at shard 2 then " in verdict.examples[0]


def drifted_since(first: int) -> Rows:
    """Rows of the table that drifts, all let go just before push `first` of each trainer."""
    rows: Rows = {}
    for trainer in range(3):
        for n in range(first, N):
            apply(rows, trainer, n)
    return rows


def test_rows_that_were_let_go_or_have_begun_anew_are_told_apart_and_break_nothing(records: list[Record]) -> None:
    verdict = judge(everything_applied(), records, drift=drifted_since(10))
    assert verdict.kept
    assert (verdict.rows_let_go, verdict.rows_begun_anew > 200) == (0, True)
    verdict = judge(everything_applied(), records, drift=drifted_since(PLAN.pushes_per_generation))
    assert verdict.kept
    assert (verdict.rows_let_go > 200, verdict.rows_begun_anew) == (True, 0)


@pytest.mark.parametrize(
    ("n", "times", "seen"), [(20, -1, "gaps"), (20, 1, "gaps"), (5, 1, "gaps")], ids=["lacks one", "one twice", "one from before"]
)
def test_a_row_that_was_let_go_has_no_gap_behind_and_nothing_from_before(n: int, times: int, seen: str, records: list[Record]) -> None:
    drift = drifted_since(10)
    apply(drift, 1, n, times=times)
    verdict = judge(everything_applied(), records, drift=drift)
    assert not verdict.kept
    assert getattr(verdict, seen) > 0
    assert verdict.examples


def test_what_trainers_saw_on_the_way_counts(tmp_path: Path, records: list[Record]) -> None:
    file = LedgerFile(tmp_path / "1")
    file.note(BAD_READ, 8)
    file.close()
    verdict = judge(everything_applied(), [records[0], Record.read(tmp_path / "1"), records[2]])
    assert (verdict.kept, verdict.bad_reads) == (False, 1)


def test_a_record_cut_short_by_a_kill_is_read_up_to_there(tmp_path: Path) -> None:
    record(tmp_path / "0", sent=5, acked=4)
    whole = (tmp_path / "0").read_bytes()
    (tmp_path / "0").write_bytes(whole[:-3])
    assert Record.read(tmp_path / "0").next_push == 4
    assert Record.read(tmp_path / "none").next_push == 0


def test_all_pushes_of_a_generation_own_digits_of_their_own() -> None:
    per = PLAN.pushes_per_generation
    places = [PLAN.place(trainer, n) for trainer in range(3) for n in range(per)]
    assert len(set(places)) == len(places) == 3 * per
    ids = np.concatenate([PLAN.ids(generation) for generation in range(50)])
    assert len(np.unique(ids)) == len(ids)


def test_counts_up_to_three_are_exact_when_every_digit_is_full() -> None:
    rows = np.zeros((256, DIM), np.float32)
    ids = PLAN.ids(0)
    for trainer in range(3):
        for n in range(PLAN.pushes_per_generation):
            some, grads = PLAN.push(trainer, n)
            rows[np.isin(ids, some)] -= 3 * grads
    assert not torn(rows).any()
    for trainer in range(3):
        for n in range(PLAN.pushes_per_generation):
            np.testing.assert_array_equal(PLAN.counts(rows, trainer, n), 3 * PLAN.members(trainer, n))
