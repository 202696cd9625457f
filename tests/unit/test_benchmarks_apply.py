"""The arithmetic and the refusals of the benchmarks apply, memory and scale. No server, and no time is asserted."""

import argparse

import numpy as np
import pytest

import kvemb
from benchmarks import apply, apply_load, memory, scale
from benchmarks.apply_load import Pass
from benchmarks.ids import row_ids
from benchmarks.measure import Spread, Turn
from benchmarks.options import whole
from benchmarks.peers import PeerError
from benchmarks.set_peer import require_overwritten
from kvemb.errors import KvembError
from kvemb.schema.pages import page_layout
from kvemb.schema.table_def import TableDef


class Rows:
    """A table that remembers pushes to it, and may lose them."""

    dim = 2
    definition = TableDef("t", 2, kvemb.optim.sgd(lr=1.0), kvemb.init.zeros(), id_dtype="uint64")

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        self.flushed = 0

    def push(self, ids: np.ndarray, grads: np.ndarray, timeout_s: float) -> None:
        assert grads.shape == (len(ids), self.dim)
        self.versions |= dict.fromkeys(ids.tolist(), 1)

    def flush(self, timeout_s: float) -> None:
        self.flushed += 1

    def pull(self, ids: np.ndarray, *, return_versions: bool, timeout_s: float) -> tuple[None, np.ndarray]:
        return None, np.array([self.versions.get(one, 0) for one in ids.tolist()], np.uint64)

    def __len__(self) -> int:
        return len(self.versions)


def test_a_row_that_was_lost_or_should_not_be_there_is_found() -> None:
    table = Rows()
    load = apply_load.make_load(table, 25, 10)  # type: ignore[arg-type]
    load.push_all()
    (lost,) = load.batches[2][3:4].tolist()
    del table.versions[lost]
    with pytest.raises(apply_load.WrongApplyError, match="1 of them have no row, the shard knows 24"):
        apply_load.check_written(load)
    table.versions |= {lost: 1, 12345: 1}
    with pytest.raises(apply_load.WrongApplyError, match="0 of them have no row, the shard knows 26"):
        apply_load.check_written(load)


def test_one_wrong_sum_is_found_and_its_id_named() -> None:
    sums = np.zeros((5, 2), np.float32)
    apply_load.require_equal(sums.copy(), sums)
    wrong = sums.copy()
    wrong[3, 1] = 1
    with pytest.raises(apply_load.WrongApplyError, match=f"1 rows .*{int(row_ids(np.array([3]))[0])}"):
        apply_load.require_equal(wrong, sums)


def test_rates_ratios_and_targets_stand_where_they_belong() -> None:
    ours = [Pass(100, 1.0, 1e-4, 2e-4, 3e-4, n_lookups=100, n_hits=100, n_batches=2) for _ in range(3)]
    sets, gets = [Pass(100, 0.5, 0, 0)] * 3, [Pass(100, 0.25, 0, 0)] * 3
    names = [("SET", sets), ("GET", gets)]
    first, by_set, by_get, both = apply.lines_of(ours, names, cached=True, dim=16)
    assert first.figures["hits"] == 1.0
    assert first.figures["rows/batch"] == "50"
    assert first.figures["target"] == "PS <= 1.0 µs/row"
    assert first.figures["PS µs/row"].median == pytest.approx(3.0)  # type: ignore[union-attr]
    assert (by_set.figures["ratio"], by_get.figures["ratio"]) == (Spread(0.5, 0.5, 0.5), Spread(0.25, 0.25, 0.25))
    assert both.figures["ratio"].median == pytest.approx(0.75)  # type: ignore[union-attr]  # 400 and 200 a second make 133
    assert [line.figures["target"] for line in (by_set, by_get, both)] == ["ratio >= 0.8", "–", "–"]
    uncached = apply.lines_of(ours, names, cached=False, dim=64)
    assert [line.figures["target"] for line in uncached] == ["–", "–", "–", "ratio >= 0.8"]
    assert len(apply.lines_of(ours, [], cached=True, dim=16)) == 1


@pytest.mark.parametrize(("after", "shown"), [((1099, 5), "999 SETs and 0 new"), ((1100, 6), "1000 SETs and 1 new")])
def test_a_run_of_redis_benchmark_that_did_not_overwrite_its_keys_is_refused(after: tuple[int, int], shown: str) -> None:
    require_overwritten((100, 5), (1100, 5), 1000)
    with pytest.raises(PeerError, match=shown):
        require_overwritten((100, 5), after, 1000)


def test_bytes_per_row_are_growth_and_compared_with_three_tensors_for_adam() -> None:
    before, after = memory.Held(1000, 0, 1), memory.Held(1000 + 204 * 100, 0, 101)
    adam = memory.line_of(16, "adam", 204, 100, before, after, n_keys=100).figures
    assert (adam["bytes/row"], adam["/ record"], adam["/ TFRA"], adam["target"]) == (204.0, 1.0, 0.5, "< 1.0")
    sgd = memory.line_of(16, "sgd", 76, 100, before, after, n_keys=100).figures
    assert (sgd["/ TFRA"], sgd["claimed bytes/row"]) == (1.5, "–")
    assert "/ TFRA" not in memory.line_of(8, "sgd", 44, 100, before, after, n_keys=100).figures
    with pytest.raises(KvembError, match="101 rows were written under 101 keys; the server holds 100"):
        memory.line_of(16, "adam", 204, 101, before, after, n_keys=101)
    paged = memory.line_of(16, "adam", 204, 2000, before, after, n_keys=100, layout=page_layout(204)).figures
    assert (paged["/ record"], paged["rows/page"], paged["target"]) == (pytest.approx(0.05), 20, "/ record <= 1.15")
    with pytest.raises(KvembError, match="under 101 keys"):
        memory.line_of(16, "adam", 204, 2001, before, after, n_keys=101, layout=page_layout(204))


def test_costs_of_trainers_add_up_and_ratios_are_to_the_first_setting() -> None:
    both = scale.costs_of([Turn(100, 1.0, 1e-4), Turn(300, 2.0, 3e-4)], server_cpu_s=8e-4)
    assert (both.rows_per_s, both.server_us, both.client_us) == (250.0, pytest.approx(2.0), pytest.approx(1.0))
    one, more = [scale.Costs(1, 1.0, 1.0), scale.Costs(1, 2.0, 2.0)], [scale.Costs(1, 1.0, 2.0), scale.Costs(1, 2.0, 4.0)]
    first, second = scale.lines_of(["one", "more"], [one, more])
    assert (second.figures["server ratio"], second.figures["client ratio"]) == (Spread(1, 1, 1), Spread(2, 2, 2))
    assert (first.figures["target"], second.figures["target"]) == ("–", "ratios <= 1.15")


def test_a_whole_number_below_the_least_is_refused() -> None:
    assert whole(2)("2") == 2
    with pytest.raises(argparse.ArgumentTypeError, match="no whole number from 2 on"):
        whole(2)("1")
