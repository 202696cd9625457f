"""Which checkpoint the next one of a log is built on, whatever was broken off, damaged or deleted before."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_log import CheckpointLog
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST, BaseCheckpoint
from kvemb.checkpoint.listing import list_checkpoints
from kvemb.checkpoint.save import SaveResult
from kvemb.checkpoint.verify import verify
from kvemb.errors import BaseOutdatedError, CheckpointError
from tests.unit.checkpoint_files import USER, save

N = 2000
IDS = np.arange(N)


class TableOfPushes:
    """Stands for a cluster: one push to some rows, and some erased, before each save; `rows` says what there is."""

    def __init__(self, n_pushed: int = 20) -> None:
        self.n_pushed = n_pushed
        self.k, self.changed, self.outdated, self.fails = 0, {0: IDS}, False, False
        self.erased: dict[int, set[int]] = {0: set()}
        self.rows: dict[int, int] = {}

    def save(self, url: str, *, base: str | None = None, weights_only: bool, extra: Any, progress: Any) -> SaveResult:
        if base is not None and self.outdated:
            raise BaseOutdatedError("slots have moved")
        if self.fails:
            (Path(url.removeprefix("file://")) / "user").mkdir(parents=True)
            (Path(url.removeprefix("file://")) / "user" / "half.parquet").write_bytes(b"half")
            raise CheckpointError("killed")
        self.k += 1
        some = np.random.default_rng(self.k).choice(N, self.n_pushed, replace=False)
        gone, kept = set(some[:3].tolist()), some[3:].tolist()
        self.changed[self.k] = IDS if self.k == 1 else np.array(sorted(kept))
        self.erased[self.k] = set() if self.k == 1 else gone
        self.rows = {row: k for row, k in self.rows.items() if row not in self.erased[self.k]}
        self.rows |= dict.fromkeys(self.changed[self.k].tolist(), self.k)
        below, since = None, 0
        if base is not None:
            manifest = open_chain(base).newest
            below, since = BaseCheckpoint(base.rpartition("/")[2], manifest.save_id), manifest.cuts[0].k
        newer = [row for row, k in self.rows.items() if k > since]
        lost = set().union(*(self.erased[k] for k in range(since + 1, self.k + 1))) - self.rows.keys() if below else ()
        return SaveResult(url, save(url, newer, k=self.k, base=below, erased=sorted(lost)), 0.0)


def saved(url: str) -> set[int]:
    chain = open_chain(url)
    return {int(row) for shard in range(2) for block in chain.rows(USER, shard) for row in block.ids}


def number_of_base(done: SaveResult) -> int:
    return 0 if done.manifest.base is None else int(done.manifest.base.name)


def test_every_one_is_built_on_that_with_the_lowest_bit_cleared_and_is_what_there_was(tmp_path: Path) -> None:
    table = TableOfPushes()
    log = CheckpointLog(table.save, str(tmp_path))
    for number in range(1, 21):
        done = log.save()
        assert done.url.endswith(f"/{number:09d}")
        assert number_of_base(done) == (0 if number == 1 else 1 + ((number - 1) & (number - 2)))
        assert saved(done.url) == table.rows.keys()
        assert len(open_chain(done.url).levels) == 1 + (number - 1).bit_count()


def test_whatever_keep_has_deleted_each_one_that_remains_is_whole_and_the_log_goes_on(tmp_path: Path) -> None:
    table = TableOfPushes()
    for number in range(1, 36):
        done = CheckpointLog(table.save, str(tmp_path), keep=1 + number % 4).save()  # a writer of its own
        assert saved(done.url) == table.rows.keys()
        assert number == 1 or done.manifest.base is not None
    for one in list_checkpoints(str(tmp_path)):
        verify(one.url).require_good()
    assert len(list_checkpoints(str(tmp_path))) < 12


def test_a_number_whose_save_was_broken_off_is_taken_again(tmp_path: Path) -> None:
    table = TableOfPushes()
    log = CheckpointLog(table.save, str(tmp_path))
    log.save()
    table.fails = True
    with pytest.raises(CheckpointError):
        log.save()
    assert (tmp_path / "000000002").exists()
    table.fails = False
    done = CheckpointLog(table.save, str(tmp_path)).save()
    assert done.url.endswith("/000000002")
    assert number_of_base(done) == 1


def test_a_base_that_is_none_any_more_is_told_and_the_next_one_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = TableOfPushes()
    log = CheckpointLog(table.save, str(tmp_path))
    log.save()
    log.save()
    table.outdated = True
    with caplog.at_level(logging.INFO, "kvemb"):
        done = log.save()
    assert number_of_base(done) == 0
    assert "checkpoint 3 of the log is full: slots have moved" in caplog.text
    assert saved(done.url) == table.rows.keys()
    table.outdated = False
    assert [number_of_base(log.save()) for _ in range(4)] == [3, 3, 5, 3]  # counted from the full one


@pytest.mark.parametrize("broken", ["000000002", "000000001"])
def test_nothing_is_built_on_one_that_is_damaged_or_lacks_its_base(tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    table = TableOfPushes()
    log = CheckpointLog(table.save, str(tmp_path))
    log.save()
    log.save()
    (tmp_path / broken / MANIFEST).write_text("{}")
    done = log.save()
    assert done.url.endswith("/000000003")
    assert number_of_base(done) == 0
    assert "nothing is built on checkpoint 2 of the log" in caplog.text


def test_it_is_full_again_when_increments_have_come_to_the_size_of_the_full_one(tmp_path: Path) -> None:
    table = TableOfPushes(300)
    log, sizes, n_full = CheckpointLog(table.save, str(tmp_path)), [], 0
    for _ in range(20):
        done = log.save()
        n_full += done.manifest.base is None
        *increments, full = (level.manifest.size_bytes for level in open_chain(done.url).levels)
        sizes.append(sum(increments) / full)
    assert n_full > 1
    assert max(sizes) < 2
