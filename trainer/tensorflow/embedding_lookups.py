"""TensorFlow's embedding lookups under their names and with their arguments; a kvemb table stands where they take a variable.

Strategy: the unique rows of a call are one small matrix. TensorFlow's own functions look positions up in it, so results and gradients, also
those of weights, are TensorFlow's own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from kvemb.errors import InvalidInputError

from ..bridge.step_tables import check_table
from ..lookahead.cluster_ports import TablePort
from .row_lookups import look_up

SparseIds = Any
"""A tf.SparseTensor or tf.RaggedTensor of integers."""


def embedding_lookup(params: TablePort, ids: Any, max_norm: float | None = None, name: str | None = None) -> Any:
    """tf.nn.embedding_lookup: the row of each id.

    Args:
        params: a kvemb table.
        ids: integers of any shape; a tf.RaggedTensor gives one.
        max_norm: rows of a larger norm are shortened to it, in the result.
        name: of the operation.

    Returns:
        float32 [*ids.shape, dim].

    Example:
        >>> import kvemb
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     words = cluster.create_table("word", dim=2, optimizer=kvemb.optim.sgd(0.5), initializer=kvemb.init.constant(2.0))
        ...     embedding_lookup(words, [[7], [8]]).numpy().tolist()
        [[[2.0, 2.0]], [[2.0, 2.0]]]
    """
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(embedding_lookup(params, ids.flat_values, max_norm, name))
    ids = _integers(ids)
    ((rows, at),) = look_up([(params, tf.reshape(ids, [-1]))])
    at = tf.ensure_shape(tf.reshape(at, tf.shape(ids)), ids.shape)
    return tf.nn.embedding_lookup(rows, at, max_norm=max_norm, name=name)


def embedding_lookup_sparse(
    params: TablePort,
    sp_ids: SparseIds,
    sp_weights: SparseIds | None,
    combiner: str | None = None,
    max_norm: float | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> Any:
    """tf.nn.embedding_lookup_sparse: the rows of each example's ids, combined.

    Args:
        params: a kvemb table.
        sp_ids: ids; every example has one at least (`safe_embedding_lookup_sparse` takes others).
        sp_weights: their weights, of the same kind and shape; None: 1 each.
        combiner: "sum", "mean" (unless given) or "sqrtn".
        max_norm: see `embedding_lookup`.
        name: of the operation.
        allow_fast_lookup: as in TensorFlow, on the rows of the call; the result is the same.
    """
    return _combined([params], [sp_ids], [sp_weights], [combiner], [max_norm], name, allow_fast_lookup)[0]


def fused_embedding_lookup_sparse(
    params: Sequence[TablePort],
    sp_ids: Sequence[SparseIds],
    sp_weights: Sequence[SparseIds | None] | None = None,
    combiners: str | Sequence[str | None] | None = None,
    max_norms: Sequence[float | None] | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> list[Any]:
    """As `embedding_lookup_sparse`, of several tables (or several times one) in one pull: lists of its arguments, a list of results."""
    n = _count(params, sp_ids, sp_weights, combiners, max_norms)
    every = [combiners] * n if combiners is None or isinstance(combiners, str) else combiners
    return _combined(params, sp_ids, sp_weights or [None] * n, every, max_norms or [None] * n, name, allow_fast_lookup)


def safe_embedding_lookup_sparse(
    embedding_weights: TablePort,
    sparse_ids: SparseIds,
    sparse_weights: SparseIds | None = None,
    combiner: str = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> Any:
    """tf.nn.safe_embedding_lookup_sparse: as `embedding_lookup_sparse`, for examples without ids, too.

    Ids below 0 are left out, of a table without num_ids -1 alone; so are, unless the combiner is "sum", ids whose weight is not above 0.

    Args:
        sparse_ids: ids of rank 2 or more; the last axis is combined.
        default_id: looked up for an example without ids; None: such an example gets zeros.
    """
    (made,) = fused_safe_embedding_lookup_sparse(
        [embedding_weights], [sparse_ids], [sparse_weights], combiner, [default_id], [max_norm], name, allow_fast_lookup
    )
    return made


def fused_safe_embedding_lookup_sparse(
    embedding_weights: Sequence[TablePort],
    sparse_ids: Sequence[SparseIds],
    sparse_weights: Sequence[SparseIds | None] | None = None,
    combiners: str | Sequence[str] = "mean",
    default_ids: Sequence[int | None] | None = None,
    max_norms: Sequence[float | None] | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> list[Any]:
    """As `safe_embedding_lookup_sparse`, of several tables (or several times one) in one pull; arguments are those of each."""
    n = _count(embedding_weights, sparse_ids, sparse_weights, combiners, default_ids, max_norms)
    every = [combiners] * n if isinstance(combiners, str) else combiners
    defaults = default_ids or [None] * n
    given = zip(embedding_weights, sparse_ids, sparse_weights or [None] * n, every, defaults, strict=True)
    pruned = [_pruned(*one) for one in given]
    found = look_up([(table, one[0].values) for table, one in zip(embedding_weights, pruned, strict=True)])
    results = []
    for (rows, at), (ids, weights, shape), combiner, default, max_norm in zip(
        found, pruned, every, defaults, max_norms or [None] * n, strict=True
    ):
        places = tf.SparseTensor(ids.indices, at, ids.dense_shape)
        own = {"combiner": combiner, "max_norm": max_norm, "name": name, "allow_fast_lookup": allow_fast_lookup}
        results.append(_filled(rows, places, weights, shape, default, own))
    return results


def _combined(
    params: Sequence[TablePort],
    sp_ids: Sequence[SparseIds],
    sp_weights: Sequence[SparseIds | None],
    combiners: Sequence[str | None],
    max_norms: Sequence[float | None],
    name: str | None,
    fast: bool,
) -> list[Any]:
    for ids in sp_ids:
        _check_sparse(ids)
    found = look_up([(table, _values(ids)) for table, ids in zip(params, sp_ids, strict=True)])
    return [
        tf.nn.embedding_lookup_sparse(rows, _with_values(ids, at), weights, combiner, max_norm, name, fast)
        for (rows, at), ids, weights, combiner, max_norm in zip(found, sp_ids, sp_weights, combiners, max_norms, strict=True)
    ]


def _pruned(table: TablePort, ids: SparseIds, weights: SparseIds | None, combiner: str, default_id: int | None) -> tuple[Any, Any, Any]:
    """Ids of rank 2, those that count, and `default_id` where an example has none; their weights; the shape that ids had."""
    _check_sparse(ids)
    if isinstance(ids, tf.RaggedTensor):
        ids = ids.to_sparse()
        weights = None if weights is None else weights.to_sparse()
    dtype = tf.uint64 if ids.dtype == tf.uint64 else tf.int64
    ids = tf.SparseTensor(ids.indices, tf.cast(ids.values, dtype), ids.dense_shape)
    shape = ids.dense_shape
    ids = tf.sparse.reshape(ids, [tf.reduce_prod(shape[:-1]), shape[-1]])
    keep = _there(table, ids.values)
    if weights is not None:
        weights = tf.SparseTensor(ids.indices, weights.values, ids.dense_shape)
        keep = keep if combiner == "sum" else keep & (weights.values > 0)
        weights = tf.sparse.retain(weights, keep)
    ids = tf.sparse.retain(ids, keep)
    if default_id is None:
        return ids, weights, shape
    if weights is not None:
        weights, _ = tf.sparse.fill_empty_rows(weights, tf.ones([], weights.dtype))
    return tf.sparse.fill_empty_rows(ids, tf.cast(default_id, dtype))[0], weights, shape


def _there(table: TablePort, ids: Any) -> Any:
    """Which ids are not left out: of a table without num_ids, whose ids may be hashes, all but -1."""
    check_table(table)
    if ids.dtype.is_unsigned:
        return tf.ones_like(ids, tf.bool)
    return ids >= 0 if table.definition.num_ids is not None else tf.not_equal(ids, -1)


def _filled(rows: Any, places: Any, weights: Any, shape: Any, default_id: int | None, own: Mapping[str, Any]) -> Any:
    """Combine rows; zeros where an example has none; of the shape that ids had."""
    places, empty = tf.sparse.fill_empty_rows(places, tf.zeros([], tf.int64))
    if weights is not None:
        weights, _ = tf.sparse.fill_empty_rows(weights, tf.ones([], weights.dtype))
    made = tf.nn.embedding_lookup_sparse(rows, places, weights, **own)
    if default_id is None:
        made = tf.where(empty[:, tf.newaxis], tf.zeros_like(made), made)
    made = tf.reshape(made, tf.concat([tf.cast(shape[:-1], tf.int32), tf.shape(made)[1:]], 0))
    rank = tf.get_static_value(tf.shape(shape)[0])
    return made if rank is None else tf.ensure_shape(made, [*[None] * (int(rank) - 1), rows.shape[1]])


def _integers(ids: Any) -> Any:
    tensor = tf.convert_to_tensor(ids)
    if not tensor.dtype.is_integer:
        raise InvalidInputError(
            f"ids must be integers, got {tensor.dtype.name}; turn text into ids with a feature column or kvemb.hash_ids"
        )
    return tensor


def _check_sparse(ids: Any) -> None:
    if not isinstance(ids, tf.SparseTensor | tf.RaggedTensor):
        raise InvalidInputError(f"ids must be a tf.SparseTensor or tf.RaggedTensor, got {type(ids).__name__}")
    if not ids.dtype.is_integer:
        raise InvalidInputError(f"ids must be integers, got {ids.dtype.name}")


def _values(ids: SparseIds) -> Any:
    return ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids.values


def _with_values(ids: SparseIds, values: Any) -> Any:
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(values)
    return tf.SparseTensor(ids.indices, values, ids.dense_shape)


def _count(tables: Any, *each: Any) -> int:
    """How many tables there are; refuse a list of another length."""
    if not isinstance(tables, list | tuple):
        raise InvalidInputError(f"give a list of tables, got {type(tables).__name__}")
    for given in each:
        if given is not None and not isinstance(given, str) and len(given) != len(tables):
            raise InvalidInputError(f"{len(tables)} tables were given, and {len(given)} of an argument that goes with each")
    return len(tables)
