"""The problem that all frameworks get: batches, first rows, first dense weights; and the interface to measure them. NumPy only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-8


@dataclass(frozen=True, eq=False)
class Problem:
    """n batches of b lines with f fields, and a model's first weights.

    Args:
        ids: int64 [n, b, f], of any 64 bits.
        positions: int32 [n, b, f], of these ids among `known_ids`: the input of a framework's own embedding.
        values: float32 [n, b, f], by which vectors are multiplied.
        labels: float32 [n, b], 0 or 1.
        known_ids: int64 [k], every id there is, distinct.
        linear: float32 [k, 1], first weights w_i.
        factors: float32 [k, dim], first vectors v_i.
        kernel0, kernel1, kernel2: float32 [in, out], of the perceptron. Its biases begin as zeros.
        lr: of Adam, for everything.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int32]
    values: NDArray[np.float32]
    labels: NDArray[np.float32]
    known_ids: NDArray[np.int64]
    linear: NDArray[np.float32]
    factors: NDArray[np.float32]
    kernel0: NDArray[np.float32]
    kernel1: NDArray[np.float32]
    kernel2: NDArray[np.float32]
    lr: NDArray[np.float64]

    @property
    def kernels(self) -> list[NDArray[np.float32]]:
        """Of the perceptron, in order."""
        return [self.kernel0, self.kernel1, self.kernel2]

    @property
    def dim(self) -> int:
        """Weights of a vector."""
        return int(self.factors.shape[1])

    @property
    def rows(self) -> dict[str, NDArray[np.float32]]:
        """First rows by table."""
        return {"linear": self.linear, "factors": self.factors}

    def save(self, path: Path) -> None:
        """Write all of it to an .npz file."""
        np.savez(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @staticmethod
    def load(path: str) -> "Problem":
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return Problem(**{name: arrays[name] for name in arrays.files})


class Contender(Protocol):
    """One contender: it trains on batches."""

    def train(self, indices: Sequence[int], after_step: Callable[[], None]) -> Any:
        """Train on these batches, calling `after_step` after each; return their losses, or the mean of them."""
        ...

    def settle(self) -> None:
        """Wait until everything is applied."""
        ...


@dataclass(frozen=True)
class Loop:
    """A contender that is a loop over batches.

    Args:
        load: returns the iterable over these batches.
        step: train on one loaded batch; return its loss.
        settle: wait until everything is applied.
    """

    load: Callable[[Sequence[int]], Any]
    step: Callable[[Any], Any]
    settle: Callable[[], None]

    def train(self, indices: Sequence[int], after_step: Callable[[], None]) -> Any:
        """Train."""
        losses = []
        for loaded in self.load(indices):
            losses.append(self.step(loaded))
            after_step()
        return losses
