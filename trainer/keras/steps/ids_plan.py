"""Which ids a batch asks a model's layers for: found once, by walking the model with symbols, and computed for each batch.

Strategy: a functional model has its graph. A subclassed one is called once with symbols for its inputs, and so is every part of a model
that holds a layer over a table. The symbol that such a layer is called with says by which operations it comes from the batch. For each
batch those operations are called again, on the batch as the host has it. A model's own `compute_loss`, which may look up what stands in y,
is called with symbols likewise.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from ..layers.keras_internals import Functional, backend_module
from ..layers.row_embedding import RowEmbedding
from ..layers.whole_ids import host, whole_ids

Values = dict[int, Any]
"""Of one batch: the values computed, by symbol."""
Compute = Callable[[Sequence[Any], Values], Any]
"""From a batch's inputs, flat, to a value."""
Feature = str | int | Callable[[Any], Any]
"""The source of a layer's ids: a key or index of x, or a function of x."""
DRAW_BEFORE = "Ids that are drawn, as negatives are, come with the batch: draw them in the input pipeline, as an input of the model"


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer in a step, and how its ids are computed."""

    layer: RowEmbedding
    ids: Compute


class IdsPlan:
    """The calls of a model's layers over tables, in the order in which they come."""

    def __init__(self, model: Any, x: Any, y: Any, features: Mapping[str, Feature | Sequence[Feature]]) -> None:
        self._model, self.calls, self._named = model, list[LayerCall](), list[tuple[RowEmbedding, Feature]]()
        self.weighs = False
        """Whether ids are computed by layers with weights, which each step changes."""
        layers = layers_over_tables(model)
        named = {layer.name for layer in layers if layer.name in features}
        for layer in layers:
            given = features.get(layer.name, ())
            for one in [given] if isinstance(given, str | int) or callable(given) else given:
                self._named.append((layer, one))
        if len(named) < len(layers):
            walked = _walked(named, model, x, y)
            if walked.constants:
                _refuse_drawn(walked.constants, _walked(named, model, x, y).constants)
            self.calls, self.weighs = walked.calls, walked.weighs

    def ids(self, x: Any, y: Any = None) -> list[tuple[RowEmbedding, NDArray[Any]]]:
        """Return each call's layer and its ids, integers of the shape that the layer is called with."""
        with _long_integers():
            flat, values = [*inputs_of(self._model, x), *keras.tree.flatten(y)] if self.calls else [], Values()
            found = [(call.layer, call.ids(list(map(_long, flat)), values)) for call in self.calls]
            found += [(layer, one(x) if callable(one) else x[one]) for layer, one in self._named]
        return [(layer, whole_ids(ids, layer.table)) for layer, ids in found]


