"""Gives a target its inputs for a while, and looks whether memory stays bounded and all are well."""

import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.target import Target

MOST_GROWTH_MB = 256
_LOOK_S = 1.0
_HONEST_S = 120.0


@dataclass
class Report:
    """What came of one target."""

    name: str
    n_inputs: int = 0
    n_honest: int = 0
    seconds: float = 0.0
    first_mb: dict[str, int] = field(default_factory=dict)
    last_mb: dict[str, int] = field(default_factory=dict)
    most_mb: dict[str, int] = field(default_factory=dict)
    trouble: str = ""
    last: bytes = b""

    def __str__(self) -> str:
        memory = ", ".join(f"{who} {self.first_mb[who]} → {self.last_mb[who]} MB (most {self.most_mb[who]})" for who in self.last_mb)
        line = f"{self.name:<14} {self.n_inputs:>8} inputs in {self.seconds:6.0f} s; {memory}; {self.n_honest} honest pushes"
        return f"{line}\n{self.trouble}" if self.trouble else line


def fuzz(target: Target, seconds: float) -> Report:
    """Attack a target that was started; return what came of it. The corpus comes first, as it is."""
    report, seeds = Report(target.name), target.seeds()
    begun_s = looked_s = time.monotonic()
    try:
        while time.monotonic() < begun_s + seconds:
            n = report.n_inputs
            report.last = seeds[n] if n < len(seeds) else target.change(target.chance.choice(seeds))
            target.attack(report.last)
            report.n_inputs += 1
            if n == len(seeds) or time.monotonic() > looked_s + _LOOK_S:
                looked_s = time.monotonic()
                _look(target, report)
        _look(target, report)
        _wait_for_honest(target)
    except Exception:
        report.trouble = traceback.format_exc()
    report.seconds = time.monotonic() - begun_s
    report.n_honest = target.honest.n_pushes if target.honest else 0
    return report


def _look(target: Target, report: Report) -> None:
    target.check()
    for who, pid in target.pids.items():
        now_mb = memory_mb(pid)
        first_mb = report.first_mb.setdefault(who, now_mb)  # once everything was used for the first time
        report.last_mb[who], report.most_mb[who] = now_mb, max(now_mb, report.most_mb.get(who, 0))
        assert now_mb < first_mb + MOST_GROWTH_MB, f"memory of the {who} rose from {first_mb} to {now_mb} MB"


def _wait_for_honest(target: Target) -> None:
    """One more push has to come through."""
    if target.honest is None:
        return
    n, over_s = target.honest.n_pushes, time.monotonic() + _HONEST_S
    while target.honest.n_pushes < n + 2:
        target.check()
        assert time.monotonic() < over_s, "the honest trainer comes to no end of its push"
        time.sleep(0.05)


def memory_mb(pid: int) -> int:
    """Memory of a process that is in use now."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) >> 10
