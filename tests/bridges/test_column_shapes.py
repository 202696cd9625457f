"""Shapes of features: what TensorFlow takes is taken in every engine, what it refuses is refused; an example keeps its values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_contract import COLUMNS, side

from kvemb.columns import (
    bucketized_column,
    categorical_column_with_identity,
    embedding_column,
    indicator_column,
    numeric_column,
)
from kvemb.errors import InvalidInputError

ENGINES = [column for column in COLUMNS if column != "jax"]
TAKEN = {(3,): (), (3, 1): (), (3, 1, 1): (), (3, 2): (2,), (3, 2, 1): (2,), (3, 4): (2, 2), (3, 2, 2): (2, 2)}
"""Of a feature, and the column's."""
REFUSED = {(): (), (2, 2): (), (4,): (2,), (2, 4): (2,), (3, 1): (2,), (2, 2, 2): (2,)}


WORD = embedding_column(categorical_column_with_identity("word", 9), 2)


def dense(engine: str, features: dict[str, Any], columns: Any) -> Any:
    """The numbers that an engine makes of features."""
    side(engine)
    if engine == "torch":
        from kvemb.torch import DenseFeatures as OfTorch

        return OfTorch(columns, None)(features).detach().numpy()  # type: ignore[arg-type]
    if engine == "tensorflow":
        from kvemb.tensorflow import input_layer

        return input_layer(features, columns, {}).numpy()
    from kvemb.keras import DenseFeatures as OfKeras

    ready = OfKeras([*columns, WORD]).preprocess({"word": np.zeros(3, np.int64), **features})  # it needs an embedding column
    (name,) = ready.keys() - {"word_embedding", "word_embedding_weights"}
    return ready[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
class TestShapes:
    @pytest.mark.parametrize("given", TAKEN)
    def test_numbers_are_taken_by_example(self, engine: str, given: tuple[int, ...]) -> None:
        values = np.arange(np.prod(given), dtype=np.float32).reshape(given)
        got = dense(engine, {"x": values}, [numeric_column("x", shape=TAKEN[given] or 1)])
        np.testing.assert_array_equal(got, values.reshape(3, -1))

    @pytest.mark.parametrize("given", REFUSED)
    @pytest.mark.parametrize("make", [lambda x: x, lambda x: indicator_column(bucketized_column(x, [1.0]))], ids=["number", "bucket"])
    def test_another_number_of_values_is_refused(self, engine: str, given: tuple[int, ...], make: Callable[[Any], Any]) -> None:
        with pytest.raises(InvalidInputError, match="feature 'x' has the shape"):
            dense(engine, {"x": np.zeros(given, np.float32)}, [make(numeric_column("x", shape=REFUSED[given] or 1))])

    def test_one_value_without_examples_is_refused(self, engine: str) -> None:
        with pytest.raises(InvalidInputError, match="feature 'x'"):
            dense(engine, {"x": np.int64(1)}, [indicator_column(categorical_column_with_identity("x", 9))])

    def test_a_masked_array_is_refused_for_it_would_lose_its_mask(self, engine: str) -> None:
        for column in (numeric_column("x"), indicator_column(categorical_column_with_identity("x", 9))):
            with pytest.raises(InvalidInputError, match=r"feature 'x': 1 elements of a numpy.ma array are masked"):
                dense(engine, {"x": np.ma.masked_equal(np.arange(3), 2)}, [column])

    def test_one_column_stands_for_a_list_of_it(self, engine: str) -> None:
        side(engine)
        if engine.startswith("keras"):
            from kvemb.keras import DenseFeatures as OfKeras

            assert [of.name for of in OfKeras(WORD).features] == ["word_embedding"]
        else:
            assert dense(engine, {"x": np.ones(3, np.float32)}, numeric_column("x")).tolist() == [[1.0]] * 3

    def test_a_dict_of_columns_is_refused_by_name(self, engine: str) -> None:
        side(engine)
        with pytest.raises(InvalidInputError, match="must be a list of columns, got dict"):
            dense(engine, {}, {"x": numeric_column("x")}) if not engine.startswith("keras") else _keras({"word": WORD})


def _keras(columns: Any) -> None:
    from kvemb.keras import DenseFeatures as OfKeras

    OfKeras(columns)
