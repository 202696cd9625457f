"""The JAX bridge: a step function over rows of kvemb tables, and optax's optimizers under their own names.

Import it as `kvemb.jax`. `distribute` converts a model, `embed` makes a step of a loss over rows, `prepare` pulls rows before their batch
is used. Rows are pulled outside of `jax.jit`, and enter it as arguments: no callback runs inside.
"""

from ..bridge.batches_ahead import BatchesAhead
from .distribute_jax import DistributedJax, distribute
from .embedded_step import EmbeddedStep, embed, prepare
from .optax_names import adagrad, adam, adamw, rmsprop, sgd

__all__ = ["BatchesAhead", "DistributedJax", "EmbeddedStep", "adagrad", "adam", "adamw", "distribute", "embed", "prepare", "rmsprop", "sgd"]
