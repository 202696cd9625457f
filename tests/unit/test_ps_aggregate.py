"""What may be merged, in which order it is summed, and what staleness says."""

import numpy as np
import pytest

import kvemb.init
import kvemb.optim
from kvemb.errors import PushRejectedError
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from paramserver.apply.applier import staleness
from paramserver.ingest.work_queue import MAX_MERGED_BYTES, hyper_by_table, merge_pushes, n_mergeable
from paramserver.model.batch import CheckedRows, PartTicket, Push, ReceivedPart
from paramserver.optim.update_rule import GRAD_LIMIT
from tests.unit.engine_storage import engine_on, make_store, never, read

SUM = TableDef("s", 1, kvemb.optim.sgd(0.1), kvemb.init.zeros())
MEAN = TableDef("m", 1, kvemb.optim.sgd(0.1), kvemb.init.zeros(), reduce="mean")


def push(definition: TableDef, ids: list[int], grads: list[float], *, incarnation: int = 1, sequence: int = 1, lr: float = 0.1) -> Push:
    values = np.array(grads, np.float32).reshape(-1, 1)
    rows = CheckedRows(definition, np.array(ids, np.uint64), values, np.empty(0, np.uint64), definition.optimizer.check_hyper({"lr": lr}))
    return Push(f"t{incarnation}", incarnation, 1, (ReceivedPart((rows,), PartTicket(sequence, 0, 0)),))


def test_pushes_of_a_sum_table_merge_and_ids_are_summed() -> None:
    pushes = [push(SUM, [5, 1], [1, 2]), push(SUM, [5], [10], incarnation=2)]
    assert n_mergeable(pushes) == 2
    (rows,) = merge_pushes(pushes, sync=False).tables
    assert (rows.ids.tolist(), rows.rows[:, 0].tolist()) == ([1, 5], [2, 11])


def test_sums_do_not_depend_on_the_order_of_arrival() -> None:
    big = [push(SUM, [1], [value], incarnation=n, sequence=s) for n, s, value in [(1, 1, 1e8), (1, 2, 1.0), (2, 1, -1e8), (3, 9, 0.3)]]
    sums = {merge_pushes(order, sync=False).tables[0].rows.tobytes() for order in (big, big[::-1], [big[2], big[0], big[3], big[1]])}
    assert len(sums) == 1


def test_pushes_with_other_run_time_values_are_never_merged() -> None:
    assert n_mergeable([push(SUM, [1], [1]), push(SUM, [1], [1], lr=0.2), push(SUM, [1], [1])]) == 1


def test_pushes_of_a_mean_table_are_never_merged_in_async_mode() -> None:
    assert n_mergeable([push(MEAN, [1], [1]), push(MEAN, [2], [1], incarnation=2)]) == 1


def test_pushes_of_other_tables_merge_whatever_they_reduce_by() -> None:
    assert n_mergeable([push(MEAN, [1], [1]), push(SUM, [1], [1]), push(SUM, [1], [1]), push(MEAN, [1], [1])]) == 3


def test_a_batch_of_several_pushes_has_a_bound_and_one_push_has_none() -> None:
    def sized(size_bytes: int) -> Push:
        return Push("t", 1, 1, (ReceivedPart((), PartTicket(1, 0, size_bytes)),))

    half = MAX_MERGED_BYTES // 2
    assert n_mergeable([sized(half), sized(half), sized(1)]) == 2
    assert n_mergeable([sized(3 * half), sized(1)]) == 1
    assert n_mergeable([sized(1), sized(3 * half)]) == 1


def test_sums_beyond_float32_are_the_largest_gradient_and_never_nan() -> None:
    huge, store = [push(SUM, [1, 2], [3e38, 1.0], incarnation=n) for n in (1, 2, 3)], make_store()
    batch = merge_pushes([*huge, push(SUM, [1], [-3e38], incarnation=4)], sync=False)
    engine_on(store).run(batch, make_version(1, 1), never)
    np.testing.assert_array_equal(read(store, SUM, [1, 2])[2][:, 0], np.float32([-0.1 * GRAD_LIMIT, -0.3]))


def test_mean_divides_by_the_members_of_a_sync_step_even_those_without_the_row() -> None:
    step = [push(MEAN, [1], [6]), push(MEAN, [], [], incarnation=2), push(MEAN, [1, 2], [3, 3], incarnation=3)]
    assert merge_pushes(step, sync=True).tables[0].rows[:, 0].tolist() == [3, 1]
    assert merge_pushes(step[:1], sync=False).tables[0].rows[:, 0].tolist() == [6]


def test_a_table_without_rows_stays_in_the_batch() -> None:
    (rows,) = merge_pushes([push(SUM, [], [])], sync=True).tables
    assert (rows.definition, len(rows.ids)) == (SUM, 0)


def test_two_values_for_one_table_in_one_step_are_refused() -> None:
    with pytest.raises(PushRejectedError, match=r"'s'.*0\.2"):
        hyper_by_table([*push(SUM, [1], [1]).parts, *push(SUM, [1], [1], lr=0.2).parts])


@pytest.mark.parametrize(
    ("seen", "current", "expected"),
    [
        ([], [], (-1.0, 0)),
        ([], [1, 2], (-1.0, 0)),
        ([4, 4], [4, 4], (0.0, 0)),
        ([0, 0], [0, 9], (0.5, 1)),
        ([(1 << 48) + 3, 8], [(2 << 48) + 10, 9], (1.0, 7)),
        ([2, 90, 40], [93, 90, 40], (1 / 3, 3)),  # no push had touched the first row for long when it was pulled
        ([90, 2], [90, 4], (0.5, 1)),  # of several pulls the newest counts
        ([5, 4], [0, 4], (0.5, 1)),
    ],
)
def test_staleness(seen: list[int], current: list[int], expected: tuple[float, int]) -> None:
    assert staleness([(np.array(seen, np.uint64), np.array(current, np.uint64))]) == expected
