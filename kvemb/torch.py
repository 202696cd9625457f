"""The PyTorch bridge under a name nobody else has: hands on `trainer.torch`, which is imported at first use."""

from importlib import import_module


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # what inspection asks every module for must not import a framework
        raise AttributeError(name)
    return getattr(import_module("trainer.torch"), name)


def __dir__() -> list[str]:
    return dir(import_module("trainer.torch"))
