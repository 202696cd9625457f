"""Where did the step go? The report of a training run: times per step, the setting to change, scalars for TensorBoard, a progress line.

Code that makes the training thread wait measures it (`trainer.report.step_times`). One thread: the one that trains. The
staleness of the pushed batches' rows comes from the acks of their pushes: the newest known, and means.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TextIO

from kvemb.errors import InvalidInputError, n_of
from kvemb.process import ProgressLine

from .step_times import StepTimes, count_in, milliseconds

_KEPT = 64
"""Pushes whose acks may be outstanding; further pushes before they settle are not measured."""


@dataclass(frozen=True)
class MeanStaleness:
    """Over all pushes measured, means of the fraction of rows changed since their pull, and of the batches of the worst shard."""

    changed_fraction: float = 0.0
    batches_elapsed: float = 0.0
    most_elapsed: int = 0
    n: int = 0

    def with_one(self, changed: float, elapsed: int) -> "MeanStaleness":
        """Return the mean with one push more."""
        n = self.n + 1
        mean_changed = self.changed_fraction + (changed - self.changed_fraction) / n
        mean_elapsed = self.batches_elapsed + (elapsed - self.batches_elapsed) / n
        return MeanStaleness(mean_changed, mean_elapsed, max(self.most_elapsed, elapsed), n)

    def __str__(self) -> str:
        if not self.n:
            return "not measured yet"
        changed = f"{self.changed_fraction:.2%} of the rows changed between pull and push"
        return f"{changed}, {self.batches_elapsed:.1f} batches went by (at most {self.most_elapsed}), over {n_of(self.n, 'push', 'pushes')}"


class StalenessLog:
    """Acks on their way, and the staleness from the settled ones. Use it from one thread."""

    def __init__(self) -> None:
        self._outstanding: deque[Any] = deque(maxlen=_KEPT)
        self._last: Any = None
        self._mean = MeanStaleness()

    def add(self, ack: Any) -> None:
        """Remember a push, by an ack whose `staleness` (`changed_fraction`, `batches_elapsed`) is None until it was applied."""
        self._settle()
        self._outstanding.append(ack)

    @property
    def last(self) -> Any:
        """Of the newest push that was applied; None before."""
        self._settle()
        return self._last

    @property
    def mean(self) -> MeanStaleness:
        """Of all pushes that were applied."""
        self._settle()
        return self._mean

    def _settle(self) -> None:
        """Read settled acks. A push without rows has no staleness; it is dropped when many others have come after it."""
        for _ in range(len(self._outstanding)):
            ack = self._outstanding.popleft()
            said = ack.staleness
            if said is None:
                self._outstanding.append(ack)
                continue
            self._last = said
            self._mean = self._mean.with_one(said.changed_fraction, said.batches_elapsed)


DEFAULT_EVERY = 50


class Writer(Protocol):
    """Takes scalars, as torch.utils.tensorboard.SummaryWriter does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Keep a number of a step."""


class StepReport:
    """Measures the steps of a training loop while it is in force: inside `with`, or while a loader that was prepared with it is iterated.

    Every optimizer step ends a step: `trainer.torch.SparseOptimizer` reports it by itself, other loops call `step`. At the end one line is
    written to `stream`: the parts of the steps, and the setting to change.

    Args:
        writer: gets loss, staleness, batches_elapsed, stall_ms (per step) and rows_per_s: the last loss and staleness, the others over
            the steps since it got them before. None: there is no writer.
        every: steps between them; 50 unless given.
        progress: whether to show a progress line while `stream` is a terminal; where it is none there is no line in any case.
        prefix: of the scalars' tags.
        stream: stderr unless given.
        clock_s: a monotonic clock.

    Raises:
        InvalidInputError: an argument of the wrong kind, or `every` without a writer.

    Example:
        >>> import sys
        >>> with StepReport(stream=sys.stdout, clock_s=iter([0.0, 0.02, 0.04]).__next__) as report:
        ...     for loss in (0.7, 0.6):
        ...         report.step(loss=loss)
        2 steps of 20 ms: compute 100 %; 0 rows/s pushed; compute-bound: nothing to turn
    """

    def __init__(
        self,
        *,
        writer: Writer | None = None,
        every: int | None = None,
        progress: bool = True,
        prefix: str = "kvemb",
        stream: TextIO | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        if writer is not None and not hasattr(writer, "add_scalar"):
            raise InvalidInputError(f"writer is {type(writer).__name__}; give one with add_scalar(), e.g. a SummaryWriter")
        if every is not None and (writer is None or isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise InvalidInputError(f"every is {every!r}; give a whole number of steps from 1 on, beside a writer")
        self._writer, self._every, self._prefix = writer, every or DEFAULT_EVERY, prefix
        self._stream = stream or sys.stderr
        self._clock_s = clock_s
        self._line = ProgressLine(self._stream, clock_s=clock_s) if progress else None
        self._staleness = StalenessLog()
        self._loss: Any = None
        self._since_s: float | None = None  # when the step under way began; None while the report is not in force
        self._outer: StepReport | None = None  # the one that was in force before
        self._seen, self._before = StepTimes(), StepTimes()  # sums behind the last step, and the one before it
        self._written, self._shown = StepTimes(), StepTimes()
        self.total = StepTimes()
        """Sums over all steps; the one under way is in all but `n_steps` and `total_s`."""

    def begin(self) -> None:
        """Put the report in force in this thread; the first step begins now. After `end` the report before it is in force again."""
        self._since_s = self._clock_s()
        if (outer := _current.get()) is not self:
            self._outer = outer
        _current.set(self)
        count_in(self.total)

    def end(self) -> None:
        """Take the report out of force, and write the remaining scalars and the summary. Idempotent; `begin` goes on with the same sums."""
        if self._since_s is None:
            return
        self._since_s, self.total = None, self._seen.copy()  # times behind the last step belong to none
        outer, self._outer = self._outer, None
        if _current.get() is self:
            outer = outer if outer is not None and outer.in_force else None
            _current.set(outer)
            count_in(None if outer is None else outer.total)
        if self._line is not None:
            self._line.end()
        if self.total.n_steps > self._written.n_steps:
            self._write()
        if self.total.n_steps:
            print(self.summary(), file=self._stream)

    def __enter__(self) -> "StepReport":
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def loss(self, value: Any) -> None:
        """Give the loss of this step: a number, or a tensor of one element, which is read when it is shown or written."""
        detach = getattr(value, "detach", None)  # the graph behind it must not be kept
        self._loss = value if detach is None else detach()

    def step(self, ack: Any = None, *, push_s: float = 0.0, window_s: float = 0.0, release_s: float = 0.0, loss: Any = None) -> None:
        """End a step.

        Args:
            ack: of its push, for rows, staleness and the wait for the push window; None for a step without one.
            push_s, window_s, release_s: seconds of handing over (its window included), waiting for earlier pushes, and for its release.
            loss: see `loss`.
        """
        if loss is not None:
            self.loss(loss)
        total = self.total
        if ack is not None:
            in_push_s: float = getattr(ack, "window_s", 0.0)  # any object may stand for an ack that knows its staleness
            total.window_s += in_push_s + window_s
            total.push_s += max(0.0, push_s - in_push_s)
            total.release_s += release_s
            total.rows_pushed += getattr(ack, "n_rows", 0)
            self._staleness.add(ack)
        now_s = self._clock_s()
        total.n_steps += 1
        total.total_s += now_s - (now_s if self._since_s is None else self._since_s)
        self._since_s = None if self._since_s is None else now_s
        self._before, self._seen = self._seen, total.copy()
        if self._writer is not None and total.n_steps - self._written.n_steps >= self._every:
            self._write()
        if self._line is not None and self._line.due:
            self._line.show(self._progress())

    @property
    def in_force(self) -> bool:
        """Whether it has begun and not ended."""
        return self._since_s is not None

    @property
    def last(self) -> StepTimes:
        """Of the last step."""
        return self._seen.since(self._before)

    @property
    def mean_staleness(self) -> MeanStaleness:
        """How stale rows were, over all pushes that were applied."""
        return self._staleness.mean

    def summary(self) -> str:
        """Return one line with the parts of the steps and the setting to change."""
        if not self.total.n_steps:
            return "no step yet"
        stale = f"staleness: {self._staleness.mean}; " if self._staleness.mean.n else ""
        return f"{self.total}; {stale}{self.total.advice()}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _write(self) -> None:
        if self._writer is None:
            return
        recent = self.total.since(self._written)
        self._written = self.total.copy()
        scalars = {
            "stall_ms": 1e3 * recent.stalled_s / max(1, recent.n_steps),
            "rows_per_s": recent.rows_pushed / max(recent.total_s, 1e-9),
        }
        if self._loss is not None:
            scalars["loss"] = float(self._loss)
        if (last := self._staleness.last) is not None:
            scalars |= {"staleness": last.changed_fraction, "batches_elapsed": float(last.batches_elapsed)}
        for name, value in scalars.items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, self.total.n_steps)

    def _progress(self) -> str:
        recent = self.total.since(self._shown)
        self._shown = self.total.copy()
        waits = [(name, share) for name, share in recent.shares().items() if name not in ("compute", "push") and share >= 0.01]
        texts = [
            f"step {self.total.n_steps:,}",
            milliseconds(recent.total_s / max(1, recent.n_steps)),
            *([f"loss {float(self._loss):.4f}"] if self._loss is not None else []),
            f"{recent.rows_pushed / max(recent.total_s, 1e-9):,.0f} rows/s",
            *(f"waits for {name} {100 * share:.0f} %" for name, share in waits),
            *([f"stale {100 * last.changed_fraction:.1f} %"] if (last := self._staleness.last) is not None else []),
        ]
        return "  ".join(texts)


_current: ContextVar[StepReport | None] = ContextVar("kvemb_report", default=None)


def current_report() -> StepReport | None:
    """Return the report in force in this thread, if there is one."""
    return _current.get()
