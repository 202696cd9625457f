"""function: a tf.function whose rows are arguments; prepare: batches whose rows are pulled before they are used.

Strategy: the step is traced once with placeholders for rows. The part of the trace that makes the ids is cut out of it: a function from a
batch to ids that does nothing else, so it may run in any thread. A second trace takes the rows as arguments [None, dim], and returns their
gradients beside its own results. So a batch's lookups are one pull, ahead or when the step is called, and no call of Python stands in the
graph.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import numpy as np
import tensorflow as tf

from kvemb.errors import InvalidInputError

from ..bridge.batches_ahead import AheadOptions, BatchesAhead, checked_ahead
from ..bridge.shared_lookups import Asked
from ..bridge.step_tables import OwnProcess, asked_of
from ..lookahead.cluster_ports import TablePort
from .row_lookups import Slots, here, lookups_of, pull, rows_of, take
from .tensorflow_internals import wrap_function

_WHY = "its lookups are found by tracing it, so it must be what tf.function takes"


@dataclass(frozen=True, eq=False)
class _Plan:
    """The traces of a step for batches of one structure.

    `ids` makes a batch's tensors the ids of each lookup, and is cut out of `trace`, which holds Python functions that stand in it. `run`,
    None until it is called, returns results, and gradients of the lookups `gradients`. `steps` are optimizers whose step stands in it.
    """

    tables: list[TablePort]
    ids: Any
    trace: Any
    run: Any
    gradients: list[int]
    steps: list[Any]


class StepFunction:
    """A step whose rows are arguments of a tf.function; made by `function`. One thread; `asked` may be called in any."""

    def __init__(self, python_function: Callable[..., Any]) -> None:
        self.python_function = python_function
        self._process = OwnProcess("TensorFlow")
        self._plans: dict[Any, _Plan] = {}
        self._runs: dict[Any, _Plan] = {}

    def __call__(self, *batch: Any) -> Any:
        """Pull, run the step, and take the gradients of its rows over; then do the optimizers' steps that stand in it.

        Raises:
            InvalidInputError: the step cannot be traced, ids come of rows, or a table does not take them; nothing was pushed.
        """
        self._process.check()
        tensors, key = _tensors(batch)
        plan = self._run_of(key, batch)
        found = pull(_asked(plan, tensors))
        given = [(rows_of(table, one), one.inverse.astype("int64", copy=False)) for table, one in zip(plan.tables, found, strict=True)]
        result, gradients = plan.run(batch=_nested(batch, tensors), given=given)
        for at, gradient in zip(plan.gradients, gradients, strict=True):
            take(plan.tables[at], found[at], gradient.numpy())
        for optimizer in plan.steps:
            optimizer.step()
        return result

    def asked(self, batch: Any) -> list[Asked]:
        """Return the lookups that the step will make with a batch of a dataset."""
        given = batch if isinstance(batch, tuple) and self._n_arguments() != 1 else (batch,)
        tensors, key = _tensors(given)
        return _asked(self._plan_of(key, given), tensors)

    def find(self, batch: Any) -> list[TablePort]:
        """Trace the step with a batch of a dataset; return the tables that it looks up in."""
        given = batch if isinstance(batch, tuple) and self._n_arguments() != 1 else (batch,)
        return self._plan_of(_tensors(given)[1], given).tables

    def _n_arguments(self) -> int:
        return len(inspect.signature(self.python_function).parameters)

    def _plan_of(self, key: Any, batch: tuple[Any, ...]) -> _Plan:
        if key not in self._plans:
            self._plans[key] = _traced(self.python_function, tf.nest.map_structure(_spec, batch))
        return self._plans[key]

    def _run_of(self, key: Any, batch: tuple[Any, ...]) -> _Plan:
        if key not in self._runs:
            specs = tf.nest.map_structure(_spec, batch)
            self._runs[key] = _compiled(self.python_function, specs, self._plan_of(key, batch))
        return self._runs[key]


def function(python_function: Callable[..., Any]) -> StepFunction:
    """Make a training step: tf.function, with the rows of its lookups as arguments. A trace serves batches of any size.

    Args:
        python_function: takes a batch (tensors, nested), looks rows up, and may ask a tf.GradientTape and take a `RowsOptimizer`'s step.
            Lookups stand in its own graph, not inside of a tf.cond, a loop or another tf.function.

    Example:
        @kvemb.tensorflow.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = loss_of(embedding_lookup(words, batch["word"]), batch["label"])
            dense.apply_gradients(zip(tape.gradient(loss, variables), variables))
            rows.step()
            return loss
    """
    return StepFunction(getattr(python_function, "python_function", python_function))


def prepare(step: Callable[..., Any], dataset: Iterable[Any], **options: Unpack[AheadOptions]) -> BatchesAhead:
    """Pull the rows of a dataset's batches before they are used. The step's lookups are found by tracing it; the loop stays as it is.

    Args:
        step: called with each batch: made by `function`, a tf.function, or plain Python that could be one.
        dataset: any iterable of batches, a tf.data.Dataset for one. Its first element is examined.
        options: `AheadOptions`: consistency, k, threads_num, capacity, executor, report.

    Returns:
        An iterable to use instead of the dataset; a context manager.

    Raises:
        InvalidInputError: the step cannot be traced, looks nothing up, looks up in tables of several clusters, or an option is wrong.

    Example:
        for batch in prepare(step, dataset, threads_num=4, capacity=8):
            loss = step(batch)
    """
    traced = step if isinstance(step, StepFunction) else function(step)
    tables = traced.find(_first(dataset))
    clusters = {id(table.cluster): table.cluster for table in tables}
    if len(clusters) != 1:
        raise InvalidInputError(f"the step looks up in {len(tables)} tables of {len(clusters)} clusters; prepare is for tables of one")
    (cluster,) = clusters.values()
    return checked_ahead(cluster, **options).batches(dataset, traced.asked, lookups_of(cluster).shared)


def _first(dataset: Iterable[Any]) -> Any:
    if iter(dataset) is dataset:
        raise InvalidInputError("dataset is an iterator, whose first batch cannot be looked at without taking it; give what it is made of")
    for batch in dataset:
        return batch
    raise InvalidInputError("dataset has no batch")


def _traced(python_function: Callable[..., Any], specs: Any) -> _Plan:
    """Trace with placeholders for rows, and cut out the part that makes the ids."""
    made: list[Slots] = []

    def trace(*batch: Any) -> None:
        slots = Slots(tf.compat.v1.get_default_graph(), None)
        made.append(slots)
        _called(python_function, batch, slots)

    try:
        concrete = tf.function(trace).get_concrete_function(*specs)
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(f"{_name(python_function)}: {_WHY}. TensorFlow says: {error}") from error
    slots = made[-1]
    feeds = concrete.graph.inputs[: len(concrete.graph.inputs) - len(concrete.graph.captures)]
    whole = wrap_function.WrappedFunction(concrete.graph, wrap_function.VariableHolder())
    try:
        ids = whole.prune(feeds, [ids for _, ids in slots.asked])
    except Exception as error:
        raise InvalidInputError(
            f"{_name(python_function)}: its ids cannot be known before it runs; are they made of other rows? TensorFlow says: {error}"
        ) from error
    # Called as a function it would look for a signature first, which it lacks, and format all ids for a message that is not shown.
    flat = partial(_flat, ids.inference_fn.call_flat, ids.captured_inputs)
    return _Plan([table for table, _ in slots.asked], flat, concrete, None, [], [])


def _flat(call: Callable[..., Any], captured: Sequence[Any], *tensors: Any) -> Any:
    return call(*tensors, *captured)


def _compiled(python_function: Callable[..., Any], specs: Any, plan: _Plan) -> _Plan:
    made: list[Slots] = []

    def trace(batch: Any, given: Any) -> Any:
        slots = Slots(tf.compat.v1.get_default_graph(), given)
        made.append(slots)
        result = _called(python_function, batch, slots)
        return result, [slots.gradients[at] for at in sorted(slots.gradients)]

    rows = [(tf.TensorSpec([None, table.dim], tf.float32), tf.TensorSpec([None], tf.int64)) for table in plan.tables]
    run = tf.function(trace).get_concrete_function(batch=specs, given=rows)
    return _Plan(plan.tables, plan.ids, plan.trace, run, sorted(made[-1].gradients), made[-1].steps)


def _called(python_function: Callable[..., Any], batch: Any, slots: Slots) -> Any:
    before, here.slots = here.slots, slots
    try:
        return python_function(*batch)
    finally:
        here.slots = before


def _asked(plan: _Plan, tensors: list[Any]) -> list[Asked]:
    ids = plan.ids(*tensors)
    return [asked_of(table, np.asarray(of)) for table, of in zip(plan.tables, ids, strict=True)]


def _tensors(batch: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """Return a batch's tensors, and the structure shared by all batches that one trace serves."""
    specs = tf.nest.map_structure(_spec, batch)
    flat_specs = tf.nest.flatten(specs, expand_composites=True)
    flat = tf.nest.flatten(batch, expand_composites=True)
    tensors = [tf.convert_to_tensor(value, spec.dtype) for value, spec in zip(flat, flat_specs, strict=True)]
    return tensors, (repr(tf.nest.map_structure(lambda spec: 0, specs)), tuple(map(repr, tf.nest.flatten(specs))))


def _nested(batch: Any, tensors: list[Any]) -> Any:
    return tf.nest.pack_sequence_as(batch, tensors, expand_composites=True)


def _spec(value: Any) -> Any:
    """The type of a value; its first axis, and those of sparse and ragged ones, may be of any length."""
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec([None] * value.shape.rank, value.dtype)
    if isinstance(value, tf.RaggedTensor):
        inner = value.shape[1:].as_list()
        return tf.RaggedTensorSpec([None, *inner], value.dtype, value.ragged_rank, value.row_splits.dtype)
    tensor = tf.convert_to_tensor(value)
    return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)


def _name(python_function: Callable[..., Any]) -> str:
    return getattr(python_function, "__name__", type(python_function).__name__)
