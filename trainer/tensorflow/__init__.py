"""The TensorFlow bridge: TensorFlow's lookups and input layers under their names, over rows of kvemb tables, without Keras.

Import it as `kvemb.tensorflow`. Lookups under a tf.GradientTape are trained by a `RowsOptimizer`; `function` takes rows as a tf.function's
arguments, `prepare` pulls them before their batch is used. What must not live here: storage, wire formats, update rules.
"""

from ..bridge.batches_ahead import BatchesAhead
from .embedding_lookups import (
    embedding_lookup,
    embedding_lookup_sparse,
    fused_embedding_lookup_sparse,
    fused_safe_embedding_lookup_sparse,
    safe_embedding_lookup_sparse,
)
from .input_layers import (
    column_tables,
    input_from_feature_columns,
    input_layer,
    sequence_input_from_feature_columns,
    sequence_input_layer,
)
from .row_lookups import RowsOptimizer
from .step_function import StepFunction, function, prepare

__all__ = [
    "BatchesAhead",
    "RowsOptimizer",
    "StepFunction",
    "column_tables",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "function",
    "fused_embedding_lookup_sparse",
    "fused_safe_embedding_lookup_sparse",
    "input_from_feature_columns",
    "input_layer",
    "prepare",
    "safe_embedding_lookup_sparse",
    "sequence_input_from_feature_columns",
    "sequence_input_layer",
]
