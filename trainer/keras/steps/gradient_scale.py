"""What Keras's optimizers do to gradients before their rule, done for rows: scales taken off, norms and values clipped.

What must not live here: rules. Keras leaves variables that are overwritten with their gradient out of all of it. The norm of a table's
gradient is that of the dense weight it stands for: rows that are not in a batch have none.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kvemb.errors import InvalidInputError

from ...bridge.pushed_steps import GradientPart
from .model_state import ModelState
from .step_values import StepValues


def rule_of(optimizer: Any) -> Any:
    """Return the optimizer that has the rule: within a LossScaleOptimizer its inner one."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


class GradientScale:
    """Of the optimizer that tables follow, as it is when a step begins.

    Args:
        optimizer: called for it.
    """

    def __init__(self, optimizer: Callable[[], Any]) -> None:
        self._optimizer, self._scale = optimizer, 1.0

    def begin(self, now: ModelState) -> None:
        """Take note of what the step's gradients will be scaled by.

        Raises:
            InvalidInputError: the optimizer does what rows cannot follow.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise InvalidInputError("the model is compiled without an optimizer, so nothing hands gradients over: compile it with one")
        refuse_unfit(optimizer)
        if optimizer is not rule_of(optimizer):
            self._scale = float(now.value(optimizer.dynamic_scale)) if optimizer.built else float(optimizer.initial_scale)
        else:
            self._scale = float(optimizer.loss_scale_factor or 1.0)

    def scaled(self, part: GradientPart, values: StepValues) -> GradientPart:
        """Return gradients as the rule is to have them."""
        ids, grads, versions = part
        return ids, _times(_clipped(_times(grads, 1.0 / self._scale), values), values.factor), versions


def _clipped(grads: Any, by: StepValues) -> Any:
    if by.clipnorm:
        norm = float(np.sqrt(np.vdot(grads, grads)))
        return grads * np.float32(by.clipnorm / norm) if norm > by.clipnorm else grads
    return np.clip(grads, -by.clipvalue, by.clipvalue) if by.clipvalue else grads


def _times(grads: Any, factor: float) -> Any:
    return grads if factor == 1.0 else grads * np.float32(factor)


def refuse_unfit(optimizer: Any) -> None:
    """Refuse options of an optimizer that rows cannot follow.

    Raises:
        InvalidInputError: naming the option, and what to do.
    """
    rule, who = rule_of(optimizer), type(rule_of(optimizer)).__name__
    if rule.gradient_accumulation_steps:
        raise InvalidInputError(
            f"gradient_accumulation_steps={rule.gradient_accumulation_steps} of {who}: Keras keeps the largest of several "
            "rows' gradients, not "
            "their sum, and rows differ from batch to batch. Compile without it; take a larger batch, or more trainers"
        )
    if rule.global_clipnorm:
        raise InvalidInputError(
            f"global_clipnorm={rule.global_clipnorm} of {who}: Keras clips dense weights by a norm that rows are not in. Take "
            "clipnorm or clipvalue, "
            "which rows follow"
        )
    if rule.use_ema:
        raise InvalidInputError(f"use_ema=True of {who}: averages of rows are not kept. Compile without it")
