"""A shard's rows on local disk, known by id and version: the index, the row's last resort, and what lets the journal be cut."""

from .reconstruct import Reconstructor, WantedVersions
from .run_set import Runs, RunView

__all__ = ["Reconstructor", "RunView", "Runs", "WantedVersions"]
