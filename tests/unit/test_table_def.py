"""A table's definition: which numbers are integers, and that messages name the table."""

import numpy as np
import pytest

from kvemb import init, optim
from kvemb.errors import InvalidInputError
from kvemb.table_def import TableDef


def definition(**changed: object) -> TableDef:
    return TableDef(**{"name": "user", "dim": 4, "optimizer": optim.sgd(), "initializer": init.zeros(), **changed})  # type: ignore[arg-type]


def test_integers_of_numpy_are_integers() -> None:
    given = definition(dim=np.int64(4), seed=np.uint8(3))
    assert given == definition(seed=3)
    assert (type(given.dim), type(given.seed)) == (int, int)
    assert given.schema == definition(seed=3).schema


@pytest.mark.parametrize("field", ["dim", "seed"])
@pytest.mark.parametrize("value", [True, np.True_, 4.0, "4", None, -1, 1 << 63])
def test_other_values_are_no_integers(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"table 'user': {field} is"):
        definition(**{field: value})


def test_an_unknown_storage_dtype_names_the_table() -> None:
    with pytest.raises(InvalidInputError, match="table 'user': unknown storage dtype 'float8'"):
        definition(dtype="float8")
