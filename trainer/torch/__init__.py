"""The PyTorch bridge: embedding modules whose rows live in a kvemb table, and the optimizer that pushes their gradients.

Import it as `kvemb.torch`. `distribute` takes an existing model to a cluster, `prepare` pulls rows before their batch is used, and
`materialize` makes a plain torch copy. Packages: `lookup` (from a forward pass to a gradient to push), `modules`, `optimizer` (the step).
"""

from ..bridge.saved_rows import MixedStepsWarning
from .checkpoints import RowCheckpoints, hugging_face_callback, lightning_callback
from .collections.embedding_collections import EmbeddingBagCollection, EmbeddingCollection
from .collections.jagged_tensors import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from .collections.keyed_recipes import EmbeddingBagConfig, EmbeddingConfig
from .conversion.distribute import distribute
from .elastic_ranks import connect_rank
from .export.dense_part import DenseProgram, export_dense
from .export.materialize import materialize
from .loaders.prepared_loader import Prepared, prepare
from .modules.dense_features import DenseFeatures
from .modules.embedding import Embedding, EmbeddingBag
from .optimizer.clipping import clip_grad_norm_
from .optimizer.sparse_optimizer import SparseOptimizer

__all__ = [
    "DenseFeatures",
    "DenseProgram",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "MixedStepsWarning",
    "Prepared",
    "RowCheckpoints",
    "SparseOptimizer",
    "clip_grad_norm_",
    "connect_rank",
    "distribute",
    "export_dense",
    "hugging_face_callback",
    "lightning_callback",
    "materialize",
    "prepare",
]
