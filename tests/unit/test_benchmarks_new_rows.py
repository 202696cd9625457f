"""What `new_rows` draws, checks, refuses and prints. No server, no TensorFlow, and no time is asserted."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import kvemb
from benchmarks import new_rows, train
from benchmarks.tfra import peer
from benchmarks.train_loop import WrongTrainingError


def test_no_row_of_a_batch_is_in_another() -> None:
    batches = new_rows.batches_of_new_rows(5, 200_000)
    unique = [np.unique(ids) for ids in batches]
    assert all(len(ids) == train.BATCH_IDS for ids in batches)
    assert len(np.unique(np.concatenate(unique))) == sum(map(len, unique))


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
