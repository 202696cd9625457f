"""RMSprop, plain, centered and with momentum. Kernels: see `update_rule`."""

from collections.abc import Mapping

import numpy as np

from kvemb.optim import OptimizerSpec

from .update_rule import Array, Factors, Kernel


def rmsprop_kernel(spec: OptimizerSpec) -> Kernel:
    """Return the kernel for the options "momentum" (is there state for it) and "centered".

        v <- alpha * v + (1 - alpha) * g^2
        a <- a + (1 - alpha) * (g - a)              centered
        u <- g / (sqrt(v + eps_root) + eps), or g / (sqrt(max(v - a^2, 0) + eps_root) + eps)        centered
        m <- momentum * m + u                       with momentum
        W <- W - lr * u, or W - lr * m              with momentum

    The max(., 0) is ours: for a gradient that hardly varies rounding makes v - a^2 negative, and torch's weights NaN.

    State: square_avg, then grad_avg if centered, then momentum_buffer if there is momentum, each [n, d].

    Reference: Hinton 2012 (lecture 6e); Graves 2013 for centered; torch.optim.RMSprop.

    Example:
        >>> import kvemb.optim
        >>> w, v, g = (np.full((1, 1), x, np.float32) for x in (1.0, 0.0, 4.0))
        >>> spec = kvemb.optim.rmsprop(lr=0.5, alpha=0.75)
        >>> rmsprop_kernel(spec)(w, [v], g, spec.defaults(), 1); w, v
        (array([[0.]], dtype=float32), array([[4.]], dtype=float32))
    """
    options = dict(spec.options)
    momentum, centered = options["momentum"], options["centered"]

    def factors(hyper: Mapping[str, float], step: int) -> dict[str, float]:
        return {"share": 1.0 - hyper["alpha"]}

    def step_in_place(weights: Array, state: list[Array], grads: Array, factors: Factors) -> None:
        square = state[0]
        scratch = np.square(grads)
        scratch *= factors["share"]
        square *= factors["alpha"]
        square += scratch
        if centered:
            _center(state[1], square, grads, scratch, factors["share"])
        else:
            scratch[...] = square
        scratch += factors.get("eps_root", 0.0)  # a journal from before it has none
        np.sqrt(scratch, out=scratch)
        scratch += factors["eps"]
        grads /= scratch
        if momentum:
            state[-1][...] = factors["momentum"] * state[-1] + grads
            np.multiply(state[-1], factors["lr"], out=grads)
        else:
            grads *= factors["lr"]
        weights -= grads

    return Kernel(step_in_place, factors)


def _center(average: Array, square: Array, grads: Array, scratch: Array, share: float | Array) -> None:
    """Move `average` towards the gradient and leave the variance in `scratch`."""
    np.subtract(grads, average, out=scratch)
    scratch *= share
    average += scratch
    np.square(average, out=scratch)
    np.subtract(square, scratch, out=scratch)
    np.maximum(scratch, 0.0, out=scratch)
