"""Adam, AMSGrad and AdamW. Kernels: see `update_rule`. What `step` counts is a decision: docs/adr/0004."""

import math
from collections.abc import Mapping

import numpy as np

from kvemb.optim import OptimizerSpec

from .update_rule import Array, Factors, Kernel


def adam_kernel(spec: OptimizerSpec) -> Kernel:
    """Return the kernel for kind "adam" or "adamw" and the option "amsgrad".

        W <- W - lr * weight_decay * W              adamw
        m <- m + (1 - beta1) * (g - m)
        v <- v + (1 - beta2) * (g^2 - v)
        u <- v, or max(u, v)                        with amsgrad
        W <- W - lr * sqrt(c2) / c1 * m / (sqrt(u) + eps')        c1 = 1 - beta1^step, c2 = 1 - beta2^step

    The references differ in eps, and each is followed. SparseAdam has eps' = eps (the "epsilon hat" of the paper's section 2),
    torch.optim.Adam and AdamW have eps' = eps * sqrt(c2).

    State: exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq, each [n, d].

    Reference: Kingma, Ba 2015; Reddi, Kale, Kumar 2018; Loshchilov, Hutter 2019; torch.optim.SparseAdam for adam,
    torch.optim.Adam(amsgrad=True) for adam with amsgrad, torch.optim.AdamW for adamw.

    Example:
        >>> import kvemb.optim
        >>> w, m, v, g = (np.full((1, 1), x, np.float32) for x in (1.0, 0.0, 0.0, 4.0))
        >>> spec = kvemb.optim.adam(lr=0.5)
        >>> adam_kernel(spec)(w, [m, v], g, spec.defaults(), 1); w.round(3)
        array([[0.5]], dtype=float32)
    """
    amsgrad = dict(spec.options)["amsgrad"]
    decoupled_decay = spec.kind == "adamw"
    eps_after_correction = amsgrad or decoupled_decay

    def factors(hyper: Mapping[str, float], step: int) -> dict[str, float]:
        root_c2 = math.sqrt(1.0 - hyper["beta2"] ** step)
        return {
            "kept": 1.0 - hyper["lr"] * hyper.get("weight_decay", 0.0),
            "share1": 1.0 - hyper["beta1"],
            "share2": 1.0 - hyper["beta2"],
            "floor": hyper["eps"] * (root_c2 if eps_after_correction else 1.0),
            "rate": hyper["lr"] * root_c2 / (1.0 - hyper["beta1"] ** step),
        }

    def step_in_place(weights: Array, state: list[Array], grads: Array, factors: Factors) -> None:
        if decoupled_decay:
            weights *= factors["kept"]
        average, square = state[0], state[1]
        scratch = grads - average
        scratch *= factors["share1"]
        average += scratch
        np.square(grads, out=grads)
        grads -= square
        grads *= factors["share2"]
        square += grads
        if amsgrad:
            np.maximum(state[2], square, out=state[2])
        np.sqrt(state[2] if amsgrad else square, out=scratch)
        scratch += factors["floor"]
        np.divide(average, scratch, out=scratch)
        scratch *= factors["rate"]
        weights -= scratch

    return Kernel(step_in_place, factors)
