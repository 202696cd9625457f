"""What holds for one step of a table: types only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepValues:
    """A table's run-time values, and what gradients are multiplied by before they are pushed."""

    hyper: dict[str, float]
    factor: float = 1.0
