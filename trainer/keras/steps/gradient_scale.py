"""What Keras's optimizers do to gradients before their rule, done for rows: scales taken off, overflows left out, norms and values clipped.

What must not live here: rules. Keras leaves variables that are overwritten with their gradient out of all of it. The norm of a table's
gradient is that of the dense weight it stands for: rows that are not in a batch have none.
"""

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
    """Of a model's optimizer, as it is compiled when a step begins.

    Args:
        model: whose.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._iterations, self._scale = 0, 1.0

    def begin(self, now: ModelState) -> None:
        """Take note of what the step's gradients will be scaled by.

        Raises:
            InvalidInputError: the optimizer does what rows cannot follow.
        """
        optimizer = self._model.optimizer
        refuse_unfit(optimizer)
        self._iterations = int(now.value(rule_of(optimizer).iterations))
        if optimizer is not rule_of(optimizer):
            self._scale = float(now.value(optimizer.dynamic_scale)) if optimizer.built else float(optimizer.initial_scale)
        else:
            self._scale = float(optimizer.loss_scale_factor or 1.0)

    def overflowed(self, after: ModelState) -> bool:
        """Whether the step was left out, as LossScaleOptimizer does where a gradient is not finite."""
        return int(after.value(rule_of(self._model.optimizer).iterations)) == self._iterations

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


def add_to_built(optimizer: Any, model: Any) -> None:
    """Let an optimizer that has its state already, as that of a loaded model, know the model's shadows: they have none."""
    for one in {id(of): of for of in (optimizer, rule_of(optimizer))}.values():
        if not one.built:
            continue
        before, now = list(one._trainable_variables), list(model.trainable_variables)
        place = {id(variable): at for at, variable in enumerate(before)}
        for name, held in list(vars(one).items()):
            if isinstance(held, list) and len(held) == len(before) and name not in ("_variables", "_trainable_variables"):
                object.__setattr__(one, name, [held[place[id(of)]] if id(of) in place else None for of in now])
        object.__setattr__(one, "_trainable_variables", now)
        object.__setattr__(one, "_trainable_variables_indices", {one._var_key(of): at for at, of in enumerate(now)})
