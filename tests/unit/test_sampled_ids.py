"""Some ids of a shard's table, without a look at all of them."""

import numpy as np
import pytest

from kvemb import init, optim
from kvemb.schema.table_def import TableDef
from paramserver.model.tables import TableState


@pytest.fixture
def state() -> TableState:
    ids = np.arange(1, 100_001, dtype=np.uint64)
    return TableState(TableDef("t", 2, optim.sgd(), init.zeros()), rows=(ids, np.ones(len(ids), np.uint64)))


@pytest.mark.parametrize("start", [0.0, 0.3, 0.999_999])
def test_about_as_many_as_were_asked_for_are_given_and_they_exist(state: TableState, start: float) -> None:
    ids = state.some(5000, start)
    assert 4000 < len(ids) <= 5000
    assert len(np.unique(ids)) == len(ids)
    assert state.known(ids).all()


def test_other_places_have_other_ids(state: TableState) -> None:
    assert not len(np.intersect1d(state.some(1000, 0.1), state.some(1000, 0.6)))


def test_a_small_table_is_given_whole_and_an_empty_one_has_none(state: TableState) -> None:
    assert len(state.some(1 << 18, 0.7)) == 100_000
    assert len(TableState(state.definition).some(10, 0.5)) == 0
