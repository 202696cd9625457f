"""A table in the place of a tf.Variable: looked up by TensorFlow's own functions, with the gradient that the variable would have.

Strategy: the variable stays the same object, of another class, so all that hold it hold the table. Its own memory becomes one row of NaN. A
lookup returns rows whose gradient is that of a gather from the variable: tf.IndexedSlices of the ids, whatever the program then does to it.

All that reads the variable whole, or writes it, is refused. A tf.function that was traced before finds that one row: a lookup fails there,
a sum is NaN.
"""

from typing import Any

import tensorflow as tf

from kvemb.errors import InvalidInputError

from ..bridge.saved_rows import StepMark
from ..bridge.step_tables import OwnProcess
from ..lookahead.cluster_ports import TablePort
from .row_lookups import find
from .tensorflow_internals import VARIABLE_VALUE_KEY, resource_variable_ops

PLAIN = resource_variable_ops.ResourceVariable
"""The one class of variables that can become tables: those of strategies, and sharded ones, are others."""
_WRITES = ("assign", "scatter_", "batch_scatter_", "_strided_slice_assign", "count_up_to")
_UNKNOWN = -1  # a step, in a checkpoint


class TableVariable(resource_variable_ops.ResourceVariable):  # type: ignore[misc]
    """A variable [n, dim] whose rows a table keeps; made by `become`."""

    _handle = None  # TensorFlow's C++ reads a variable by this, past all methods here; without one it asks __tf_tensor__
    table: TablePort
    mark: StepMark
    _path: str
    _nothing: Any
    _process: OwnProcess

    @property
    def handle(self) -> Any:
        """What tapes know the variable by."""
        return self._nothing

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Look rows up, float32 [*indices.shape, dim]; tf.gather and tf.nn's lookups call it."""
        self._process.check()
        with tf.name_scope(name or "Gather"):
            ids = tf.convert_to_tensor(indices)
            (((rows, at), _),) = find([(self.table, tf.reshape(ids, [-1]))])
            shape = tf.concat([tf.shape(ids), [self.table.dim]], 0)
            found = tf.ensure_shape(tf.reshape(tf.gather(rows, at), shape), ids.shape.concatenate([self.table.dim]))
            return self._attached(ids, found)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """As `sparse_read`, of indices [..., 1]."""
        indices = tf.convert_to_tensor(indices)
        if indices.shape.rank is None or indices.shape[-1] != 1:
            raise self._refused("gather_nd of parts of rows")
        return self.sparse_read(indices[..., 0], name)

    def _attached(self, ids: Any, found: Any) -> Any:
        """Give rows that were found the gradient of a gather. A read of the variable hands the gradient on as it is, so it stays sparse."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def attached(nothing: Any) -> tuple[Any, Any]:
            return tf.identity(found), lambda gradient: self._slices(ids, gradient)

        resource_variable_ops.variable_accessed(self)
        return attached(tf.raw_ops.ReadVariableOp(resource=self._nothing, dtype=tf.float32))

    def _slices(self, ids: Any, gradient: Any) -> Any:
        if type(tf.compat.v1.get_default_graph()).__name__ == "_WhileBodyGradFuncGraph":
            raise self._refused("a gradient through a loop of a tf.function", "; take the tape into the loop, or the lookup out of it")
        values = tf.reshape(tf.convert_to_tensor(gradient), [-1, self.table.dim])
        return tf.IndexedSlices(values, tf.reshape(ids, [-1]), tf.constant(self.shape.as_list()))

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        raise self._refused("a read of the whole variable")

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        """Refuse: it would be all rows."""
        raise self._refused("a read of the whole variable")

    def __tf_tracing_type__(self, signature_context: Any) -> Any:
        """Refuse: in the function it would be a plain variable."""
        raise self._refused("an argument of a tf.function", "; let the function find it in the model")

    def _export_to_saved_model_graph(self, *_: Any, **__: Any) -> Any:
        raise self._refused("a SavedModel", "; save a plain copy, kvemb.tensorflow.materialize(model)")

    def _serialize_to_tensors(self) -> dict[str, Any]:
        """For tf.train.Checkpoint: the step that the rows are at. They are saved by the cluster."""
        state = self.mark.state()
        return {VARIABLE_VALUE_KEY: tf.constant([state.get("step", _UNKNOWN), state.get("epoch", _UNKNOWN)], tf.int64)}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> None:
        step, epoch = restored_tensors[VARIABLE_VALUE_KEY].numpy().tolist()
        self.mark.load({} if step == _UNKNOWN else {"step": step, "epoch": epoch})

    def __repr__(self) -> str:
        """Describe it without reading rows."""
        return f"<TableVariable {self.name!r} shape={tuple(self.shape.as_list())} table={self.table.name!r}>"

    def _refused(self, what: str, instead: str = "") -> InvalidInputError:
        instead = instead or (
            f". Look rows up (tf.gather, tf.nn.embedding_lookup; all of them with tf.range({self.shape[0]})), set them with table.assign, "
            f"or keep the variable with leave=[{self._path!r}]"
        )
        return InvalidInputError(f"{what} is refused for {self._path!r}: its rows are in table {self.table.name!r} of a cluster{instead}")


def _writing(name: str) -> Any:
    def refused(self: TableVariable, *_: Any, **__: Any) -> Any:
        raise self._refused(f"{name}, which would write rows,")

    return refused


for _name in dir(PLAIN):
    if _name.startswith(_WRITES):
        setattr(TableVariable, _name, _writing(_name))


def become(variable: Any, table: TablePort, path: str) -> TableVariable:
    """Turn a variable of class `PLAIN`, float32 [n, dim], into one over a table, for all that hold it, and free its memory."""
    nothing = vars(variable).pop("_handle")
    tf.raw_ops.AssignVariableOp(resource=nothing, value=tf.fill([1, table.dim], float("nan")), validate_shape=False)
    variable.__class__ = TableVariable
    variable.table, variable.mark, variable._path = table, StepMark(table), path
    variable._nothing, variable._process = nothing, OwnProcess("TensorFlow")
    assert isinstance(variable, TableVariable)
    return variable
