"""Gradient descent, with or without momentum. Kernels: see `update_rule`."""

import numpy as np

from kvemb.optim import OptimizerSpec

from .update_rule import Array, Factors, Kernel


def sgd_kernel(spec: OptimizerSpec) -> Kernel:
    """Return the kernel for the options "momentum" (is there state for it) and "nesterov".

        g <- g + weight_decay * W
        m <- momentum * m + g                  with momentum
        g <- m, or g + momentum * m            with momentum; with nesterov
        W <- W - lr * g

    State: momentum_buffer [n, d], 0 at first (torch starts it with the first gradient, which is the same).

    Reference: torch.optim.SGD with dampening=0; Sutskever et al. 2013.

    Example:
        >>> import numpy as np, kvemb.optim
        >>> w, g, m = (np.full((1, 1), x, np.float32) for x in (1.0, 0.5, 1.0))
        >>> spec = kvemb.optim.sgd(lr=0.5, momentum=0.5)
        >>> sgd_kernel(spec)(w, [m], g, spec.defaults(), 1); w, m
        (array([[0.5]], dtype=float32), array([[1.]], dtype=float32))
    """
    options = dict(spec.options)
    momentum, nesterov = options["momentum"], options["nesterov"]

    def step_in_place(weights: Array, state: list[Array], grads: Array, factors: Factors) -> None:
        if np.any(factors["weight_decay"]):
            _add_scaled(grads, weights, factors["weight_decay"])
        if momentum:
            (buffer,) = state
            buffer *= factors["momentum"]
            buffer += grads
            if nesterov:
                _add_scaled(grads, buffer, factors["momentum"])
            else:
                grads = buffer.copy()
        _add_scaled(weights, grads, np.negative(factors["lr"], dtype=np.float32))

    return Kernel(step_in_place)


def _add_scaled(target: Array, values: Array, factor: float | Array) -> None:
    """Add factor * values to `target`, rounded once, as torch does. It multiplies and adds in one where its processor can (all that have
    AVX2, and ARM's). A product of two float32 is exact in float64; the sum is rounded there, far below the last bit of a float32.
    """
    scale = np.asarray(factor, np.float32).astype(np.float64)
    exact = values * scale
    exact += target
    np.copyto(target, exact, casting="same_kind", where=scale != 0)  # -0.0 stays what it is where nothing is added
