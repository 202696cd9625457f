"""Optimizers that step once for several batches: what those batches have left so far."""

import warnings
from typing import Generic, TypeVar

T = TypeVar("T")


class GatheredBatches(Generic[T]):
    """The gradients of rows, batch by batch, until a step pushes them."""

    def __init__(self) -> None:
        self.batches: list[T] = []
        self._n = 0

    def begin(self, n_gathered: int) -> None:
        """Begin a batch; warn where the optimizer's state is not that of the batches here. These are dropped then."""
        if n_gathered != self._n:
            warnings.warn(
                f"the optimizer has gathered gradients of {n_gathered} batches, and those of rows here are of {self._n}: its state was "
                "loaded, or begun anew, in the middle of a step. The coming step trains rows by the batches from now on alone. Save where "
                "a step is whole",
                stacklevel=4,
            )
            self.batches, self._n = [], n_gathered

    def add(self, batch: T) -> None:
        """Keep a batch's gradients."""
        self.batches.append(batch)
        self._n += 1

    def clear(self) -> None:
        """Begin a new step."""
        self.batches, self._n = [], 0
