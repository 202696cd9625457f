"""materialize: a plain torch copy of a model whose rows are in a cluster, for export and serving.

Strategy: the model is deep-copied with a stand-in for each module over a table, so that everything else is copied by Python's own rules.
All ids of a table with num_ids become torch's own module, chosen ids `KnownRows`. A module over several tables becomes one that runs the
same recipe on such modules (`plain_tables`).
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from kvemb.arrays.ids import normalize, to_caller
from kvemb.errors import InvalidInputError

from ...bridge.filled_tables import rows_of_table
from ..collections.embedding_collections import EmbeddingBagCollection, EmbeddingCollection
from ..lookup.table_module import LookupModule, TableModule
from ..modules.dense_features import DenseFeatures
from ..modules.embedding import Embedding, EmbeddingBag, ScaledEmbedding
from ..modules.table_collection import TableCollection
from ..optimizer.sparse_optimizer import leave_out
from .plain_tables import (
    KnownRows,
    KnownRowsBag,
    PlainDenseFeatures,
    PlainEmbeddingBagCollection,
    PlainEmbeddingCollection,
    ScaledKnownRows,
    ScaledRows,
)

_KINDS = (ScaledEmbedding, Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection, DenseFeatures)
_Rows = tuple[int, str, bytes]
"""Cluster, table, and which of its ids: modules for which these are the same share their rows."""


def materialize(model: nn.Module, ids: Mapping[str, ArrayLike] | None = None, *, max_bytes: int = 2 << 30) -> nn.Module:
    """Copy a model with its rows in plain torch modules. The model is not changed.

    This process's pushes are applied first. In an asynchronous job other trainers may go on. The rows of a copy are of about one time,
    and those of a checkpoint of one cut (docs/checkpoints.md).

    Args:
        model: with Embedding, EmbeddingBag, collections and DenseFeatures of this package.
        ids: by table name or module path, the ids whose rows are taken, any integers. Other ids of that table have rows of zeros in the
            copy. A table that is not named is taken whole, which needs its num_ids. A column's ids are its buckets.
        max_bytes: refuse more rows than this, together.

    Returns:
        A model of torch's own modules, or `KnownRows` and `KnownRowsBag` where ids were given. Their rows are float32 on the CPU; the
        model's other parameters stay on their devices. Modules over several tables become those of `plain_tables`, with such modules
        inside. All modules over a table share one parameter, unless they were given different ids.

        The model may hold an optimizer that pushes (the one given to `distribute`, or a SparseOptimizer) as an attribute, in a list or
        on a scheduler. The copy has None there.

    Raises:
        InvalidInputError: too many bytes, a table without num_ids and without ids, or names that are neither table nor path. Also a module
            of another kind over tables, or one with a forward of its own.
        StorageError: rows could not be read.

    Example:
        >>> import kvemb
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     words = cluster.create_table("word", dim=2, optimizer=kvemb.optim.sgd(), initializer=kvemb.init.constant(0.5), num_ids=9)
        ...     plain = materialize(nn.Sequential(Embedding(words)))
        >>> plain
        Sequential(
          (0): Embedding(9, 2)
        )
        >>> plain(torch.tensor([8]))
        tensor([[0.5000, 0.5000]], grad_fn=<EmbeddingBackward0>)
    """
    found = dict(table_modules(model))
    chosen = _chosen(found, {} if ids is None else ids)
    _check_size(found, chosen, max_bytes)
    for cluster in {id(module.table.cluster): module.table.cluster for module in found.values()}.values():
        if not cluster.read_only:
            cluster.flush()
    weights: dict[_Rows, nn.Parameter] = {}
    memo: dict[Any, Any] = {}
    leave_out(memo)
    for path, module in found.items():
        wanted = chosen.get(path)
        key = _rows_of(module, wanted)
        if key not in weights:  # modules that share a table share the weight
            rows = torch.from_numpy(rows_of_table(module.table, wanted))
            if wanted is not None:  # the row of ids that are not chosen
                rows = torch.cat([rows, rows.new_zeros(1, module.table.dim)])
            weights[key] = nn.Parameter(rows.to(module.dtype))
        memo[id(module)] = _plain(module, wanted, weights[key])
    for collection in model.modules():
        if isinstance(collection, TableCollection):
            memo[id(collection)] = _plain_collection(collection, memo)
    plain = copy.deepcopy(model, memo)
    _tie(plain, {id(weight) for weight in weights.values()})
    return plain


def _tie(plain: nn.Module, weights: set[int]) -> None:
    """Make a weight that modules read whole a parameter of theirs again, as before `distribute`."""
    for module in plain.modules():
        for name in [name for name, value in vars(module).items() if id(value) in weights]:
            module._parameters[name] = vars(module).pop(name)


def table_modules(model: nn.Module) -> Iterator[tuple[str, TableModule]]:
    """Find the modules over one table each; those of collections are modules, too."""
    for path, module in model.named_modules():
        if not isinstance(module, LookupModule):
            continue
        kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
        if kind is None and type(module) is not TableModule:
            known = ", ".join(kind.__name__ for kind in _KINDS)
            raise InvalidInputError(f"module {path!r} is a {type(module).__name__}; those that can be made plain are {known}")
        if kind is not None and type(module).forward is not kind.forward:
            raise InvalidInputError(
                f"module {path!r} is a {type(module).__name__}, a {kind.__name__} with a forward of its own; a plain copy would not have it"
            )
        if isinstance(module, TableModule):
            yield path, module


def _chosen(found: Mapping[str, TableModule], ids: Mapping[str, ArrayLike]) -> dict[str, NDArray[np.int64]]:
    """Return the ids of each path that has some, unique and ascending, its table's padding ids among them."""
    tables = {module.table.name for module in found.values()}
    unknown = sorted(set(ids) - set(found) - tables)
    if unknown:
        raise InvalidInputError(
            f"ids: {', '.join(map(repr, unknown))} is no table and no path of a module over one; there are the tables {sorted(tables)} "
            f"and the paths {sorted(found)}"
        )
    chosen = {}
    for path, module in found.items():
        name = path if path in ids else module.table.name
        definition = module.table.definition
        if name not in ids:
            if definition.num_ids is None:
                raise InvalidInputError(f"module {path!r}: table {definition.name!r} has no num_ids; give ids={{{definition.name!r}: …}}")
            continue
        # All modules of a table keep the same rows, so that they share the weight.
        table = _rows_of(module, None)
        padding = [m.padding_idx for m in found.values() if _rows_of(m, None) == table and m.padding_idx is not None]
        flat, _ = normalize(ids[name], definition.id_dtype, definition.name, definition.num_ids)
        known = np.union1d(to_caller(flat, definition.id_dtype), np.array(padding, definition.id_dtype))
        if not len(known) or int(known[-1]) >= 1 << 63:
            raise InvalidInputError(f"ids of {name!r}: give at least one, all below 2**63, which is as far as torch counts")
        chosen[path] = known.astype(np.int64)
    return chosen


