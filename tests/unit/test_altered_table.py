"""What becomes of rows when their table gets another definition."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb import init, optim
from kvemb.alter.altered_table import AlteredTable, TableChanges
from kvemb.errors import InvalidInputError
from kvemb.schema.table_def import TableDef, frozen_or_trained

OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9),
    "adagrad": optim.adagrad(initial_accumulator_value=0.5),
    "rowwise": optim.rowwise_adagrad(),
    "adam": optim.adam(),
    "amsgrad": optim.adamw(amsgrad=True),
    "rmsprop": optim.rmsprop(momentum=0.5, centered=True),
}
KINDS = sorted(OPTIMIZERS)


def fields_of(definition: TableDef, values: np.ndarray) -> dict[str, np.ndarray]:
    """The weights and each field of the state: [n, width] by name."""
    fields = definition.optimizer.state_fields()
    widths = [definition.dim, *(field.size(definition.dim) for field in fields)]
    return dict(zip(["weights", *(field.name for field in fields)], np.split(values, np.cumsum(widths)[:-1], axis=1), strict=True))


@given(st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 20))
def test_columns_and_state_that_both_have_keep_their_bits_and_the_rest_begins_anew(
    before: str, after: str, dim: int, new_dim: int, zeros: bool, n: int
) -> None:
    rng = np.random.default_rng(n)
    old = TableDef("user", dim, OPTIMIZERS[before], init.normal(std=1.0), seed=3)
    change = AlteredTable.of(old, TableChanges(dim=new_dim, optimizer=OPTIMIZERS[after], new_columns="zeros" if zeros else "initializer"))
    ids = rng.integers(0, 1 << 63, n).astype(np.uint64)
    weights = rng.standard_normal((n, dim), np.float32)
    state = rng.standard_normal((n, old.record.state_size), np.float32)
    new = fields_of(change.new, change.rows(ids, weights, state))
    kept = min(dim, new_dim)
    assert new["weights"][:, :kept].tobytes() == weights[:, :kept].tobytes()
    expected = np.zeros((n, new_dim), np.float32) if zeros else change.new.initial_rows(ids)
    assert new["weights"][:, kept:].tobytes() == expected[:, kept:].tobytes()
    there = fields_of(old, np.concatenate([weights, state], axis=1))
    for field in change.new.optimizer.state_fields():
        now, width = new[field.name], min(field.size(dim), field.size(new_dim)) if field.name in there else 0
        if width:
            assert now[:, :width].tobytes() == there[field.name][:, :width].tobytes()
        assert (now[:, width:] == np.float32(field.initial)).all()
    assert change.keeps_steps == any(field.name in there for field in change.new.optimizer.state_fields())


def test_words_say_what_is_kept_what_begins_anew_and_what_goes() -> None:
    old = TableDef("user", 16, optim.adam(), init.normal(std=0.1))
    said = "\n".join(AlteredTable.of(old, TableChanges(dim=32, optimizer=optim.adam(amsgrad=True), dtype="float16")).words())
    assert "dim 16 -> 32: 16 columns kept, the 16 new ones are those of the initializer, normal" in said
    assert "exp_avg, exp_avg_sq kept, with the steps; max_exp_avg_sq begins anew" in said
    assert "dtype float32 -> float16" in said
    assert "the last 4 columns of every row go, for good" in AlteredTable.of(old, TableChanges(dim=12)).words()[0]
    assert "state: none" in "".join(AlteredTable.of(old, TableChanges(optimizer=optim.sgd())).words())
    buckets = AlteredTable.of(old, TableChanges(expected_rows=100_000_000))
    assert buckets.words()[0].startswith("layout: 256 fast buckets -> ")
    assert AlteredTable.of(old, TableChanges(dim=16)).is_none
    assert not AlteredTable.of(old, TableChanges(optimizer=optim.adam(lr=0.5))).is_none


def opaque() -> TableDef:
    dim, _ = frozen_or_trained("ngram", None, "bytes:8", None, None, frozen=False)
    return TableDef("ngram", dim, optim.FROZEN, init.zeros(), "bytes:8")


REFUSED: list[tuple[TableDef, dict[str, Any], str]] = [
    (TableDef("user", 4, optim.sgd(), init.zeros()), {"dim": 0}, "dim is 0"),
    (TableDef("user", 4, optim.sgd(), init.zeros()), {"dtype": "int8"}, "dtype"),
    (TableDef("user", 4, optim.sgd(), init.zeros()), {"dtype": "bytes:4"}, "opaque bytes"),
    (opaque(), {"dim": 9}, "their users only"),
    (opaque(), {"optimizer": optim.sgd()}, "make another table, and fill"),
    (TableDef("user", 4, optim.adam(), init.zeros()), {"optimizer": optim.ftrl()}, "ftrl computes weights from its state"),
    (TableDef("user", 4, optim.adam(), init.zeros()), {"optimizer": "adagrad"}, "one of kvemb.optim's functions"),
    (TableDef("user", 4, optim.adam(), init.zeros()), {"dim": 40_000}, "at most 65536"),
    (TableDef("user", 4, optim.adam(), init.zeros()), {"layout": "compact"}, "expected"),
    (TableDef("user", 4, optim.adam(), init.zeros(), num_ids=10), {"expected_rows": 10}, "num_ids"),
    (TableDef("user", 4, optim.adam(), init.columns((1, init.zeros()), (3, init.normal()))), {"dim": 5}, "columns"),
    (TableDef("user", 4, optim.adam(), init.zeros()), {"new_columns": "ones"}, "new_columns"),
]


@pytest.mark.parametrize(("old", "changes", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_a_change_with_nothing_sensible_for_its_rows_is_refused(old: TableDef, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        AlteredTable.of(old, TableChanges(**changes))


def test_opaque_rows_move_to_another_number_of_buckets_as_they_are() -> None:
    change = AlteredTable.of(opaque(), TableChanges(expected_rows=100_000_000))
    rows = np.arange(16, dtype=np.uint8).reshape(2, 8)
    assert change.rows(np.arange(2, dtype=np.uint64), rows, np.empty((2, 0), np.float32)) is rows
    assert change.new.n_buckets != change.old.n_buckets


def test_a_weight_that_the_new_dtype_cannot_hold_is_refused_and_named() -> None:
    change = AlteredTable.of(TableDef("user", 2, optim.sgd(), init.zeros()), TableChanges(dtype="float16"))
    rows = np.array([[1, -65504], [3, -65505]], np.float32)
    none = np.empty((2, 0), np.float32)
    with pytest.raises(InvalidInputError, match=r"id 9: has a weight beyond 65504"):
        change.rows(np.array([8, 9], np.uint64), rows, none)
    assert change.rows(np.array([8], np.uint64), rows[:1], none[:1]).tobytes() == rows[:1].tobytes()
