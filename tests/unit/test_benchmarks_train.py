"""What `train`, `deepfm` and the TFRA peer compute, refuse and print. No server, no TensorFlow, and no time is asserted."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import deepfm_rounds, train, train_loop
from benchmarks.measure import Spread, Turn
from benchmarks.peers import PeerError
from benchmarks.report import Report, Section, as_text
from benchmarks.tfra import lookups, peer
from kvemb.client.ack import Staleness
from kvemb.optim import adam
from paramserver.optim.kernels import build_optimizer


def stretch(n_rows: int, wall_s: float = 1.0, staleness: tuple[Staleness, ...] = ()) -> train_loop.Stretch:
    turn = Turn(n_rows, wall_s, client_cpu_s=n_rows * 1e-6)
    return train_loop.Stretch(turn, n_rows * 2e-6, n_rows * 3e-6, n_operations=2 * n_rows, n_calls=n_rows // 2, staleness=staleness)


def test_the_ratio_is_taken_within_a_round_and_costs_are_per_row() -> None:
    seen = (Staleness(0.5, 4), Staleness(0.1, 2))
    rounds = [stretch(300, 1.0, seen), stretch(800, 2.0, seen)]
    ours, slower, tfra = train.lines_of({"ours": rounds, "slower": rounds[:1] * 2}, [stretch(100), stretch(100)], dim=16)
    assert ours.figures["/ TFRA"] == Spread(3.5, 3.0, 4.0)
    assert ours.figures["target"] == "/ TFRA >= 1.5"
    assert slower.figures["/ TFRA"] == Spread(3.0, 3.0, 3.0)
    assert slower.figures["target"] == "–"
    assert tfra.figures["operations/row"] == 6.0
    assert ours.figures["k rows/s"] == Spread(0.35, 0.3, 0.4)
    assert ours.figures["changed"] == Spread(0.3, 0.3, 0.3)
    assert ours.figures["elapsed"] == Spread(3, 3, 3)
    for name, per_row in (("operations/row", 2), ("calls/row", 0.5), ("server µs/row", 2), ("PS µs/row", 3), ("trainer µs/row", 1)):
        assert ours.figures[name].median == pytest.approx(per_row), name  # type: ignore[union-attr]
    assert "TFRA" in as_text(Report("train", [Section({}, lines=[ours, tfra])]).to_dict(["x"], 0.0))


def test_adam_on_the_rows_of_a_step_is_what_our_optimizer_gives() -> None:
    batches = [np.array([5, 9, 5], np.uint64), np.array([9, 7], np.uint64), np.array([5, 7], np.uint64)]
    ids, expected = train_loop.after_steps(batches, lr=0.01)
    assert ids.tolist() == [5, 7, 9]
    spec = adam(lr=0.01)
    optimizer = build_optimizer(spec)  # what a shard runs
    w, state = np.zeros((3, 1), np.float32), optimizer.initial_state(3, 1)
    for step, batch in enumerate(batches, 1):
        at = np.searchsorted(ids, np.unique(batch))
        grads = np.full((len(at), 1), train_loop.GRADIENT, np.float32)
        w[at], state[at] = optimizer.update(w[at], state[at], grads, spec.defaults(), step)
    assert w[:, 0] == pytest.approx(expected, rel=1e-5)


def test_rows_that_are_not_what_adam_makes_are_refused() -> None:
    _, expected = train_loop.after_steps([np.array([1, 2], np.uint64)], lr=0.01)
    rows = np.repeat(expected[:, None], 4, axis=1).astype(np.float32)
    train_loop.require_close("ours", rows, expected)
    rows[1, 2] *= np.float32(1.001)
    with pytest.raises(train_loop.WrongTrainingError, match=r"TFRA: .* off by 1\.0"):
        train_loop.require_close("TFRA", rows, expected)
    rows[1, 2] = np.nan
    with pytest.raises(train_loop.WrongTrainingError):
        train_loop.require_close("TFRA", rows, expected)


ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "step":
        sys.exit("out of memory")
    if request["do"] == "open":
        print(json.dumps({"tfra": json.load(open(request["config"]))["redis_host_port"][0]}), flush=True)
    elif request["do"] == "run":
        print(json.dumps({"n_rows": 7, "n_steps": 1, "wall_s": request["seconds"], "cpu_s": 0.5}), flush=True)
    else:
        print(json.dumps({"error": "KeyError: no such thing"}), flush=True)
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A worker that speaks the protocol and has no TensorFlow."""
    program = tmp_path / "fake"
    program.write_text(f"#!{sys.executable}\n{ECHO}", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(peer, "PYTHON", program)
    return program


def test_the_worker_is_asked_in_lines_and_its_turns_are_turns(fake: Path) -> None:
    with peer.started() as tfra:
        tfra.open(1234, dim=4)
        assert tfra.versions == {"tfra": 1234}
        assert tfra.turn("train", 2.5) == Turn(7, 2.5, 0.5)
        pid = tfra.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_the_worker_says_of_its_failure_is_raised(fake: Path) -> None:
    with peer.started() as tfra:
        with pytest.raises(PeerError, match="KeyError: no such thing"):
            tfra.batches([np.zeros(3, np.uint64)])
        with pytest.raises(PeerError, match="has ended: out of memory"):
            tfra.step(0)
        with pytest.raises(PeerError, match="has ended"):
            tfra.step(0)


class FakeTfra:
    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def rows(self, ids: np.ndarray, call: str) -> np.ndarray:
        return self._rows


class Asked:
    positions = np.array([1, 5, 0])
    ids = np.array([11, 15, 10], np.uint64)


def test_a_lookup_of_tfra_that_reads_something_else_is_refused() -> None:
    weights = np.arange(6, dtype=np.float32).reshape(3, 2)
    good = np.array([[2, 3], [0, 0], [0, 1]], np.float32)  # position 5 does not exist
    lookups.require_rows(FakeTfra(good), "lookup", Asked(), weights)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="1 of 3 rows differ"):
        lookups.require_rows(FakeTfra(good + np.float32(good == 1)), "lookup", Asked(), weights)  # type: ignore[arg-type]


