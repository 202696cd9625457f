"""The benchmarks' own arithmetic: their draws, counts, checks and output. No server, and no time is asserted."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvemb
from benchmarks import ids, measure, peers, pull, report
from benchmarks.__main__ import BENCHMARKS, main
from kvemb.schema.table_def import TableDef


def table_of(n_rows: int, dim: int = 4) -> SimpleNamespace:
    """What batches are made from, without servers."""
    definition = TableDef("bench", dim, kvemb.optim.sgd(lr=1.0), kvemb.init.constant(0.5), id_dtype="uint64")
    weights = np.arange(n_rows * dim, dtype=np.float32).reshape(n_rows, dim)
    return SimpleNamespace(table=SimpleNamespace(definition=definition), weights=weights, n_rows=n_rows)


def test_zipf_draws_ranks_as_its_law_says_and_uniform_does_not() -> None:
    counts = {kind: np.sort(np.bincount(ids.sampler(kind, 1000, seed=1)(200_000), minlength=1000))[::-1] for kind in ids.DISTRIBUTIONS}
    law = np.arange(1, 1001) ** -1.05
    assert counts["zipf"][:5] / 200_000 == pytest.approx(law[:5] / law.sum(), rel=0.05)
    assert counts["uniform"][0] < 2 * 200


def test_one_wrong_weight_is_found_and_its_id_named() -> None:
    (batch,) = pull.make_batches(table_of(100), "uniform", 0.0, n=1, size=50)
    assert pull.verify(batch, batch.expected.copy()) == (50, batch.n_distinct)
    rows = batch.expected.copy()
    rows[17, 3] = np.nextafter(rows[17, 3], np.float32(np.inf))
    with pytest.raises(pull.WrongRowError, match=f"1 rows differ.*{int(batch.ids[17])}"):
        pull.verify(batch, rows)
    with pytest.raises(pull.WrongRowError, match="expected float32"):
        pull.verify(batch, rows[:-1])


def test_contenders_take_turns_and_ratios_are_taken_within_a_round() -> None:
    order = []

    def contender(name: str, speeds: list[int]) -> measure.Contender:
        left = iter(speeds)

        def take_turn(seconds: float) -> measure.Turn:
            order.append(name)
            return measure.Turn(n_rows=next(left), wall_s=seconds, client_cpu_s=1e-6, n_commands=1)

        return measure.Contender(name, take_turn)

    both = [contender("ours", [1, 40, 10, 30]), contender("peer", [1, 20, 10, 60])]  # the first round warms up
    ours, peer = measure.run_rounds(both, [os.getpid()], seconds=1.0, repeats=3)
    assert order == ["ours", "peer"] * 4
    assert ours.rows_per_s == measure.Spread(30, 10, 40)
    assert peer.ratio == measure.Spread(1.0, 0.5, 2.0)
    assert ours.client_us_per_row == measure.Spread(1 / 30, 1 / 40, 1 / 10)


@pytest.mark.parametrize(
    ("hits", "misses", "missing"),
    [(0, 1000, 0.0), (999, 1, 0.0), (500, 0, 0.0), (1000, 0, 0.5), (900, 100, 1.0)],
)
def test_a_run_of_redis_benchmark_that_did_not_read_its_keys_is_refused(hits: int, misses: int, missing: float) -> None:
    with pytest.raises(peers.PeerError, match=f"{hits} hits, {misses} misses"):
        peers.require_hits(hits, misses, 1000, missing)


def test_output_of_redis_benchmark_without_a_rate_is_refused() -> None:
    with pytest.raises(peers.PeerError, match="no rate"):
        peers.requests_per_s("Could not connect\n")


def measured(name: str) -> measure.Measured:
    spread = measure.Spread(1.5, 1.0, 2.0)
    return measure.Measured(name, measure.Spread(2e6, 1e6, 3e6), spread, spread, 0.95, spread)


def test_a_report_survives_json_and_prints_aligned(tmp_path: Path) -> None:
    section = report.Section({"store": "redis", "dim": 16}, [measured("Table.pull"), measured("peer")], ["A word."])
    plain = report.Report("pull", [section], {"redis server": "redis 7"}).to_dict(["python", "-m", "benchmarks", "a b"], 0.5)
    report.write_json(tmp_path / "r.json", plain)
    read = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert read == json.loads(json.dumps(plain))
    assert read["command"] == "python -m benchmarks 'a b'"
    assert read["versions"]["redis server"] == "redis 7"
    assert read["load"]["before"] == 0.5
    assert {"cpu", "cores", "kernel", "python"} <= set(read["machine"])
    text = report.as_text(read)
    assert text == report.as_text(plain)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    assert "2.00 M (1.00..3.00)" in text
    assert "A word." in text


def test_an_error_of_ours_is_one_line_and_a_failing_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(options: argparse.Namespace) -> report.Report:
        """Fail."""
        raise peers.PeerError("the peer is gone")

    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {"pull": type(BENCHMARKS["pull"])(failing, pull.add_arguments)})
    assert main(["pull"]) == 1
    assert capsys.readouterr().err == "benchmarks pull: the peer is gone\n"


def test_all_questions_are_known_where_pytest_is_not_installed() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['pytest'] = None; import benchmarks.__main__ as them; print(*them.BENCHMARKS)"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert told.stdout.split() == list(BENCHMARKS), told.stderr
