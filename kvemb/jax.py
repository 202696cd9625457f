"""The JAX bridge: hands on `trainer.jax`, which is imported at first use."""

from kvemb.own import facade

__getattr__, __dir__ = facade("trainer.jax")
