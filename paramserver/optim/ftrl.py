"""FTRL-Proximal. Kernels: see `update_rule`."""

import numpy as np

from .update_rule import Array, Factors


def ftrl_kernel(weights: Array, state: list[Array], grads: Array, factors: Factors) -> None:
    """Apply one step of FTRL-Proximal in place.

        sigma <- (sqrt(n + g^2) - sqrt(n)) / lr
        z <- z + g - sigma * W
        n <- n + g^2
        W <- 0 where |z| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + l2)

    W follows from z and n alone, so a first value other than 0 is given up at the first step.

    Args:
        weights: float32 [n, d].
        state: [z [n, d], n [n, d]]; n > 0.
        grads: float32 [n, d]; used up.
        factors: lr (> 0; the paper's alpha), beta, l1, l2.

    Reference: McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches", algorithm 1.

    Example:
        >>> w, z, n, g = (np.full((1, 2), x, np.float32) for x in (0.0, 0.0, 9.0, 4.0))
        >>> g[0, 1] = 0.5
        >>> ftrl_kernel(w, [z, n], g, {"lr": 0.5, "beta": 0.0, "l1": 1.0, "l2": 0.0}); w
        array([[-0.3,  0. ]], dtype=float32)
    """
    z, n = state
    lr, l1 = factors["lr"], factors["l1"]
    root_before = np.sqrt(n)
    z += grads
    np.square(grads, out=grads)
    n += grads
    denominator = np.sqrt(n, out=grads)
    sigma = np.subtract(denominator, root_before, out=root_before)
    sigma /= lr
    sigma *= weights
    z -= sigma
    denominator += factors["beta"]
    denominator /= lr
    denominator += factors["l2"]
    # clip(z, -l1, l1) - z is 0 where |z| <= l1, and sign(z) * l1 - z elsewhere.
    np.clip(z, -l1, l1, out=weights)
    weights -= z
    weights /= denominator
