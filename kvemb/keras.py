"""The Keras bridge: hands on `trainer.keras`, which is imported at first use."""

from kvemb.own import facade

__getattr__, __dir__ = facade("trainer.keras")
