"""The arithmetic of `frameworks`: ratios within a round, losses that differ, absent frameworks. No server, no framework, no time."""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from benchmarks import frameworks
from benchmarks.frameworks import FrameworkTurn, WrongFrameworkLossError, lines_of, require_same_losses_as_own
from benchmarks.in_frameworks.problem import Problem
from benchmarks.measure import Spread
from benchmarks.peers import PeerError
from benchmarks.tfra import peer
from benchmarks.worker_process import ROOT, running
from kvemb.errors import KvembError


def turns(*step_ms: float, loss: float = 0.5) -> list[FrameworkTurn]:
    return [FrameworkTurn(ms / 1e3, 0.001, 0.002, loss) for ms in step_ms]


def small(**given: int) -> argparse.Namespace:
    return argparse.Namespace(**{"dim": 3, "batch": 4, "lines": 10} | given)


def test_a_framework_is_compared_with_itself_and_tensorflow_with_tfra() -> None:
    tensorflow, jax = ({"own": turns(10, 20), "ours, ahead": turns(11, 24)} for _ in range(2))
    lines = {line.name: line.figures for line in lines_of({"tensorflow": tensorflow, "jax": jax, "tfra": {"lookup": turns(22, 12)}})}
    assert lines["tensorflow, ours, ahead"]["/ own"] == Spread(pytest.approx(1.15), pytest.approx(1.1), pytest.approx(1.2))
    assert lines["tensorflow, ours, ahead"]["/ TFRA"] == Spread(1.25, 0.5, 2.0)
    assert lines["tensorflow, ours, ahead"]["target"] == "/ own <= 1.15, / TFRA < 1"
    assert (lines["jax, ours, ahead"]["/ TFRA"], lines["jax, ours, ahead"]["target"]) == ("–", "/ own <= 1.15")
    assert lines["tfra, lookup"]["/ own"] == "–"


def test_who_learns_something_else_is_named() -> None:
    own, keras_own = {"own": turns(1)}, {"own": turns(1, loss=0.3)}
    require_same_losses_as_own({"jax": own | {"ours": turns(1, loss=0.52), "ours, ahead": turns(1, loss=0.55)}})
    require_same_losses_as_own({"keras-tensorflow": keras_own | {"ours": turns(1)}, "jax": own})
    with pytest.raises(WrongFrameworkLossError, match=r"jax, ours: mean loss 0\.5500"):
        require_same_losses_as_own({"jax": own | {"ours": turns(1, loss=0.55)}})
    with pytest.raises(WrongFrameworkLossError, match="keras-tensorflow, ours"):
        require_same_losses_as_own({"keras-tensorflow": keras_own | {"ours": turns(1, loss=0.3)}, "jax": own})
    with pytest.raises(WrongFrameworkLossError, match="tfra"):
        require_same_losses_as_own({"jax": own, "tfra": {"lookup": turns(1, loss=float("nan"))}})


def test_every_framework_gets_the_same_problem(tmp_path: Path) -> None:
    problem = frameworks.problem_of(small())
    problem.save(tmp_path / "problem.npz")
    read = Problem.load(str(tmp_path / "problem.npz"))
    assert read.ids.shape == (2, 4, 20)
    np.testing.assert_array_equal(read.known_ids[read.positions], problem.ids)
    assert [kernel.shape for kernel in read.kernels] == [(60, 64), (64, 32), (32, 1)]
    assert {name: rows.shape[1] for name, rows in read.rows.items()} == {"linear": 1, "factors": 3}
    with pytest.raises(KvembError, match="less than one batch"):
        frameworks.problem_of(small(lines=3))


def test_a_framework_that_is_not_installed_is_absent(tmp_path: Path) -> None:
    """The worker says so, and what fails in it comes back."""
    command = [sys.executable, "-m", "benchmarks.in_frameworks.worker", "in_nothing"]
    with running("nothing", command, {"PYTHONPATH": str(ROOT)}) as worker:
        assert worker.ask(do="open", problem="", where="") == {"absent": "benchmarks.in_frameworks.in_nothing"}
        with pytest.raises(PeerError, match="nothing: "):
            worker.ask(do="turn", contender="own", indices=[1], lead=1)


def test_without_tfra_it_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer, "PYTHON", tmp_path / "python")
    with ExitStack() as stack:
        assert frameworks._start(stack, "tfra") is None
