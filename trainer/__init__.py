"""The trainer's side: `prefetch` looks rows up ahead of their batch, `StepReport` shows where the time of steps went.

Each framework has a bridge, a package of its own here (`trainer.torch`). Import the bridge you use.
"""

from .lookahead import Prefetch, prefetch
from .report.step_report import StepReport

__all__ = ["Prefetch", "StepReport", "prefetch"]
