"""trainer.prefetch: batches in order with the rows fetched for them, errors at the batch concerned, no thread or row remains."""

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from kvemb.errors import ClosedError, DeadlineExceededError, InvalidInputError
from kvemb.net.deadline import Deadline
from trainer import prefetch
from trainer.lookahead.pool_sizes import CHOICE_EVERY, FIRST_CHOICE_AFTER, Sizes
from trainer.lookahead.prefetch import size_of
from trainer.lookahead.pull_threads import NAME, PullThreads

WAIT_S = 90.0


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]


def same(batch: int) -> int:
    return batch


def test_batches_come_in_order_whatever_their_pulls_take() -> None:
    def pull(batch: int) -> int:
        time.sleep(0.02 if batch % 3 == 0 else 0.0)
        return -batch

    got = list(prefetch(range(30), same, pull, threads_num=4, capacity=8))
    assert got == [(i, -i) for i in range(30)]
    assert ours() == []


def test_a_batch_is_pulled_while_the_one_before_it_is_used() -> None:
    pulled = [threading.Event() for _ in range(5)]

    def pull(batch: int) -> int:
        pulled[batch].set()
        return batch

    for batch, _ in prefetch(range(5), same, pull, threads_num=1, capacity=1):
        if batch + 1 < len(pulled):
            assert pulled[batch + 1].wait(WAIT_S)


def test_no_more_than_capacity_lies_ahead() -> None:
    began: list[int] = []
    batches = prefetch(range(40), same, lambda batch: began.append(batch), threads_num=4, capacity=3)
    most = 0
    for batch, _ in batches:
        time.sleep(0.002)
        most = max(most, max(began) - batch)
    assert most == 3


def test_every_iteration_is_a_run_of_its_own_over_the_loader() -> None:
    batches = prefetch([1, 2, 3], same, same)
    assert [list(batches), list(batches)] == [[(1, 1), (2, 2), (3, 3)]] * 2
    assert len(batches) == 3


@pytest.mark.parametrize("where", ["loader", "need", "pull"])
def test_an_error_comes_up_at_its_batch_and_ends_the_run(where: str) -> None:
    def fail_at_3(batch: int) -> int:
        if batch == 3:
            raise OSError(where)
        return batch

    def loader() -> Iterator[int]:
        for batch in range(6):
            yield fail_at_3(batch) if where == "loader" else batch

    batches = prefetch(loader(), fail_at_3 if where == "need" else same, fail_at_3 if where == "pull" else same, threads_num=2, capacity=4)
    seen: list[tuple[int, int]] = []
    run = iter(batches)
    with pytest.raises(OSError, match=where):
        seen.extend(run)
    assert [batch for batch, _ in seen] == [0, 1, 2]
    assert list(run) == []
    assert ours() == []


def test_leaving_early_ends_threads_and_the_loader() -> None:
    ended = []

    def loader() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.append(True)

    for batch, _ in prefetch(loader(), same, same, threads_num=3, capacity=5):
        if batch == 4:
            break
    assert ours() == []
    assert ended == [True]


def test_an_iterator_of_the_callers_own_is_left_open_and_can_be_gone_on_with() -> None:
    mine = (batch for batch in range(1000))
    for batch, _ in prefetch(mine, same, same, threads_num=1, capacity=2):
        if batch == 4:
            break
    assert 5 < next(mine) <= 8, "what was read ahead is gone"
    assert next(mine) < 20


def test_a_run_that_was_replaced_by_another_says_so() -> None:
    batches = prefetch(range(10), same, same, threads_num=1, capacity=2)
    first = iter(batches)
    next(first)
    assert len(list(batches)) == 10
    with pytest.raises(InvalidInputError, match="iterated again"):
        next(first)


@pytest.mark.parametrize("sizes", [(4, 1, 2), (4, 2, 3, 1), (1, 8, 1)])
def test_threads_remain_however_their_number_changes(sizes: tuple[int, ...]) -> None:
    threads, gate = PullThreads(sizes[0]), threading.Event()
    busy = [threads.submit(gate.wait, 30) for _ in range(8)]
    for n in sizes[1:]:
        threads.resize(n)
    gate.set()
    for one in busy:
        one.result(30)
    tasks = [threads.submit(time.sleep, 0.01) for _ in range(8)]
    for task in tasks:
        task.result(30)
    deadline = time.monotonic() + 30
    while len(ours()) > sizes[-1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(ours()) == sizes[-1]
    threads.close(Deadline.after(30))
    assert ours() == []


def test_an_interrupt_while_rows_are_awaited_does_not_wait_for_them() -> None:
    gate, ended = threading.Event(), threading.Event()
    interrupt = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))

    def pull(batch: int) -> None:
        gate.wait(60)
        ended.set()

    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(prefetch(range(10), same, pull, threads_num=1, capacity=3)))
    assert not ended.is_set(), "it was not waited for"
    gate.set()
    assert ended.wait(30)
    while ours():
        time.sleep(0.01)


