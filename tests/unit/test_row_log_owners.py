"""A process that another one has shut out publishes no run and takes away none."""

from pathlib import Path

import pytest

from kvemb.errors import FencedError, JournalFullError
from paramserver.row_log import Runs
from paramserver.row_log.run_writer import RunWriter
from tests.unit.run_states import TABLE, State, check, count, in_order, log_in, publish, records, small_blocks, u64

__all__ = ["small_blocks"]  # the fixture


class Owners:
    """Opens a folder for one process after another; all but the last are fenced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.epoch = folder, 0

    def next(self, limit: int = 9) -> Runs:
        self.epoch += 1
        epoch = self.epoch

        def still_ours() -> None:
            if epoch != self.epoch:
                raise FencedError(f"epoch {epoch}")

        return log_in(self.folder, limit=limit, epoch=epoch, still_ours=still_ours)


def begun(runs: Runs, state: State) -> RunWriter:
    writer, ids = runs.begin(TABLE), in_order(state)
    writer.add_rows(u64(ids), records(ids, [state[i][0] for i in ids]))
    return writer


def test_a_process_that_was_shut_out_publishes_nothing(tmp_path: Path) -> None:
    owners = Owners(tmp_path)
    old = owners.next()
    writer = begun(old, {1: (5, True)})
    new = owners.next()  # deletes the run that the other one writes
    with pytest.raises(FencedError):
        count(old, [writer], 5)
    assert not list(tmp_path.iterdir())
    publish(new, {2: (7, True)}, 7)
    for runs in (old, new):
        runs.close()
    again = owners.next()
    assert again.cut == 7
    check(again, {2: (7, True)})
    again.close()


def test_a_process_that_was_shut_out_gives_up_no_run_but_its_own(tmp_path: Path) -> None:
    owners = Owners(tmp_path)
    old = owners.next()
    given_up = begun(old, {1: (5, True)})
    new = owners.next()
    writer = begun(new, {2: (7, True)})
    given_up.drop()
    count(new, [writer], 7)
    old._sweep()
    for runs in (old, new):
        runs.close()
    again = owners.next()
    check(again, {2: (7, True)})
    again.close()


def test_a_process_that_was_shut_out_in_a_merge_leaves_the_successors_log(tmp_path: Path) -> None:
    owners = Owners(tmp_path)
    old = owners.next(limit=1)
    publish(old, {1: (5, True), 2: (5, True)}, 5)
    publish(old, {2: (6, True)}, 6)
    merging = old.merge(TABLE)
    next(merging)
    new = owners.next()
    publish(new, {3: (9, True)}, 9)
    with pytest.raises(FencedError):
        list(merging)
    for runs in (old, new):
        runs.close()
    again = owners.next()
    assert again.cut == 9
    check(again, {1: (5, True), 2: (6, True), 3: (9, True)})
    again.close()


def test_a_process_shut_out_right_after_it_was_asked_replaces_no_state(tmp_path: Path) -> None:
    first = log_in(tmp_path, epoch=1)
    publish(first, {1: (5, True)}, 5)
    opened: list[Runs] = []
    first._saved._still_ours = lambda: opened.append(log_in(tmp_path, epoch=2))
    with pytest.raises(JournalFullError, match="No such file"):
        publish(first, {1: (6, True)}, 6)
    again = log_in(tmp_path, epoch=3)
    assert again.cut == 5
    check(again, {1: (5, True)})
    for runs in (first, *opened, again):
        runs.close()