def layers_over_tables(model: Any) -> list[RowEmbedding]:
    """Return a model's layers over tables, each once."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, RowEmbedding)]


def inputs_of(model: Any, x: Any) -> list[Any]:
    """Return a batch's inputs, flat, in the order and the rank in which the model's graph has them."""
    graph = _graph_of(model)
    if graph is None:
        return list(keras.tree.flatten(x))
    flat = keras.tree.flatten(x) if not isinstance(x, Mapping) else _by_name(graph._inputs_struct, x)
    return [_of_rank(one, symbol) for one, symbol in zip(flat, graph.inputs, strict=False)]


def _by_name(struct: Any, x: Mapping[str, Any]) -> list[Any]:
    """The inputs of a batch that is a mapping: those that the graph has no use for are left out."""
    if isinstance(struct, Mapping):
        return [one for key in sorted(struct) for one in keras.tree.flatten(x[key])]
    return [x[one.name] for one in keras.tree.flatten(struct)]


def _of_rank(value: Any, symbol: Any) -> Any:
    if value is None or len(value.shape) == len(symbol.shape):
        return value
    if len(value.shape) == len(symbol.shape) - 1 and symbol.shape[-1] == 1:
        return _sliced(value, (..., None))
    if len(value.shape) == len(symbol.shape) + 1 and value.shape[-1] == 1:
        return _sliced(value, (..., 0))
    return value


def _graph_of(model: Any) -> Any:
    """The functional graph of a model; None if it has none."""
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) and _runs_its_graph(model) else None


def _runs_its_graph(model: Any) -> bool:
    return type(model).call is Functional.call


def _walked(named: set[str], model: Any, x: Any, y: Any) -> "_SymbolWalk":
    walk = _SymbolWalk(named)
    with _meeting(walk.meet):
        walk.model(model, x, y)
    return walk


def _refuse_drawn(constants: "list[tuple[str, Any]]", again: "list[tuple[str, Any]]") -> None:
    """Refuse ids that do not come from the batch and differ at each call: the step would draw other ids than were pulled."""
    for (layer, one), (_, other) in zip(constants, again, strict=False):
        if not np.array_equal(host(one), host(other)):
            raise InvalidInputError(
                f"layer {layer!r} looks up ids that the model draws in its call, so their rows cannot be pulled. {DRAW_BEFORE}"
            )


class _SymbolWalk:
    """Collects the calls of layers over tables; `_symbols` says how each symbol comes from the batch."""

    def __init__(self, named: set[str]) -> None:
        self.calls: list[LayerCall] = []
        self.constants: list[tuple[str, Any]] = []
        """By layer's name: ids that do not come from the batch."""
        self.weighs = False
        """Whether ids are computed by layers with weights."""
        self._named = named
        self._symbols: dict[int, Compute] = {}
        self._kept: list[Any] = []  # symbols whose id() is a key

    def model(self, model: Any, x: Any, y: Any) -> None:
        graph = _graph_of(model)
        n = len(graph.inputs) if graph is not None else len(keras.tree.flatten(x))
        inputs = [_input(at) for at in range(n)]
        if graph is not None:
            symbols, predicted = graph._inputs_struct, graph._outputs_struct
            self._graph(graph, inputs)
        else:
            symbols = keras.tree.map_structure(_symbol_like, x)
            predicted = self._call(model, (symbols,), {}, dict(zip(map(id, keras.tree.flatten(symbols)), inputs, strict=True)))
        if y is not None and type(model).compute_loss is not keras.Model.compute_loss:
            self._loss(model, symbols, keras.tree.map_structure(_symbol_like, y), predicted, n)

    def _loss(self, model: Any, x: Any, y: Any, predicted: Any, n: int) -> None:
        """Call a model's own loss with symbols. If it takes none, its lookups are not foreseen, and refused in the step by name."""
        for at, symbol in enumerate(keras.tree.flatten(y)):
            self._know(symbol, _input(n + at))
        try:
            with keras.StatelessScope():
                model._compute_loss(x=x, y=y, y_pred=predicted, sample_weight=None)
        except InvalidInputError:
            raise
        except Exception:
            return

    def _know(self, symbol: Any, compute: Compute) -> None:
        self._symbols[id(symbol)] = compute
        self._kept.append(symbol)

    def _graph(self, graph: Any, inputs: Sequence[Compute]) -> None:
        for symbol, compute in zip(graph.inputs, inputs, strict=True):
            self._know(symbol, compute)
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                if node.operation is not None and not node.is_input:
                    self.meet(node.operation, node.arguments.args, node.arguments.kwargs)

    def meet(self, operation: Any, args: Any, kwargs: Any) -> None:
        """Look at one call within a model: of a layer over a table, or of a part that holds some."""
        if isinstance(operation, RowEmbedding):
            symbol = kwargs.get("inputs", args[0] if args else None)
            if operation.name not in self._named:
                if not isinstance(symbol, keras.KerasTensor):
                    self.constants.append((operation.name, symbol))
                self.calls.append(LayerCall(operation, self._of(symbol)))
        elif isinstance(operation, keras.Layer) and layers_over_tables(operation):
            graph = _graph_of(operation)
            if graph is not None:
                self._graph(graph, [self._of(one) for one in keras.tree.flatten(args[0] if args else kwargs)])
            else:
                replaced = keras.tree.map_structure(
                    lambda one: _symbol_like(one) if isinstance(one, keras.KerasTensor) else one, (args, kwargs)
                )
                known = {
                    id(new): self._of(old)
                    for new, old in zip(keras.tree.flatten(replaced), keras.tree.flatten((args, kwargs)), strict=True)
                    if isinstance(old, keras.KerasTensor)
                }
                self._kept.append(replaced)
                self._call(operation, replaced[0], replaced[1], known)

    def _call(self, layer: Any, args: Any, kwargs: Any, known: Mapping[int, Compute]) -> Any:
        """Call a layer's own code with symbols; return what it returns."""
        self._symbols.update(known)
        self._kept.append(args)
        try:
            return layer.call(*args, **kwargs)
        except InvalidInputError:
            raise
        except Exception as error:
            raise InvalidInputError(
                f"cannot tell which ids {type(layer).__name__} {layer.name!r} looks up: called with symbols it fails "
                f"({type(error).__name__}: "
                f"{error}). Write its call with keras.ops and layers, or name what feeds each layer with distribute(features={{'layer': "
                f"key of x, or a function of x}}). {DRAW_BEFORE}"
            ) from error

    def _of(self, symbol: Any) -> Compute:
        """Return how a symbol's value is computed."""
        if not isinstance(symbol, keras.KerasTensor):
            return lambda flat, values: symbol
        known = self._symbols.get(id(symbol))
        return known if known is not None else self._operation(symbol)

    def _operation(self, symbol: Any) -> Compute:
        operation, node_index, tensor_index = symbol._keras_history
        if operation is None or isinstance(operation, keras.layers.InputLayer):
            raise InvalidInputError(
                "cannot tell where the ids of a layer over a table come from: its input is none of the model's; name it with "
                "distribute(features=…)"
            )
        if isinstance(operation, RowEmbedding):
            raise InvalidInputError(
                f"ids are computed from rows of layer {operation.name!r}, which are pulled in the same moment. Compute these ids before, "
                "with a model of its own, and hand them in as an input"
            )
        self.weighs |= isinstance(operation, keras.Layer) and bool(operation.weights)
        node = operation._inbound_nodes[node_index]
        before = {id(one): self._of(one) for one in node.input_tensors}
        place, key = id(node), tensor_index
        self._kept.append(symbol)

        def compute(flat: Sequence[Any], values: Values) -> Any:
            if place not in values:
                args, kwargs = node.arguments.fill_in({at: of(flat, values) for at, of in before.items()})
                values[place] = keras.tree.flatten(_run(operation, args, kwargs))
            return values[place][key]

        self._know(symbol, compute)
        return compute


