"""TensorFlow's own feature columns, taken for ours where they mean the same: read by the names of their classes and fields.

What they have and we have not is refused by name. Only the hash is another one, and the generator of first rows.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kvemb import init
from kvemb.errors import InvalidInputError
from kvemb.init import Initializer

from . import declare
from .column_kinds import CategoricalColumn, DenseColumn

_OUR_OWN = CategoricalColumn | DenseColumn


def from_tensorflow(columns: Iterable[Any]) -> list[Any]:
    """Return columns of tf.feature_column as columns of ours, in their order; ours stay as they are.

    Bridges take TensorFlow's columns without this; call it once where a column's options need its name, or columns are used many times.

    Args:
        columns: numeric, bucketized, identity, hashed, vocabulary list, weighted, crossed, indicator, embedding, shared embedding columns.

    Raises:
        InvalidInputError: a column of another kind, or what has no counterpart here: max_norm, trainable=False, a checkpoint to load from,
            use_safe_embedding_lookup=False, a hash_key, an initializer that is not among kvemb.init's.

    Example:
        >>> from_tensorflow([declare.numeric_column("price")])[0].name
        'price'
    """
    return [_converted(column) for column in _listed(columns)]


def checked_dense_columns(columns: Iterable[Any], *, sequences: bool = False) -> list[DenseColumn]:
    """Return the columns of a dense input, ours or TensorFlow's, in their order; one may stand for a list of it."""
    columns = _listed(columns)
    listed = from_tensorflow(map(_of_step, columns) if sequences else columns)
    for column in listed:
        if not isinstance(column, DenseColumn):
            hint = "; wrap it with embedding_column or indicator_column" if isinstance(column, CategoricalColumn) else ""
            raise InvalidInputError(f"feature_columns takes numeric, indicator and embedding columns, got {type(column).__name__}{hint}")
    names = [column.name for column in listed]
    if not names or len(set(names)) < len(names):
        raise InvalidInputError(f"feature_columns must be columns of distinct names, got {names}")
    return listed


def _listed(columns: Any) -> Iterable[Any]:
    if isinstance(columns, Mapping | str) or not isinstance(columns, Iterable | _OUR_OWN):
        raise InvalidInputError(f"feature_columns must be a list of columns, got {type(columns).__name__}")
    return [columns] if isinstance(columns, _OUR_OWN) or hasattr(columns, "_asdict") else columns


def _of_module(given: object, *roots: str) -> bool:
    return type(given).__module__.split(".")[0] in roots


def _of_step(column: Any) -> Any:
    """The column of a step, of TensorFlow's column of a sequence; others as they are."""
    source = getattr(column, "categorical_column", None)
    if source is not None and type(source).__name__ == "SequenceCategoricalColumn":
        return column._replace(categorical_column=source.categorical_column)
    if type(column).__name__ != "SequenceNumericColumn":
        return column
    if column.default_value != 0 or column.normalizer_fn is not None:
        raise InvalidInputError(
            f"column {column.name!r}: default_value and normalizer_fn have no counterpart: steps are filled up with 0, and TensorFlow's "
            "function gets a SparseTensor. Give a numeric_column, whose function gets the values"
        )
    return declare.numeric_column(column.key, column.shape)


def _converted(column: Any) -> Any:
    if not _of_module(column, "tensorflow") or not hasattr(column, "_asdict"):
        return column  # ours, or nothing that anybody knows
    kind = type(column).__name__
    if kind not in _KINDS:
        raise InvalidInputError(f"column {column.name!r}: TensorFlow's {kind} has no counterpart; {_INSTEAD.get(kind, 'leave it out')}")
    creator = getattr(column, "shared_embedding_column_creator", None)  # has the options that shared columns have in common
    given = {name.lstrip("_"): value for name, value in vars(creator).items()} if creator is not None else {}
    for field, (usual, instead) in _REFUSED.items():
        value = {**given, **column._asdict()}.get(field, usual)
        if value is not usual:
            raise InvalidInputError(f"column {column.name!r}: {field}={value!r} has no counterpart; {instead}")
    return _KINDS[kind](column)


