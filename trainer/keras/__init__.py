"""The Keras bridge: layers whose rows live in a kvemb table, on TensorFlow, JAX and torch.

Import it as `kvemb.keras`. `distribute` takes a model to a cluster; it is trained and used as before. Packages: `layers` (rows enter a
step, and their gradient leaves it), `steps` (pull and push around a model's steps), `distributing` (`distribute` itself).
"""

from ..bridge.saved_rows import MixedStepsWarning
from .distributing.distribute_keras import distribute, materialize
from .layers.column_features import ColumnFeatures as DenseFeatures
from .layers.distributed_embedding import DistributedEmbedding
from .layers.feature_configs import FeatureConfig, TableConfig
from .layers.row_embedding import RowEmbedding as Embedding
from .steps.kept_weights import KerasRowCheckpoints as RowCheckpoints
from .steps.step_seam import prepare

__all__ = [
    "DenseFeatures",
    "DistributedEmbedding",
    "Embedding",
    "FeatureConfig",
    "MixedStepsWarning",
    "RowCheckpoints",
    "TableConfig",
    "distribute",
    "materialize",
    "prepare",
]
