"""The arithmetic of `scale --simulate`: costs are found again in what they cost, and what misses is named. No server."""

from dataclasses import replace

import pytest

from benchmarks.scale_jobs import Sample
from benchmarks.scale_simulate import fitted, misses, ratios_of, summary
from kvemb.operate.row_costs import COSTS, NETWORK, SERVER, SHARD, TRAIN, TRAINER, Scale, cost

SCALE = Scale(nodes=1, shards=1, trainers=1, n_rows=10**6, record_bytes=40, layout="fast", n_keys=256, step_rows=32_000)
SCALES = [
    replace(SCALE, nodes=nodes, shards=shards, record_bytes=record_bytes, step_rows=step_rows)
    for nodes, shards in ((1, 1), (8, 1), (1, 4), (8, 4), (4, 2))
    for record_bytes in (40, 204)
    for step_rows in (2_000, 32_000)
]


def as_the_model_says(at: Scale) -> Sample:
    return Sample(TRAIN, at, {role: cost(TRAIN, role, at) for role in (SERVER, SHARD, TRAINER, NETWORK)}, 1.0)


def test_costs_are_found_again_in_what_they_make() -> None:
    found = fitted([as_the_model_says(at) for at in SCALES], SHARD, COSTS[TRAIN, SHARD])
    assert found == pytest.approx(COSTS[TRAIN, SHARD])


def test_a_cost_below_zero_is_left_out() -> None:
    samples = [Sample(TRAIN, at, {SHARD: 5.0 - at.record_bytes / 100}, 1.0) for at in SCALES]
    found = fitted(samples, SHARD, ("row", "byte"))
    assert found.keys() == {"row"}
    assert 2.5 < found["row"] < 5.0


def test_what_is_not_within_a_fifth_is_named() -> None:
    good = as_the_model_says(SCALE)
    bad = replace(good, costs=good.costs | {SERVER: 1.5 * good.costs[SERVER]})
    assert misses([good]) == []
    (line,) = misses([good, bad])
    assert line.name == "train, server: 1 nodes, 1 shards, 40 B, fast, 256 keys"
    assert line.figures["ratio"] == pytest.approx(1.5)
    (told,) = [line for line in summary([good, bad]) if line.name == TRAIN]
    assert (told.figures[SERVER], told.figures[SHARD]) == ("1 of 2: 1.25 (1.00..1.50)", "2 of 2: 1.00 (1.00..1.00)")


def test_two_cores_give_fewer_rows_where_rows_cost_more() -> None:
    one = as_the_model_says(SCALE)
    dear = replace(one, costs={role: 2 * each for role, each in one.costs.items()})
    assert ratios_of(dear)["rows/s of 2 cores"] == pytest.approx(0.5)