def _dtype(column: Any) -> str:
    return "int64" if column.dtype.is_integer else str(column.dtype.name)


def _embedding(of: Any) -> Any:
    return declare.embedding_column(_converted(of.categorical_column), of.dimension, of.combiner, _first(of, of.initializer))


def _shared(of: Any) -> Any:
    common = of.shared_embedding_column_creator
    return _sharing(of, common.dimension, common._initializer, common._name)


def _sharing(of: Any, dimension: int, initializer: Any, name: str) -> Any:
    column, first = _converted(of.categorical_column), _first(of, initializer)
    return declare.shared_embedding_columns([column], dimension, of.combiner, first, name)[0]


def _first(column: Any, given: Any) -> Initializer:
    """The counterpart of an initializer; its seed has none, since first rows are drawn by id."""
    kind = type(given).__name__
    if not _of_module(given, "tensorflow", "keras") or kind not in _INITIALIZERS:
        raise InvalidInputError(f"column {column.name!r}: initializer {kind} has no counterpart; take one of {', '.join(_INITIALIZERS)}")
    return _INITIALIZERS[kind](given.get_config())


_INITIALIZERS: Final[dict[str, Callable[[dict[str, Any]], Initializer]]] = {
    "TruncatedNormal": lambda of: init.truncated_normal(of["mean"], of["stddev"]),
    "RandomNormal": lambda of: init.normal(of["mean"], of["stddev"]),
    "RandomUniform": lambda of: init.uniform(of["minval"], 1.0 if of["maxval"] is None else of["maxval"]),
    "Constant": lambda of: init.constant(of["value"]),
    "Zeros": lambda of: init.zeros(),
    "Ones": lambda of: init.constant(1.0),
}
_KINDS: Final[dict[str, Callable[[Any], Any]]] = {
    "NumericColumn": lambda of: declare.numeric_column(of.key, of.shape, of.normalizer_fn),
    "BucketizedColumn": lambda of: declare.bucketized_column(_converted(of.source_column), of.boundaries),
    "IdentityCategoricalColumn": lambda of: declare.categorical_column_with_identity(of.key, of.number_buckets, of.default_value),
    "HashedCategoricalColumn": lambda of: declare.categorical_column_with_hash_bucket(of.key, of.hash_bucket_size, _dtype(of)),
    "VocabularyListCategoricalColumn": lambda of: declare.categorical_column_with_vocabulary_list(
        of.key, of.vocabulary_list, _dtype(of), of.default_value, of.num_oov_buckets
    ),
    "WeightedCategoricalColumn": lambda of: declare.weighted_categorical_column(_converted(of.categorical_column), of.weight_feature_key),
    "CrossedColumn": lambda of: declare.crossed_column([_converted(key) for key in of.keys], of.hash_bucket_size),
    "IndicatorColumn": lambda of: declare.indicator_column(_converted(of.categorical_column)),
    "EmbeddingColumn": _embedding,
    "SharedEmbeddingColumn": _shared,
    "_SharedEmbeddingColumn": lambda of: _sharing(of, of.dimension, of.initializer, of.shared_embedding_collection_name),  # TensorFlow 1's
}
_INSTEAD: Final = {
    "VocabularyFileCategoricalColumn": "give the file's lines to categorical_column_with_vocabulary_list",
    "SequenceCategoricalColumn": "give the dense column of it to sequence_input_layer",
    "SequenceNumericColumn": "give it to sequence_input_layer",
}
_REFUSED: Final[dict[str, tuple[Any, str]]] = {
    "max_norm": (None, "leave it out: a lookup writes no rows. kvemb.tensorflow.embedding_lookup_sparse has it"),
    "ckpt_to_load_from": (None, "leave it out, and set the table's rows from the checkpoint (Table.assign)"),
    "trainable": (True, "leave it out, and keep its table out of RowsOptimizer, or freeze the layer that has it"),
    "use_safe_embedding_lookup": (True, "leave it out: an example without values has zeros here"),
    "hash_key": (None, "leave it out: combinations are hashed by XXH64"),
}
