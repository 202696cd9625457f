"""Looking rows up before the batch that needs them is used: threads, pipeline, rows. NumPy only, for every framework's bridge.

Users call `prefetch`; the docstring of `pipeline` says which thread does which work.
"""

from .prefetch import Prefetch, prefetch

__all__ = ["Prefetch", "prefetch"]
