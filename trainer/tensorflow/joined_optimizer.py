"""A Keras optimizer whose step pushes, too: it gives tables' gradients to the parameter servers, and trains the other variables itself.

Strategy: the optimizer stays the same object. Its `apply`, which apply_gradients calls, and its `build` are replaced. Rows are pushed
before the others are updated: a push that fails leaves them as they were. The learning rate and the number of steps are read before both.

Gradients of an id that comes several times are summed first, as the parameter servers' rules want them. One thread; not fork-safe.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kvemb.arrays.segment_sum import group_by_id
from kvemb.errors import InvalidInputError

from ..bridge.shared_lookups import LookupResult
from ..bridge.step_tables import Gradient, OwnProcess, StepTables, asked_of
from ..keras.distributing.keras_rules import MappedRule, undecayed
from ..keras.steps.model_state import refuse_unfit, rule_of, ruled
from .row_lookups import lookups_of
from .table_variables import TableVariable

_SEEN = 64  # lookups of a table whose versions are known at a push: more than a step makes


_Given = tuple[TableVariable, Any]
"""The variable of a table, and the tf.IndexedSlices that an optimizer was given for it."""


def checked_rule(optimizer: Any) -> MappedRule:
    """Return an optimizer's rule for tables."""
    backend = tf.keras.backend.backend()
    if backend != "tensorflow" or not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise InvalidInputError(
            f"optimizer is {type(optimizer).__module__}.{type(optimizer).__name__}, with Keras on {backend}; give the one of "
            "tf.keras.optimizers, with Keras on TensorFlow, whose apply_gradients trains the model"
        )
    if "apply" in vars(optimizer):
        raise InvalidInputError("the optimizer pushes rows already: distribute is for once")
    refuse_unfit(optimizer)
    for option in ("gradient_accumulation_steps", "loss_scale_factor"):
        if getattr(optimizer, option):
            raise InvalidInputError(f"{option}: do it in the loop, before apply_gradients; rows follow what is done to gradients there")
    if rule_of(optimizer) is not optimizer:
        raise InvalidInputError("LossScaleOptimizer: rows are float32, and their gradients need no scale; give its inner optimizer")
    return MappedRule(optimizer)


class JoinedOptimizer:
    """Stands in an optimizer's `apply` and `build`, from `install` on."""

    def __init__(self, optimizer: Any, rule: MappedRule, variables: Sequence[TableVariable], max_unapplied: int) -> None:
        self._optimizer, self._rule, self._process = optimizer, rule, OwnProcess("TensorFlow")
        self._variables = tuple(variables)
        self._apply, self._build, self._built = optimizer.apply, optimizer.build, list(optimizer._trainable_variables)
        lookups = lookups_of(variables[0].table.cluster)
        self.tables = StepTables([of.table for of in variables], timeout_s=None, max_unapplied=max_unapplied, shared=lookups.shared)
        self._seen: dict[str, deque[LookupResult]] = {name: deque(maxlen=_SEEN) for name in self.tables.by_name}
        for of in variables:
            lookups.told[of.table.name] = self._telling(of)

    def install(self) -> None:
        """Take the places."""
        for name, of in (("apply", self.apply), ("build", self.build)):
            object.__setattr__(self._optimizer, name, tf.autograph.experimental.do_not_convert(of))  # Keras would track what it is given

    def build(self, variables: Sequence[Any]) -> None:
        """Make the state of variables without a table; the others' is kept beside their rows."""
        self._built = list(variables)
        self._build([of for of in variables if not isinstance(of, TableVariable)])

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Push tables' gradients in one push, then update the other variables; a failed push changes none, and may be applied later."""
        self._process.check()
        variables = self._built if trainable_variables is None else list(trainable_variables)
        if len(grads) != len(variables):
            raise InvalidInputError(f"{len(grads)} gradients were given for {len(variables)} variables")
        if all(of is None for of in grads):
            raise InvalidInputError("no variable has a gradient: does the loss come of them, under the tape?")
        given, rest = [], []
        for gradient, variable in zip(grads, variables, strict=True):
            if not isinstance(variable, TableVariable):
                rest.append((gradient, variable))
            elif gradient is not None:
                given.append((variable, _checked(variable, gradient)))
        if not self._optimizer.built:
            self.build(variables)  # before the push: in a tf.function, what state begins with must not depend on it
        with tf.control_dependencies(self._push(given)):
            if any(gradient is not None for gradient, _ in rest):
                self._apply(*map(list, zip(*rest, strict=True)))
            else:
                self._optimizer._iterations.assign_add(1)

    def _push(self, given: Sequence[_Given]) -> list[Any]:
        """Push here or, in a tf.function, in its graph; return the operation that does."""
        rate = tf.cast(tf.convert_to_tensor(self._optimizer.learning_rate), tf.float32)
        n_steps = tf.identity(tf.convert_to_tensor(self._optimizer.iterations))

        def push(rate: Any, n_steps: Any, *arrays: NDArray[Any]) -> None:
            self._push_arrays([variable for variable, _ in given], float(rate), int(n_steps), arrays)

        tensors = [rate, n_steps, *(part for _, slices in given for part in (slices.indices, slices.values))]
        if tf.executing_eagerly():
            push(*(of.numpy() for of in tensors))
            return []
        return [tf.numpy_function(push, tensors, [])]

    def _push_arrays(self, variables: Sequence[TableVariable], rate: float, n_steps: int, arrays: Sequence[NDArray[Any]]) -> None:
        values, gradients = self._rule.with_rate(self._optimizer, rate, n_steps), list[Gradient]()
        now = {of.table.name: values if self._optimizer._use_weight_decay(of) else undecayed(values) for of in self._variables}
        for name, one in now.items():  # of every table: in a sync job other trainers may have gradients of those that have none here
            self.tables.hyper[name] = dict(one.hyper)
        for at, variable in enumerate(variables):
            _, ids = asked_of(variable.table, arrays[2 * at])
            groups = group_by_id(ids)
            # In memory of their own: TensorFlow's is gone after the call, and an async push may still be on its way.
            part = (
                groups.ids.copy(),
                np.array(groups.sum(arrays[2 * at + 1]), np.float32),
                self._versions(variable.table.name, groups.ids),
            )
            unique, rows, versions = ruled(part, now[variable.table.name])
            gradients.append((variable.table.name, LookupResult(unique, np.empty(0, np.intp), rows, versions), rows))
        self.tables.push(gradients)

    def _telling(self, variable: TableVariable) -> Callable[[LookupResult], None]:
        seen = self._seen[variable.table.name]

        def told(found: LookupResult) -> None:
            variable.mark.before_lookup(False)
            seen.append(LookupResult(found.ids, found.inverse[:0], found.rows[:0].copy(), found.versions))

        return told

    def _versions(self, table: str, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the versions of rows that gradients were computed from: those of the newest lookup; for the report, so 0 where unknown."""
        versions = np.zeros(len(ids), np.uint64)
        for found in self._seen[table]:
            at = np.minimum(np.searchsorted(found.ids, ids), max(0, len(found.ids) - 1))
            there = found.ids[at] == ids if len(found.ids) else np.zeros(len(ids), np.bool_)
            versions[there] = found.versions[at[there]]
        self._seen[table].clear()
        return versions


def _checked(variable: TableVariable, gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        raise InvalidInputError(
            f"the gradient of table {variable.table.name!r} is a {type(gradient).__name__} of all rows; give the tf.IndexedSlices that the "
            "tape returns, or another one: tf.clip_by_global_norm and tf.clip_by_norm keep it, tf.convert_to_tensor does not"
        )
    return gradient
