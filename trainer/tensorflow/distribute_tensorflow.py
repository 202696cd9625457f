"""distribute: the large embeddings of a tf.Module, plain tf.Variables, become tables, in place, in one line; its training loop stays.

Strategy: everything is checked before anything changes. Then tables are made and filled, and then the variables and the optimizer become
others, the same objects.

materialize: a plain copy of a model over tables, to save, export or look at.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.schema.table_def import check_table_name

from ..bridge.distributed import Distributed
from ..bridge.filled_tables import (
    CARRIED,
    First,
    SiteTable,
    TableOptions,
    check_connection,
    fill,
    make_table,
    none_replaced,
    rows_of_table,
    shared_already,
)
from ..bridge.pushed_steps import MAX_UNAPPLIED, check_max_unapplied
from ..bridge.step_tables import StepTables
from .table_variables import PLAIN, TableVariable, become

if TYPE_CHECKING:
    from kvemb.api import Cluster

Names = Mapping[str, str] | Callable[[str], str]
"""Table names by path in the model, or a function from it."""
MAX_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class VariableSite:
    """One variable that becomes a table.

    Args:
        table: its name.
        path: of the variable in the model.
        variable: float32 [n_rows, dim].
    """

    table: str
    path: str
    variable: Any

    @property
    def n_rows(self) -> int:
        """Rows: ids are 0 to n_rows - 1."""
        return int(self.variable.shape[0])

    @property
    def dim(self) -> int:
        """Weights per row."""
        return int(self.variable.shape[1])

    @property
    def padding(self) -> list[int]:
        """None: a variable has no such row."""
        return []

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows [n, dim] of the variable."""
        rows: NDArray[np.float32] = tf.gather(self.variable, ids).numpy()
        return rows

    def __str__(self) -> str:
        return f"table {self.table!r} (variable {self.path!r})"


@dataclass(frozen=True, eq=False, kw_only=True)
class DistributedTensorFlow(Distributed):
    """The result of `distribute`.

    Args:
        steps: push the gradients: `last_ack` is of the newest push.
    """

    steps: StepTables


def distribute(
    model: Any,
    cluster: "Cluster",
    *,
    optimizer: Any,
    min_rows: int = 10_000,
    names: Names | None = None,
    prefix: str = "",
    leave: Collection[str] = (),
    initializer: Initializer | None = None,
    dtype: str = "float32",
    seed: int = 0,
    reduce: str = "sum",
    max_unapplied: int = MAX_UNAPPLIED,
    quiet: bool = False,
) -> DistributedTensorFlow:
    """Replace a tf.Module's large embeddings by tables of a cluster, in place, and have its optimizer push their gradients.

    The program stays: tf.gather and tf.nn's lookups of the variables, the tape, what is done to gradients, `apply_gradients`, in a
    tf.function or not. Call it before the first of these. Every trainer of a job calls it, with the same arguments; so does one that
    resumes. A table begins with the variable's values: the trainer that makes it assigns them, others wait until they are there.

    Args:
        model: a tf.Module, whose variables exist.
        cluster: of `kvemb.connect`.
        optimizer: of tf.keras.optimizers, whose apply_gradients trains the model. Tables get its rule, and follow its learning rate.
        min_rows: variables [n, dim] of fewer rows stay, and so do those that are not trained.
        names: of the tables, by the variable's path in the model ("towers.0.user"), or a function from it; the path unless given.
        prefix: stands before the name of each table, as "ranker/": a model that is not to share rows with another one needs its own.
        leave: paths of variables that stay: a large kernel, which a program multiplies by.
        initializer: draws the rows, in place of the values.
        dtype, seed, reduce: of the tables; see `kvemb.schema.table_def.TableDef`.
        max_unapplied: in an async job, how many of its pushes may not be applied yet when a step is over.
        quiet: do not write the report to stderr.

    Raises:
        InvalidInputError: a variable that cannot be a table, an optimizer without a counterpart, or arguments that do not go together.
            Nothing was changed.
        TableMismatchError, UnknownTableError, DeadlineExceededError, …: a table exists with another identity, is missing, or is not filled.
            The model is as it was; tables may have been made.

    Example:
        model, optimizer = Recommender(), tf.keras.optimizers.Adagrad(0.05)
        distribute(model, cluster, optimizer=optimizer)
        for batch in dataset:
            with tf.GradientTape() as tape:
                loss = model.loss(batch)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
    """
    from .joined_optimizer import JoinedOptimizer, checked_rule  # with Keras, which a program has that gives an optimizer of it

    check_connection(cluster)
    check_max_unapplied(max_unapplied)
    if not isinstance(model, tf.Module):
        raise InvalidInputError(
            f"model must be a tf.Module, got {type(model).__name__}; a Keras model is for kvemb.keras.distribute. A program without "
            "a module can put its variables into one: model = tf.Module(); model.user = variable"
        )
    rule = checked_rule(optimizer)
    sites, left = _find_sites(model, min_rows, names, leave, prefix)
    known = {id(of) for of in optimizer._trainable_variables}
    if built := [site.path for site in sites if id(site.variable) in known]:
        raise InvalidInputError(
            f"nothing was changed: the optimizer has state for {', '.join(built)} already; call distribute before its first step"
        )
    if initializer is not None:
        for site in sites:
            initializer.check_dim(site.dim)
    first = First(True, CARRIED, "") if initializer is None else First(False, initializer, "given")
    options = TableOptions(dtype, seed, reduce)
    tables = [make_table(cluster, site, rule.spec, options, first, None) for site in sites]
    fill(tables, None)
    joined = JoinedOptimizer(optimizer, rule, [become(one.site.variable, one.table, one.site.path) for one in tables], max_unapplied)
    joined.install()
    lines = [*_lines(tables), *(f"variable {path!r} stays: {why}" for path, why in left), *shared_already(tables)]
    done = DistributedTensorFlow(tables=tuple(one.table for one in tables), lines=tuple(lines), steps=joined.tables)
    done.report(quiet=quiet)
    return done


