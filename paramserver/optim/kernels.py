"""From a specification to its optimizer: which kernel serves which kind. No maths here."""

from collections.abc import Callable, Mapping

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from . import adagrad, adam, ftrl, rmsprop, sgd
from .gradient_transforms import compose
from .update_rule import Kernel, Optimizer

_KERNELS: Mapping[str, Callable[[OptimizerSpec], Kernel]] = {
    "sgd": sgd.sgd_kernel,
    "adagrad": lambda spec: Kernel(adagrad.adagrad_kernel),
    "rowwise_adagrad": lambda spec: Kernel(adagrad.rowwise_adagrad_kernel),
    "adam": adam.adam_kernel,
    "adamw": adam.adam_kernel,
    "ftrl": lambda spec: Kernel(ftrl.ftrl_kernel),
    "rmsprop": rmsprop.rmsprop_kernel,
}


def build_optimizer(spec: OptimizerSpec) -> Optimizer:
    """Build the optimizer that a table's specification names.

    Args:
        spec: the table's specification, as made by `kvemb.optim`.

    Raises:
        InvalidInputError: this parameter server knows no such kind (the trainer's release is newer).

    Example:
        >>> import kvemb.optim
        >>> build_optimizer(kvemb.optim.adam()).state_size(16)
        32
    """
    if spec.kind not in _KERNELS:
        known = ", ".join(_KERNELS)
        raise InvalidInputError(f"no maths for optimizer {spec.kind!r} on this parameter server; known: {known}")
    return Optimizer(spec, _KERNELS[spec.kind](spec), compose(spec.transforms))
