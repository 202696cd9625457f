"""A connected model's dense weights as Keras hands them out and takes them back, with the step of their rows; and shadow variables.

Callbacks (EarlyStopping, ModelCheckpoint, BackupAndRestore) keep weights by a few methods of a model, which are wrapped: they keep the
rows, too (`RowCheckpoints`), or a warning follows when dense weights of one step are used with rows of another.

Shadows take the gradients of tables' rows out of a step: a Keras optimizer overwrites one with its gradient, by `assign` in a name scope
that names the optimizer, which is noted while the step is traced or run. A compiled step runs without notes, so the value tells: a shadow
is blank before each step, zeros and a last row of ones, to which no position of a batch refers.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from ...bridge.saved_rows import SavedRows
from ..layers.keras_internals import global_state
from .ids_plan import layers_over_tables
from .model_state import rule_of

_NAME = "rows_gradient"
_PATIENCE = 3  # steps
_PATIENCE_SCALED = 50  # steps of an optimizer that scales losses, of which the first ones often overflow: each halves the scale
_BY = "_handed_by"
_EACH = "_each_batch"


def is_shadow(variable: Any) -> bool:
    """Whether a variable takes a table's gradient."""
    return bool(variable.name == _NAME and getattr(variable, "overwrite_with_gradient", False))


def shadow_of(layer: Any, dim: int) -> Any:
    """Return the variable of a layer that takes the gradient of its table's rows; add it where there is none yet."""
    for variable in layer._trainable_variables:
        if is_shadow(variable):
            return variable
    locked = layer._tracker.locked
    layer._tracker.unlock()
    shadow = layer.add_weight(
        shape=(1, dim), initializer="zeros", dtype="float32", autocast=False, name=_NAME, overwrite_with_gradient=True
    )
    if locked:
        layer._tracker.lock()
    if keras.backend.backend() == "tensorflow":  # of any number of rows, so that a change of it causes no new trace
        kind = type(shadow._value)
        shadow._value = kind(np.zeros((1, dim), np.float32), trainable=True, shape=(None, dim), name=_NAME)
    _note_who_assigns(shadow)
    return shadow


def _note_who_assigns(shadow: Any) -> None:
    assign = shadow.assign
    object.__setattr__(shadow, _BY, [])

    def noted(value: Any) -> Any:
        scopes = global_state.get_global_attribute("name_scope_stack") or [None]
        getattr(shadow, _BY).append(getattr(scopes[-1], "caller", None))
        return assign(value)

    object.__setattr__(shadow, "assign", noted)


def blank(capacity: int, dim: int) -> Any:
    """Return the value of a shadow before a step: memory of its own, which the step may overwrite."""
    return keras.ops.copy(_blank(capacity, dim))


@lru_cache(4)
def _blank(capacity: int, dim: int) -> Any:
    value = np.zeros((capacity, dim), np.float32)
    value[-1] = 1.0
    return keras.ops.convert_to_tensor(value)