def test_an_interrupt_while_the_loader_is_read_does_not_wait_for_pulls() -> None:
    gate, began, ended = threading.Event(), threading.Event(), threading.Event()

    def pull(batch: int) -> None:
        if batch == 1:
            began.set()
            gate.wait(WAIT_S)
            ended.set()

    def loader() -> Iterator[int]:
        yield from (0, 1)
        assert began.wait(WAIT_S)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(prefetch(loader(), same, pull, threads_num=1, capacity=3))
    assert not ended.is_set(), "it was not waited for"
    gate.set()
    while ours():
        time.sleep(0.01)


def test_a_pull_that_never_ends_is_waited_for_as_long_as_was_said_and_no_longer() -> None:
    gate, ended = threading.Event(), threading.Event()

    def pull(batch: int) -> None:
        gate.wait(WAIT_S)
        ended.set()

    with pytest.raises(DeadlineExceededError, match=r"within 4 s: .* timeout of its own"):
        next(iter(prefetch(range(8), same, pull, threads_num=2, capacity=4, timeout_s=4)))
    assert not ended.is_set(), "it was not waited for to its end"
    gate.set()
    while ours():
        time.sleep(0.01)


def test_a_forked_child_is_told_at_once_and_can_begin_a_run_of_its_own() -> None:
    gate = threading.Event()
    batches = prefetch(range(8), same, lambda batch: batch > 2 and os.getpid() == parent and gate.wait(WAIT_S), threads_num=2, capacity=4)
    parent, run = os.getpid(), iter(batches)
    next(run)

    def child() -> None:
        signal.alarm(20)
        with pytest.raises(ClosedError, match=rf"process {parent}"):
            next(run)
        assert len(list(batches)) == 8
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    gate.set()
    assert process.exitcode == 0
    assert len(list(run)) == 7, "the parent's goes on"


class Lazy:
    @property
    def nbytes(self) -> int:
        raise ValueError("not loaded yet")


def test_the_size_of_what_has_none_is_no_error_and_long_lists_are_estimated() -> None:
    array = np.zeros(10)
    assert size_of([Lazy(), array]) == 80
    assert size_of([array] * 100_000) == 8_000_000
    assert size_of(["text"] * 100_000) == 0


def test_an_executors_threads_are_not_told() -> None:
    with ThreadPoolExecutor(1) as executor:
        batches = prefetch(range(3), same, same, executor=executor)
        list(batches)
    assert batches.report.startswith("threads of the executor, capacity")


def test_one_long_pause_is_no_long_step() -> None:
    sizes = Sizes("auto", "auto")
    for step_s in [0.009] * 320 + [60.0] + [0.009] * 63:
        sizes.add(read_s=0.001, pull_s=0.025, step_s=step_s, size_bytes=1000)
    assert sizes.threads_num == 3
    assert sizes.averages.step_s < 0.01


def test_close_and_the_context_manager_end_a_run_that_is_kept() -> None:
    for close_it in (True, False):
        with prefetch(range(1000), same, same, threads_num=2, capacity=2) as batches:
            run = iter(batches)
            next(run)
            assert ours()
            if close_it:
                batches.close()
                assert ours() == []
                assert list(run) == []
        assert ours() == []


def test_a_run_that_another_thread_waits_for_is_not_closed_under_it() -> None:
    gate, reading, got = threading.Event(), threading.Event(), []

    def loader() -> Iterator[int]:
        yield 0
        reading.set()
        assert gate.wait(WAIT_S)
        yield 1

    batches = prefetch(loader(), same, same, threads_num=1, capacity=1)
    loop = threading.Thread(target=lambda: got.extend(batches))
    loop.start()
    assert reading.wait(WAIT_S)
    for wrong in (batches.close, lambda: next(batches._run()), lambda: iter(batches)):
        with pytest.raises(InvalidInputError, match="one thread"):
            wrong()
    gate.set()
    loop.join(WAIT_S)
    assert got == [(0, 0), (1, 1)], "the loop went on"
    assert ours() == []


