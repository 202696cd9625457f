"""Whose pushes a batch holds, by the journal: from the last segment back, and nothing where it is not kept any more."""

from pathlib import Path

import pytest

from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from paramserver.journal import BatchEntry, Journal, SessionEntry, Watermark, encode_entry
from paramserver.journal.batch_search import trainers_of
from paramserver.model.batch import APPLY, Batch

N_BATCHES = 40


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Batches 1 to 40 of two epochs, some of them behind sessions, in many segments."""
    made = Journal(tmp_path / "journal", "os", segment_bytes=700)
    for k in range(1, N_BATCHES + 1):
        if k % 7 == 0:
            made.append(encode_entry(SessionEntry(f"trainer-{k}", k)))
        marks = (Watermark(f"trainer-{k}", 1, k), Watermark("other", 2, k))
        made.append(encode_entry(BatchEntry(make_version(1 + k // 20, k), Batch(APPLY, ()), (), marks)))
    made.commit()
    assert made.end.segment > 5
    return made


@pytest.mark.parametrize("k", range(1, N_BATCHES + 1))
def test_every_batch_that_is_kept_is_found(journal: Journal, k: int) -> None:
    assert trainers_of(journal, make_version(1 + k // 20, k), Deadline.after(60)) == [f"trainer-{k}", "other"]


@pytest.mark.parametrize("version", [make_version(1, N_BATCHES), make_version(3, N_BATCHES + 1), make_version(0, 5)])
def test_a_batch_that_never_was_has_no_trainers(journal: Journal, version: int) -> None:
    assert trainers_of(journal, version, Deadline.after(60)) == []


def test_a_batch_that_was_let_go_has_no_trainers(journal: Journal) -> None:
    journal.discard_before(journal.end)
    assert trainers_of(journal, make_version(1, 1), Deadline.after(60)) == []
    assert trainers_of(journal, make_version(3, N_BATCHES), Deadline.after(60)) == [f"trainer-{N_BATCHES}", "other"]
