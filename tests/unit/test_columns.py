"""Feature columns and what features hold: the rules of tf.feature_column, on plain arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from trainer.columns import (
    bucketized_column,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_list,
    crossed_column,
    embedding_column,
    indicator_column,
    numeric_column,
    shared_embedding_columns,
    weighted_categorical_column,
)
from trainer.columns.column_kinds import CategoricalColumn, NumericColumn
from trainer.columns.column_values import ColumnValues
from trainer.columns.feature_values import Bags, cross_bags, dense_bags, hash_buckets, jagged_bags, list_bags


def texts(*words: object) -> np.ndarray:
    array = np.empty(len(words), object)
    array[:] = words
    return array


def read(bags: Bags) -> list[list[object]]:
    """The bags as nested lists."""
    return [part.tolist() for part in np.split(bags.values, np.cumsum(bags.lengths)[:-1])]


# --- what a feature holds -----------------------------------------------------------------------------------------------------------


def test_a_dense_feature_is_bags_of_equal_length() -> None:
    assert read(dense_bags(np.array([4, 5]))) == [[4], [5]]
    assert read(dense_bags(np.array([[4, 5], [6, 7]]))) == [[4, 5], [6, 7]]
    assert dense_bags(np.empty((3, 0), np.int64)).lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["U", "S", "T", object])
def test_text_arrays_become_objects(dtype: object) -> None:
    bags = dense_bags(np.array([["a", "bc"], ["", "d"]], dtype=np.dtypes.StringDType() if dtype == "T" else dtype)).present()
    assert [word.decode() if isinstance(word, bytes) else word for word in bags.values.tolist()] == ["a", "bc", "d"]
    assert bags.lengths.tolist() == [2, 1]


def test_missing_values_are_left_out_of_their_bags() -> None:
    assert read(dense_bags(np.array([[-1, -1], [3, -1], [-1, 4], [5, 6]])).present()) == [[], [3], [4], [5, 6]]
    assert read(list_bags([["", "a"], [b"", b"b"]]).present()) == [["a"], [b"b"]]
    assert read(dense_bags(np.array([0.0, -1.0])).present()) == [[0.0], [-1.0]]


@given(st.lists(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), max_size=4), max_size=6))
def test_what_is_kept_stays_in_its_bag(bags: list[list[tuple[int, bool]]]) -> None:
    flat = [one for bag in bags for one in bag]
    values, mask = np.array([value for value, _ in flat], np.int64), np.array([kept for _, kept in flat], bool)
    left = Bags(values, np.array([len(bag) for bag in bags], np.int64), values.astype(np.float32)).keep(mask)
    assert left.values.tolist() == [value for value, kept in flat if kept]
    assert left.lengths.tolist() == [sum(kept for _, kept in bag) for bag in bags]
    assert left.weights is not None
    assert left.weights.tolist() == left.values.tolist()


def test_weights_go_with_their_values() -> None:
    bags = Bags(np.array([1, -1, 2]), np.array([1, 2]), np.array([0.5, 1.5, 2.5], np.float32)).present()
    assert bags.weights is not None
    assert bags.weights.tolist() == [0.5, 2.5]


def test_lists_may_differ_in_length() -> None:
    assert read(list_bags([[1, 2], [], [3]])) == [[1, 2], [], [3]]
    assert read(list_bags([("a",), ("b", "c")])) == [["a"], ["b", "c"]]
    assert read(list_bags(["a", "b"])) == [["a"], ["b"]]
    assert list_bags([[], []]).lengths.tolist() == [0, 0]
    assert list_bags([]).lengths.tolist() == []


@pytest.mark.parametrize("rows", [["a", ["b"]], [[1, [2]]], [object()], [[2**70]], [[True]]])
def test_lists_that_are_no_feature_are_refused(rows: list[object]) -> None:
    with pytest.raises(InvalidInputError):
        list_bags(rows)


@pytest.mark.parametrize("array", [np.zeros((2, 2, 2)), np.array(3), np.array([True]), np.array([1j])])
def test_arrays_that_are_no_feature_are_refused(array: np.ndarray) -> None:
    with pytest.raises(InvalidInputError):
        dense_bags(array)


@pytest.mark.parametrize("lengths", [[1, 1], [2, 2], [4, -1], [[3]], [1.5, 1.5]])
def test_lengths_that_do_not_fit_the_values_are_refused(lengths: list[object]) -> None:
    with pytest.raises(InvalidInputError):
        jagged_bags(np.arange(3), np.array(lengths))


def test_jagged_values_are_never_missing() -> None:
    assert read(jagged_bags(np.array([-1, 7, 8]), np.array([1, 0, 2], np.int32))) == [[-1], [], [7, 8]]
    with pytest.raises(InvalidInputError, match="weights"):
        jagged_bags(np.arange(3), np.array([3]), np.ones(2))


# --- what values mean ---------------------------------------------------------------------------------------------------------------


def test_identity_takes_values_as_they_are_and_a_default_for_the_others() -> None:
    column = categorical_column_with_identity("c", 10, default_value=4)
    assert column.buckets(np.array([0, 9, 10, -7], np.int32)).tolist() == [0, 9, 4, 4]
    assert column.buckets(np.array([2**64 - 1, 3], np.uint64)).tolist() == [4, 3]


def test_identity_without_a_default_refuses_values_out_of_range_by_name() -> None:
    with pytest.raises(InvalidInputError, match="'c': 10 is outside"):
        categorical_column_with_identity("c", 10).buckets(np.array([3, 10]))


def test_hash_buckets_are_those_of_the_values() -> None:
    words = texts("a", "b", "a")
    assert np.array_equal(categorical_column_with_hash_bucket("c", 50).buckets(words), hash_buckets(words, 50))
    assert np.array_equal(categorical_column_with_hash_bucket("c", 50, "int64").buckets(np.arange(9)), hash_buckets(np.arange(9), 50))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (categorical_column_with_hash_bucket("c", 9), np.array([1])),
        (categorical_column_with_hash_bucket("c", 9, "int64"), texts("1")),
        (categorical_column_with_hash_bucket("c", 9, "int64"), np.array([1.0])),
        (categorical_column_with_vocabulary_list("c", ["a"]), np.array([1])),
        (categorical_column_with_vocabulary_list("c", [1]), texts("1")),
        (categorical_column_with_identity("c", 9), np.array([1.0])),
        (categorical_column_with_identity("c", 9), texts("1")),
    ],
)
def test_values_of_another_kind_than_the_column_are_refused(column: CategoricalColumn, values: np.ndarray) -> None:
    with pytest.raises(InvalidInputError, match="'c' holds"):
        column.buckets(values)


def test_a_vocabulary_gives_places_and_leaves_others_out() -> None:
    column = categorical_column_with_vocabulary_list("c", ["red", "green"])
    assert column.num_buckets == 2
    assert column.buckets(texts("green", b"red", "blue", "green")).tolist() == [1, 0, -1, 1]


def test_a_vocabulary_of_integers_is_not_sorted() -> None:
    column = categorical_column_with_vocabulary_list("c", np.array([70, -3, 12]))
    assert column.buckets(np.array([12, 70, -3, 71, 0, -9])).tolist() == [2, 0, 1, -1, -1, -1]
    assert column.buckets(np.array([2**64 - 3, 12], np.uint64)).tolist() == [-1, 2]


def test_a_default_stands_for_what_is_not_listed() -> None:
    assert categorical_column_with_vocabulary_list("c", ["a", "b"], default_value=0).buckets(texts("b", "z")).tolist() == [1, 0]


def test_what_is_not_listed_is_hashed_behind_the_vocabulary() -> None:
    column = categorical_column_with_vocabulary_list("c", ["a", "b"], num_oov_buckets=5)
    assert column.num_buckets == 7
    assert column.buckets(texts("b", "z")).tolist() == [1, 2 + int(hash_buckets(texts("z"), 5)[0])]
    integers = categorical_column_with_vocabulary_list("c", [4, 2], num_oov_buckets=5)
    assert integers.buckets(np.array([2, 9])).tolist() == [1, 2 + int(hash_buckets(np.array([9]), 5)[0])]


def test_a_bucket_holds_its_lower_boundary() -> None:
    column = bucketized_column(numeric_column("x"), [0, 0.7, 10])
    values = np.array([-1, 0, 0.5, 0.7, 9.9, 10, 1e9, np.nan], np.float32)
    assert column.num_buckets == 4
    assert column.buckets(values).tolist() == [0, 1, 1, 2, 2, 3, 3, 3]


def test_several_numbers_have_ranges_of_their_own() -> None:
    column = bucketized_column(numeric_column("x", shape=2), [5])
    assert column.num_buckets == 4
    assert column.buckets(np.array([1, 1, 9, 9], np.float32)).tolist() == [0, 2, 1, 3]


def ids_of(column: CategoricalColumn, **features: list[object]) -> Bags:
    def numbers(of: NumericColumn, given: Mapping[str, Any]) -> NDArray[Any]:
        return np.array(given[of.key], np.float32).reshape(-1, of.width)

    return ColumnValues(features, lambda value: (list_bags(value), True), numbers).ids(column)


def test_a_cross_is_of_a_features_values_and_of_columns_ids() -> None:
    page, colour = categorical_column_with_identity("page", 9), categorical_column_with_vocabulary_list("colour", ["red", "green"])
    age = bucketized_column(numeric_column("age", shape=2), [18])
    made = ids_of(
        crossed_column([page, "word", crossed_column([age, colour], 2)], 10**12),
        page=[[3, -1], [4, 5]],
        word=[["a", ""], ["b"]],
        age=[[17, 20], [30, 1]],
        colour=[["green", "pink"], ["", "red"]],
    )
    # A column leaves missing values out, and crosses what it does not know as -1; a feature's own values are all there.
    parts = [[[3], [4, 5]], [["a", ""], ["b"]], [[0, 3], [1, 2]], [[1, -1], [0]]]
    expected = cross_bags([list_bags(part) for part in parts], 10**12)
    assert (made.values.tolist(), made.lengths.tolist()) == (expected.values.tolist(), expected.lengths.tolist())
    assert made.lengths.tolist() == [1 * 2 * 2 * 2, 2 * 1 * 2 * 1]


def test_numbers_are_not_crossed_and_the_feature_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"'price' holds float64.*bucketized_column"):
        ids_of(crossed_column(["price", "word"], 9), price=[1.5], word=["a"])


def test_an_indicator_counts_buckets_and_adds_weights() -> None:
    colour = categorical_column_with_vocabulary_list("colour", ["red", "green"])
    weighted = weighted_categorical_column(colour, "w")
    features = {"colour": [["red", "red", "pink"], [], ["green"]], "w": [[0.5, -1.0, 9.0], [], [2.0]]}
    assert indicator_column(colour).counts(ids_of(colour, **features)).tolist() == [[2, 0], [0, 0], [0, 1]]
    assert indicator_column(weighted).counts(ids_of(weighted, **features)).tolist() == [[-0.5, 0], [0, 0], [0, 2]]
    assert indicator_column(colour).counts(ids_of(colour, colour=[])).shape == (0, 2)


# --- what columns are called, and what is refused ------------------------------------------------------------------------------------


def test_names_are_tensorflows() -> None:
    page = categorical_column_with_identity("page", 9)
    age = bucketized_column(numeric_column("age"), [18])
    named = [embedding_column(c, 4).name for c in (page, age, weighted_categorical_column(page, "w"))]
    assert named == ["page_embedding", "age_bucketized_embedding", "page_weighted_by_w_embedding"]
    crossed = crossed_column(["z", crossed_column([age, page], 5)], 9)
    assert (crossed.name, indicator_column(crossed).name) == ("age_bucketized_X_page_X_z", "age_bucketized_X_page_X_z_indicator")
    assert embedding_column(page, 4).table_name == "page_embedding"
    assert embedding_column(page, 4, table_name="pages").table_name == "pages"


def test_shared_columns_share_a_table_and_keep_their_order() -> None:
    columns = [categorical_column_with_identity(key, 9) for key in "zab"]
    shared = shared_embedding_columns(columns, 4, "sum")
    assert [column.source for column in shared] == columns
    assert {column.table_name for column in shared} == {"a_b_z_shared_embedding"}
    assert shared_embedding_columns(columns, 4, shared_embedding_collection_name="t")[0].table_name == "t"


def test_the_first_rows_are_tensorflows() -> None:
    column = embedding_column(categorical_column_with_identity("page", 9), 16)
    assert column.initializer.to_dict() == {"kind": "truncated_normal", "mean": 0.0, "std": 0.25}
    assert column.combiner == "mean"


ID = categorical_column_with_identity("c", 9)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: numeric_column(""),
        lambda: numeric_column("x", shape=0),
        lambda: numeric_column("x", normalizer_fn=3),
        lambda: categorical_column_with_identity(7, 9),
        lambda: categorical_column_with_identity("c", 0),
        lambda: categorical_column_with_identity("c", True),
        lambda: categorical_column_with_identity("c", 9, default_value=9),
        lambda: categorical_column_with_hash_bucket("c", 0),
        lambda: categorical_column_with_hash_bucket("c", 2**63),
        lambda: categorical_column_with_hash_bucket("c", 9, dtype="float32"),
        lambda: categorical_column_with_vocabulary_list("c", []),
        lambda: categorical_column_with_vocabulary_list("c", "abc"),
        lambda: categorical_column_with_vocabulary_list("c", ["a", 1]),
        lambda: categorical_column_with_vocabulary_list("c", ["a", b"a"]),
        lambda: categorical_column_with_vocabulary_list("c", [1, 1]),
        lambda: categorical_column_with_vocabulary_list("c", ["a"], dtype="int64"),
        lambda: categorical_column_with_vocabulary_list("c", ["a"], default_value=0, num_oov_buckets=1),
        lambda: categorical_column_with_vocabulary_list("c", ["a"], default_value=1),
        lambda: bucketized_column(ID, [1]),
        lambda: bucketized_column(numeric_column("x"), []),
        lambda: bucketized_column(numeric_column("x"), [2, 1]),
        lambda: bucketized_column(numeric_column("x"), [1, 1 + 1e-12]),
        lambda: bucketized_column(numeric_column("x"), [float("nan")]),
        lambda: weighted_categorical_column(numeric_column("x"), "w"),
        lambda: weighted_categorical_column(ID, ""),
        lambda: crossed_column(["a"], 9),
        lambda: crossed_column("ab", 9),
        lambda: crossed_column(["a", "b"], 0),
        lambda: crossed_column(["a", categorical_column_with_hash_bucket("b", 9)], 9),
        lambda: crossed_column(["a", weighted_categorical_column(ID, "w")], 9),
        lambda: crossed_column(["a", numeric_column("x")], 9),
        lambda: weighted_categorical_column(crossed_column(["a", "b"], 9), "w"),
        lambda: indicator_column(numeric_column("x")),
        lambda: embedding_column(numeric_column("x"), 4),
        lambda: embedding_column(ID, 0),
        lambda: embedding_column(ID, 4, combiner="max"),
        lambda: embedding_column(ID, 4, initializer=0.1),
        lambda: embedding_column(ID, 4, table_name="no\nlines"),
        lambda: shared_embedding_columns([], 4),
        lambda: shared_embedding_columns([ID, numeric_column("x")], 4),
        lambda: shared_embedding_columns([ID, categorical_column_with_identity("d", 8)], 4),
    ],
)
def test_what_makes_no_column_is_refused(declare: object) -> None:
    with pytest.raises(InvalidInputError):
        declare()
