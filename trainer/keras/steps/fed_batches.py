"""A batch with its rows: what a step of a model over tables takes instead of the batch alone.

What must not live here: which ids (`ids_plan`), what a step does with its gradients (`step_seam`). Strategy: of all that a batch asks a
table for there is one lookup, and one leaf in the step. Rows are padded to one of few capacities, so that what a backend has compiled for
one batch serves the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ...bridge.cluster_ports import TablePort
from ...bridge.shared_lookups import Asked, LookupResult, SharedLookups
from ..layers.row_embedding import RowEmbedding

_LEAST = 64  # rows


@dataclass(frozen=True)
class AskedByLayers:
    """What a batch asks for.

    Args:
        asked: for each table, once, all ids that its layers' calls ask for, one after another.
        calls: for each call its layer's name, its table's, the shape of its ids, and where they begin among the table's.
    """

    asked: list[Asked]
    calls: list[tuple[str, str, tuple[int, ...], int]]


def wanted_of(ids: Sequence[tuple[RowEmbedding, NDArray[Any]]]) -> AskedByLayers:
    """Put together what the calls of a step ask for; raises as `RowEmbedding.ids_of`."""
    parts: dict[str, list[NDArray[np.uint64]]] = {}
    tables: dict[str, TablePort] = {}
    calls, starts = [], dict[str, int]()
    for layer, values in ids:
        name = layer.table.name
        tables[name] = layer.table
        flat = layer.ids_of(values)
        calls.append((layer.name, name, tuple(values.shape), starts.get(name, 0)))
        starts[name] = starts.get(name, 0) + len(flat)
        parts.setdefault(name, []).append(flat)
    return AskedByLayers([(tables[name], flats[0] if len(flats) == 1 else np.concatenate(flats)) for name, flats in parts.items()], calls)


def look_up(wanted: AskedByLayers, shared: SharedLookups, training: bool) -> dict[str, LookupResult]:
    """Return what is found, by table."""
    found = shared.look_up(wanted.asked, recording=training)
    return {table.name: one for (table, _), one in zip(wanted.asked, found, strict=True)}


def capacity_of(n_rows: int, before: int = 0) -> int:
    """Return for how many rows a step is made: never fewer than before, with room for an eighth more where it grows.

    Example:
        >>> capacity_of(1000), capacity_of(900, 1152), capacity_of(1153, 1152)
        (1152, 1152, 1408)
    """
    if n_rows <= before:
        return before
    least = max(_LEAST, n_rows + n_rows // 8)
    grain = 1 << max(0, least.bit_length() - 4)
    return -(-least // grain) * grain


def fed_of(wanted: AskedByLayers, found: Mapping[str, LookupResult], capacities: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return what travels beside the batch, as the backend's tensors: see `layers.rows_at_hand`."""
    rows = {name: keras.ops.convert_to_tensor(_padded(one.rows, capacities[name])) for name, one in found.items()}
    at: dict[str, list[Any]] = {}
    for layer, table, shape, start in wanted.calls:
        n = int(np.prod(shape, dtype=np.int64))
        places = found[table].inverse[start : start + n].astype(np.int32).reshape(shape)
        at.setdefault(layer, []).append(keras.ops.convert_to_tensor(places))
    return {"rows": rows, "at": at}


def _padded(rows: NDArray[np.float32], capacity: int) -> NDArray[np.float32]:
    if len(rows) == capacity:
        return rows
    padded = np.zeros((capacity, rows.shape[1]), np.float32)
    padded[: len(rows)] = rows
    return padded