def turns(step_s: float, loss: float = 0.5) -> deepfm_rounds.Round:
    return deepfm_rounds.Round([step_s, 2 * step_s, 0.0], settle_s=step_s, trainer_cpu_s=0.3, others_cpu_s=0.6, losses=[loss, loss])


def test_a_step_is_compared_with_the_faster_of_torchs_own_in_its_round() -> None:
    rounds = [[turns(0.1), turns(0.3)], [turns(0.2), turns(0.2)], [turns(0.3), turns(0.3)]]
    sparse, dense, ours = deepfm_rounds.lines_of(["sparse", "dense", "ours"], rounds, n_local=2)
    assert sparse.figures["ratio"].high == pytest.approx(1.5)  # type: ignore[union-attr]
    assert dense.figures["ratio"].high == pytest.approx(2.0)  # type: ignore[union-attr]
    assert ours.figures["ratio"].low == pytest.approx(1.5)  # type: ignore[union-attr]
    assert ours.figures["ratio"].high == pytest.approx(3.0)  # type: ignore[union-attr]
    assert ours.figures["ms/step"].low == pytest.approx(600.0)  # type: ignore[union-attr]  # the median step and its share of settling
    assert ours.figures["trainer ms"].median == pytest.approx(100.0)  # type: ignore[union-attr]
    assert (sparse.figures["target"], ours.figures["target"]) == ("–", "ratio <= 1.5")


def test_a_contender_that_learns_something_else_is_refused() -> None:
    deepfm_rounds.require_same_loss(["a", "b"], [[turns(0.1, 0.5)], [turns(0.1, 0.505)]])
    for wrong in (0.52, float("nan")):
        with pytest.raises(deepfm_rounds.WrongLossError, match=r"^b: "):
            deepfm_rounds.require_same_loss(["a", "b"], [[turns(0.1, 0.5)], [turns(0.1, wrong)]])


def test_steps_of_ours_are_compared_with_the_parameter_server_of_their_mode() -> None:
    rounds = [[turns(0.1)], [turns(0.2)], [turns(0.4)]]
    _, memory_ps, ours = deepfm_rounds.lines_of(["torch", "(b)", "(c)"], rounds, n_local=1, peers={2: 1})
    assert ours.figures["/ (b)"] == Spread(2.0, 2.0, 2.0)
    assert ours.figures["target"] == "ratio <= 1.5, / (b) <= 1"
    assert (memory_ps.figures["/ (b)"], memory_ps.figures["target"]) == ("–", "–")
