"""Which rows have another node in which phase of a plan."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.move_plan import ABORTING, CLEANING, FLIPPED, MOVING, NODES, MovePlan
from kvemb.stores.standalone.node_rows import MovingRows

KEYS = RowKeys(b"tab", np.arange(3000, dtype=np.uint64))


@pytest.mark.parametrize(
    ("phase", "leaving", "joining", "has_any"),
    [
        (MOVING, (), (), True),
        (MOVING, (), (1,), True),
        (FLIPPED, (1,), (), True),
        (CLEANING, (), (), True),
        (CLEANING, (1,), (), False),
        (ABORTING, (), (), True),
        (ABORTING, (), (1,), False),
    ],
)
def test_a_node_that_goes_keeps_its_rows_and_all_others_are_written_or_erased(
    phase: str, leaving: tuple[int, ...], joining: tuple[int, ...], has_any: bool
) -> None:
    before = ClusterMap.first(3, 1)
    other = np.where(before.slot_nodes == 0, 1, before.slot_nodes).astype(np.uint16)
    now = replace(before, plan=MovePlan(NODES, phase, other, leaving, joining))
    has = MovingRows(cast(Any, None), now).has(KEYS)
    np.testing.assert_array_equal(has, (before.slot_nodes[KEYS.slots()] == 0) & has_any)