class Handing:
    """Watches that the gradients of a model's tables are handed over by the optimizer whose rule, rate and scale they follow."""

    def __init__(self, shadows: Mapping[str, Any], optimizer: Callable[[], Any]) -> None:
        self._shadows, self._optimizer = shadows, optimizer
        self._by: dict[str, list[Any]] = {}
        self._left_out: dict[str, int] = {}

    def forget(self) -> None:
        """Drop all notes: the function that trains is made again."""
        self._by, self._left_out = {}, {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Take notes while a step is traced or run."""
        for shadow in self._shadows.values():
            getattr(shadow, _BY).clear()
        yield
        for name, shadow in self._shadows.items():
            by = getattr(shadow, _BY)
            if len(by) > 1:
                raise InvalidInputError(
                    f"train_step applies gradients of table {name!r} {len(by)} times, and its rows change once a step: this step changed "
                    "no row. Add the losses up, and apply their gradients once; or make two steps of it, with train_on_batch of two models "
                    "that share the layer"
                )
            self._by.setdefault(name, []).extend(one for one in by if all(one is not other for other in self._by.get(name, ())))

    def gradient(self, table: str, value: NDArray[np.float32], n: int) -> NDArray[np.float32] | None:
        """Return the gradient [n, dim] that a step left in a shadow; None where it left none."""
        expected, by = rule_of(self._optimizer()), self._by.get(table, [])
        if value[-1].any() and (value[-1] == 1.0).all() and not value[:-1].any():
            self._left(table, scaled=expected is not self._optimizer())
            return None
        if not by or any(one is not expected for one in by):
            raise InvalidInputError(_wrong_hands(table, expected, next((one for one in by if one is not expected), None)))
        return value[:n]

    def _left(self, table: str, scaled: bool) -> None:
        """Count a step without a gradient, unless it may have overflowed."""
        known = table in self._by and bool(self._by[table])
        if known and scaled:
            return
        self._left_out[table] = n = self._left_out.get(table, 0) + 1
        if n != (_PATIENCE_SCALED if scaled else _PATIENCE):
            return
        said = f"{n} steps looked up rows of table {table!r} and gave no optimizer their gradients, so those steps changed no row"
        if known:
            warnings.warn(f"{said}. Gradients that are gathered over several batches are lost for rows", stacklevel=2)
            return
        raise InvalidInputError(
            f"{said}. Apply them with the model's optimizer: the variable {_NAME!r} of the layer is among model.trainable_variables, and "
            "takes its gradient there. If rows are not to be trained, set trainable=False on the layer and compile again"
        )


def _wrong_hands(table: str, expected: Any, other: Any) -> str:
    rule = f"{type(expected).__name__} {expected.name!r}"
    if isinstance(other, keras.optimizers.Optimizer):
        return (
            f"{type(other).__name__} {other.name!r} is given the gradients of table {table!r}, whose rows follow {rule}: this step "
            "changed no row. Name the optimizer that trains the embeddings, distribute(model, cluster, optimizer=…), before "
            f"any training; or apply these gradients with {rule}"
        )
    return (
        f"something that is no Keras optimizer updates the variables of table {table!r}: this step changed no row, for the "
        f"variables then hold no gradient. Apply gradients with {rule} (apply, apply_gradients or stateless_apply), over "
        "model.trainable_variables; its rule is then the parameter servers' work"
    )


def hand_over_each_batch(optimizer: Any) -> None:
    """Have an optimizer that gathers batches leave gradients of rows in their shadows, batch by batch: Keras would keep the largest."""
    if _EACH in vars(optimizer):
        return
    overwrite, like = optimizer._overwrite_variables_directly_with_gradients, optimizer.add_variable_from_reference

    def leaving(grads: Any, variables: Any) -> Any:
        pairs = list(zip(grads, variables, strict=True))
        for gradient, variable in pairs:
            if is_shadow(variable):
                variable.assign(gradient)
        rest = [pair for pair in pairs if not is_shadow(pair[1])]
        return overwrite([gradient for gradient, _ in rest], [variable for _, variable in rest])

    def none_like(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        return None if is_shadow(reference_variable) else like(reference_variable, *args, **kwargs)

    object.__setattr__(optimizer, "_overwrite_variables_directly_with_gradients", leaving)
    object.__setattr__(optimizer, "add_variable_from_reference", none_like)
    object.__setattr__(optimizer, _EACH, True)


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


_KEPT = "_weights_kept"


def not_connected(model: Any) -> InvalidInputError:
    """Return the error for a model whose steps have no rows yet."""
    return InvalidInputError(f"{type(model).__name__} is no model over tables yet: call kvemb.keras.distribute(model, cluster) first")


class WeightsList(list[Any]):
    """The result of `get_weights`: arrays, and by layer's name the mark's state of the rows at that time."""

    def __init__(self, arrays: Iterable[Any], said: dict[str, dict[str, int]]) -> None:
        super().__init__(arrays)
        self.said = said


class KeptWeights:
    """Wraps the methods that hand a model's weights out and take them back."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._originals = {name: getattr(model, name) for name in ("save", "save_weights", "load_weights")}
        self.rows: SavedRows | None = None
        """Keeps the rows beside the weights; None: they are not kept."""

    def install(self) -> None:
        """Wrap them from now on."""
        own = {"get_weights": self._get, "set_weights": self._set, "load_weights": self._load, "export": self._refuse_export}
        for name, method in {**own, "save": self._saving("save"), "save_weights": self._saving("save_weights")}.items():
            object.__setattr__(self._model, name, method)
        object.__setattr__(self._model, _KEPT, self)

    def _dense(self) -> list[Any]:
        """Return weights for EarlyStopping and others: without shadows, which are no weights and change their shape."""
        return [variable for variable in self._model.weights if not is_shadow(variable)]

    def _get(self) -> WeightsList:
        if self.rows is not None:
            self.rows.save()
        said = {layer.name: layer.mark.state() for layer in layers_over_tables(self._model)}
        return WeightsList([variable.numpy() for variable in self._dense()], said)

    def _set(self, weights: list[Any]) -> None:
        dense = self._dense()
        if len(weights) != len(dense):
            raise InvalidInputError(f"the model has {len(dense)} weights beside its tables, got {len(weights)}")
        for variable, value in zip(dense, weights, strict=True):
            variable.assign(value)
        said = weights.said if isinstance(weights, WeightsList) else {}
        for layer in layers_over_tables(self._model):
            layer.mark.load(said.get(layer.name, {}))
        self._follow()

    def _saving(self, name: str) -> Callable[..., Any]:
        def saving(*args: Any, **kwargs: Any) -> Any:
            if self.rows is not None:
                self.rows.save()
            return self._originals[name](*args, **kwargs)

        return saving

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        """Load a file of dense weights; one that holds a plain model's embeddings is refused, and changes nothing."""
        variables = self._dense() + list(self._model.optimizer.variables if getattr(self._model, "optimizer", None) else [])
        before, layers = [variable.numpy() for variable in variables], layers_over_tables(self._model)
        try:
            result = self._originals["load_weights"](*args, **kwargs)
        except ValueError:
            self._refuse_plain(layers, variables, before)
            raise
        self._refuse_plain(layers, variables, before)
        self._follow()
        return result

    def _refuse_plain(self, layers: list[Any], variables: list[Any], before: list[Any]) -> None:
        errors = [error for layer in layers if (error := layer.take_refusal()) is not None]
        if errors:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            raise errors[0]

    def _follow(self) -> None:
        if self.rows is not None:
            self.rows.follow()

    def _refuse_export(self, *args: Any, **kwargs: Any) -> None:
        raise InvalidInputError(
            f"model {self._model.name!r} has rows in a cluster, which an exported file cannot ask: export its copy of plain layers, "
            "kvemb.keras.materialize(model).export(…)"
        )


class KerasRowCheckpoints(SavedRows):
    """`kvemb.keras.RowCheckpoints`: save the rows of a model's cluster beside its dense weights, and bring them back.

    From then on `get_weights`, `save_weights` and `save` of the model save the rows of that step, too (once for a step), and `set_weights`
    and `load_weights` load those of the weights that they take. So EarlyStopping, ModelCheckpoint and BackupAndRestore keep whole models.
    After `keras.saving.load_model` and `distribute` call `follow()`. All tables of the cluster are saved and loaded: in a job of several
    trainers let one do it, while no other trains.
    """

    def __init__(self, model: Any, url: str, *, keep: int | None = None) -> None:
        kept = getattr(model, _KEPT, None)
        if not isinstance(kept, KeptWeights):
            raise not_connected(model)
        marks: dict[str, list[Any]] = {}
        for layer in layers_over_tables(model):
            marks.setdefault(layer.table.name, []).append(layer.mark)
        super().__init__(marks, url, keep=keep)
        kept.rows = self
