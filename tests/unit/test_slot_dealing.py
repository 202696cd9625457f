"""Slots dealt again: each owner has its share afterwards, as nearly as groups of slots allow, and none both gives and takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slot_dealing import deal
from kvemb.schema.slots import N_SLOTS
from tests.matrix import examples

WEIGHTS = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]), min_size=8, max_size=8), min_size=1, max_size=3)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(2, 8), WEIGHTS, st.sampled_from(["even", "uneven", "skewed"]), st.integers(0, 9))
def test_nobody_gives_and_takes_in_one_dealing(n_owners: int, rounds: list[list[float]], kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = {"even": np.full(N_SLOTS, 1000.0), "uneven": rng.uniform(0, 2000, N_SLOTS), "skewed": rng.pareto(1.0, N_SLOTS) * 100}[kind]
    sizes, owners = drawn.astype(np.uint64), equal_runs(n_owners).astype(np.uint16)
    for weights in rounds:
        shares = dict(enumerate(weights[:n_owners]))
        if not any(shares.values()):
            continue
        dealt = deal(owners, sizes, shares)
        moves = dealt != owners
        assert not set(owners[moves].tolist()) & set(dealt[moves].tolist())
        assert all(shares[owner] > 0 for owner in np.unique(dealt).tolist())
        owners = dealt


@pytest.mark.parametrize("weights", [[1, 2, 3, 2, 1], [2, 1, 1, 0.5, 3], [3, 0.5, 2, 2, 2]])
def test_a_second_set_of_weights_is_met_as_well_as_the_first(weights: list[float]) -> None:
    owners, even = equal_runs(5).astype(np.uint16), np.full(N_SLOTS, 1000, np.uint64)
    for shares in ([1, 1, 3, 1, 2], weights):
        owners = deal(owners, even, dict(enumerate(shares)))
        np.testing.assert_allclose(np.bincount(owners, minlength=5) / N_SLOTS, np.array(shares) / sum(shares), atol=0.006)
