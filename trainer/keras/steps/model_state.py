"""The values of a model's variables around one step, wherever the backend keeps them.

On JAX `fit` hands them from step to step, and gives their memory away to each. So they are read before it or after it, and never kept.

Gradients of rows are treated here as Keras's optimizers treat others before their rule, which leave out variables that are overwritten:
scales are taken off, norms and values clipped. The norm of a table's gradient is that of the dense weight it stands for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from ...lookahead.cluster_ports import GradientPart


class ModelState:
    """The values now."""

    def __init__(self, model: Any, given: "list[Any]") -> None:
        self._model, self._given = model, [list(map(list, one)) for one in given]

    def given(self) -> "tuple[Any, ...]":
        """Return the state that the function takes before its batches."""
        return tuple(tuple(one) for one in self._given)

    def value(self, variable: Any) -> NDArray[Any]:
        """Return a variable's value as NumPy."""
        held = self._held(variable)
        return np.asarray(keras.ops.convert_to_numpy(variable.value if held is None else held[0][held[1]]))

    def trains(self, variable: Any) -> bool:
        """Whether the step trains a variable: neither it nor its layer is frozen."""
        return any(variable is one for one in self._model.trainable_variables)

    def put(self, variable: Any, value: Any) -> None:
        """Give a variable a value, also of another shape."""
        variable._shape = tuple(value.shape)
        held = self._held(variable)
        if held is not None:
            held[0][held[1]] = value
            return
        backend = keras.backend.backend()
        if backend == "tensorflow":
            variable._value.assign(value)
        elif backend == "torch":
            variable._value.data, variable._value.grad = value, None
        else:
            variable._value = value

    def _held(self, variable: Any) -> "tuple[list[Any], int] | None":
        """The list and the place in it where the state given has a variable's value."""
        if not self._given:
            return None
        trainable, non_trainable, optimizer, _ = self._given[0]
        lists = (
            (self._model.trainable_variables, trainable),
            (self._model.non_trainable_variables, non_trainable),
            (self._model.optimizer.variables, optimizer),
        )
        for variables, values in lists:
            for place, one in enumerate(variables):
                if one is variable:
                    return values, place
        return None


@contextmanager
def in_place(model: Any, state: "list[Any]") -> Iterator[None]:
    """Have values in variables that Keras has emptied for its steps on JAX, while a model's code is called beside them."""
    filled = _give_back(model, state)
    try:
        yield
    finally:
        for variable, before in filled:
            variable._value = before


def leave_with(model: Any, state: "list[Any]") -> None:
    """Put values back where a call failed: into variables that Keras has emptied, or whose memory a step got. On JAX they would be lost."""
    _give_back(model, state)
    if state:
        model._jax_state = None  # fit would put it into the variables, and its memory is given away


def _give_back(model: Any, state: "list[Any]") -> "list[tuple[Any, Any]]":
    """Put values into the variables that have none; return these, and each one's earlier content."""
    if not state:
        return []
    values = list(state[0])
    lists = [model.trainable_variables, model.non_trainable_variables]
    if len(values) == 4:
        lists.append(model.optimizer.variables)
    if len(values) > 2:
        lists.append(model.metrics_variables)
    filled = []
    for variables, held in zip(lists, values, strict=True):
        for variable, value in zip(variables, held, strict=True):
            if (variable._value is None or variable._value.is_deleted()) and not value.is_deleted():
                filled.append((variable, variable._value))
                variable._value, variable._shape = value, tuple(value.shape)
    return filled


@dataclass(frozen=True)
class StepValues:
    """A table's run-time values, and the treatment of gradients before they are pushed: clipping, then a factor."""

    hyper: dict[str, float]
    factor: float = 1.0
    clipnorm: float | None = None
    clipvalue: float | None = None


def rule_of(optimizer: Any) -> Any:
    """Return the optimizer that has the rule: within a LossScaleOptimizer its inner one."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def n_per_step(optimizer: Any) -> int:
    """Return how many batches an optimizer gathers for a step."""
    return int(rule_of(optimizer).gradient_accumulation_steps or 1)


def n_batches_of(optimizer: Any, now: ModelState) -> int:
    """Return how many batches an optimizer has had."""
    return int(now.value(rule_of(optimizer)._iterations))


class GradientScale:
    """The gradient scale of the optimizer that tables follow, at the beginning of a step."""

    def __init__(self, optimizer: Callable[[], Any]) -> None:
        self._optimizer, self._scale = optimizer, 1.0

    def begin(self, now: ModelState) -> None:
        """Take note of the scale of the step's gradients."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise InvalidInputError("the model is compiled without an optimizer, so nothing hands gradients over: compile it with one")
        refuse_unfit(optimizer)
        if optimizer is not rule_of(optimizer):
            self._scale = float(now.value(optimizer.dynamic_scale)) if optimizer.built else float(optimizer.initial_scale)
        else:
            self._scale = float(optimizer.loss_scale_factor or 1.0)

    def unscaled(self, part: GradientPart) -> GradientPart:
        """Return a batch's gradients without the scale of its loss."""
        ids, grads, versions = part
        return ids, _times(grads, 1.0 / self._scale), versions


def ruled(part: GradientPart, values: StepValues) -> GradientPart:
    """Return a step's gradients as the rule is to have them."""
    ids, grads, versions = part
    return ids, _times(_clipped(grads, values), values.factor), versions


def _clipped(grads: Any, by: StepValues) -> Any:
    if by.clipnorm:
        norm = float(np.sqrt(np.vdot(grads, grads)))
        return grads * np.float32(by.clipnorm / norm) if norm > by.clipnorm else grads
    return np.clip(grads, -by.clipvalue, by.clipvalue) if by.clipvalue else grads


def _times(grads: Any, factor: float) -> Any:
    return grads if factor == 1.0 else grads * np.float32(factor)


def refuse_unfit(optimizer: Any) -> None:
    """Refuse options of an optimizer that rows cannot follow."""
    rule, who = rule_of(optimizer), type(rule_of(optimizer)).__name__
    if rule.global_clipnorm:
        raise InvalidInputError(
            f"global_clipnorm={rule.global_clipnorm} of {who}: Keras clips dense weights by a norm that rows are not in. Take "
            "clipnorm or clipvalue, "
            "which rows follow"
        )
    if rule.use_ema:
        raise InvalidInputError(f"use_ema=True of {who}: averages of rows are not kept. Compile without it")
