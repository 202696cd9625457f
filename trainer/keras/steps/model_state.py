"""The values of a model's variables around one step, wherever the backend keeps them: in the variables, or in what JAX's functions take.

What must not live here: what is done with them. On JAX `fit` takes the values out of the variables, hands them from step to step, and gives
their memory away to each step. So they are read before it or after it, and never kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray


class ModelState:
    """The values now.

    Args:
        model: whose.
        given: the state that a JAX function takes or returned, (trainable, non-trainable, optimizer's, metrics'); empty on other backends.
    """

    def __init__(self, model: Any, given: "list[Any]") -> None:
        self._model, self._given = model, [list(map(list, one)) for one in given]

    def given(self) -> "tuple[Any, ...]":
        """Return what the function takes before its batches."""
        return tuple(tuple(one) for one in self._given)

    def value(self, variable: Any) -> NDArray[Any]:
        """Return a variable's value as NumPy."""
        held = self._held(variable)
        return np.asarray(keras.ops.convert_to_numpy(variable.value if held is None else held[0][held[1]]))

    def trains(self, variable: Any) -> bool:
        """Whether the step trains a variable: neither it nor its layer is frozen."""
        return any(variable is one for one in self._model.trainable_variables)

    def put(self, variable: Any, value: Any) -> None:
        """Give a variable a value, of another shape than before where it likes."""
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
    """Put values into the variables that have none; return these, and what each had."""
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
