"""RowEmbedding, `kvemb.keras.Embedding`: keras.layers.Embedding over a kvemb table."""

from collections.abc import Sequence
from typing import Any, Self

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from ...bridge.saved_rows import StepMark
from ...bridge.step_tables import asked_of
from ...lookahead.cluster_ports import TablePort
from .keras_internals import get_keras_mask, in_stateless_scope, in_symbolic_scope, set_keras_mask
from .rows_at_hand import RowsAtHand, not_differentiated
from .whole_ids import whole_ids

COMBINERS = ("sum", "mean", "sqrtn")
_ANY = 2**63 - 1
_ROWS_AT = "rows_at"  # in files of weights


@keras.saving.register_keras_serializable(package="kvemb", name="Embedding")
class RowEmbedding(keras.layers.Embedding):  # type: ignore[misc]
    """Look up rows by id, as keras.layers.Embedding. One class, for Keras asks one layer for all of it.

    It trains in a model that `distribute` has connected. Elsewhere it looks up the ids of its call, and refuses to train.
    """

    def __init__(
        self,
        table: TablePort | str,
        combiner: str | None = None,
        *,
        mask_zero: bool = False,
        output_dim: int | None = None,
        input_dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        by_name = isinstance(table, str)
        if not by_name and not all(hasattr(table, name) for name in ("pull", "dim", "definition", "cluster")):
            raise InvalidInputError(f"table must be a kvemb table (cluster.table(…)) or its name, got {type(table).__name__}")
        if combiner is not None and combiner not in COMBINERS:
            raise InvalidInputError(f"combiner is {combiner!r}; give None or one of {', '.join(COMBINERS)}")
        if by_name and output_dim is None:
            raise InvalidInputError(f"table {table!r} is a name: give output_dim, the weights of a row, too")
        num_ids = input_dim if isinstance(table, str) else table.definition.num_ids
        dim = output_dim if isinstance(table, str) else table.dim
        super().__init__(num_ids or _ANY, dim, mask_zero=mask_zero, **kwargs)
        self.become_rows(table.name if not isinstance(table, str) else table, combiner)
        if not isinstance(table, str):
            self.connect(table)

    def become_rows(self, table_name: str, combiner: str | None, *, follows: bool = False, weight_key: object = None) -> None:
        """Set the attributes that this class adds to its base, in a layer that is made, or converted."""
        self.table_name, self.combiner = table_name, combiner
        self._convert_input_args, self._allow_non_tensor_positional_args = False, True  # JAX would make 32 bits of a NumPy array's 64
        self.__dict__.pop("quantize", None)  # Keras's, of a layer that was converted, or around this class's
        # Behind Keras's tracker: none of these is a part of the layer.
        object.__setattr__(self, "follows", follows)
        object.__setattr__(self, "weight_key", weight_key)
        object.__setattr__(self, "_links", {"table": None, "mark": None, "at_hand": [], "said": {}, "refusal": None})

    def connect(self, table: TablePort) -> None:
        """Take a table, of a model that is loaded or made by name."""
        if table.dim != self.output_dim:
            raise InvalidInputError(f"table {table.name!r} has dim {table.dim}, layer {self.name!r} has {self.output_dim}")
        self._links["table"], self._links["mark"] = table, StepMark(table)
        self.mark.load(self._links["said"])

    def feed_from(self, at_hand: RowsAtHand) -> None:
        """Take the rows of a model's steps from there; a layer may be in several models."""
        self._links["at_hand"].append(at_hand)

    @property
    def table(self) -> TablePort:
        """The table."""
        table: TablePort | None = self._links["table"]
        if table is None:
            raise InvalidInputError(
                f"layer {self.name!r} is over table {self.table_name!r} of a cluster that it does not know: call "
                "kvemb.keras.distribute(model, cluster)"
            )
        return table

    @property
    def mark(self) -> StepMark:
        """At which step its rows are, in saved weights; of a layer that has its table."""
        found: StepMark = self._links["mark"]
        return found

    @property
    def connected(self) -> bool:
        """Whether it has its table."""
        return self._links["table"] is not None

    @property
    def embeddings(self) -> Any:
        """Refuse: the rows are in the cluster."""
        raise InvalidInputError(
            f"layer {self.name!r} has no weight: its rows are in table {self.table_name!r}. Look them up by id, or take those of "
            "kvemb.keras.materialize(model)"
        )

    def build(self, input_shape: Any = None) -> None:
        """Build nothing: the rows are in the cluster."""
        self.built = True

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Look up rows.

        Args:
            inputs: ids, any shape.
            weights: float, of the shape of `inputs`: factors of the rows; with a combiner only.

        Returns:
            [*inputs.shape, dim]; with a combiner [*inputs.shape[:-1], dim], [batch, dim] at least. Of the layer's compute dtype.
        """
        if weights is not None and self.combiner is None:
            raise InvalidInputError(f"layer {self.name!r}: weights go with a combiner")
        inputs = np.asarray(inputs) if isinstance(inputs, list | tuple) else inputs
        rows, mask = self._rows(inputs)
        if self.combiner is not None:
            alone = len(inputs.shape) == 1
            # For a bag of one row the weight matters in a sum only.
            factors = self._factors(inputs, mask, None if alone and self.combiner != "sum" else weights)
            if alone:
                rows, factors = keras.ops.expand_dims(rows, -2), keras.ops.expand_dims(factors, -1)
            return keras.ops.cast(_combined(rows, factors, self.combiner), self.compute_dtype)
        rows = keras.ops.cast(rows, self.compute_dtype)
        if mask is not None:
            set_keras_mask(rows, mask)  # it stays: Keras asks for a mask where there is none
        return rows

    def _rows(self, inputs: Any) -> tuple[Any, Any]:
        """The rows of ids, and which of these are not 0, where that is known and asked for."""
        for at_hand in self._links["at_hand"]:
            if at_hand.there:
                leaf, at, mask = at_hand.look_up(self.table_name, self.name, inputs)
                return keras.ops.take(leaf, at, axis=0), mask
        if in_symbolic_scope() or (in_stateless_scope() and any(of.building for of in self._links["at_hand"])):
            return keras.ops.zeros((*keras.ops.shape(inputs), self.output_dim), "float32"), None
        return self._pulled_now(inputs)

    def _pulled_now(self, inputs: Any) -> tuple[Any, Any]:
        """Rows of a call outside of a model's steps, which trains nothing."""
        table = self.table
        self.mark.before_lookup(False)
        training = self._get_call_context().training
        if training:
            raise InvalidInputError(self._not_trained("is called in training"))
        try:
            values = whole_ids(inputs, table, self._declared())
        except InvalidInputError:
            raise
        except Exception as error:
            raise InvalidInputError(
                f"layer {self.name!r} over table {self.table.name!r} is traced, and its ids have no values yet. Train, "
                "evaluate and predict "
                "with a model that kvemb.keras.distribute(model, cluster) has connected; to export it, take kvemb.keras.materialize(model)"
            ) from error
        ids = self.ids_of(values)
        distinct, inverse = np.unique(ids, return_inverse=True)
        rows, _ = table.pull(distinct if table.definition.id_dtype == "uint64" else distinct.view(np.int64), return_versions=True)
        found = keras.ops.convert_to_tensor(rows[inverse].reshape(*values.shape, table.dim))
        mask = keras.ops.convert_to_tensor(values != 0) if self.mask_zero else None
        if training is False or not self.trainable:
            return found, mask
        return not_differentiated(found, self._not_trained("is differentiated")), mask

    def _not_trained(self, what: str) -> str:
        return (
            f"layer {self.name!r} over table {self.table.name!r} {what} outside of fit and train_on_batch of a model "
            "that kvemb.keras.distribute(model, cluster) has connected: its gradients would not be pushed. Connect the model that you "
            "train, be it one around it, and write a step of your own as its train_step; call it with training=False for no training"
        )

    def _declared(self) -> str | None:
        """The dtype of integers that the graph which the layer stands in makes of its ids, if it does."""
        symbols = [one for node in self._inbound_nodes for one in node.input_tensors[:1]]
        return next((str(one.dtype) for one in symbols if "int" in str(one.dtype)), None)

    def ids_of(self, values: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the ids [m] of an array of integers that the layer is called with, flat and checked."""
        return asked_of(self.table, values)[1]

    def _factors(self, inputs: Any, mask: Any, weights: Any) -> Any:
        factors = keras.ops.ones(keras.ops.shape(inputs), "float32") if weights is None else keras.ops.cast(weights, "float32")
        return factors if mask is None else factors * keras.ops.cast(mask, "float32")

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """As keras.layers.Embedding; the result of a combiner has no mask."""
        return None if self.combiner is not None else super().compute_mask(inputs, mask)

    def _set_mask_metadata(self, inputs: Any, outputs: Any, previous_mask: Any) -> None:
        """In a graph have the mask come with the rows, where it is of all bits of the ids."""
        if self.mask_zero and self.combiner is None and isinstance(outputs, keras.KerasTensor) and self.input_dim > 1 << 31:
            set_keras_mask(outputs, _MaskOfRows()(inputs, outputs))
        else:
            super()._set_mask_metadata(inputs, outputs, previous_mask)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the result's shape."""
        combined = self.combiner is not None and len(input_shape) > 1
        return (*(input_shape[:-1] if combined else input_shape), self.output_dim)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Return shape and dtype of the result."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype)

    def save_own_variables(self, store: Any) -> None:
        """Save the step at which the rows are; the rows themselves are saved with the cluster."""
        if self.connected and (said := self.mark.state()):
            store[_ROWS_AT] = np.array([said["epoch"], said["step"]], np.int64)

    def load_own_variables(self, store: Any) -> None:
        """Take note at which step the rows were."""
        names = set(store.keys())
        if names - {_ROWS_AT}:
            self._links["refusal"] = InvalidInputError(
                f"nothing was changed: the file holds weights for layer {self.name!r}, which is over table {self.table_name!r} of a "
                "cluster. Load such a file before distribute, which carries them"
            )
            raise self._links["refusal"]
        self._links["said"] = dict(zip(("epoch", "step"), map(int, store[_ROWS_AT][:]), strict=True)) if names else {}
        if self.connected:
            self.mark.load(self._links["said"])

    def take_refusal(self) -> InvalidInputError | None:
        """Return why a file was refused since this was asked last; Keras makes a warning of it, or another error."""
        refusal: InvalidInputError | None = self._links["refusal"]
        self._links["refusal"] = None
        return refusal

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal layer, with its table's name."""
        base = keras.layers.Layer.get_config(self)
        num_ids = None if self.input_dim == _ANY else self.input_dim
        own = {"table": self.table_name, "combiner": self.combiner, "mask_zero": self.mask_zero}
        own |= {"follows": True} if self.follows else {}
        return {**base, **own, "output_dim": self.output_dim, "input_dim": num_ids}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make a layer that `distribute` connects."""
        rest = dict(config)
        follows = rest.pop("follows", False)
        layer = cls(**rest)
        object.__setattr__(layer, "follows", follows)
        return layer

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Refuse."""
        raise InvalidInputError(
            f"layer {self.name!r} is over table {self.table_name!r}: LoRA needs all rows at once; materialize the model first"
        )

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Refuse."""
        raise InvalidInputError(
            f"layer {self.name!r} is over table {self.table_name!r}: materialize the model first, then quantize the copy"
        )


@keras.saving.register_keras_serializable(package="kvemb")
class _MaskOfRows(keras.Operation):  # type: ignore[misc]
    """Which ids are not 0, by the layer that has looked them up."""

    def call(self, ids: Any, rows: Any) -> Any:
        """Return the mask that `rows` have; elsewhere than in a step it may be that of the ids."""
        mask = get_keras_mask(rows)
        return keras.ops.not_equal(ids, 0) if mask is None else mask

    def compute_output_spec(self, ids: Any, rows: Any) -> Any:
        """Return shape and dtype of the mask."""
        return keras.KerasTensor(ids.shape, dtype="bool")


# As `kvemb.keras` calls it: by this name Keras finds a layer's place in a file of weights, which is that of the plain layer then.
RowEmbedding.__name__ = "Embedding"


def _combined(rows: Any, factors: Any, combiner: str) -> Any:
    total = keras.ops.sum(rows * keras.ops.expand_dims(factors, -1), axis=-2)
    if combiner == "sum":
        return total
    norm = keras.ops.sum(factors if combiner == "mean" else keras.ops.square(factors), axis=-1, keepdims=True)
    norm = norm if combiner == "mean" else keras.ops.sqrt(norm)
    empty = keras.ops.equal(norm, 0)
    return keras.ops.where(empty, keras.ops.zeros_like(total), total / keras.ops.where(empty, keras.ops.ones_like(norm), norm))
