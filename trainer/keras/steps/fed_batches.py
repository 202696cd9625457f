"""A batch with its rows: what a step of a model over tables takes instead of the batch alone.

All ids that a batch asks a table for are one lookup, and one leaf in the step, padded to one of few capacities: a compiled step serves the
next batch, too.

`FitAhead` pulls the rows of coming batches while a step runs. On every backend `fit` makes an epoch iterator, has the model built with it,
and asks it for each epoch's batches; a source that reads ahead takes the place of the iterator's own there. So batches come by `fit`'s own
path, in its order. The step compares ids, so a step of another batch in between (`evaluate` in a callback) pulls for itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from ...bridge.batches_ahead import Ahead, AskedOf, BatchesAhead
from ...bridge.shared_lookups import Asked, LookupResult, SharedLookups
from ...lookahead.cluster_ports import TablePort
from ..layers.keras_internals import jax_trainer
from ..layers.row_embedding import RowEmbedding
from .ids_plan import IdsPlan

_LEAST = 64  # rows
_KEEPS = "_keeps_integers"


@dataclass(frozen=True)
class AskedByLayers:
    """For each table once all ids asked for; for each call its layer, table, the ids' shape, where they begin, and which are not masked."""

    asked: list[Asked]
    calls: list[tuple[str, str, tuple[int, ...], int, NDArray[np.bool_] | None]]


def wanted_of(ids: Sequence[tuple[RowEmbedding, NDArray[Any]]]) -> AskedByLayers:
    """Put together the ids that the calls of a step ask for; raises as `RowEmbedding.ids_of`."""
    parts: dict[str, list[NDArray[np.uint64]]] = {}
    tables: dict[str, TablePort] = {}
    calls, starts = [], dict[str, int]()
    for layer, values in ids:
        name = layer.table.name
        tables[name] = layer.table
        flat = layer.ids_of(values)
        calls.append((layer.name, name, values.shape, starts.get(name, 0), values != 0 if layer.mask_zero else None))
        starts[name] = starts.get(name, 0) + len(flat)
        parts.setdefault(name, []).append(flat)
    return AskedByLayers([(tables[name], flats[0] if len(flats) == 1 else np.concatenate(flats)) for name, flats in parts.items()], calls)


def look_up(wanted: AskedByLayers, shared: SharedLookups, training: bool) -> dict[str, LookupResult]:
    """Return the results, by table."""
    found = shared.look_up(wanted.asked, recording=training)
    return {table.name: one for (table, _), one in zip(wanted.asked, found, strict=True)}


def capacity_of(n_rows: int, before: int = 0) -> int:
    """Return the number of rows that a step is made for: never fewer than before, with room for an eighth more when it grows."""
    if n_rows <= before:
        return before
    least = max(_LEAST, n_rows + n_rows // 8)
    grain = 1 << max(0, least.bit_length() - 4)
    return -(-least // grain) * grain


def fed_of(wanted: AskedByLayers, found: Mapping[str, LookupResult], capacities: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return the tensors that travel beside the batch, of the backend's own kind: see `layers.rows_at_hand`."""
    rows = {name: keras.ops.convert_to_tensor(_padded(one.rows, capacities[name])) for name, one in found.items()}
    at: dict[str, list[Any]] = {}
    masks: dict[str, list[Any]] = {}
    for layer, table, shape, start, mask in wanted.calls:
        n = int(np.prod(shape, dtype=np.int64))
        places = found[table].inverse[start : start + n].astype(np.int32).reshape(shape)
        at.setdefault(layer, []).append(keras.ops.convert_to_tensor(places))
        if mask is not None:
            masks.setdefault(layer, []).append(keras.ops.convert_to_tensor(mask))
    return {"rows": rows, "at": at, "masks": masks}


def _padded(rows: NDArray[np.float32], capacity: int) -> NDArray[np.float32]:
    if len(rows) == capacity:
        return rows
    padded = np.zeros((capacity, rows.shape[1]), np.float32)
    padded[: len(rows)] = rows
    return padded


def keep_integers() -> None:
    """Have Keras on JAX leave integers in NumPy until their step, for all models: on a device they have 32 bits."""
    if keras.backend.backend() != "jax" or getattr(jax_trainer()._distribute_data, _KEEPS, False):
        return
    inner = jax_trainer()._distribute_data

    def distributed(data: Any, layouts: Any = None) -> Any:
        if keras.distribution.distribution() is not None:
            return inner(data, layouts)
        return keras.tree.map_structure(lambda one: one if isinstance(one, np.ndarray) and one.dtype.kind in "iu" else inner(one), data)

    setattr(distributed, _KEEPS, True)
    jax_trainer()._distribute_data = distributed


Plan = Callable[[Any], IdsPlan]
"""Finds from a batch how its ids are computed, before other threads see the batch."""


class FitAhead:
    """Stands in the place of the source of a model's `fit`."""

    def __init__(self, plan: Plan, plans: Mapping[bool, IdsPlan], shared: SharedLookups) -> None:
        self._source, self._plans, self._shared = _Source(plan), plans, shared
        self._batches: BatchesAhead | None = None
        self._beginning = False

    def install(self, model: Any) -> None:
        """Take that place from now on; until `prepare` nothing changes."""
        build = "_maybe_symbolic_build" if keras.backend.backend() == "tensorflow" else "_symbolic_build"
        object.__setattr__(model, "fit", self._around_fit(model.fit))
        object.__setattr__(model, build, self._with_epochs(getattr(model, build)))

    def prepare(self, ahead: Ahead) -> BatchesAhead:
        """Pull ahead from the next `fit` on."""
        self._batches = ahead.batches(self._source, _asked_by(self._plans), self._shared)
        return self._batches

    def _around_fit(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            batches = self._batches
            if batches is None:
                return fit(*args, **kwargs)
            self._beginning = True
            try:
                return fit(*args, **kwargs)
            finally:
                self._beginning = False
                batches.close()
                self._source.batches = None

        return around

    def _with_epochs(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Learn of `fit`'s epochs: building the model is the first thing that it does with them."""

        def with_epochs(*args: Any, **kwargs: Any) -> Any:
            epochs: Any = kwargs.get("iterator")
            mine, self._beginning = self._beginning and epochs is not None, False
            result = build(*args, **kwargs)
            if mine:
                self._source.batches, batches = epochs._get_iterator, self._batches
                epochs._get_iterator = lambda: batches
            return result

        return with_epochs


class _Source:
    """The batches of an epoch, as `fit` would have them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.batches: Callable[[], Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.batches is None:
            raise InvalidInputError("these are the batches of a model's fit, which is not under way; iterate your own")
        return _planned(iter(self.batches()), self._plan)


def _planned(batches: Iterator[Any], plan: Plan) -> Iterator[Any]:
    for batch in batches:
        plan(batch)
        yield keras.tree.map_structure(_kept, batch)


def _kept(value: Any) -> Any:
    """Copy an array: a generator may fill the same one for its next batch, which is read before this one is used."""
    copy = getattr(value, "clone", None) or getattr(value, "copy", None)
    return value if copy is None else copy()


def _asked_by(plans: Mapping[bool, IdsPlan]) -> AskedOf:
    def asked(batch: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        plan = plans[y is not None]
        if plan.weighs:
            raise InvalidInputError(
                "ids of this model are computed by layers with weights, which the steps before a batch change: its rows cannot be pulled "
                "ahead. Train it without prepare"
            )
        return wanted_of(plan.ids(x, y)).asked

    return asked
