"""The measurement of `deepfm`: turns of steps of each contender, the table and the check made from them. No torch, no servers."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import Spread, cpu_s
from benchmarks.report import Line

MOST_RATIO, MOST_RATIO_AHEAD = 1.5, 1.1
_LOSS_TOLERANCE = 0.02
# Rows one batch older still: measured 3.4 %. With so few rows all of them are in every batch, and Adam bears little delay; simulated in one
# process, losses of gradients applied 2 steps late end 9 % higher, 3 steps late 12 %.
_STALE_LOSS_TOLERANCE = 0.06


class WrongLossError(AssertionError):
    """A contender did not learn what torch's own embeddings learn from the same batches."""


@dataclass
class Steps:
    """A contender, and the time that every step took.

    Args:
        name: for the table.
        step: train on batch i of the shared order, or on what `load` yields for it; return the loss.
        settle: wait until everything is applied.
        pids: of servers and shards, which work beside the trainer.
        load: yields something for each of these batches, which may take time of the step that uses it.
    """

    name: str
    step: Callable[[Any], float]
    settle: Callable[[], None]
    pids: Sequence[int] = ()
    load: Callable[[Sequence[int]], Iterable[Any]] = iter

    def round(self, indices: Sequence[int]) -> "Round":
        """Train on these batches; the last step is followed by what settles it, whose time is shared by all."""
        wall_s, losses = [], []
        others_s, cpu_before_s = cpu_s(self.pids), time.process_time()
        start_s = time.perf_counter()
        for loaded in self.load(indices):
            losses.append(self.step(loaded))
            end_s = time.perf_counter()
            wall_s.append(end_s - start_s)
            start_s = end_s
        start_s = time.perf_counter()
        self.settle()
        settle_s = (time.perf_counter() - start_s) / len(indices)
        return Round(wall_s, settle_s, (time.process_time() - cpu_before_s), cpu_s(self.pids) - others_s, losses)


@dataclass(frozen=True)
class Round:
    """Steps of one turn: wall time of each and of settling (per step), CPU time of the trainer and of the others, losses."""

    wall_s: list[float]
    settle_s: float
    trainer_cpu_s: float
    others_cpu_s: float
    losses: list[float]

    @property
    def step_s(self) -> float:
        """The median step, with its share of settling."""
        return median(self.wall_s) + self.settle_s


def lines_of(
    names: Sequence[str],
    rounds: Sequence[Sequence[Round]],
    n_local: int,
    peers: Mapping[int, int] | None = None,
    ahead: Collection[int] = (),
) -> list[Line]:
    """Lay the rounds out.

    Args:
        names: of the contenders, torch's own first.
        rounds: of each contender.
        n_local: how many are torch's own.
        peers: for contenders that have one, the number of the classic parameter server of their mode.
        ahead: those that pull rows ahead, which have a stricter target.
    """
    best_s = [min(one.step_s for one in at) for at in zip(*rounds[:n_local], strict=True)]
    lines = []
    for index, (name, mine) in enumerate(zip(names, rounds, strict=True)):
        n_steps = len(mine[0].wall_s)
        figures: dict[str, Spread | float | str] = {
            "ms/step": Spread.of([one.step_s * 1e3 for one in mine]),
            "ratio": Spread.of([one.step_s / best for one, best in zip(mine, best_s, strict=True)]),
            "/ (b)": "–",
            "trainer ms": Spread.of([one.trainer_cpu_s * 1e3 / n_steps for one in mine]),
            "other ms": Spread.of([one.others_cpu_s * 1e3 / n_steps for one in mine]),
            "loss": f"{np.mean(mine[-1].losses):.4f}",
            "target": "–" if index < n_local else f"ratio <= {MOST_RATIO}",
        }
        if index in ahead:
            figures["target"] = f"ratio <= {MOST_RATIO_AHEAD}"
        elif peers is not None and index >= n_local:
            if index in peers:
                other = rounds[peers[index]]
                figures["/ (b)"] = Spread.of([one.step_s / its.step_s for one, its in zip(mine, other, strict=True)])
                figures["target"] = f"ratio <= {MOST_RATIO}, / (b) <= 1"
            else:
                figures["target"] = "–"
        lines.append(Line(name, figures))
    return lines


def require_same_loss(names: Sequence[str], rounds: Sequence[Sequence[Round]], stale: Collection[int] = ()) -> None:
    """Refuse a contender whose loss in the last round is not the first one's.

    Args:
        names, rounds: as for `lines_of`.
        stale: those that may be further off, as they pull rows ahead without waiting for pushes.

    Raises:
        WrongLossError: naming it.
    """
    expected = float(np.mean(rounds[0][-1].losses))
    for index, (name, mine) in enumerate(zip(names, rounds, strict=True)):
        loss = float(np.mean(mine[-1].losses))
        if not abs(loss / expected - 1) <= (_STALE_LOSS_TOLERANCE if index in stale else _LOSS_TOLERANCE):
            raise WrongLossError(f"{name}: mean loss {loss:.4f} in the last round, {names[0]} has {expected:.4f}")
