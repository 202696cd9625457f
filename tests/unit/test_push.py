"""What push, assign and erase check before anything is sent."""

import numpy as np
import pytest

from kvemb import init, optim
from kvemb.datapath.push import prepare_assign, prepare_erase, prepare_push
from kvemb.errors import InvalidInputError
from kvemb.schema.table_def import TableDef

TABLE = TableDef("user", 2, optim.sgd(lr=0.5), init.zeros())
NAN, INF = float("nan"), float("inf")


def test_duplicates_are_summed_and_ids_come_out_distinct() -> None:
    rows = prepare_push(TABLE, [[9, 4], [9, 9]], np.arange(8.0).reshape(2, 2, 2))
    assert rows.ids.tolist() == [4, 9]
    assert rows.rows.tolist() == [[2, 3], [0 + 4 + 6, 1 + 5 + 7]]
    assert (rows.table, rows.schema, rows.hyper, len(rows.versions)) == ("user", TABLE.schema, {}, 0)


def test_of_a_duplicates_versions_the_oldest_counts() -> None:
    rows = prepare_push(TABLE, [9, 4, 9], np.ones((3, 2)), np.array([7, 8, 6], np.uint64))
    assert rows.versions.tolist() == [8, 6]


def test_run_time_values_travel_complete() -> None:
    assert prepare_push(TABLE, [1], np.ones((1, 2)), None, {"lr": 2}).hyper == {"lr": 2.0, "momentum": 0.0, "weight_decay": 0.0}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_float_dtype_and_any_strides_are_taken(dtype: type) -> None:
    grads = np.arange(12).astype(dtype).reshape(6, 2)[::-2]
    assert prepare_push(TABLE, [1, 2, 3], grads).rows.tolist() == grads.tolist()


def test_an_empty_batch_is_fine() -> None:
    for ids, grads in (([], []), (np.zeros((3, 0), int), np.zeros((3, 0, 2)))):
        rows = prepare_push(TABLE, ids, grads)
        assert rows.rows.shape == (0, 2)


@pytest.mark.parametrize(
    ("ids", "grads", "message"),
    [
        ([1.0], [[1.0, 2.0]], "expected integers"),
        ([1, 2], [[1.0, 2.0]], r"shape \(1, 2\), expected \(2, 2\)"),
        ([1], [[1.0, 2.0, 3.0]], r"shape \(1, 3\), expected \(1, 2\)"),
        ([1], [1.0, 2.0], r"shape \(2,\), expected \(1, 2\)"),
        ([], [[1.0, 2.0]], "shape"),
        ([1], [], "shape"),
        ([1], [[1, 2]], "int64, expected floats"),
        ([1], [["a", "b"]], "expected floats"),
        ([1, 2], [[1.0, 2.0], [1.0]], "cannot be read"),
        ([5, -7, 8], [[1.0, 1.0], [1.0, NAN], [INF, 1.0]], r"id -7: NaN or infinity .*2 such rows"),
        ([5], [[1e39, 1.0]], "id 5: NaN or infinity"),
        ([5, 5], [[3e38, 0.0], [3e38, 0.0]], "id 5: the sum of its gradients exceeds float32"),
        ([5, 5], [[INF, 0.0], [-INF, 0.0]], "id 5: NaN or infinity"),
    ],
)
def test_unusable_gradients_are_refused(ids: object, grads: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        prepare_push(TABLE, ids, grads)  # type: ignore[arg-type]
    assert "'user'" in str(caught.value)


@pytest.mark.parametrize(
    ("versions", "message"),
    [(np.array([1], np.int64), "int64, expected uint64"), (np.array([1, 2], np.uint64), "shape"), ([0.5], "float64")],
)
def test_unusable_versions_are_refused(versions: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        prepare_push(TABLE, [1], np.ones((1, 2)), versions)  # type: ignore[arg-type]


@pytest.mark.parametrize(("hyper", "message"), [({"beta1": 0.5}, "beta1"), ({"lr": NAN}, "lr"), ({"momentum": 0.9}, "momentum")])
def test_unusable_run_time_values_are_refused(hyper: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        prepare_push(TABLE, [1], np.ones((1, 2)), None, hyper)


def test_the_caller_s_arrays_are_not_changed() -> None:
    ids, grads = np.array([3, 1, 3]), np.ones((3, 2), np.float32)
    prepare_push(TABLE, ids, grads)
    assert (ids.tolist(), grads.tolist()) == ([3, 1, 3], [[1, 1]] * 3)


def test_assign_sorts_rows_with_their_ids() -> None:
    rows = prepare_assign(TABLE, [9, -4], [[1.0, 2.0], [3.0, 4.0]])
    assert rows.rows[rows.ids == 9].tolist() == [[1, 2]]
    assert rows.rows[rows.ids == np.uint64(2**64 - 4)].tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [([3, -2, -2], np.ones((3, 2)), "id -2 stands twice"), ([3], [[NAN, 1.0]], "id 3"), ([3], [[1, 2]], "floats")],
)
def test_unusable_assignments_are_refused(ids: object, rows: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        prepare_assign(TABLE, ids, rows)  # type: ignore[arg-type]


def test_an_assign_with_state_has_it_behind_the_weights() -> None:
    table = TableDef("adam", 2, optim.rowwise_adagrad(), init.zeros())
    rows = prepare_assign(table, [9, 4], [[1.0, 2.0], [3.0, 4.0]], [[5.0], [6.0]])
    assert rows.rows.tolist() == [[3, 4, 6], [1, 2, 5]]
    with pytest.raises(InvalidInputError, match=r"state have shape \(1, 2\), expected \(1, 1\)"):
        prepare_assign(table, [9], [[1.0, 2.0]], [[5.0, 6.0]])
    with pytest.raises(InvalidInputError, match="NaN or infinity in its row"):
        prepare_assign(table, [9], [[1.0, 2.0]], [[NAN]])
    wide = TableDef("wide", 40_000, optim.adam(), init.zeros())
    with pytest.raises(InvalidInputError, match="Leave the state out"):
        prepare_assign(wide, [9], np.zeros((1, 40_000)), np.zeros((1, 80_000)))


def test_erase_takes_duplicates() -> None:
    rows = prepare_erase(TABLE, [5, 3, 5])
    assert rows.ids.tolist() == [3, 5]
    assert rows.rows.shape == (2, 0)
