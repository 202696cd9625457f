"""What holds for one step of a table: types only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepValues:
    """A table's run-time values, and what is done to gradients before they are pushed: clipped, then multiplied by a factor."""

    hyper: dict[str, float]
    factor: float = 1.0
    clipnorm: float | None = None
    clipvalue: float | None = None
