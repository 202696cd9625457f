"""The output of `kvemb show` for a record: weights, and the state of any optimizer."""

import numpy as np
import pytest

from kvemb import init, optim
from kvemb.commands.table_commands import _values
from kvemb.schema.table_def import TableDef


@pytest.mark.parametrize("optimizer", [optim.sgd(), optim.sgd(momentum=0.9), optim.adam(), optim.adagrad(), optim.ftrl()], ids=str)
def test_a_row_is_shown_with_the_state_of_its_optimizer_and_without_where_there_is_none(optimizer: optim.OptimizerSpec) -> None:
    definition = TableDef("t", 4, optimizer, init.zeros())
    stored = bytes(definition.record.prefix_bytes) + np.arange(definition.record.state_size, dtype="<f4").tobytes()
    shown = _values(definition, np.array([1], np.uint64), stored)
    assert shown["weights"] == [0.0] * 4
    assert list(shown["state"]) == [field.name for field in optimizer.state_fields()]
    assert [value for values in shown["state"].values() for value in values] == list(range(definition.record.state_size))
