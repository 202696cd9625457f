"""What `new_rows` draws, checks, refuses and prints. No server, no TensorFlow, and no time is asserted."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import kvemb
from benchmarks import new_rows, train
from benchmarks.__main__ import build_parser
from benchmarks.measure import Turn
from benchmarks.tfra import peer
from benchmarks.train_loop import Stretch, WrongTrainingError
from kvemb.client.ack import Staleness


def test_no_row_of_a_batch_is_in_another() -> None:
    batches = new_rows.batches_of_new_rows(5, 200_000)
    unique = [np.unique(ids) for ids in batches]
    assert all(len(ids) == train.BATCH_IDS for ids in batches)
    assert len(np.unique(np.concatenate(unique))) == sum(map(len, unique))


def test_drawing_has_a_line_for_each_distribution_and_dim_by_both_algorithms() -> None:
    options = build_parser().parse_args(["new_rows", "--dim", "16", "3", "--rows", "50", "--seconds", "0.001", "--repeats", "2"])
    lines = new_rows._drawing(options).lines
    assert [(line.name, line.figures["dim"], line.figures["target"]) for line in lines[::3]] == [
        ("initial rows, normal", "16", "<= 0.1"), ("initial rows, normal", "3", "–"),
    ]  # fmt: skip
    assert len(lines) == 6
    for line in lines:
        one, two = (line.figures[f"algorithm {number}: µs/row"] for number in (1, 2))
        assert 0 < one.low <= one.median  # type: ignore[union-attr]
        assert 0 < two.low <= two.median  # type: ignore[union-attr]


def test_the_target_of_a_line_is_that_of_this_question() -> None:
    stretches = [Stretch(Turn(200, 1.0, 0.1), 1.0, 1.0, 600, 200, (Staleness(0.0, 0),))] * 3
    (line,) = train.lines_of({"ours, every row new": stretches}, [], dim=64, targets=new_rows.TARGETS)
    assert (line.figures["target"], line.figures["/ TFRA"]) == ("/ TFRA >= 1.3", "–")


def test_rows_that_are_no_draws_and_what_was_added_are_refused() -> None:
    ids, added = np.arange(4000, dtype=np.uint64), np.full(4000, -0.01)
    first = kvemb.init.normal(std=0.01).rows(ids, 16, table="t", seed=0)
    new_rows.require_drawn("TFRA", (first - 0.01).astype(np.float32), added, 0.01)
    for wrong in (first, first * 2 - 0.01, np.full_like(first, -0.01)):
        with pytest.raises(WrongTrainingError, match="TFRA: rows began at a mean of"):
            new_rows.require_drawn("TFRA", wrong, added, 0.01)


def test_without_tfra_the_lines_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer, "PYTHON", tmp_path / "none")
    with ExitStack() as stack:
        other, notes = new_rows._tfra(stack, 1, 16, [], {})
    assert other is None
    assert notes == ["Peer skipped: TFRA is not installed. To set it up beside this checkout: make bench-peers"]
