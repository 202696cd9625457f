"""The kernels of all optimizers, one function a rule, and the kernel of each kind of specification.

A kernel works in place on copies that `update_rule` gives it: weights and gradients float32 [n, d], state as each one says. The meaning of
`step` for Adam is a decision: docs/adr/0004.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from .update_rule import Array, Factors, Kernel, Optimizer, compose


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
        # grads: [n, d], the direction to go.
        _add_scaled(weights, grads, np.negative(factors["lr"], dtype=np.float32))

    return Kernel(step_in_place)


def _add_scaled(target: Array, values: Array, factor: float | Array) -> None:
    """Add factor * values to `target` in place, rounded once, as torch does on processors with a fused multiply-add (AVX2, ARM).

    A product of two float32 is exact in float64; the sum is rounded there, far below the last bit of a float32.
    """
    scale = np.asarray(factor, np.float32).astype(np.float64)  # [] or [n, 1]
    exact = values * scale  # float64 [n, d]
    exact += target
    np.copyto(target, exact, casting="same_kind", where=scale != 0)  # where nothing is added, -0.0 remains -0.0


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
    scratch = np.square(grads)  # [n, d]: g^2, then the divisor
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
    # mean: [n, 1], of a row's squares. scale: [n, 1], first the divisor, then lr / divisor.
    # add.reduce sums each row by itself, in an order that depends on d only.
    mean = np.add.reduce(np.square(grads), axis=1, keepdims=True)
    mean /= grads.shape[1]
    total += mean
    scale = np.sqrt(total)
    scale += factors["eps"]
    np.divide(factors["lr"], scale, out=scale)
    grads *= scale
    weights -= grads


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
        average, square = state[0], state[1]  # m and v, [n, d] each
        scratch = grads - average  # [n, d]: the change of m; later the divisor, then the change of the weights
        scratch *= factors["share1"]
        average += scratch
        np.square(grads, out=grads)  # from here on grads holds g^2, then the change of v
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
        square = state[0]  # v, [n, d]
        scratch = np.square(grads)  # [n, d]: g^2; later v, or the variance, then the divisor
        scratch *= factors["share"]
        square *= factors["alpha"]
        square += scratch
        if centered:
            _center(state[1], square, grads, scratch, factors["share"])
        else:
            scratch[...] = square
        scratch += factors.get("eps_root", 0.0)  # a journal older than eps_root has none
        np.sqrt(scratch, out=scratch)
        scratch += factors["eps"]
        grads /= scratch  # u; below lr * u, or lr * m
        if momentum:
            state[-1][...] = factors["momentum"] * state[-1] + grads
            np.multiply(state[-1], factors["lr"], out=grads)
        else:
            grads *= factors["lr"]
        weights -= grads

    return Kernel(step_in_place, factors)


def _center(average: Array, square: Array, grads: Array, scratch: Array, share: float | Array) -> None:
    """Move `average` towards the gradient and leave the variance, max(v - a^2, 0), in `scratch`; all [n, d]."""
    np.subtract(grads, average, out=scratch)
    scratch *= share
    average += scratch
    np.square(average, out=scratch)
    np.subtract(square, scratch, out=scratch)
    np.maximum(scratch, 0.0, out=scratch)


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
    root_before = np.sqrt(n)  # [n, d] as all arrays here; its memory becomes sigma, then sigma * W
    z += grads
    np.square(grads, out=grads)
    n += grads
    # In the memory of grads: sqrt(n), and further down the divisor of the new weights.
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


def frozen_kernel(weights: Array, state: list[Array], grads: Array, factors: Factors) -> None:
    """Leave the rows as they are. Nothing comes here: gradients for a frozen table are refused at admission.

    Example:
        >>> w = np.ones((1, 2), np.float32)
        >>> frozen_kernel(w, [], w, {}); w
        array([[1., 1.]], dtype=float32)
    """


_KERNELS: Mapping[str, Callable[[OptimizerSpec], Kernel]] = {
    "sgd": sgd_kernel,
    "adagrad": lambda spec: Kernel(adagrad_kernel),
    "rowwise_adagrad": lambda spec: Kernel(rowwise_adagrad_kernel),
    "adam": adam_kernel,
    "adamw": adam_kernel,
    "ftrl": lambda spec: Kernel(ftrl_kernel),
    "rmsprop": rmsprop_kernel,
    "frozen": lambda spec: Kernel(frozen_kernel),
}


def build_optimizer(spec: OptimizerSpec) -> Optimizer:
    """Build the optimizer that a table's specification names.

    Args:
        spec: the table's specification, as made by `kvemb.optim`.

    Raises:
        InvalidInputError: this parameter server knows no such kind (the trainer's release is newer).

    Example:
        >>> import kvemb.optim
        >>> build_optimizer(kvemb.optim.adam()).spec.state_size(16)
        32
    """
    if spec.kind not in _KERNELS:
        known = ", ".join(_KERNELS)
        raise InvalidInputError(f"no maths for optimizer {spec.kind!r} on this parameter server; known: {known}")
    return Optimizer(spec, _KERNELS[spec.kind](spec), compose(spec.transforms))