def test_an_abandoned_run_keeps_no_batch_alive() -> None:
    class Batch:
        pass

    kept: list[weakref.ref[Batch]] = []

    def loader() -> Iterator[Batch]:
        for _ in range(10):
            batch = Batch()
            kept.append(weakref.ref(batch))
            yield batch

    run = iter(prefetch(loader(), lambda batch: batch, lambda batch: batch, threads_num=2, capacity=4))
    next(run)
    assert any(one() is not None for one in kept)
    del run
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)
    assert ours() == []


def test_a_pull_that_was_not_begun_is_not_made_after_the_end() -> None:
    began, go_on = [], threading.Event()

    def pull(batch: int) -> int:
        began.append(batch)
        if batch == 1:
            go_on.wait(WAIT_S)
        return batch

    run = iter(prefetch(range(100), same, pull, threads_num=1, capacity=8))
    for _ in range(1):
        next(run)
    threading.Timer(0.05, go_on.set).start()
    run.close()  # type: ignore[attr-defined]
    assert max(began) <= 1
    assert ours() == []


def test_an_executor_of_the_callers_own_does_the_work_and_stays_open() -> None:
    names = set()

    def pull(batch: int) -> int:
        names.add(threading.current_thread().name.split("_")[0])
        return batch

    with ThreadPoolExecutor(2, thread_name_prefix="mine") as executor:
        assert [b for b, _ in prefetch(range(9), same, pull, executor=executor)] == list(range(9))
        assert executor.submit(same, 1).result(WAIT_S) == 1
    assert names == {"mine"}


def test_an_executor_that_never_gets_to_it_is_not_waited_for_without_end() -> None:
    class Busy:
        def submit(self, task: object, /, *args: object) -> "Future[object]":
            return Future()

    with pytest.raises(DeadlineExceededError, match="executor"):
        next(iter(prefetch(range(3), same, same, executor=Busy(), timeout_s=0.05)))


@pytest.mark.parametrize(
    "options",
    [
        {"threads_num": 0},
        {"threads_num": 9},
        {"threads_num": True},
        {"threads_num": "many"},
        {"capacity": 0},
        {"capacity": 2.0},
        {"executor": object()},
        {"timeout_s": 0},
    ],
)
def test_unusable_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        prefetch([1], same, same, **options)  # type: ignore[arg-type]


def test_a_number_of_threads_beside_an_executor_is_refused() -> None:
    with ThreadPoolExecutor(1) as executor, pytest.raises(InvalidInputError, match="no effect"):
        prefetch([1], same, same, executor=executor, threads_num=2)


def test_auto_chooses_and_says_what() -> None:
    batches = prefetch([np.zeros(1000)] * 40, lambda batch: batch, lambda need: need)
    list(batches)
    assert batches.capacity == batches.threads_num + 1
    assert f"threads_num {batches.threads_num} (auto), capacity {batches.capacity} (auto)" in batches.report
    assert "0.016 MB per batch" in batches.report


@pytest.mark.parametrize(("pull_s", "step_s", "threads_num"), [(0.001, 0.020, 1), (0.019, 0.004, 4), (0.5, 0.001, 8)])
def test_auto_has_as_many_pulls_under_way_as_fit_into_a_step(pull_s: float, step_s: float, threads_num: int) -> None:
    sizes = Sizes("auto", "auto")
    for _ in range(FIRST_CHOICE_AFTER):
        sizes.add(read_s=0.001, pull_s=pull_s, step_s=step_s, size_bytes=1000)
    assert (sizes.threads_num, sizes.capacity) == (threads_num, threads_num + 1)


def test_auto_follows_what_changes() -> None:
    sizes = Sizes("auto", 7)
    for pull_s in (0.001, 0.039):
        for _ in range(4 * CHOICE_EVERY):
            sizes.add(read_s=0.0, pull_s=pull_s, step_s=0.010, size_bytes=1000)
    assert (sizes.threads_num, sizes.capacity) == (4, 7)


def test_auto_bounds_the_memory_of_what_lies_ahead() -> None:
    large = np.zeros(100 << 17)  # 100 MB; all batches are this one
    batches = prefetch([large] * 12, lambda batch: None, lambda need: None)
    assert len(list(batches)) == 12
    assert batches.capacity == 2
