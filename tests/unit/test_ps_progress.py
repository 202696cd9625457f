"""Up to which batch storage has every row, while rows are written behind."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.engine.write_behind import Bound
from paramserver.model.batch import APPLY, ASSIGN, ERASE
from tests.unit.write_behind_shard import ADAM, FOREVER, Shard, never, read

IDS = np.arange(12, dtype=np.uint64)
BATCHES = st.lists(st.tuples(st.sampled_from([APPLY] * 4 + [ASSIGN, ERASE]), st.sets(st.integers(0, 11), min_size=1)), max_size=12)


@settings(max_examples=100, deadline=None)
@given(BATCHES, st.sampled_from([1, 3, 10**6]))
def test_storage_has_every_batch_up_to_the_mark(batches: list[tuple[str, set[int]]], bound: int) -> None:
    shard = Shard(Bound(bound, 1e6))
    for kind, ids in batches:
        before = shard.engine.stored_k
        shard.run(sorted(ids), kind)
        mark = shard.engine.stored_k
        assert before <= mark <= shard.engine.k
        assert shard.engine.k - mark <= bound
        k_now = (shard.tables.state(ADAM).versions(IDS) & np.uint64((1 << 48) - 1)).astype(int)
        k_stored = (read(shard.store, ADAM, IDS)[1] & np.uint64((1 << 48) - 1)).astype(int)
        assert (k_stored <= k_now).all()
        behind = k_stored < k_now
        assert (k_now[behind] > mark).all()


def test_the_mark_stays_at_the_batch_before_the_oldest_row_that_is_not_written() -> None:
    shard = Shard(FOREVER)
    assert shard.engine.stored_k == 0
    for ids in ([0, 1], [2], [0], [3], [2]):  # the third batch changes a row that is kept, the others new ones
        shard.run(ids)
    assert (shard.engine.k, shard.engine.stored_k) == (5, 2)
    shard.engine.write_dirty(never)
    assert shard.engine.stored_k == 5
    plain = Shard(None)
    plain.run([0])
    assert plain.engine.stored_k == 1
