"""The PyTorch bridge: embedding modules whose rows live in a kvemb table, and the optimizer that pushes their
gradients.

What must not live here: storage, wire formats, update rules. `ports` says what is needed of a table and a cluster,
`lookup` how a forward pass becomes a gradient to push, `embedding` the modules, `optimizer` the step, `prepare` pulls
rows before their batch is used. Also reachable as `kvemb.torch`.
"""

from trainer.torch.clipping import clip_grad_norm_
from trainer.torch.collection_configs import EmbeddingBagConfig, EmbeddingConfig
from trainer.torch.collections import EmbeddingBagCollection, EmbeddingCollection
from trainer.torch.columns import DenseFeatures
from trainer.torch.distribute import distribute
from trainer.torch.embedding import Embedding, EmbeddingBag
from trainer.torch.jagged import JaggedTensor, KeyedJaggedTensor
from trainer.torch.keyed_tensor import KeyedTensor
from trainer.torch.materialize import materialize
from trainer.torch.optimizer import SparseOptimizer
from trainer.torch.prepare import prepare
from trainer.torch.prepared import Prepared

__all__ = [
    "DenseFeatures",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Prepared",
    "SparseOptimizer",
    "clip_grad_norm_",
    "distribute",
    "materialize",
    "prepare",
]
