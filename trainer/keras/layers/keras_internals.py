"""What this bridge imports from Keras's private modules, and the framework below Keras.

Private attributes are read where they are needed. tests/bridges/test_private_names.py lists all of both, and names one that has gone.
"""

import sys
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.models.functional import Functional
from keras.src.utils.jax_utils import is_in_jax_tracing_scope

__all__ = [
    "Functional",
    "get_keras_mask",
    "get_stateless_scope",
    "global_state",
    "in_stateless_scope",
    "in_symbolic_scope",
    "is_in_jax_tracing_scope",
    "set_keras_mask",
]


def backend_module(name: str) -> Any | None:
    """Return jax or torch where that is Keras's backend, which has imported it; None where another is."""
    return sys.modules[name] if keras.backend.backend() == name else None


def jax_trainer() -> Any:
    """Return Keras's module of the training loop on JAX."""
    return keras.src.backend.jax.trainer
