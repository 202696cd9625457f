"""Adagrad, per element and per row. Kernels: see `update_rule`."""

import numpy as np

from .update_rule import Array, Factors


def adagrad_kernel(weights: Array, state: list[Array], grads: Array, factors: Factors) -> None:
    """Apply one step of Adagrad in place.

        a <- a + g^2
        W <- W - lr * g / (sqrt(a) + eps)

    Args:
        weights: float32 [n, d].
        state: [sum [n, d]].
        grads: float32 [n, d]; used up.
        factors: lr, eps.

    Reference: Duchi, Hazan, Singer 2011; torch.optim.Adagrad with lr_decay=0.

    Example:
        >>> w, a, g = (np.full((1, 1), x, np.float32) for x in (1.0, 0.0, 4.0))
        >>> adagrad_kernel(w, [a], g, {"lr": 0.5, "eps": 1e-10}); w, a
        (array([[0.5]], dtype=float32), array([[16.]], dtype=float32))
    """
    (total,) = state
    scratch = np.square(grads)
    total += scratch
    np.sqrt(total, out=scratch)
    scratch += factors["eps"]
    grads /= scratch
    grads *= factors["lr"]
    weights -= grads


def rowwise_adagrad_kernel(weights: Array, state: list[Array], grads: Array, factors: Factors) -> None:
    """Apply one step of Adagrad with a single sum per row in place.

        a <- a + mean_i(g_i^2)
        W <- W - lr * g / (sqrt(a) + eps)

    Args:
        weights: float32 [n, d].
        state: [mean_square_sum [n, 1]].
        grads: float32 [n, d]; used up.
        factors: lr, eps.

    Reference: EXACT_ROWWISE_ADAGRAD of FBGEMM (fbgemm_gpu); DLRM, Naumov et al. 2019.

    Example:
        >>> w, a, g = (np.full((1, 2), x, np.float32) for x in (1.0, 0.0, 4.0))
        >>> rowwise_adagrad_kernel(w, [a[:, :1]], g, {"lr": 0.5, "eps": 1e-8}); w
        array([[0.5, 0.5]], dtype=float32)
    """
    (total,) = state
    # add.reduce sums each row by itself, in an order that depends on d only.
    mean = np.add.reduce(np.square(grads), axis=1, keepdims=True)
    mean /= grads.shape[1]
    total += mean
    scale = np.sqrt(total)
    scale += factors["eps"]
    np.divide(factors["lr"], scale, out=scale)
    grads *= scale
    weights -= grads
