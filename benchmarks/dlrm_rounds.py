"""What `dlrm` measures: turns of steps in which pipelines are full, where their time went, and what comes of them. No torch, no servers."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.measure import Spread, cpu_s
from benchmarks.report import Line

N_FILL = 3
"""Steps at the beginning of a turn that do not count: from then on pushes and prefetched batches are as many as there may ever be."""
N_TAIL = 3
"""Steps at its end that do not count either: without them rows of the last ones would have been pulled before the clock ran."""
_LOSS_TOLERANCE = 0.03


class WrongLossError(AssertionError):
    """A contender did not learn what the one with rows in this process learns from the same batches."""


@dataclass
class Spent:
    """Seconds of the steps so far: waiting for rows, and in push (serializing, sending, waiting for earlier pushes or the release)."""

    rows_s: float = 0.0
    push_s: float = 0.0


@dataclass
class Trainer:
    """A contender.

    Args:
        name: for the table.
        batches: returns the inputs of `step` for these numbers of the shared order; may pull rows ahead.
        step: train on one; return the loss.
        settle: wait until everything is applied.
        spent: kept up to date by `batches` and `step`.
        pids: processes that work beside this one, by role.
        exact: whether losses must be those of rows in this process, bit for bit.
    """

    name: str
    batches: Callable[[Sequence[int]], Iterable[object]]
    step: Callable[[object], float]
    settle: Callable[[], None]
    spent: Spent = field(default_factory=Spent)
    pids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    exact: bool = False

    def turn(self, indices: Sequence[int]) -> "Turn":
        """Train on these batches, then settle. The clock runs from the end of step N_FILL until N_TAIL steps are left."""
        losses: list[float] = []
        times: dict[int, dict[str, float]] = {}
        n_steps = len(indices) - N_FILL - N_TAIL
        for batch in self.batches(indices):
            losses.append(self.step(batch))
            if len(losses) in (N_FILL, N_FILL + n_steps):
                times[len(losses)] = self._now()
        spent = {name: value - times[N_FILL][name] for name, value in times[N_FILL + n_steps].items()}
        began_s = time.perf_counter()
        self.settle()
        return Turn({name: value / n_steps for name, value in spent.items()}, time.perf_counter() - began_s, losses)

    def _now(self) -> dict[str, float]:
        cpu = {f"{what} cpu": cpu_s(pids) for what, pids in self.pids.items()}
        times = {"step": time.perf_counter(), "rows": self.spent.rows_s, "push": self.spent.push_s, "trainer cpu": time.process_time()}
        return times | cpu


@dataclass(frozen=True)
class Turn:
    """Seconds per step by activity ("step" is all of them), seconds to settle, losses."""

    spent_s: Mapping[str, float]
    settle_s: float
    losses: Sequence[float]

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.spent_s["step"]


@dataclass(frozen=True)
class Target:
    """A ratio of two contenders' steps that is to be reached: `over` / `under`, at most or at least `bound`."""

    over: str
    under: str
    bound: float
    at_least: bool = False

    def line(self, rounds: Mapping[str, Sequence[Turn]]) -> Line:
        """Measure it: the median of the rounds' ratios."""
        ratios = [a.step_s / b.step_s for a, b in zip(rounds[self.over], rounds[self.under], strict=True)]
        spread = Spread.of(ratios)
        reached = spread.median >= self.bound if self.at_least else spread.median <= self.bound
        sign = ">=" if self.at_least else "<="
        return Line(
            f"{self.over} / {self.under}", {"ratio": spread, "target": f"{sign} {self.bound}", "": "reached" if reached else "missed"}
        )


def take_turns(trainers: Sequence[Trainer], indices_of: Callable[[int], Sequence[int]], n_rounds: int) -> dict[str, list[Turn]]:
    """Let all take turns on the same batches, by name; a round before those that count warms up, and only its losses are looked at."""
    rounds: dict[str, list[Turn]] = {one.name: [] for one in trainers}
    for number in range(n_rounds + 1):
        for one in trainers:
            rounds[one.name].append(one.turn(indices_of(number)))
    require_same_losses(trainers, rounds)
    return {name: turns[1:] for name, turns in rounds.items()}


def require_same_losses(trainers: Sequence[Trainer], rounds: Mapping[str, Sequence[Turn]]) -> None:
    """Refuse contenders that did not learn, or not the same as the first one.

    Raises:
        WrongLossError: naming it.
    """
    expected = np.array([turn.losses for turn in rounds[trainers[0].name]])
    if not (np.isfinite(expected).all() and expected[-1].mean() < expected[0].mean()):
        raise WrongLossError(
            f"{trainers[0].name}: mean loss {expected[0].mean():.4f} in the first turn, {expected[-1].mean():.4f} in the last"
        )
    for one in trainers[1:]:
        losses = np.array([turn.losses for turn in rounds[one.name]])
        if one.exact and not np.array_equal(losses, expected):
            at = np.argwhere(losses != expected)[0]
            raise WrongLossError(
                f"{one.name}: loss {losses[tuple(at)]!r} in step {at[1]} of turn {at[0]}, expected {expected[tuple(at)]!r}"
            )
        if not abs(losses[-1].mean() / expected[-1].mean() - 1) <= _LOSS_TOLERANCE:
            raise WrongLossError(f"{one.name}: mean loss {losses[-1].mean():.4f} in the last turn, expected {expected[-1].mean():.4f}")


def lines_of(rounds: Mapping[str, Sequence[Turn]], local: str, n_cores: int) -> list[Line]:
    """Lay the rounds out, in milliseconds per step; "/ local" is this one's step over that of rows in this process, within a round.

    "cpu / cores" is what a step cannot fall below on a machine of so many cores: everybody's CPU time, spread evenly.
    """
    lines = []
    for name, turns in rounds.items():
        cpu_s = [sum(seconds for what, seconds in turn.spent_s.items() if what.endswith("cpu")) for turn in turns]
        ms = {what: Spread.of([turn.spent_s.get(what, 0.0) * 1e3 for turn in turns]) for what in turns[0].spent_s}
        ratios = [turn.step_s / its.step_s for turn, its in zip(turns, rounds[local], strict=True)]
        figures: dict[str, Spread | float | str] = {"ms/step": ms["step"], "/ local": Spread.of(ratios)}
        figures |= {what: f"{ms[what].median:.1f}" for what in ("rows", "push", *(what for what in ms if what.endswith("cpu")))}
        alone = not any(what.endswith("cpu") and what != "trainer cpu" for what in ms)  # and its step is one thread
        figures |= {"cpu / cores": "–" if alone else f"{np.median(cpu_s) * 1e3 / n_cores:.1f}"}
        figures |= {"drain ms": f"{np.median([turn.settle_s for turn in turns]) * 1e3:.0f}", "loss": f"{np.mean(turns[-1].losses):.4f}"}
        lines.append(Line(name, figures))
    return lines
