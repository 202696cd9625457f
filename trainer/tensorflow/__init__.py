"""The TensorFlow bridge: plain programs of TensorFlow 2 over rows of kvemb tables, without Keras's models.

Import it as `kvemb.tensorflow`. `distribute` takes a tf.Module and its optimizer to a cluster; the program stays. Or TensorFlow's lookups
and input layers under their names, over tables: under a tf.GradientTape they are trained by a `RowsOptimizer`. `function` takes rows as a
tf.function's arguments, `prepare` pulls them before their batch is used.
"""

from ..bridge.batches_ahead import BatchesAhead
from ..bridge.saved_rows import MixedStepsWarning
from .distribute_tensorflow import distribute, materialize
from .embedding_lookups import (
    embedding_lookup,
    embedding_lookup_sparse,
    fused_embedding_lookup_sparse,
    fused_safe_embedding_lookup_sparse,
    safe_embedding_lookup_sparse,
)
from .input_layers import column_tables, input_from_feature_columns, input_layer, sequence_input_from_feature_columns, sequence_input_layer
from .row_lookups import RowsOptimizer
from .step_function import StepFunction, function, prepare

__all__ = [
    "BatchesAhead",
    "MixedStepsWarning",
    "RowsOptimizer",
    "StepFunction",
    "column_tables",
    "distribute",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "function",
    "fused_embedding_lookup_sparse",
    "fused_safe_embedding_lookup_sparse",
    "input_from_feature_columns",
    "input_layer",
    "materialize",
    "prepare",
    "safe_embedding_lookup_sparse",
    "sequence_input_from_feature_columns",
    "sequence_input_layer",
]