@contextmanager
def _long_integers() -> Iterator[None]:
    """Have JAX compute with integers of 64 bits in this thread, as other backends do."""
    jax = backend_module("jax")
    with nullcontext() if jax is None else jax.enable_x64(True):
        yield


def _sliced(value: Any, key: Any) -> Any:
    """Slice by NumPy; but arrays of JAX as they are, since they may have been cut, which `whole_ids` says."""
    return (value if keras.backend.backend() == "jax" else host(value))[key]


def _long(value: Any) -> Any:
    """Return integers as such of 64 bits, from which no operation makes shorter ones; on JAX, where shorter ones may have been cut."""
    short = isinstance(value, np.ndarray) and value.dtype.kind == "i" and value.dtype.itemsize < 8
    return value.astype(np.int64) if short and keras.backend.backend() == "jax" else value


def _run(operation: Any, args: Any, kwargs: Any) -> Any:
    """Call an operation on values; a model's cast of integers to shorter ones is for its weights, and cuts no ids."""
    kind = type(operation).__name__
    if kind == "GetItem":
        key = args[1] if len(args) > 1 else kwargs["key"]
        return _sliced(args[0], tuple(key) if isinstance(key, list) else key)
    if kind == "Cast" and "int" in operation.dtype and "int" in keras.backend.standardize_dtype(args[0].dtype):
        return args[0]
    if isinstance(operation, keras.Layer) and operation._call_has_training_arg:
        kwargs = {**kwargs, "training": False}
    return operation(*args, **kwargs)


def _input(at: int) -> Compute:
    return lambda flat, values: flat[at]


def _symbol_like(value: Any) -> Any:
    if value is None:
        return None
    shape = tuple(value.shape)
    dtype = keras.backend.standardize_dtype(value.dtype) if not (isinstance(value, np.ndarray) and value.dtype.kind in "OSU") else "string"
    return keras.KerasTensor((None, *shape[1:]) if shape else shape, dtype=dtype)


_patching = threading.Lock()


@contextmanager
def _meeting(meet: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Call `meet` at every outermost call of a layer in this thread: Keras has no hook for calls within a model's code."""
    original, mine, within = keras.Layer.__call__, threading.get_ident(), threading.Lock()

    def told(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != mine or within.locked():
            return original(layer, *args, **kwargs)
        meet(layer, args, kwargs)
        with within:
            return original(layer, *args, **kwargs)

    with _patching:
        keras.Layer.__call__ = told
        try:
            yield
        finally:
            keras.Layer.__call__ = original
