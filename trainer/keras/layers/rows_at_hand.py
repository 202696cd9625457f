"""The rows that came with the batch of the step under way, where the model's layers find them. One thread.

On every backend a shadow variable stands beside a table's distinct rows, `leaf = rows + (shadow - stop_gradient(shadow))`, which Keras
overwrites with its gradient instead of updating it: the rows' gradient, summed by row, as the dense weight of an Embedding would have it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras

from kvemb.errors import InvalidInputError

from .keras_internals import backend_module, get_stateless_scope, in_stateless_scope, is_in_jax_tracing_scope

Fed = Mapping[str, Any]
"""The tensors beside a batch: "rows" by table, [capacity, dim]; by layer "at", its positions of each call, and "masks" of ids other than 0,
where it masks these: in the step itself ids may have lost bits, and be 0.
"""


class RowsAtHand:
    """The rows of the step under way, for one model."""

    def __init__(self) -> None:
        self.shadows: dict[str, Any] = {}
        """By table, the variable that takes its gradient."""
        self.building = False
        """Whether Keras may call the model with a batch to build it, on JAX: with ids that are cut, and for no rows."""
        self._fed: Fed | None = None
        self._calls: dict[str, list[Any]] = {}  # by layer, the ids of its calls in the step so far
        self._training = False

    @property
    def there(self) -> bool:
        """Whether a step is under way."""
        return self._fed is not None

    @contextmanager
    def of_step(self, fed: Fed, training: bool) -> Iterator[None]:
        """Have rows at hand until the step has been traced or run."""
        self._fed, self._training = fed, training
        self._calls = {}
        try:
            yield
        finally:
            self._fed, self._calls = None, {}

    def look_up(self, table: str, layer: str, ids: Any) -> tuple[Any, Any, Any]:
        """Return a table's leaf [capacity, dim], the positions in it of a layer's next call, and its mask; ids tell a repeated call."""
        assert self._fed is not None, "called within a step"
        calls: Sequence[Any] = self._fed["at"].get(layer, ())
        before, foreseen = self._calls.setdefault(layer, []), [tuple(at.shape) for at in calls]
        n, shape = _call_again(before, ids) if len(before) == len(calls) else len(before), tuple(ids.shape)
        if n == len(before):
            before.append(ids)
        if n >= len(calls) or not same_shape(foreseen[n], shape):
            raise InvalidInputError(
                f"layer {layer!r} over table {table!r}: its call {n + 1} in a step asks for ids of shape {shape}, rows were pulled "
                f"for {foreseen or 'no call'}. A train_step that calls the model several times, or a call that differs from step to step, "
                f"is not foreseen: name what feeds each call in turn, distribute(features={{{layer!r}: [key of x, or a function of x, …]}})"
            )
        masks = self._fed["masks"].get(layer)
        return self._leaf(table), calls[n], None if masks is None else masks[n]

    def _leaf(self, table: str) -> Any:
        """Return rows with their shadow, new for each call, which may stand under another tape, or under none."""
        assert self._fed is not None
        leaf = self._fed["rows"][table]
        if self._training and table in self.shadows:
            value = keras.ops.convert_to_tensor(self.shadows[table])
            leaf = leaf + (value - keras.ops.stop_gradient(value))
        return leaf


def _call_again(before: Sequence[Any], ids: Any) -> int:
    """Return which call has the same ids, where torch makes it again in backward (keras.remat); the number of calls if none."""
    torch = backend_module("torch")
    if torch is None or torch._C._current_graph_task_id() == -1:  # as torch.utils.checkpoint knows backward
        return len(before)
    return next((n for n, one in enumerate(before) if torch.equal(one, ids)), len(before))


def not_differentiated(rows: Any, why: str) -> Any:
    """Return rows whose gradient would not be pushed: asking for it is an error."""
    if keras.backend.backend() == "jax":
        _refuse_traced_weights(why)
        return rows

    def told(rows: Any, witness: Any) -> Any:
        def grad(*args: Any, upstream: Any = None) -> Any:
            raise InvalidInputError(why)

        return keras.ops.copy(rows), grad

    return keras.ops.custom_gradient(told)(rows, keras.ops.convert_to_tensor(_witness()))


@cache
def _witness() -> Any:
    """Return a variable that is trained, so that a tape follows values computed from it."""
    return keras.Variable(0.0, name="witness")


def _refuse_traced_weights(why: str) -> None:
    """Refuse traced weights: JAX differentiates a model's weights by giving it others, which are traced."""
    scope = get_stateless_scope() if in_stateless_scope() else None
    if scope is not None and any(is_in_jax_tracing_scope(value) for value in scope.state_mapping.values()):
        raise InvalidInputError(why)


def same_shape(known: Sequence[int | None], shape: Sequence[int | None]) -> bool:
    """Whether two shapes agree where both are known."""
    return len(known) == len(shape) and all(a == b for a, b in zip(known, shape, strict=True) if a is not None and b is not None)
