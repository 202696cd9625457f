"""How a shard shares its time between batches and its part in a move of slots."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import MOVING, NODES, MovePlan
from paramserver.scaling import phase_runner
from paramserver.scaling.phase_runner import PhaseProgress, PhaseRunner, PhaseWork

_SLICES, _SLICE_S, _BATCH_S = 800, 0.0005, 0.1  # four tables, of which a hundred ranges of slots move, listed twice; a busy machine


class _SmallSlices(PhaseWork):
    """Each takes half a millisecond of a clock that stands still otherwise."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self._clock = clock

    def phase(self, cluster_map: ClusterMap, progress: PhaseProgress) -> Iterator[float]:
        for _ in range(_SLICES):
            self._clock.now_s += _SLICE_S
            yield 0.0

    def held_up(self, error: Exception) -> str:
        raise error

    @property
    def trouble(self) -> str:
        return ""


def test_many_small_slices_do_not_wait_for_a_batch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(phase_runner, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    first = ClusterMap.first(2, 1)
    moving = replace(first, version=first.version + 1, plan=MovePlan(NODES, MOVING, first.slot_nodes[::-1].copy()))
    work = _SmallSlices(clock)
    engine = SimpleNamespace(k=0)
    parts: Any = SimpleNamespace(maps=SimpleNamespace(cluster_map=moving), engine=engine)
    flushes: Any = None
    runner = PhaseRunner(parts, flushes, work, work, done=lambda: None)
    longest_s, batches = 0.0, 0
    while not (batches and runner.progress.done):
        before_s = clock.now_s
        engine.k += 1
        runner.step(lambda error, pause_s: None)
        longest_s = max(longest_s, clock.now_s - before_s)
        clock.now_s += _BATCH_S
        batches += 1
    assert batches < _SLICES / 10, "a hundred ranges of few rows are the work of a moment"
    assert longest_s < 0.02, "no batch waits longer than for a copy of a megabyte"
