"""Where the time of training steps went, in seconds, and which setting to change. Pure but for one context variable.

Code that makes the training thread wait adds the seconds to the times that `counted` returns, if there are any: those of the report in
force (`trainer.report.step_report`). A few additions per step, nothing per row.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from operator import sub

from kvemb.errors import n_of

MATTERS = 0.1
"""A share of the time from which on waiting is worth an advice."""
_SHOWN = 0.005

_ADVICE = {
    "rows": "raise capacity or threads_num, or add storage nodes",
    "lookups": "look them up ahead: kvemb.torch.prepare(model, loader), kvemb.trainer.prefetch",
    "foreseen": "their lookups were not foreseen, the prepared loader's report says which",
    "push window": "add shards (parameter_servers.shards), or raise max_unapplied",
    "sync release": "add shards, or find the trainer that the others wait for",
    "loader": "give the DataLoader more worker processes (num_workers)",
}


@dataclass
class StepTimes:
    """Sums over steps, in seconds and rows; what is not named here is the training loop's own: `compute_s`.

    `loader_s`: reading batches. `ahead_s`, `lookup_s`: waiting for rows pulled ahead, or when a module is called. `push_s`: merging
    gradients and handing them over. `window_s`: waiting for room for a push. `release_s`: waiting for the release of a sync step.
    """

    n_steps: int = 0
    total_s: float = 0.0
    loader_s: float = 0.0
    ahead_s: float = 0.0
    lookup_s: float = 0.0
    push_s: float = 0.0
    window_s: float = 0.0
    release_s: float = 0.0
    rows_ahead: int = 0
    rows_looked_up: int = 0
    rows_pushed: int = 0

    @property
    def rows_s(self) -> float:
        """Waiting for rows."""
        return self.ahead_s + self.lookup_s

    @property
    def stalled_s(self) -> float:
        """Waiting for anything."""
        return self.loader_s + self.rows_s + self.window_s + self.release_s

    @property
    def compute_s(self) -> float:
        """The training loop's own time."""
        return max(0.0, self.total_s - self.stalled_s - self.push_s)

    def since(self, before: "StepTimes") -> "StepTimes":
        """Return the difference to an earlier state of these sums."""
        return StepTimes(*map(sub, vars(self).values(), vars(before).values()))

    def copy(self) -> "StepTimes":
        """Return these sums as they are now."""
        return StepTimes(*vars(self).values())

    def shares(self) -> dict[str, float]:
        """Return the fraction of the time that each thing took, by name; the largest first."""
        seconds = {
            "compute": self.compute_s,
            "rows": self.rows_s,
            "push": self.push_s,
            "push window": self.window_s,
            "sync release": self.release_s,
            "loader": self.loader_s,
        }
        total_s = max(self.total_s, 1e-9)
        return dict(sorted(((name, s / total_s) for name, s in seconds.items()), key=lambda item: -item[1]))

    def advice(self) -> str:
        """Say which setting to change."""
        if not self.n_steps:
            return "no step yet"
        waits = {name: share for name, share in self.shares().items() if name not in ("compute", "push")}
        name, share = next(iter(waits.items()))
        if share < MATTERS:
            return "compute-bound: nothing to turn"
        cure = name
        if name == "rows" and self.lookup_s > self.ahead_s:
            cure = "foreseen" if self.rows_ahead else "lookups"
        return f"trainer waited {100 * share:.0f} % for {'' if name == 'rows' else 'the '}{name}: {_ADVICE[cure]}"

    def __str__(self) -> str:
        if not self.n_steps:
            return "no step yet"
        shown = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares().items() if share >= _SHOWN)
        rate = self.rows_pushed / max(self.total_s, 1e-9)
        return f"{n_of(self.n_steps, 'step')} of {milliseconds(self.total_s / self.n_steps)}: {shown}; {rate:,.0f} rows/s pushed"


def milliseconds(seconds: float) -> str:
    """Return a duration for people."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


_counted: ContextVar[StepTimes | None] = ContextVar("kvemb_counted", default=None)


def counted() -> StepTimes | None:
    """Return the sums of the report in force in this thread, to add to; None without one."""
    return _counted.get()


def count_in(times: StepTimes | None) -> None:
    """Put sums in force in this thread, or none."""
    _counted.set(times)
