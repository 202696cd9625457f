"""Gradient transforms, composed in one place. They run in the table's order before its optimizer and keep no state."""

from collections.abc import Iterable, Mapping

import numpy as np

from kvemb.optim import TransformSpec

from .update_rule import Array, Factors, Transform


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
