"""What is common to all optimizers: purity, blocks, slot layout, the guard against overflow.

The maths is in the kernels beside this file.

A kernel gets one block of rows in contiguous arrays that belong to it, and changes them in place; so the maths needs
few temporaries and none of it can reach the caller's arrays. Rows do not know each other: a row's result has the same
bits whichever rows lie beside it, which journal replay relies on when it skips rows that are already written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

Array = npt.NDArray[np.float32]

Kernel = Callable[[Array, list[Array], Array, Mapping[str, float], int], None]
"""(weights [n, d], slots each [n, d] or [n, 1] in the spec's order, grads [n, d], hyper, step): changes weights and
slots, may use up grads."""

Transform = Callable[[Array, Array, Mapping[str, float]], None]
"""(grads [n, d], weights [n, d], hyper): changes grads only."""

# Values of one array in a block: 512 KiB each, 8192 rows of dim 16. Measured on 40,000 rows, 1 MiB of L2 cache a core:
# without blocks adam and ftrl take 3.1 to 3.3 times as long at dim 16, 2.0 to 2.4 times at dim 64, sgd and
# rowwise_adagrad about the same; with blocks of an eighth of this size all take 1.2 to 1.7 times as long, since NumPy's
# fixed cost per call shows.
_BLOCK_VALUES = 1 << 17

# Gradients are cut to this size first. A float32 squared overflows from 1.8e19 on, and one infinite second moment
# would freeze its row for good (or make it NaN: inf - inf). At 1e15 sums of squares have room for 1e8 such gradients.
# No sane gradient comes near it.
GRAD_LIMIT = 1e15


@dataclass(frozen=True)
class Optimizer:
    """One table's update method, as two pure functions. Made by `build`; immutable, so any thread may use it."""

    spec: OptimizerSpec
    kernel: Kernel
    transforms: tuple[Transform, ...]

    def slot_size(self, dim: int) -> int:
        """Return the number of float32 slot values beside one row of `dim` weights.

        Example:
            >>> import kvemb.optim; from paramserver.optim import build
            >>> build(kvemb.optim.rowwise_adagrad()).slot_size(16)
            1
        """
        return self.spec.slot_size(dim)

    def init_slots(self, n: int, dim: int) -> Array:
        """Return the slots of `n` rows that were never pushed.

        Returns:
            float32 [n, slot_size(dim)].

        Example:
            >>> import kvemb.optim; from paramserver.optim import build
            >>> build(kvemb.optim.ftrl()).init_slots(1, 2)
            array([[0. , 0. , 0.1, 0.1]], dtype=float32)
        """
        slots = self.spec.slots()
        one_row = np.repeat(np.array([s.initial for s in slots], np.float32), [s.size(dim) for s in slots])
        return np.tile(one_row, (n, 1))

    def update(self, weights: Array, slots: Array, grads: Array, hyper: Mapping[str, float], step: int) -> tuple[Array, Array]:
        """Apply one batch of gradients: one row each, ids unique. Nothing that is passed in is changed or kept.

        Args:
            weights: float32 [n, d].
            slots: float32 [n, slot_size(d)], as `init_slots` or an earlier `update` made them.
            grads: float32 [n, d], finite (the caller has checked); beyond +-1e15 they are cut.
            hyper: run-time values; those left out have the table's defaults.
            step: number of applies of this table in this shard, this one included: 1 for the first (docs/adr/0004).

        Returns:
            New weights, float32 [n, d], and new slots, float32 [n, s], both C-contiguous. Finite whenever weights stay
            below about 1e19.

        Raises:
            InvalidInputError: shapes or dtypes that do not fit, a step < 1, unusable run-time values.

        Example:
            >>> import kvemb.optim; from paramserver.optim import build
            >>> w, g = np.ones((1, 2), np.float32), np.array([[1, -1]], np.float32)
            >>> build(kvemb.optim.sgd(lr=0.5)).update(w, np.empty((1, 0), np.float32), g, {}, step=1)[0]
            array([[0.5, 1.5]], dtype=float32)
        """
        self._check(weights, slots, grads, step)
        new_weights, new_slots = np.array(weights, order="C"), np.empty(slots.shape, np.float32)
        self._update(new_weights, slots, new_slots, grads, hyper, step)
        return new_weights, new_slots

    def update_in_place(self, weights: Array, slots: Array, grads: Array, hyper: Mapping[str, float], step: int) -> None:
        """Do what `update` does, to the same bits, and leave the new weights and slots in the arrays that held the old ones.

        Args:
            weights, slots: as in `update`, C-contiguous.
            grads, hyper, step: as in `update`.

        Raises:
            InvalidInputError: as `update`; nothing was changed.

        Example:
            >>> import kvemb.optim; from paramserver.optim import build
            >>> w, g = np.ones((1, 2), np.float32), np.array([[1, -1]], np.float32)
            >>> build(kvemb.optim.sgd(lr=0.5)).update_in_place(w, np.empty((1, 0), np.float32), g, {}, step=1); w
            array([[0.5, 1.5]], dtype=float32)
        """
        self._check(weights, slots, grads, step)
        self._update(weights, slots, slots, grads, hyper, step)

    def _update(self, weights: Array, slots: Array, new_slots: Array, grads: Array, hyper: Mapping[str, float], step: int) -> None:
        """Change `weights` in place; fill in `new_slots`, which may be `slots`."""
        # Python floats: a NumPy float64 scalar among them would turn the arithmetic into float64.
        hyper = self.spec.check_hyper(hyper)
        layout = self._layout(weights.shape[1])
        rows = max(1, _BLOCK_VALUES // max(1, weights.shape[1]))
        for low in range(0, len(weights), rows):
            block = slice(low, low + rows)
            parts = [(slots[block, columns], new_slots[block, columns]) for columns in layout]
            self._update_block(weights[block], parts, grads[block], hyper, step, own=slots is new_slots and len(layout) == 1)

    def _update_block(
        self,
        weights: Array,
        parts: list[tuple[Array, Array]],
        grads: Array,
        hyper: Mapping[str, float],
        step: int,
        *,
        own: bool,
    ) -> None:
        """Change `weights` in place; of each of `parts`, (before, after), fill in `after`: with `own` they are one contiguous array."""
        grads = np.clip(grads, -GRAD_LIMIT, GRAD_LIMIT, order="C")  # a copy, so the kernel may use it up
        for transform in self.transforms:
            transform(grads, weights, hyper)
        # Contiguous copies: on columns of the wider slots array every operation would start anew at each row.
        owned = [before if own else before.copy(order="C") for before, _ in parts]
        self.kernel(weights, owned, grads, hyper, step)
        if own:
            return
        for (_, after), values in zip(parts, owned, strict=True):
            after[...] = values

    def _layout(self, dim: int) -> list[slice]:
        """Return the columns of each slot in [n, slot_size(dim)]."""
        ends = list(accumulate((slot.size(dim) for slot in self.spec.slots()), initial=0))
        return [slice(start, end) for start, end in pairwise(ends)]

    def _check(self, weights: Array, slots: Array, grads: Array, step: int) -> None:
        if weights.ndim != 2 or grads.shape != weights.shape:
            raise InvalidInputError(f"weights and grads must both be [n, d], got {weights.shape} and {grads.shape}")
        expected = (len(weights), self.slot_size(weights.shape[1]))
        if slots.shape != expected:
            raise InvalidInputError(f"{self.spec.kind}: slots must be {expected}, got {slots.shape}")
        if any(a.dtype != np.float32 for a in (weights, slots, grads)):
            raise InvalidInputError(f"all must be float32, got {weights.dtype}, {slots.dtype}, {grads.dtype}")
        if step < 1:
            raise InvalidInputError(f"step counts from 1, got {step}")
