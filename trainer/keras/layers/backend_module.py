"""The framework below Keras, for the few questions that Keras itself has no word for."""

import sys
from typing import Any

import keras


def backend_module(name: str) -> Any | None:
    """Return jax or torch where that is Keras's backend, which has imported it; None where another is."""
    return sys.modules[name] if keras.backend.backend() == name else None
