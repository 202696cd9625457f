"""keras.optimizers' rules in a table's words: which update rule an optimizer asks for, and its run-time values at a step.

Strategy: by exact class. Keras and the parameter servers write some rules down in different forms, and the differences are put into the
run-time values and the gradient:

* Adagrad has epsilon under the root: here it is a part of the accumulator's first value.
* AdamW and AMSGrad have epsilon before the bias correction: it is divided by the correction of the step that comes.
* SGD's momentum has the learning rate in it: gradients are pushed multiplied by the rate, and the table's own rate is 1.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from ..steps.model_state import ModelState, StepValues, rule_of

_TINY = 1e-30  # the least eps that a table takes
_NAME = "embeddings"  # of the weight of a keras.layers.Embedding

Values = Callable[[Any, float, int], StepValues]
"""From the optimizer, its learning rate at this step, and the step's number from 1."""


def _sgd(rule: Any, lr: float, step: int) -> StepValues:
    if rule.momentum:
        return StepValues({"lr": 1.0, "momentum": float(rule.momentum), "weight_decay": 0.0}, lr)
    return StepValues({"lr": lr, "momentum": 0.0, "weight_decay": float(rule.weight_decay or 0.0)})


def _adagrad(rule: Any, lr: float, step: int) -> StepValues:
    return StepValues({"lr": lr, "eps": _TINY})


def _adam(rule: Any, lr: float, step: int) -> StepValues:
    corrected = rule.amsgrad or isinstance(rule, keras.optimizers.AdamW)
    eps = float(rule.epsilon) / (math.sqrt(1.0 - rule.beta_2**step) if corrected else 1.0)
    values = {"lr": lr, "beta1": float(rule.beta_1), "beta2": float(rule.beta_2), "eps": max(eps, _TINY)}
    return StepValues(values | ({"weight_decay": float(rule.weight_decay or 0.0)} if isinstance(rule, keras.optimizers.AdamW) else {}))


def _rmsprop(rule: Any, lr: float, step: int) -> StepValues:
    return StepValues({"lr": lr, "alpha": float(rule.rho), "eps": _TINY, "eps_root": float(rule.epsilon), "momentum": float(rule.momentum)})


def _ftrl(rule: Any, lr: float, step: int) -> StepValues:
    l2 = 2.0 * float(rule.l2_regularization_strength)
    return StepValues({"lr": lr, "l1": float(rule.l1_regularization_strength), "l2": l2, "beta": float(rule.beta)})


_ADAM = lambda rule: {"amsgrad": bool(rule.amsgrad)}  # noqa: E731
_RULES: Mapping[type, tuple[str, Values, Callable[[Any], dict[str, Any]]]] = {
    keras.optimizers.SGD: ("sgd", _sgd, lambda rule: {"nesterov": bool(rule.nesterov)} if rule.momentum else {}),
    keras.optimizers.Adagrad: (
        "adagrad",
        _adagrad,
        lambda rule: {"initial_accumulator_value": float(rule.initial_accumulator_value) + float(rule.epsilon)},
    ),
    keras.optimizers.Adam: ("adam", _adam, _ADAM),
    keras.optimizers.AdamW: ("adamw", _adam, _ADAM),
    keras.optimizers.RMSprop: ("rmsprop", _rmsprop, lambda rule: {"centered": bool(rule.centered)}),
    keras.optimizers.Ftrl: ("ftrl", _ftrl, lambda rule: {"initial_accumulator_value": float(rule.initial_accumulator_value)}),
}


class MappedRule:
    """The rule and values of a Keras optimizer, for tables."""

    def __init__(self, optimizer: Any) -> None:
        rule = rule_of(optimizer)
        self._kind = _class_of(rule)
        if self._kind not in _RULES:
            known = ", ".join(of.__name__ for of in _RULES)
            raise InvalidInputError(
                f"the parameter servers have no update rule for {self._kind.__name__}; compile with one of keras.optimizers' "
                f"{known}, or give "
                "tables a rule of their own with optimizer=kvemb.optim.…"
            )
        self._refuse(rule)
        kind, _, fixed = _RULES[self._kind]
        self.spec = OptimizerSpec.from_dict({"kind": kind, **fixed(rule), **self._values(rule, _rate_now(rule), 1).hyper})

    def at(self, optimizer: Any, now: ModelState, n_steps: int, n_batches: int) -> StepValues:
        """Return the values for the coming step, after `n_steps` of the model and as many batches as its schedules count."""
        return self.with_rate(optimizer, _rate(rule_of(optimizer), now, n_batches), n_steps)

    def with_rate(self, optimizer: Any, lr: float, n_steps: int) -> StepValues:
        """Return the values for the coming step, after `n_steps`, with the learning rate that it has; raises as `at`."""
        rule = rule_of(optimizer)
        if _class_of(rule) is not self._kind:
            raise InvalidInputError(
                f"the model is compiled with {type(rule).__name__} now, its tables were made for {self._kind.__name__}; "
                "compile it with that"
            )
        self._refuse(rule)
        values = self._values(rule, lr, n_steps + 1)
        return replace(values, clipnorm=rule.clipnorm, clipvalue=rule.clipvalue)

    def _values(self, rule: Any, lr: float, step: int) -> StepValues:
        return _RULES[self._kind][1](rule, lr, step)

    def _refuse(self, rule: Any) -> None:
        decays = self._kind is keras.optimizers.AdamW or (self._kind is keras.optimizers.SGD and not rule.momentum)
        if rule.weight_decay and not decays:
            raise InvalidInputError(
                f"weight_decay={rule.weight_decay} of {self._kind.__name__} has no counterpart in the parameter servers; take AdamW"
            )
        if self._kind is keras.optimizers.Ftrl and (rule.learning_rate_power != -0.5 or rule.l2_shrinkage_regularization_strength):
            raise InvalidInputError(
                "Ftrl: the parameter servers have learning_rate_power=-0.5 and l2_shrinkage_regularization_strength=0.0 only; got "
                f"{rule.learning_rate_power} and {rule.l2_shrinkage_regularization_strength}"
            )


def is_excluded(rule: Any, weight_key: object) -> bool:
    """Whether an optimizer's `exclude_from_weight_decay` names the weight that a table's rows were: the variable, or a part of its name."""
    names = getattr(rule, "_exclude_from_weight_decay_pattern", None)
    return weight_key in getattr(rule, "_exclude_from_weight_decay", ()) or (names is not None and bool(names.search(_NAME)))


def undecayed(values: StepValues) -> StepValues:
    """Return the values without weight decay."""
    return replace(values, hyper={name: 0.0 if name == "weight_decay" else value for name, value in values.hyper.items()})


def _class_of(rule: Any) -> type:
    """Keras's own class; on torch it makes an object of a class of that backend."""
    if not type(rule).__module__.startswith("keras.src."):
        return type(rule)
    return next((kind for kind in type(rule).__mro__ if kind in _RULES), type(rule))


def _rate_now(rule: Any) -> float:
    return float(keras.ops.convert_to_numpy(rule.learning_rate))


def _rate(rule: Any, now: ModelState, n_batches: int) -> float:
    given = rule._learning_rate
    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        return float(keras.ops.convert_to_numpy(given(keras.ops.convert_to_tensor(n_batches))))
    if isinstance(given, keras.Variable):
        return float(now.value(given))
    return float(np.asarray(keras.ops.convert_to_numpy(given() if callable(given) else given)))
