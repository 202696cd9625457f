"""materialize: a plain Keras copy of a model over tables, to save, export or look at.

What must not live here: which ids (all of a table, up to `max_bytes`). The copy knows no cluster, and trains like any model.
"""

from typing import Any

import keras
import numpy as np

from kvemb.errors import InvalidInputError

from ..layers.row_embedding import RowEmbedding
from ..steps.ids_plan import layers_over_tables
from ..steps.kept_weights import is_shadow

MAX_BYTES = 1 << 30
_CHUNK_BYTES = 16 << 20


def materialize(model: Any, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return a copy whose layers are keras.layers.Embedding with the rows of now.

    Args:
        model: Sequential or functional, or a subclassed one that keras.models.clone_model can copy; not changed.
        max_bytes: of all rows together.

    Raises:
        InvalidInputError: a table has no num_ids or more bytes than that, a layer has a combiner, or there is nothing to copy.
    """
    layers = {layer.name: layer for layer in layers_over_tables(model)}
    if not layers:
        raise InvalidInputError("the model has no layer over a table")
    _check(list(layers.values()), max_bytes)
    for layer in layers.values():
        layer.mark.before_lookup(False)
        layer.table.cluster.flush()

    def copied(layer: Any) -> Any:
        return _plain(layer) if isinstance(layer, RowEmbedding) else type(layer).from_config(layer.get_config())

    copy = keras.models.clone_model(model, clone_function=copied)
    if not copy.built:
        copy.build(model.input_shape)
    for old, new in zip(model._flatten_layers(include_self=False), copy._flatten_layers(include_self=False), strict=True):
        if isinstance(old, RowEmbedding):
            new.set_weights([_rows(old)])
        elif not old._layers:
            for to, of in zip(new.weights, [one for one in old.weights if not is_shadow(one)], strict=True):
                to.assign(of.numpy())  # a copy: on JAX a step gives the memory of its arrays away
    return copy


def _check(layers: list[RowEmbedding], max_bytes: int) -> None:
    tables = {layer.table_name: layer.table.definition for layer in layers}
    if endless := [name for name, definition in tables.items() if definition.num_ids is None]:
        raise InvalidInputError(
            f"table {', '.join(endless)}: any 64-bit number is an id, so a copy cannot have all rows; make it with num_ids"
        )
    if combining := [layer.name for layer in layers if layer.combiner is not None]:
        raise InvalidInputError(f"layer {', '.join(combining)}: keras.layers.Embedding has no combiner, so there is no plain copy")
    needed = sum(4 * (definition.num_ids or 0) * definition.dim for definition in tables.values())
    if needed > max_bytes:
        raise InvalidInputError(f"all rows of {', '.join(tables)} are {needed} bytes, above max_bytes={max_bytes}; raise it")


def _plain(layer: RowEmbedding) -> Any:
    return keras.layers.Embedding(layer.input_dim, layer.output_dim, mask_zero=layer.mask_zero, name=layer.name, dtype=layer.dtype_policy)


def _rows(layer: RowEmbedding) -> Any:
    table, rows = layer.table, np.empty((layer.input_dim, layer.output_dim), np.float32)
    n_chunk = max(1, _CHUNK_BYTES // (4 * layer.output_dim))
    for low in range(0, len(rows), n_chunk):
        ids = np.arange(low, min(low + n_chunk, len(rows)))
        rows[low : low + n_chunk] = table.pull(ids, return_versions=True)[0]
    return rows
