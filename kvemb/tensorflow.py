"""The TensorFlow bridge: hands on `trainer.tensorflow`, which is imported at first use."""

from kvemb.own import facade

__getattr__, __dir__ = facade("trainer.tensorflow")
