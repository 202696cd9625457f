"""A part is refused whole, before any of it is accepted, with the table and the first wrong id named."""

from typing import Any

import numpy as np
import pytest

import kvemb.init
import kvemb.optim
from kvemb.errors import PushRejectedError, SlotsMovedError
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import PushPart
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef
from paramserver.ingest.part_checks import check_part, check_rows
from paramserver.model.batch import ASSIGN, ERASE
from tests.owners import shard_of
from tests.unit.sent_parts import OWNED, TABLE, THREE_SHARDS, find, part, rows


def check(it: PushPart) -> Any:
    return check_part(it, find, 1, THREE_SHARDS)


def with_value(value: float) -> TableRows:
    values = np.ones((len(OWNED), 2), np.float32)
    values[2, 1] = values[3, 0] = value
    return rows(rows=values)


def test_a_good_part_comes_back_with_all_run_time_values() -> None:
    (checked,) = check(part(rows(hyper={"lr": 0.25})))
    assert checked.definition is TABLE
    assert checked.hyper == {**TABLE.optimizer.defaults(), "lr": 0.25}
    assert checked.ids.tolist() == OWNED.tolist()


def test_ids_need_not_ascend() -> None:
    (checked,) = check(part(rows(ids=OWNED[[2, 0, 3, 1]])))
    assert checked.ids.tolist() == OWNED[[2, 0, 3, 1]].tolist()


def test_a_part_without_rows_is_fine() -> None:
    (checked,) = check(part(rows(ids=OWNED[:0], rows=np.empty((0, 0), np.float32))))
    assert checked.rows.shape == (0, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_name_the_first_id(value: float) -> None:
    with pytest.raises(PushRejectedError, match=f"'user': NaN or infinity in 2 rows, first id {OWNED[2]};"):
        check(part(with_value(value)))


def test_a_negative_id_is_named_as_its_caller_wrote_it() -> None:
    ids = np.arange(-1000, 0).astype(np.int64).view(np.uint64)
    ids = ids[shard_of(ids, 3) == 1][:1]
    with pytest.raises(PushRejectedError, match=f"first id {int(ids.view(np.int64)[0])};"):
        check(part(rows(ids=ids, rows=np.full((1, 2), np.nan, np.float32))))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (part(rows(), digest=5), "does not match its data"),
        (part(rows(), sequence=0), "count from 1"),
        (part(rows(), rows()), "stands twice"),
        (part(rows(table="usr")), "existing: user"),
        (part(rows(schema=TABLE.schema ^ 1)), "another definition"),
        (part(rows(rows=np.ones((len(OWNED), 3), np.float32))), "dim 3, expected 2"),
        (part(rows(ids=OWNED[[0, 1, 1, 2]])), f"id {OWNED[1]} stands twice"),
        (part(rows(ids=OWNED[[3, 0, 1, 3]])), f"id {OWNED[3]} stands twice"),
        (part(rows(hyper={"lr": float("nan")})), "lr"),
        (part(rows(hyper={"speed": 1.0})), "speed"),
    ],
)
def test_a_bad_part_is_refused(bad: PushPart, says: str) -> None:
    with pytest.raises(PushRejectedError, match=says):
        check(bad)


def test_rows_of_another_shard_are_refused_as_moved() -> None:
    with pytest.raises(
        SlotsMovedError, match="id 0 belongs to shard 0 by the cluster map of serial 1, this is shard 1 of 3; nothing was acc"
    ):
        check(part(rows(ids=np.arange(4, dtype=np.uint64))))


def test_erase_carries_no_rows() -> None:
    assert check_rows(rows(rows=np.empty((4, 0), np.float32)), find, 1, THREE_SHARDS, ERASE).rows.shape == (4, 0)
    with pytest.raises(PushRejectedError, match="dim 2, expected 0"):
        check_rows(rows(), find, 1, THREE_SHARDS, ERASE)


@pytest.mark.parametrize("kind", ["", ASSIGN, ERASE])
def test_ids_outside_a_dense_table_are_refused_by_name(kind: str) -> None:
    dense = TableDef("user", 2, kvemb.optim.adam(lr=0.5), kvemb.init.zeros(), num_ids=int(OWNED[3]))
    values = np.empty((len(OWNED), 0), np.float32) if kind == ERASE else np.ones((len(OWNED), 2), np.float32)
    sent = rows(schema=dense.schema, rows=values)
    with pytest.raises(PushRejectedError, match=rf"table 'user': id {int(OWNED[3])} is outside 0 to {int(OWNED[3])} - 1"):
        check_rows(sent, lambda name, schema: dense, 0, ClusterMap.first(0, 1), kind)
    inside = rows(schema=dense.schema, rows=values[:3], ids=OWNED[:3])
    assert check_rows(inside, lambda name, schema: dense, 0, ClusterMap.first(0, 1), kind).ids.tolist() == OWNED[:3].tolist()
