"""distribute: the large embeddings of a tf.Module, plain tf.Variables, become tables, in place, in one line; its training loop stays.

Variables and optimizer become others, the same objects.

materialize: a plain copy of a model over tables, to save, export or look at.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from ..bridge.convert_model import Conversion, Distributed, DistributeOptions, convert_model
from ..bridge.filled_tables import Site, SiteTable, TableOptions, WeightPlace, check_bytes, rows_of_table
from ..bridge.pushed_steps import MAX_UNAPPLIED, check_max_unapplied
from ..bridge.step_tables import StepTables
from .table_variables import PLAIN, TableVariable, become

if TYPE_CHECKING:
    from kvemb.api import Cluster

MAX_BYTES = 1 << 30


@dataclass(frozen=True, eq=False, kw_only=True)
class DistributedTensorFlow(Distributed):
    """The result of `distribute`.

    Args:
        steps: push the gradients: `last_ack` is of the newest push.
    """

    steps: StepTables


def distribute(
    model: Any, cluster: "Cluster", *, optimizer: Any, max_unapplied: int = MAX_UNAPPLIED, **options: Unpack[DistributeOptions]
) -> DistributedTensorFlow:
    """Replace a tf.Module's large embeddings by tables of a cluster, in place, and have its optimizer push their gradients.

    The program stays: tf.gather and tf.nn's lookups of the variables, the tape, what is done to gradients, `apply_gradients`, in a
    tf.function or not. Call it before the first of these. Every trainer of a job calls it, with the same arguments; so does one that
    resumes. A table begins with the variable's values: the trainer that makes it assigns them, others wait until they are there.

    Args:
        model: a tf.Module, whose variables exist.
        cluster: of `kvemb.connect`.
        optimizer: of tf.keras.optimizers, whose apply_gradients trains the model. Tables get its rule, and follow its learning rate.
        max_unapplied: in an async job, how many of its pushes may not be applied yet when a step is over.
        options: `DistributeOptions`: min_rows, names, prefix, leave (paths of variables that stay, as a large kernel, which a program
            multiplies by), initializer, dtype, seed, reduce, quiet.

    Raises:
        InvalidInputError: a variable that cannot be a table, an optimizer without a counterpart, or arguments that do not go together.
            Nothing was changed.
        TableMismatchError, UnknownTableError, DeadlineExceededError, …: of a table; the model is as it was, tables may have been made.

    Example:
        model, optimizer = Recommender(), tf.keras.optimizers.Adagrad(0.05)
        distribute(model, cluster, optimizer=optimizer)
        for batch in dataset:
            with tf.GradientTape() as tape:
                loss = model.loss(batch)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
    """
    check_max_unapplied(max_unapplied)
    if not isinstance(model, tf.Module):
        raise InvalidInputError(
            f"model must be a tf.Module, got {type(model).__name__}; a Keras model is for kvemb.keras.distribute. A program without "
            "a module can put its variables into one: model = tf.Module(); model.user = variable"
        )
    return convert_model(TensorFlowModel(model, optimizer, max_unapplied), cluster, **options)


class TensorFlowModel(Conversion[DistributedTensorFlow]):
    """A tf.Module, and the optimizer of its variables."""

    kind = "variable"
    sought = "variable [n, dim]"
    none_there = "the model has none; does its first call make them?"

    def __init__(self, model: Any, optimizer: Any, max_unapplied: int) -> None:
        from .joined_optimizer import checked_rule  # with Keras, which a program has that gives an optimizer of it

        self._model, self._optimizer, self._max_unapplied = model, optimizer, max_unapplied
        self._rule = checked_rule(optimizer)

    def places(self) -> list[WeightPlace]:
        """Find the variables [n, dim]."""
        return [_place(path, of) for path, of in _matrices(self._model).items()]

    def problems(self, holders: Sequence[WeightPlace]) -> Iterator[str]:
        """Yield why a variable cannot become a table."""
        return (f"{one.paths[0]!r}: {problem}" for one in holders for problem in _problems(one.weight))

    def rules(self, sites: Sequence[Site], options: TableOptions) -> Mapping[str, OptimizerSpec]:
        """The optimizer's rule for all."""
        known = {id(of) for of in self._optimizer._trainable_variables}
        if built := [site.path for site in sites if id(site.weight) in known]:
            raise InvalidInputError(
                f"nothing was changed: the optimizer has state for {', '.join(built)} already; call distribute before its first step"
            )
        return {site.table: self._rule.spec for site in sites}

    def convert(self, tables: Sequence[SiteTable], cluster: "Cluster", options: TableOptions) -> Callable[..., DistributedTensorFlow]:
        """Make variables over tables of the variables, and have the optimizer push."""
        from .joined_optimizer import JoinedOptimizer

        variables = [become(one.site.weight, one.table, one.site.path) for one in tables]
        joined = JoinedOptimizer(self._optimizer, self._rule, variables, self._max_unapplied)
        joined.install()
        return partial(DistributedTensorFlow, tables=tuple(one.table for one in tables), steps=joined.tables)


def _place(path: str, variable: Any) -> WeightPlace:
    def rows_of(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = tf.gather(variable, ids).numpy()
        return rows

    stays = "" if variable.trainable else "it is not trained"
    if isinstance(variable, TableVariable):
        stays = f"it is table {variable.table.name!r} already"
    n_rows, dim = (n or 0 for n in variable.shape)
    return WeightPlace((path,), variable, variable, n_rows, dim, rows_of, stays)


def _matrices(model: Any) -> dict[str, Any]:
    """Return the variables [n, dim] by path, each once."""
    by_path, seen = {}, set()
    for path, variable in model._flatten(predicate=lambda of: isinstance(of, tf.Variable), with_path=True):
        if variable.shape.rank == 2 and id(variable) not in seen:
            seen.add(id(variable))
            by_path[".".join(map(str, path))] = variable
    return by_path


def _problems(variable: Any) -> Iterator[str]:
    if type(variable) is not PLAIN:
        yield f"{type(variable).__name__} is no plain tf.Variable; make it outside of a strategy's scope and of a graph of TensorFlow 1"
    elif variable.dtype != tf.float32:
        yield f"it is {variable.dtype.name}, and rows are looked up as float32 (storage may be 16 bits: dtype=)"
    if variable.constraint is not None:
        yield "constraint: it would write rows, which only parameter servers do"


def materialize(model: Any, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return a copy of a model over tables with plain variables, which have the rows of now. It knows no cluster.

    Args:
        model: that `distribute` took, and copy.deepcopy can copy; not changed.
        max_bytes: of all rows together.

    Raises:
        InvalidInputError: the rows have more bytes than that, or there is nothing to copy.
    """
    variables = [of for of in _matrices(model).values() if isinstance(of, TableVariable)] if isinstance(model, tf.Module) else []
    if not variables:
        raise InvalidInputError("the model has no variable over a table")
    check_bytes([of.table for of in variables], max_bytes)
    variables[0].table.cluster.flush()
    plain: dict[int, Any] = {id(of): tf.Variable(rows_of_table(of.table), name=of.name.partition(":")[0]) for of in variables}
    return copy.deepcopy(model, plain)