def _check_size(found: Mapping[str, TableModule], chosen: Mapping[str, NDArray[np.int64]], max_bytes: int) -> None:
    sizes: dict[_Rows, int] = {}
    for path, module in found.items():
        n_rows = len(chosen[path]) + 1 if path in chosen else module.table.definition.num_ids or 0
        sizes[_rows_of(module, chosen.get(path))] = 4 * n_rows * module.table.dim
    if sum(sizes.values()) > max_bytes:
        largest = max(sizes, key=lambda rows: sizes[rows])
        raise InvalidInputError(
            f"the rows are {sum(sizes.values())} bytes, more than max_bytes={max_bytes}; the largest table is {largest[1]!r} with "
            f"{sizes[largest]}. Give ids={{{largest[1]!r}: …}}, those that are served, or a larger max_bytes"
        )


def _rows_of(module: TableModule, ids: NDArray[np.int64] | None) -> _Rows:
    return id(module.table.cluster), module.table.name, b"" if ids is None else ids.tobytes()


def _plain(module: TableModule, ids: NDArray[np.int64] | None, weight: nn.Parameter) -> nn.Module:
    plain: nn.Module
    if ids is not None:
        known = torch.from_numpy(ids)
        if isinstance(module, EmbeddingBag):
            plain = KnownRowsBag(known, weight, module)
        elif isinstance(module, ScaledEmbedding):
            plain = ScaledKnownRows(known, weight, module.padding_idx, module.factor)
        else:
            plain = KnownRows(known, weight, module.padding_idx)
    else:
        n_rows, dim = weight.shape
        with torch.device("meta"):  # no memory for a weight that is replaced at once
            if isinstance(module, EmbeddingBag):
                last, padding = module.include_last_offset, module.padding_idx
                plain = nn.EmbeddingBag(n_rows, dim, mode=module.mode, include_last_offset=last, padding_idx=padding)
            elif isinstance(module, ScaledEmbedding):
                plain = ScaledRows(n_rows, dim, module.padding_idx, module.factor)
            else:
                plain = nn.Embedding(n_rows, dim, padding_idx=module.padding_idx)
        plain.weight = weight
    return plain.train(module.training)


def _plain_collection(module: TableCollection[Any], memo: Mapping[int, Any]) -> nn.Module:
    """Return the module's recipe over the plain modules that `memo` has of its tables."""
    tables = {one.table.name: memo[id(one)] for one in module.table_modules()}
    plain: nn.Module
    if isinstance(module, EmbeddingBagCollection):
        plain = PlainEmbeddingBagCollection(module.recipe, tables)
    elif isinstance(module, EmbeddingCollection):
        plain = PlainEmbeddingCollection(module.recipe, tables)
    else:
        plain = PlainDenseFeatures(module.recipe, tables)
    return plain.train(module.training)
