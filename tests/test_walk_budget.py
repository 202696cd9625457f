"""The way of one pull and of one push, in functions, files and frames: the way that a reader has to walk has a budget.

A shard runs in this process beside its client, on a real server, so that one profile hook sees both. Counted is what every one of a few
equal pulls (pushes) executes, so that timers and watchers that happen to run beside one of them do not count. The figures below are
today's: a change that raises one says here why; one that lowers it writes the lower figure down.

Policies took 4 functions and a file of a push: it names the registry's serial, which its outcome tells, and each table's admission is
looked up before pushes are merged. Tables that take no gradients took 2 functions, which tell them from others. The feed took 1, by which
it learns what is applied; and 1 asks whether the table is being altered. The list of background jobs took 3 functions and 3 files of a
push: moves, evictions and flushes say themselves when they are due.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import kvemb
from kvemb.config import load
from kvemb.local_cluster.launcher import LocalCluster
from paramserver.lifecycle.start import start

BUDGET = {
    "pull: functions": 80,
    "pull: files": 22,
    "pull: frames to the socket": 11,
    "push: functions": 342,
    "push: files": 72,
    "apply: frames to the socket": 11,
}

ROOT = Path(__file__).parent.parent
OURS = tuple(f"{ROOT / package}/" for package in ("kvemb", "paramserver"))
SOCKETS = f"{ROOT / 'kvemb' / 'net'}/"
N_WALKS = 5


def _ours(frame: FrameType) -> bool:
    """A function of the product; comprehensions and lambdas count for the function that they stand in."""
    code = frame.f_code
    return code.co_filename.startswith(OURS) and not code.co_name.startswith("<")


class Walk:
    """Records which of our functions run while it is on, in any thread that was started after it."""

    def __init__(self) -> None:
        self.on = False
        self.seen: set[CodeType] = set()
        self.frames_to_socket = self.frames_from_apply = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.on or event != "call" or not _ours(frame):
            return
        self.seen.add(frame.f_code)
        if not frame.f_code.co_filename.startswith(SOCKETS):
            return
        stack = list(self._stack(frame))
        if threading.current_thread() is threading.main_thread():
            self.frames_to_socket = max(self.frames_to_socket, len(stack))
        elif "_apply" in stack:
            self.frames_from_apply = max(self.frames_from_apply, stack.index("_apply"))

    @staticmethod
    def _stack(frame: FrameType | None) -> Iterator[str]:
        """The names of our functions that are under way, the innermost first."""
        while frame is not None:
            if _ours(frame):
                yield frame.f_code.co_name
            frame = frame.f_back

    def of(self, act: Callable[[], object]) -> set[CodeType]:
        """What one act executes."""
        self.seen = set()
        self.on = True
        act()
        self.on = False
        return self.seen

    def of_all(self, act: Callable[[], object]) -> set[CodeType]:
        """The functions that each of a few equal acts executes, after a first one that fills caches."""
        self.of(act)
        self.frames_to_socket = self.frames_from_apply = 0
        return set.intersection(*(self.of(act) for _ in range(N_WALKS)))


@pytest.fixture
def walk() -> Iterator[Walk]:
    """A hook on this thread and all that are started while the test runs."""
    walk = Walk()
    threading.setprofile(walk)
    sys.setprofile(walk)
    yield walk
    sys.setprofile(None)
    threading.setprofile(None)


def n_files(codes: set[CodeType]) -> int:
    return len({code.co_filename for code in codes})


def test_one_pull_and_one_push_stay_within_their_budgets(walk: Walk) -> None:
    with LocalCluster("redis") as local:
        local.shards[0].stop(30.0)
        config = load(local.config_path, {})
        shard = start(config, 0, listen=config.servers.shards[0], start_timeout_s=30.0, wait=threading.Event().wait)
        try:
            with kvemb.connect(local.url) as cluster:
                table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.adam())
                ids, grads = np.arange(100), np.ones((100, 4), np.float32)
                pushed = walk.of_all(lambda: table.push(ids, grads).wait_applied(timeout_s=30))
                applied = walk.frames_from_apply
                pulled = walk.of_all(lambda: table.pull(ids))
                frames = walk.frames_to_socket
        finally:
            shard.stop(10.0)
    found = dict(zip(BUDGET, (len(pulled), n_files(pulled), frames, len(pushed), n_files(pushed), applied), strict=True))
    assert {name: n for name, n in found.items() if n > BUDGET[name]} == {}, f"over the budget {BUDGET}"
