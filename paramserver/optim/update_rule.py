"""The frame of all optimizers: purity, blocks, layout of the state, the guard against overflow; and the gradient transforms.

The optimizers' maths is in `kernels`. A kernel gets one block of rows in contiguous arrays that belong to it, and changes them in place. So
the maths needs few temporaries, and none of it can reach the caller's arrays. A row's result has the same bits whichever rows lie beside
it. Journal replay relies on that when it skips rows that are already written. Gradient transforms run in the table's order before its
optimizer and keep no state.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec, TransformSpec

Array = npt.NDArray[np.float32]

Factors = Mapping[str, float | Array]
"""The numbers that an update multiplies and adds, by name: Python floats, or float32 [n, 1] where rows differ in them. NumPy rounds a
Python float to float32 before it meets a float32 array, so both give the same bits."""

KernelStep = Callable[[Array, list[Array], Array, Factors], None]
"""(weights [n, d], state: arrays [n, d] or [n, 1] in the spec's order, grads [n, d], factors): changes weights and state, may use up
grads. All arithmetic on single numbers is done before, in `Kernel.factors`: of arrays it would be rounded at other places."""

Transform = Callable[[Array, Array, Factors], None]
"""(grads [n, d], weights [n, d], factors: the run-time values): changes grads only."""


@dataclass(frozen=True)
class Kernel:
    """One optimizer's update of a block of rows, and the numbers it takes at a step.

    Args:
        step: changes a block of rows.
        factors: (run-time values, step) -> the numbers that the kernel's `step` needs beside the run-time values themselves.
    """

    step: KernelStep
    factors: Callable[[Mapping[str, float], int], dict[str, float]] = lambda hyper, step: {}

    def __call__(self, weights: Array, state: list[Array], grads: Array, hyper: Mapping[str, float], step: int) -> None:
        """Change weights and state in place, and perhaps grads."""
        self.step(weights, state, grads, {**hyper, **self.factors(hyper, step)})


# Values of one array in a block: 512 KiB each, 8192 rows of dim 16. Measured on 40,000 rows, 1 MiB of L2 cache a core. Without blocks adam
# and ftrl take 3.1 to 3.3 times as long at dim 16, 2.0 to 2.4 times at dim 64. sgd and rowwise_adagrad take about the same. With blocks of
# an eighth of this size all take 1.2 to 1.7 times as long, since NumPy's fixed cost per call shows.
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

    def initial_state(self, n: int, dim: int) -> Array:
        """Return the state of `n` rows that were never pushed.

        Returns:
            float32 [n, s], s = `OptimizerSpec.state_size`.

        Example:
            >>> import kvemb.optim; from paramserver.optim import build_optimizer
            >>> build_optimizer(kvemb.optim.ftrl()).initial_state(1, 2)
            array([[0. , 0. , 0.1, 0.1]], dtype=float32)
        """
        fields = self.spec.state_fields()
        # float32 [s]: the state of one row, each field's first value as many times as it has columns.
        one_row = np.repeat(np.array([s.initial for s in fields], np.float32), [s.size(dim) for s in fields])
        return np.tile(one_row, (n, 1))

    def update(self, weights: Array, state: Array, grads: Array, hyper: Mapping[str, float], step: int) -> tuple[Array, Array]:
        """Apply one batch of gradients: one row each, ids unique. Nothing that is passed in is changed or kept.

        Args:
            weights: float32 [n, d].
            state: float32 [n, s], as `initial_state` or an earlier `update` made them.
            grads: float32 [n, d], finite (the caller has checked); beyond +-1e15 they are cut.
            hyper: run-time values; omitted ones have the table's defaults.
            step: number of applies of this table in this shard, this one included: 1 for the first (docs/adr/0004).

        Returns:
            New weights, float32 [n, d], and new state, float32 [n, s], both C-contiguous. Finite whenever weights stay
            below about 1e19.

        Raises:
            InvalidInputError: shapes or dtypes that do not fit, a step < 1, unusable run-time values.

        Example:
            >>> import kvemb.optim; from paramserver.optim import build_optimizer
            >>> w, g = np.ones((1, 2), np.float32), np.array([[1, -1]], np.float32)
            >>> build_optimizer(kvemb.optim.sgd(lr=0.5)).update(w, np.empty((1, 0), np.float32), g, {}, step=1)[0]
            array([[0.5, 1.5]], dtype=float32)
        """
        new_weights, new_state = np.array(weights, order="C"), np.array(state, order="C")
        self.update_in_place(new_weights, new_state, grads, self.factors(self.spec.check_hyper(hyper), step))
        return new_weights, new_state

    def factors(self, hyper: Mapping[str, float], step: int) -> dict[str, float]:
        """Return every number that an update at this step uses, as Python floats.

        Args:
            hyper: as `OptimizerSpec.check_hyper` returns them: a NumPy float64 scalar among them would turn the arithmetic into float64.
            step: as in `update`.

        Raises:
            InvalidInputError: a step < 1.
        """
        if step < 1:
            raise InvalidInputError(f"step counts from 1, got {step}")
        return {**hyper, **self.kernel.factors(hyper, step)}

    def update_in_place(self, weights: Array, state: Array, grads: Array, factors: Factors) -> None:
        """Do the same as `update`, to the same bits, in the arrays that held the old values; rows may differ in step and run-time values.

        Args:
            weights, state: as in `update`, C-contiguous.
            grads: as in `update`.
            factors: those that `factors` returns, by name: a number, or float32 [n, 1] where rows differ in it.

        Raises:
            InvalidInputError: as `update`; nothing was changed.

        Example:
            >>> import kvemb.optim; from paramserver.optim import build_optimizer
            >>> w, g = np.ones((2, 1), np.float32), np.ones((2, 1), np.float32)
            >>> factors = {"lr": np.array([[0.5], [0.25]], np.float32), "momentum": 0.0, "weight_decay": 0.0}
            >>> build_optimizer(kvemb.optim.sgd()).update_in_place(w, np.empty((2, 0), np.float32), g, factors); w
            array([[0.5 ],
                   [0.75]], dtype=float32)
        """
        layout = self._layout(weights, state, grads)
        rows = max(1, _BLOCK_VALUES // max(1, weights.shape[1]))
        for low in range(0, len(weights), rows):
            block = slice(low, low + rows)  # of m rows
            # The block's factors: numbers, or float32 [m, 1].
            these = {name: value if isinstance(value, float) else value[block] for name, value in factors.items()}
            some = np.clip(grads[block], -GRAD_LIMIT, GRAD_LIMIT, order="C")  # [m, d]: a copy, so the kernel may use it up
            for transform in self.transforms:
                transform(some, weights[block], these)
            parts = [state[block, columns] for columns in layout]  # of the state: views, [m, d] or [m, 1] each
            # Contiguous copies of several: on columns of the wider state array every operation would start again at each row.
            owned = parts if len(parts) == 1 else [part.copy(order="C") for part in parts]
            self.kernel.step(weights[block], owned, some, these)
            for part, values in zip(parts, owned, strict=True):
                if values is not part:
                    part[...] = values

    def _layout(self, weights: Array, state: Array, grads: Array) -> list[slice]:
        """Return the columns of each part of the state; raises InvalidInputError where the arrays do not fit."""
        if weights.ndim != 2 or grads.shape != weights.shape:
            raise InvalidInputError(f"weights and grads must both be [n, d], got {weights.shape} and {grads.shape}")
        ends = list(accumulate((field.size(weights.shape[1]) for field in self.spec.state_fields()), initial=0))
        if state.shape != (len(weights), ends[-1]):
            raise InvalidInputError(f"{self.spec.kind}: state must be {(len(weights), ends[-1])}, got {state.shape}")
        if any(a.dtype != np.float32 for a in (weights, state, grads)):
            raise InvalidInputError(f"all must be float32, got {weights.dtype}, {state.dtype}, {grads.dtype}")
        return [slice(start, end) for start, end in pairwise(ends)]


def compose(specs: Iterable[TransformSpec]) -> tuple[Transform, ...]:
    """Return the functions for `specs`, in order. A spec is valid by construction, so every kind is known.

    Example:
        >>> from kvemb.optim import clip_by_value, l2
        >>> g, w = np.array([[1.0, -3.0]], np.float32), np.array([[10.0, 10.0]], np.float32)
        >>> for transform in compose([l2(0.5), clip_by_value(4.0)]):
        ...     transform(g, w, {"l2_weight": 0.5, "clip_value": 4.0})
        >>> g
        array([[4., 2.]], dtype=float32)
    """
    return tuple(_TRANSFORMS[spec.kind] for spec in specs)


def clip_by_value(grads: Array, weights: Array, factors: Factors) -> None:
    """g <- min(max(g, -clip_value), clip_value), in place. As torch.nn.utils.clip_grad_value_.

    Example:
        >>> g = np.array([[2.0, -0.5]], np.float32)
        >>> clip_by_value(g, g, {"clip_value": 1.0}); g
        array([[ 1. , -0.5]], dtype=float32)
    """
    np.clip(grads, -factors["clip_value"], factors["clip_value"], out=grads)


def clip_by_norm(grads: Array, weights: Array, factors: Factors) -> None:
    """g <- g * min(1, clip_norm / (|g|_2 + 1e-6)) per row, in place. As torch.nn.utils.clip_grad_norm_, row by row.

    Example:
        >>> g = np.array([[3.0, 4.0], [0.3, 0.4]], np.float32)
        >>> clip_by_norm(g, g, {"clip_norm": 1.0}); g.round(3)
        array([[0.6, 0.8],
               [0.3, 0.4]], dtype=float32)
    """
    # scale: float32 [n, 1], each row's sum of squares, then its norm, then its factor, at most 1.
    # add.reduce sums each row by itself, in an order that depends on d only.
    scale = np.add.reduce(np.square(grads), axis=1, keepdims=True)
    np.sqrt(scale, out=scale)
    scale += 1e-6
    np.divide(factors["clip_norm"], scale, out=scale)
    np.minimum(scale, 1.0, out=scale)
    grads *= scale


def l2(grads: Array, weights: Array, factors: Factors) -> None:
    """g <- g + l2_weight * W, in place: the gradient of l2_weight / 2 * |W|^2. As weight_decay of torch.optim.Adam.

    Example:
        >>> g = np.array([[1.0]], np.float32)
        >>> l2(g, np.array([[4.0]], np.float32), {"l2_weight": 0.5}); g
        array([[3.]], dtype=float32)
    """
    grads += factors["l2_weight"] * weights


_TRANSFORMS: Mapping[str, Transform] = {"clip_by_value": clip_by_value, "clip_by_norm": clip_by_norm, "l2": l2}