def _find_sites(
    model: Any, min_rows: int, names: Names | None, leave: Collection[str], prefix: str
) -> tuple[list[VariableSite], list[tuple[str, str]]]:
    """Decide for each variable [n, dim] whether it becomes a table.

    Returns:
        Those that do; (path, why) of those that stay.
    """
    found = _matrices(model)
    for what, given in (("leave", set(leave)), ("names", set(names) if isinstance(names, Mapping) else set())):
        if unknown := sorted(given - found.keys()):
            raise InvalidInputError(f"{what}: no variable [n, dim] is at {', '.join(unknown)}; there are: {', '.join(found) or 'none'}")
    sites, left, problems = [], [], []
    for path, variable in found.items():
        if why := "leave=[…] names it" if path in leave else _reason_to_stay(variable, min_rows):
            left.append((path, why))
            continue
        problems += [f"{path!r}: {problem}" for problem in _problems(variable)]
        sites.append(VariableSite(_name(path, names, prefix), path, variable))
    if problems:
        raise InvalidInputError(
            "nothing was changed: " + "; ".join(problems) + ". Change the model, or keep these local with leave=[their paths]"
        )
    tables = [site.table for site in sites]
    if twice := sorted({name for name in tables if tables.count(name) > 1}):
        raise InvalidInputError(f"names: several variables would be table {', '.join(twice)}; give each a name of its own")
    if not sites:
        raise none_replaced("embedding", left, "the model has no variable [n, dim]; does its first call make them?")
    return sites, left


def _matrices(model: Any) -> dict[str, Any]:
    """Return the variables [n, dim] by path, each once."""
    by_path, seen = {}, set()
    for path, variable in model._flatten(predicate=lambda of: isinstance(of, tf.Variable), with_path=True):
        if variable.shape.rank == 2 and id(variable) not in seen:
            seen.add(id(variable))
            by_path[".".join(map(str, path))] = variable
    return by_path


def _reason_to_stay(variable: Any, min_rows: int) -> str:
    if isinstance(variable, TableVariable):
        return f"it is table {variable.table.name!r} already"
    if (variable.shape[0] or 0) < min_rows:
        return f"{variable.shape[0]} rows, fewer than min_rows={min_rows}"
    return "" if variable.trainable else "it is not trained"


def _problems(variable: Any) -> Iterator[str]:
    if type(variable) is not PLAIN:
        yield f"{type(variable).__name__} is no plain tf.Variable; make it outside of a strategy's scope and of a graph of TensorFlow 1"
    elif variable.dtype != tf.float32:
        yield f"it is {variable.dtype.name}, and rows are looked up as float32 (storage may be 16 bits: dtype=)"
    if variable.constraint is not None:
        yield "constraint: it would write rows, which only parameter servers do"


def _name(path: str, names: Names | None, prefix: str) -> str:
    given = names(path) if callable(names) else (names or {}).get(path, path)
    try:
        return check_table_name(prefix + given)
    except InvalidInputError as error:
        raise InvalidInputError(f"variable {path!r}: {error}; give names={{{path!r}: …}}") from error


def _lines(tables: Sequence[SiteTable[VariableSite]]) -> list[str]:
    return [
        f"variable {one.site.path!r}: {one.site.n_rows} x {one.site.dim} -> table {one.site.table!r}, "
        f"{'made' if one.made else 'opened'}, {one.table.definition.optimizer.kind}"
        + (", its values carried" if one.first.carried and one.made else "")
        for one in tables
    ]


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
    needed = sum(4 * of.shape.num_elements() for of in variables)
    if needed > max_bytes:
        raise InvalidInputError(
            f"all rows of {', '.join(of.table.name for of in variables)} are {needed} bytes, above max_bytes={max_bytes}; raise it"
        )
    variables[0].table.cluster.flush()
    plain: dict[int, Any] = {id(of): tf.Variable(rows_of_table(of.table), name=of.name.partition(":")[0]) for of in variables}
    return copy.deepcopy(model, plain)
